"""A server's socket for clients of the same machine."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from gtrain.wire.counters import Counters
from gtrain.wire.limits import Limits
from gtrain.wire.transport import (
    BACKLOG,
    LINGER_MILLISECONDS,
    Frames,
    Listener,
    Poller,
    listen_error,
    refuse_second_server,
)
from gtrain.wire.unix.stream import ConnectionEndedError, ProtocolError, Stream


class UnixListener(Listener):
    """A server's Unix socket, and its connections.

    Args:
        address: ``ipc://`` and a path to bind.
        descriptor: a bound socket to use instead, or None.
        limits: of this side.
        name: the server's, for messages.
        counters: connections that do not speak the protocol are counted there.
    """

    def __init__(self, address: str, descriptor: int | None, limits: Limits, name: str, counters: Counters) -> None:
        super().__init__(name, counters)
        self.endpoint, self._limits = address, limits
        self._path = address.removeprefix("ipc://") if descriptor is None else None
        self._socket = socket.socket(fileno=os.dup(descriptor)) if descriptor is not None else self._bind()
        self._socket.setblocking(False)
        self._socket.listen(BACKLOG)
        self._poller = Poller(self._socket.fileno())
        self._streams: dict[int, Stream] = {}  # by descriptor
        self._routes: dict[bytes, Stream] = {}  # by routing id
        self._readable: deque[int] = deque()
        self._connections = 0

    def _bind(self) -> socket.socket:
        """Bind, in place of a socket that a killed server left behind."""
        assert self._path is not None
        bound = socket.socket(socket.AF_UNIX)
        try:
            refuse_second_server(self._path)
            with suppress(FileNotFoundError):
                os.unlink(self._path)
            bound.bind(self._path)
        except OSError as err:
            bound.close()
            raise listen_error(self._name, self.endpoint, err) from err
        return bound

    # ------------------------------------------------------------------------------------------------ messages

    def receive(self) -> Frames | None:
        while self._readable or self._check():
            descriptor = self._readable.popleft()
            stream = self._streams.get(descriptor)
            frames = None if stream is None else self._receive_from(descriptor, stream)
            if stream is not None and frames is not None:
                if stream.buffered:
                    # The kernel reports only what it still holds.
                    self._readable.append(descriptor)
                return [memoryview(stream.routing), *frames]
        return None

    def _receive_from(self, descriptor: int, stream: Stream) -> Frames | None:
        """Return the next message of a connection; None if none has arrived or the connection has ended."""
        try:
            return stream.receive()
        except ConnectionEndedError:
            self._drop(descriptor)
        except ProtocolError as err:
            self._refusals.count()
            if err.is_zmq:
                stream.greet_zmq()
            reason = "it uses keys, and this server has none" if err.is_zmq else str(err)
            self._refusals.report("a process of this machine", reason)
            self._drop(descriptor)
        return None

    def send(self, routing: bytes, header: bytes, frames: Sequence[memoryview]) -> int:
        stream = self._routes.get(routing)
        if stream is None:
            return 0
        watched = stream.unsent
        try:
            nbytes = stream.send(header, frames)
        except ConnectionEndedError:
            self._drop(stream.descriptor)
            return 0
        if stream.unsent and not watched:
            self._poller.watch_output(stream.descriptor, True)
        return nbytes

    # ------------------------------------------------------------------------------------------------ events

    def wait(self, seconds: float) -> None:
        super().wait(seconds)
        self._handle(self._poller.ready)

    def _check(self) -> bool:
        """Handle the events that have occurred; return whether a connection has input."""
        self._handle(self._poller.check())
        return bool(self._readable)

    def _handle(self, ready: list[int]) -> None:
        for descriptor in ready:
            if descriptor == self._socket.fileno():
                self._accept()
            elif descriptor in self._streams:
                self._flush(descriptor)
                if descriptor not in self._readable:
                    self._readable.append(descriptor)

    def _accept(self) -> None:
        """Accept all connections that are waiting."""
        while True:
            try:
                sock, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as err:
                self._refusals.report("a process of this machine", str(err.strerror))
                return
            self._connections += 1
            # Numbers of connections, not descriptors, which the kernel reuses: a late reply must not reach another
            # client.
            stream = Stream(sock, self._limits, self._connections.to_bytes(8, "little"))
            self._streams[stream.descriptor] = self._routes[stream.routing] = stream
            self._poller.watch(stream.descriptor)

    def _flush(self, descriptor: int) -> None:
        """Send the data that waited for room in the kernel."""
        stream = self._streams[descriptor]
        if not stream.unsent:
            return
        try:
            stream.flush()
        except ConnectionEndedError:
            self._drop(descriptor)
        else:
            if not stream.unsent:
                self._poller.watch_output(descriptor, False)

    def _drop(self, descriptor: int) -> None:
        """Close and forget a connection."""
        stream = self._streams.pop(descriptor)
        del self._routes[stream.routing]
        stream.close()

    def _close(self) -> None:
        deadline = time.monotonic() + LINGER_MILLISECONDS / 1000
        while any(stream.unsent for stream in self._streams.values()) and time.monotonic() < deadline:
            self._poller.wait(deadline - time.monotonic())
            for descriptor in [ready for ready in self._poller.ready if ready in self._streams]:
                self._flush(descriptor)
        for stream in self._streams.values():
            stream.close()
        # Before the socket closes: a server that waits for that makes a new one at the path.
        if self._path is not None:
            with suppress(OSError):
                os.unlink(self._path)
        self._socket.close()
        self._poller.close()
