"""A client's connection: the DEALER socket, whether the peer is there, and why not."""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from gtrain.wire.limits import Limits
from gtrain.wire.zeromq.security import Security
from gtrain.wire.zeromq.sockets import (
    Frames,
    Monitor,
    Waiter,
    configure,
    has_input,
    hurry,
    process_context,
    receive,
    send,
)

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_MECHANISM_MISMATCH = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
_SEVERAL = 3
RECONNECT_MILLISECONDS = 50
MAX_RECONNECT_MILLISECONDS = 1000
LINGER_MILLISECONDS = 1000
LOOK_SECONDS = 0.01
QUIET_SECONDS = 10.0
"""Without any event for so long the connection is begun anew: after some errors zmq gives up without a word."""


@dataclass(slots=True)
class News:
    """What changed since the last look.

    Args:
        lost: the connection ended.
        arrived: a connection was made, after the loss if there was one.
        refusal: why the peer will never let this process in; None if it may.
    """

    lost: bool = False
    arrived: bool = False
    refusal: str | None = None


def mismatch(secured: bool) -> str:
    """Why a peer refuses a process that has keys, or one that has none."""
    ours, theirs = ("has keys", "has none") if secured else ("has no keys", "asks for them")
    return f"this process {ours} and it {theirs}"


class Link:
    """The socket to one server.

    Args:
        address: the server's.
        security: keys, or None.
        limits: of this side.
    """

    def __init__(self, address: str, security: Security | None, limits: Limits) -> None:
        self._address, self._secured = address, security is not None
        self._socket = process_context().socket(zmq.DEALER)
        configure(self._socket, limits, address)
        self._socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MILLISECONDS)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, 5000)
        if address.startswith("tcp://"):
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, 10_000)  # a machine that vanished closes no connection
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 60_000)
        if security is not None:
            security.identify(self._socket)
        self._monitor = Monitor(self._socket, _EVENTS)
        self._waiter = Waiter(int(self._socket.getsockopt(zmq.FD)), self._monitor.descriptor)
        self.wait, self.wake = self._waiter.wait, self._waiter.wake
        self._looked = 0.0
        self._last_event = time.monotonic()
        self._broken_off = 0  # handshakes in a row
        self._retried = 0  # attempts in a row that reached nobody
        self._socket.connect(address)

    def send(self, header: bytes, frames: Sequence[memoryview]) -> int:
        """Send one message and return its bytes; 0 if it could not be sent, and the connection is begun anew."""
        try:
            return send(self._socket, [header], frames)
        except zmq.Again:
            self.renew()
            return 0

    @property
    def unsent(self) -> bool:
        """Whether something waits for a thread of this process to send it: never, zmq has one of its own."""
        return False

    def receive(self) -> Frames | None:
        """The next message, or None."""
        return receive(self._socket)

    def has_input(self) -> bool:
        """Whether a message can be received; sending may have eaten the signal that says so."""
        return has_input(self._socket)

    def connection_changed(self) -> bool:
        """Whether there may be news: the last waiting said so, or nobody has looked for a while."""
        return self._monitor.descriptor in self._waiter.ready or time.monotonic() - self._looked > LOOK_SECONDS

    def news(self) -> News | None:
        """What happened to the connection, or None if nothing did."""
        self._looked = time.monotonic()
        if not self._monitor.waiting():
            return None
        news = News()
        self._last_event = time.monotonic()
        for event, value in self._monitor.read():
            self._note(news, event, value)
        return news

    def _note(self, news: News, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            news.arrived, self._broken_off = True, 0
            hurry()  # by now zmq's threads are there
        elif event == zmq.EVENT_DISCONNECTED:
            news.lost, news.arrived = True, False
        elif event == zmq.EVENT_CONNECTED:
            self._retried = 0
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._retried += 1
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._broken_off += 1
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            news.refusal = "this process's key is not on its list"
        elif value == _MECHANISM_MISMATCH:
            news.refusal = mismatch(self._secured)

    def suspicion(self) -> str | None:
        """Why the peer probably refuses this process: it ends every handshake; None if there is no such sign."""
        if self._broken_off < _SEVERAL or self._retried > 1:
            return None
        reason = "the keys are probably another job's" if self._secured else "it probably asks for keys"
        return f"it ended {self._broken_off} handshakes in a row; {reason}"

    def renew_if_quiet(self, now: float) -> None:
        """Begin anew if nothing has been heard of the connection for long; called while the peer is not there."""
        if now - self._last_event > QUIET_SECONDS:
            self.renew()

    def renew(self) -> None:
        """Drop the connection with what is queued for it, and connect once more."""
        self._last_event = time.monotonic()
        try:
            self._socket.disconnect(self._address)
        except zmq.ZMQError as err:  # zmq has given it up by itself
            if err.errno != errno.ENOENT:
                raise
        self._socket.connect(self._address)

    def close(self) -> None:
        """Close the socket; what is queued may leave for a second, without anybody waiting for it."""
        self._monitor.close()
        self._socket.close()
        self._waiter.close()
