"""A server's socket within a machine: as :class:`gtrain.wire.zeromq.listener.Listener`, without zmq."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from gtrain.wire.counters import Counters
from gtrain.wire.limits import Limits
from gtrain.wire.unix.stream import EndedError, ForeignError, Piece, Stream
from gtrain.wire.zeromq.listener import BACKLOG, LINGER_MILLISECONDS, no_place, refuse_a_second_server
from gtrain.wire.zeromq.sockets import Frames, Waiter

log = logging.getLogger(__name__)


class LocalListener:
    """The listening socket of a server, and its connections.

    Args:
        address: ``ipc://`` and a path to bind.
        descriptor: a bound socket to use for it, or None.
        limits: of this side.
        name: the server's, for messages.
        counters: peers that are no clients are counted there.
    """

    def __init__(self, address: str, descriptor: int | None, limits: Limits, name: str, counters: Counters) -> None:
        self.endpoint = address
        self._name, self._limits, self._counters = name, limits, counters
        self._path = address.removeprefix("ipc://") if descriptor is None else None
        self._socket = socket.socket(fileno=os.dup(descriptor)) if descriptor is not None else self._bound()
        self._socket.setblocking(False)
        self._socket.listen(BACKLOG)
        self._waiter = Waiter(self._socket.fileno())
        self._streams: dict[int, Stream] = {}  # by descriptor
        self._names: dict[bytes, int] = {}  # descriptors by routing id
        self._routes: dict[int, bytes] = {}
        self._readable: deque[int] = deque()
        self._connections = 0
        self._told: set[str] = set()
        self._closed = False
        self._closing = threading.RLock()  # a signal handler may close it

    def _bound(self) -> socket.socket:
        """Bind, in place of a socket that a killed server left behind."""
        assert self._path is not None
        bound = socket.socket(socket.AF_UNIX)
        try:
            refuse_a_second_server(self._path)
            with suppress(FileNotFoundError):
                os.unlink(self._path)
            bound.bind(self._path)
        except OSError as err:
            bound.close()
            raise no_place(self._name, self.endpoint, err) from err
        return bound

    # ---------------------------------------------------------------------------------------------- messages

    def receive(self) -> Frames | None:
        """The next message, its first frame where it came from; None if there is none."""
        while self._readable or self._look():
            descriptor = self._readable.popleft()
            stream = self._streams.get(descriptor)
            frames = None if stream is None else self._attempt(descriptor, stream)
            if stream is not None and frames is not None:
                if stream.buffered:
                    self._readable.append(descriptor)  # else the kernel knows whether there is more
                return [Piece(memoryview(self._routes[descriptor])), *frames]
        return None

    def _attempt(self, descriptor: int, stream: Stream) -> Frames | None:
        """The next message of a connection; None if there is none, or the connection has ended."""
        try:
            return stream.receive()
        except EndedError:
            self._drop(descriptor)
        except ForeignError as err:
            self._counters.refused += 1
            if err.zmq:
                stream.greet_zmq()
            self._tell("it uses keys, and this server none" if err.zmq else str(err))
            self._drop(descriptor)
        return None

    def send(self, routing: bytes, header: bytes, frames: Sequence[memoryview]) -> int:
        """Send a message to a connection, if it is still there; return its bytes."""
        descriptor = self._names.get(routing)
        if descriptor is None:
            return 0
        stream = self._streams[descriptor]
        waited = stream.unsent
        try:
            sent = stream.send(header, frames)
        except EndedError:
            self._drop(descriptor)
            return 0
        if stream.unsent and not waited:
            self._waiter.want_room(descriptor, True)
        return sent

    # ------------------------------------------------------------------------------------------- what happens

    def wait(self, seconds: float) -> None:
        """Return when something may have happened, after ``seconds`` at the latest."""
        self._waiter.wait(seconds)
        self._note(self._waiter.ready)

    def _look(self) -> bool:
        """See whether anything came; tell whether a connection has something to read."""
        self._note(self._waiter.look())
        return bool(self._readable)

    def _note(self, ready: list[int]) -> None:
        for descriptor in ready:
            if descriptor == self._socket.fileno():
                self._accept()
            elif descriptor in self._streams:
                self._go_on(descriptor)
                if descriptor not in self._readable:
                    self._readable.append(descriptor)

    def _accept(self) -> None:
        """Let all in that have come."""
        while True:
            try:
                sock, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as err:
                self._tell(str(err.strerror))
                return
            self._connections += 1
            stream, routing = Stream(sock, self._limits), self._connections.to_bytes(8, "little")
            self._streams[stream.descriptor] = stream
            self._names[routing], self._routes[stream.descriptor] = stream.descriptor, routing
            self._waiter.watch(stream.descriptor)

    def _go_on(self, descriptor: int) -> None:
        """Send what waits for room."""
        stream = self._streams[descriptor]
        if not stream.unsent:
            return
        try:
            stream.flush()
        except EndedError:
            self._drop(descriptor)
        else:
            if not stream.unsent:
                self._waiter.want_room(descriptor, False)

    def _drop(self, descriptor: int) -> None:
        """Forget a connection."""
        self._streams.pop(descriptor).close()
        del self._names[self._routes.pop(descriptor)]

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            log.warning("%s refused a connection from a process of this machine: %s", self._name, reason)

    def wake(self) -> None:
        """End the waiting of the loop; from any thread."""
        with self._closing:
            if not self._closed:
                self._waiter.wake()

    def watch(self) -> None:
        """Look at what happened to connections: here it is seen when they are read."""

    def close(self) -> None:
        """Close the sockets; answers already given leave if their clients take them within two seconds."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        end = time.monotonic() + LINGER_MILLISECONDS / 1000
        while any(stream.unsent for stream in self._streams.values()) and (left := end - time.monotonic()) > 0:
            self._waiter.wait(left)
            for descriptor in [one for one in self._waiter.ready if one in self._streams]:
                self._go_on(descriptor)
        for stream in self._streams.values():
            stream.close()
        self._socket.close()
        if self._path is not None:
            with suppress(OSError):
                os.unlink(self._path)
        self._waiter.close()
