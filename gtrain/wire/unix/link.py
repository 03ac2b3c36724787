"""A client's connection to a server of the same machine."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from gtrain.wire.limits import Limits
from gtrain.wire.transport import (
    MAX_RECONNECT_MILLISECONDS,
    RECONNECT_MILLISECONDS,
    ConnectionChange,
    Frames,
    Link,
    Poller,
)
from gtrain.wire.unix.stream import ConnectionEndedError, ProtocolError, Stream


class UnixLink(Link):
    """A client's Unix socket.

    Args:
        address: the server's, ``ipc://`` and a path.
        limits: of this side.
    """

    def __init__(self, address: str, limits: Limits) -> None:
        self._path, self._limits = address.removeprefix("ipc://"), limits
        self._stream: Stream | None = None
        self._poller = Poller()
        self._change = ConnectionChange()
        self._changed = False
        self._pause = RECONNECT_MILLISECONDS / 1000
        self._next_attempt = 0.0
        self._watches_output = False
        self._connect()

    def wait(self, seconds: float) -> None:
        if self._stream is None:
            seconds = min(seconds, max(0.0, self._next_attempt - time.monotonic()))
        super().wait(seconds)

    def send(self, header: bytes, frames: Sequence[memoryview]) -> int:
        if self._stream is None:
            return 0
        try:
            nbytes = self._stream.send(header, frames)
        except ConnectionEndedError:
            self._disconnect()
            return 0
        self._watch_output(self._stream.unsent)
        return nbytes

    @property
    def unsent(self) -> bool:
        """Whether data waits for room in the kernel; :meth:`receive` sends it."""
        return self._stream is not None and self._stream.unsent

    def receive(self) -> Frames | None:
        if self._stream is None:
            return None
        try:
            if self._stream.unsent:
                self._stream.flush()
                self._watch_output(self._stream.unsent)
            return self._stream.receive()
        except ConnectionEndedError:
            self._disconnect()
        except ProtocolError as err:
            self._disconnect()
            self._change.refusal = "this process has no keys and it asks for them" if err.is_zmq else str(err)
        return None

    def connection_change(self) -> ConnectionChange | None:
        """Connect again if it is time to; a lost connection is noticed by sending and receiving."""
        if self._stream is None and self._change.refusal is None and time.monotonic() >= self._next_attempt:
            self._connect()
        if not self._changed:
            return None
        change, self._change, self._changed = self._change, ConnectionChange(), False
        return change

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._poller.close()

    # ------------------------------------------------------------------------------------------------ connecting

    def _connect(self) -> None:
        """Try to connect once."""
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            sock.connect(self._path)
        except OSError:
            # No server listens yet, or its backlog is full: try again later.
            sock.close()
            self._next_attempt = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, MAX_RECONNECT_MILLISECONDS / 1000)
            return
        self._stream, self._pause = Stream(sock, self._limits), RECONNECT_MILLISECONDS / 1000
        self._poller.watch(self._stream.descriptor)
        self._watches_output = False
        self._change.connected = self._changed = True

    def _disconnect(self) -> None:
        """Close the connection after its end was noticed."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._change.lost, self._change.connected, self._changed = True, False, True
        self._next_attempt = time.monotonic() + self._pause

    def _watch_output(self, enabled: bool) -> None:
        """Have :meth:`wait` return as soon as more data can be sent, or no longer."""
        if enabled != self._watches_output and self._stream is not None:
            self._poller.watch_output(self._stream.descriptor, enabled)
            self._watches_output = enabled
