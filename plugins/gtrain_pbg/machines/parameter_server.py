"""A parameter server: adds up what machines have changed of the parameters that all of them have."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gtrain.errors import DataError
from gtrain.strategy.server import ServerContext
from gtrain.wire import Caller, Message
from gtrain_pbg.machines.heartbeat import start_heartbeat


def main(context: ServerContext) -> None:
    """Serve until asked to end."""
    start_heartbeat(context)
    context.serve(Handlers().methods())


class Handlers:
    """The methods of a parameter server. Keys are a parameter's name and the number of its piece."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    def methods(self) -> dict[str, Any]:
        """The handlers by the names of their methods."""
        return {name: getattr(self, name) for name in ("put", "add", "get")}

    def put(self, message: Message, caller: Caller) -> None:
        """Have these values. Fields: ``keys``; as many tensors."""
        self._values |= dict(zip(message.fields["keys"], message.tensors, strict=True))

    def add(self, message: Message, caller: Caller) -> Message:
        """Add what has changed, and answer with the new values. Fields: ``keys``; as many tensors."""
        for key, change in zip(message.fields["keys"], message.tensors, strict=True):
            self._value(key).add_(change)
        return self.get(message, caller)

    def get(self, message: Message, caller: Caller) -> Message:
        """The values. Fields: ``keys``."""
        return Message({}, [self._value(key).clone() for key in message.fields["keys"]])

    def _value(self, key: str) -> Tensor:
        if key not in self._values:
            raise DataError(f"there is no parameter {key} here.", hint="this is an error of gtrain.")
        return self._values[key]
