"""What a rank answers, by name. Handlers may be added while the server runs; who asks earlier waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from gtrain.wire import Caller, Message

Handler = Callable[[Message], Message]


class Handlers(dict[str, Any]):
    """The handlers of a :class:`gtrain.wire.Server`, which looks them up by ``get``.

    Ranks run the same program at their own pace. A request that comes before its handler was added is kept, and
    answered as soon as it is; the asker's deadline bounds the wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._waiting: dict[str, list[tuple[Message, Future[Message]]]] = {}

    def add(self, name: str, handler: Handler) -> None:
        """Answer requests of that name from now on; requests that wait for it are answered by this call."""

        def answer(message: Message, caller: Caller) -> Message:
            return handler(message)

        with self._lock:
            self[name] = answer
            waiting = self._waiting.pop(name, [])
        for message, future in waiting:
            try:
                future.set_result(handler(message))
            except Exception as error:
                future.set_exception(error)

    def get(self, name: str, default: Any = None) -> Any:
        """The handler of that name, or one that keeps the request until there is one."""
        return super().get(name) or (lambda message, caller: self._keep(name, message, caller))

    def _keep(self, name: str, message: Message, caller: Caller) -> Message | Future[Message]:
        with self._lock:
            if name not in self:
                future: Future[Message] = Future()
                self._waiting.setdefault(name, []).append((message, future))
                return future
        return self[name](message, caller)
