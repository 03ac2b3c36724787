"""A client's connection within a machine: as :class:`gtrain.wire.zeromq.link.Link`, without zmq."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from gtrain.wire.limits import Limits
from gtrain.wire.unix.stream import EndedError, ForeignError, Stream
from gtrain.wire.zeromq.link import MAX_RECONNECT_MILLISECONDS, RECONNECT_MILLISECONDS, News, mismatch
from gtrain.wire.zeromq.sockets import Frames, Waiter


class LocalLink:
    """The socket to one server of this machine.

    Args:
        address: the server's, ``ipc://`` and a path.
        limits: of this side.
    """

    def __init__(self, address: str, limits: Limits) -> None:
        self._path, self._limits = address.removeprefix("ipc://"), limits
        self._stream: Stream | None = None
        self._waiter = Waiter()
        self.wake = self._waiter.wake
        self._news = News()
        self._changed = False
        self._pause = RECONNECT_MILLISECONDS / 1000
        self._next_attempt = 0.0
        self._wants_room = False
        self._connect()

    def wait(self, seconds: float) -> None:
        """Return when something may have happened, after ``seconds`` at the latest."""
        if self._stream is None:
            seconds = min(seconds, max(0.0, self._next_attempt - time.monotonic()))
        self._waiter.wait(seconds)

    def send(self, header: bytes, frames: Sequence[memoryview]) -> int:
        """Send one message and return its bytes; 0 if it could not be sent, because the connection has ended."""
        if self._stream is None:
            return 0
        try:
            sent = self._stream.send(header, frames)
        except EndedError:
            self._lose()
            return 0
        self._want_room(self._stream.unsent)
        return sent

    @property
    def unsent(self) -> bool:
        """Whether something waits until the kernel takes it; :meth:`receive` sees to it."""
        return self._stream is not None and self._stream.unsent

    def receive(self) -> Frames | None:
        """The next message, or None."""
        if self._stream is None:
            return None
        try:
            if self._stream.unsent:
                self._stream.flush()
                self._want_room(self._stream.unsent)
            return self._stream.receive()
        except EndedError:
            self._lose()
        except ForeignError as err:
            self._lose()
            self._news.refusal = mismatch(secured=False) if err.zmq else str(err)
        return None

    def has_input(self) -> bool:
        """Whether an answer may have come that a waiting thread is not told of: never, here."""
        return False

    def connection_changed(self) -> bool:
        """Whether there is news; that a server has gone is seen by who sends to it, or receives."""
        return self._changed or (self._stream is None and time.monotonic() >= self._next_attempt)

    def news(self) -> News | None:
        """What happened to the connection, or None if nothing did."""
        if self._stream is None and self._news.refusal is None and time.monotonic() >= self._next_attempt:
            self._connect()
        if not self._changed:
            return None
        news, self._news, self._changed = self._news, News(), False
        return news

    def suspicion(self) -> str | None:
        """Why the peer probably refuses this process; here it is known, or there is no sign."""
        return None

    def renew_if_quiet(self, now: float) -> None:
        """Nothing: a connection is there, or it is tried again all the time."""

    def close(self) -> None:
        """Close the socket; what the kernel has taken still arrives."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._waiter.close()

    # ------------------------------------------------------------------------------------------------- inside

    def _connect(self) -> None:
        """Try once."""
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            sock.connect(self._path)
        except OSError:  # nobody is there yet, or too many wait there
            sock.close()
            self._next_attempt = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, MAX_RECONNECT_MILLISECONDS / 1000)
            return
        self._stream, self._pause = Stream(sock, self._limits), RECONNECT_MILLISECONDS / 1000
        self._waiter.watch(self._stream.descriptor)
        self._wants_room = False
        self._news.arrived = self._changed = True

    def _lose(self) -> None:
        """The connection has ended."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._news.lost, self._news.arrived, self._changed = True, False, True
        self._next_attempt = time.monotonic() + self._pause

    def _want_room(self, wanted: bool) -> None:
        """Have waiting end as soon as more can be sent."""
        if wanted != self._wants_room and self._stream is not None:
            self._waiter.want_room(self._stream.descriptor, wanted)
            self._wants_room = wanted
