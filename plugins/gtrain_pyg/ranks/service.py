"""Requests between ranks: each rank serves its part to the ranks that do not host it, over gtrain.wire."""

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
    """The ranks of a job as servers of their parts.

    Unless every rank hosts every part, each rank runs a server in a thread. Its handlers run there one at a time; a
    handler that is added late may run in the thread that adds it, so handlers keep their memory per thread. ::

        peers = Peers(group, detect_hosting(group, "tcp"), counters=strategy.counters)
        peers.handle("rows", rows)             # before or after open()
        peers.open()                           # every rank
        reply = peers.wait(peers.request(1, "rows", {}, [ids]))

    Args:
        group: the job's ranks; used by :meth:`open` only.
        hosting: the parts that this rank hosts.
        counters: count bytes and the time of waiting; None counts nothing.
        timeout: deadline of a request, seconds.
        security: the job's keys; needed if its ranks are on several machines.
        main_address: host of the ranks' rendezvous. This machine's address is that of the interface that leads there;
            None: the host name.

    Attributes:
        hosting: as passed.
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
        self._handlers = DeferredHandlers()
        self._server: Server | None = None
        self._listener: Listener | None = None
        self._addresses: list[str] = []
        self._clients: dict[int, Client] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._traffic_before: tuple[int, int] | None = None
        if counters is not None:
            counters.meters.append(self)

    def handle(self, name: str, handler: Handler) -> None:
        """Reply to requests of that name, from any rank, with what ``handler`` returns.

        The requesting rank raises the handler's exceptions. The tensors of a reply must not be written to while
        anything refers to them.
        """
        self._handlers.add(name, handler)

    def open(self) -> None:
        """Start this rank's server and exchange addresses; collective, once."""
        if self.hosting.complete:
            return
        if not self.hosting.loopback and self._security is None:
            raise ConfigError(
                "the job's ranks are on several machines, and it has no keys.",
                hint="make keys with gtrain key cluster.key_file=job.key, and give all processes of the job the file.",
            )
        if self._security is None:
            self._listener = listen_here()
        else:
            host = own_address(self._main_address, 1) if self._main_address else socket.gethostname()
            self._listener = listen_tcp(host)
        name, descriptor = f"rank {self.hosting.rank}", self._listener.descriptor
        self._server = Server(self._handlers, name=name, descriptor=descriptor, security=self._security).start()
        self._addresses = self._group.all_gather_object(self._listener.address)

    def request(
        self, part: int, method: str, fields: Mapping[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> Future[Message]:
        """Send a request to the owner of a part; the future has its reply or its exception.

        Args:
            part: the part, and the rank.
            method: the name of a handler.
            fields: small values; see :class:`gtrain.wire.Message`.
            tensors: not to be written to until the future is done.
        """
        return self._client(part).submit(method, fields, tensors)

    def wait(self, reply: Future[Message]) -> Message:
        """Wait for a reply to :meth:`request`, and count the time.

        Raises:
            RemoteError: the handler raised; has its message.
            DeadlineError: no reply arrived in time.
            PeerRestartedError, WireError: the owner died, or this rank is closing.
        """
        if reply.done() or self._counters is None:
            return reply.result()
        start = time.perf_counter()
        try:
            return reply.result()
        finally:
            with self._lock:
                self._counters.waited(start, start)

    def close(self) -> None:
        """Close all connections; pending requests raise. Idempotent, and safe after other ranks have died."""
        with self._lock:
            self._closed = True
            clients, self._clients = self._clients, {}
        for resource in (*clients.values(), self._server, self._listener):
            if resource is not None:
                resource.close()

    # ------------------------------------------------------------------------------------------ a meter of Counters

    def start(self) -> None:
        """Remember the traffic before training resumes."""
        self._traffic_before = self.traffic()

    def stop(self) -> None:
        """Count the traffic since :meth:`start`: requests and replies, as a client and as a server."""
        assert self._counters is not None
        if self._traffic_before is not None:
            sent, received = self.traffic()
            self._counters.bytes_sent += sent - self._traffic_before[0]
            self._counters.bytes_received += received - self._traffic_before[1]
        self._traffic_before = None

    def traffic(self) -> tuple[int, int]:
        """Return the bytes sent and received since :meth:`open`, as a client and as a server."""
        counters = [client.counters for client in list(self._clients.values())]
        if self._server is not None:
            counters.append(self._server.counters)
        return sum(each.bytes_sent for each in counters), sum(each.bytes_received for each in counters)

    def _client(self, part: int) -> Client:
        client = self._clients.get(part)
        if client is not None:
            return client
        with self._lock:
            if self._closed or not self._addresses:
                state = "closed" if self._closed else "not open"
                raise ConfigError(
                    f"Rank {self.hosting.rank} requested data of part {part}, and its connections are {state}.",
                    hint="have every rank call Peers.open() before it samples, and Peers.close() at the end.",
                )
            if part not in self._clients:
                self._clients[part] = Client(
                    self._addresses[part],
                    peer=f"rank {part}",
                    name=f"rank {self.hosting.rank}",
                    security=self._security,
                    timeout_seconds=self._timeout,
                )
            return self._clients[part]


class DeferredHandlers(dict[str, Any]):
    """The handlers of a :class:`gtrain.wire.Server`, which looks them up with ``get``.

    Ranks run the same program at different speeds. A request that arrives before its handler was added waits for it;
    the requester's deadline bounds the wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._waiting: dict[str, list[tuple[Message, Future[Message]]]] = {}

    def add(self, name: str, handler: Handler) -> None:
        """Add a handler; this call also replies to the requests that wait for it."""
        with self._lock:
            self[name] = lambda message, caller: handler(message)
            waiting = self._waiting.pop(name, [])
        for message, future in waiting:
            try:
                future.set_result(handler(message))
            except Exception as error:
                future.set_exception(error)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the handler of that name, or one that defers the request until it is added."""
        return super().get(name) or (lambda message, caller: self._defer(name, message, caller))

    def _defer(self, name: str, message: Message, caller: Caller) -> Message | Future[Message]:
        with self._lock:
            if name not in self:
                future: Future[Message] = Future()
                self._waiting.setdefault(name, []).append((message, future))
                return future
        return self[name](message, caller)
