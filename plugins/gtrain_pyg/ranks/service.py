"""The ranks as each other's servers: what one does not host it asks the owner for, over gtrain.wire."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from gtrain.errors import ConfigError
from gtrain.launch.sockets import Listener, listen_here, listen_tcp, own_address
from gtrain.strategy.counters import Counters
from gtrain.strategy.group import Group
from gtrain.wire import Caller, Client, Message, Security, Server
from gtrain_pyg.ranks.hosting import Hosting

Handler = Callable[[Message], Message]


class Peers:
    """The other ranks of a job, each of which answers for its part.

    A rank whose part is not hosted by every rank runs a server in a thread. Its handlers run there one at a time, but a
    handler that is added late may run in the thread that adds it, so handlers keep their memory by thread. ::

        peers = Peers(group, host(group, "tcp"), counters=strategy.counters)
        peers.handle("rows", rows)             # before or after
        peers.open()                           # every rank
        answer = peers.wait(peers.ask(1, "rows", {}, [ids]))

    Args:
        group: the job's ranks; used by :meth:`open` only.
        hosting: which parts this rank hosts.
        counters: where bytes, and the time of waiting, are counted; None: nowhere.
        timeout: deadline of a request, seconds.
        security: the job's keys, where its ranks are on several machines.
        main_address: host that the ranks met at; the address by which this machine is reached is the one that leads
            there. None: the one of the default route.

    Attributes:
        hosting: as given.
    """

    def __init__(
        self,
        group: Group,
        hosting: Hosting,
        *,
        counters: Counters | None = None,
        timeout: float = 60.0,
        security: Security | None = None,
        main_address: str | None = None,
    ) -> None:
        self.hosting = hosting
        self._group, self._counters, self._timeout = group, counters, timeout
        self._security, self._main_address = security, main_address
        self._handlers = Handlers()
        self._server: Server | None = None
        self._listener: Listener | None = None
        self._addresses: list[str] = []
        self._clients: dict[int, Client] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._before: tuple[int, int] | None = None
        if counters is not None:
            counters.meters.append(self)

    def handle(self, name: str, handler: Handler) -> None:
        """Answer requests of that name, from any rank, by what ``handler`` makes of the message.

        What it raises is raised at the asker. The tensors of its answer must not be written to until nothing refers to
        them any more.
        """
        self._handlers.add(name, handler)

    def open(self) -> None:
        """Start this rank's server and learn where the others' are; every rank calls it, once."""
        if self.hosting.complete:
            return
        name, loopback = f"rank {self.hosting.rank}", self.hosting.loopback
        if not loopback and self._security is None:
            raise ConfigError(
                "the job's ranks are on several machines, and it has no keys.",
                hint="make keys with gtrain key cluster.key_file=job.key, and give all processes of the job the file.",
            )
        own = own_address(self._main_address, 1) if self._main_address else socket.gethostname()
        self._listener = listen_here() if self._keys is None else listen_tcp(own)
        descriptor = self._listener.descriptor
        self._server = Server(self._handlers, name=name, descriptor=descriptor, security=self._keys).start()
        self._addresses = self._group.all_gather_object(self._listener.address)

    def ask(
        self, part: int, method: str, fields: Mapping[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> Future[Message]:
        """Ask the owner of a part; what it answers, or what went wrong, comes with the future.

        Args:
            part: the part, and the rank.
            method: the name of a handler.
            fields: small values; see :class:`gtrain.wire.Message`.
            tensors: not to be written to until the future is done.
        """
        return self._client(part).submit(method, fields, tensors)

    def wait(self, answer: Future[Message]) -> Message:
        """Wait for an answer of :meth:`ask`.

        Raises:
            RemoteError: the rank asked raised; has its message.
            DeadlineError: no answer in time.
            PeerRestartedError, WireError: the rank has gone, or this one is closing.
        """
        if answer.done() or self._counters is None:
            return answer.result()
        began = time.perf_counter()
        try:
            return answer.result()
        finally:
            with self._lock:
                self._counters.waited(began, began)

    def close(self) -> None:
        """End; what is under way raises. Can be called twice, and when other ranks are dead."""
        with self._lock:
            self._closed = True
            clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()
        if self._server is not None:
            self._server.close()
        if self._listener is not None:
            self._listener.close()

    # ------------------------------------------------------------------------------------------ as a meter

    def start(self) -> None:
        """Note what had crossed before training goes on."""
        self._before = self.traffic()

    def stop(self) -> None:
        """Count what has since: requests and answers, both as a client and as a server."""
        assert self._counters is not None
        if self._before is not None:
            sent, received = self.traffic()
            self._counters.bytes_sent += sent - self._before[0]
            self._counters.bytes_received += received - self._before[1]
        self._before = None

    def traffic(self) -> tuple[int, int]:
        """Return the bytes sent and received since :meth:`open`, as a client and as a server."""
        counted = [client.counters for client in list(self._clients.values())]
        if self._server is not None:
            counted.append(self._server.counters)
        return sum(each.bytes_sent for each in counted), sum(each.bytes_received for each in counted)

    # ------------------------------------------------------------------------------------------ inside

    @property
    def _keys(self) -> Security | None:
        return self._security

    def _client(self, part: int) -> Client:
        client = self._clients.get(part)
        if client is not None:
            return client
        with self._lock:
            if self._closed or not self._addresses:
                state = "closed" if self._closed else "not open"
                raise ConfigError(
                    f"Rank {self.hosting.rank} asked for part {part} of the graph, and its connections are {state}.",
                    hint="have every rank call Peers.open() before anything is sampled, and Peers.close() at the end.",
                )
            if part not in self._clients:
                self._clients[part] = Client(
                    self._addresses[part],
                    peer=f"rank {part}",
                    name=f"rank {self.hosting.rank}",
                    security=self._keys,
                    timeout_seconds=self._timeout,
                )
            return self._clients[part]


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
