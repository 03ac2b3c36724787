"""A client's ZeroMQ connection: a DEALER socket, whether its server is connected, and why not."""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence

import zmq

from gtrain.wire.limits import Limits
from gtrain.wire.transport import (
    MAX_RECONNECT_MILLISECONDS,
    RECONNECT_MILLISECONDS,
    ConnectionChange,
    Frames,
    Link,
    Poller,
)
from gtrain.wire.zeromq.security import Security
from gtrain.wire.zeromq.sockets import (
    MECHANISM_MISMATCH,
    Monitor,
    configure,
    has_input,
    process_context,
    receive,
    send,
    shorten_slices,
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
SUSPICIOUS_HANDSHAKES = 3
"""This many broken handshakes in a row are taken for a refusal."""
CLIENT_LINGER_MILLISECONDS = 1000
CHECK_SECONDS = 0.01
"""The monitor is read this often even if the last wait did not report it."""
IDLE_SECONDS = 10.0
"""Without any event for this long the link connects again: after some errors zmq gives up silently."""


class ZmqLink(Link):
    """A client's DEALER socket.

    Args:
        address: the server's.
        security: the job's keys, or None.
        limits: of this side.
    """

    def __init__(self, address: str, security: Security | None, limits: Limits) -> None:
        self._address, self._secured = address, security is not None
        self._socket = process_context().socket(zmq.DEALER)
        configure(self._socket, limits, address)
        options = {
            zmq.LINGER: CLIENT_LINGER_MILLISECONDS,
            zmq.RECONNECT_IVL: RECONNECT_MILLISECONDS,
            zmq.RECONNECT_IVL_MAX: MAX_RECONNECT_MILLISECONDS,
            zmq.CONNECT_TIMEOUT: 5000,
        }
        if address.startswith("tcp://"):
            # A machine that vanished closes no connection.
            options |= {zmq.HEARTBEAT_IVL: 5_000, zmq.HEARTBEAT_TIMEOUT: 60_000}
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        if security is not None:
            security.identify(self._socket)
        self._monitor = Monitor(self._socket, _EVENTS)
        self._poller = Poller(int(self._socket.getsockopt(zmq.FD)), self._monitor.descriptor)
        self._last_check = 0.0
        self._last_event = time.monotonic()
        self._broken_handshakes = 0  # in a row
        self._failed_attempts = 0  # in a row: nothing listened at the address
        self._socket.connect(address)

    def send(self, header: bytes, frames: Sequence[memoryview]) -> int:
        try:
            return send(self._socket, [header], frames)
        except zmq.Again:
            self._reconnect()
            return 0

    def receive(self) -> Frames | None:
        return receive(self._socket)

    def has_input(self) -> bool:
        """Whether a message has arrived: sending may have consumed zmq's signal for it."""
        return has_input(self._socket)

    def connection_change(self) -> ConnectionChange | None:
        now = time.monotonic()
        # The monitor's descriptor is edge-triggered, so it is also read from time to time.
        if self._monitor.descriptor not in self._poller.ready and now - self._last_check <= CHECK_SECONDS:
            return None
        self._last_check = now
        if not self._monitor.has_events():
            return None
        change, self._last_event = ConnectionChange(), now
        for event, value in self._monitor.read():
            self._record(change, event, value)
        return change

    def _record(self, change: ConnectionChange, event: int, value: int) -> None:
        match event:
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                change.connected, self._broken_handshakes = True, 0
                shorten_slices()  # zmq's threads exist by now
            case zmq.EVENT_DISCONNECTED:
                change.lost, change.connected = True, False
            case zmq.EVENT_CONNECTED:
                self._failed_attempts = 0
            case zmq.EVENT_CONNECT_RETRIED:
                self._failed_attempts += 1
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._broken_handshakes += 1
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                change.refusal = "this process's key is not on its list"
            case _ if value == MECHANISM_MISMATCH:
                ours, theirs = ("has keys", "has none") if self._secured else ("has no keys", "asks for them")
                change.refusal = f"this process {ours} and it {theirs}"

    def suspected_refusal(self) -> str | None:
        """Return a reason if the server breaks off every handshake.

        zmq does not say that a server's key is wrong, and a server with keys may close the connection of a client
        without keys before its greeting, which names them, has left.
        """
        if self._broken_handshakes < SUSPICIOUS_HANDSHAKES or self._failed_attempts > 1:
            return None
        reason = "the keys are probably another job's" if self._secured else "it probably asks for keys"
        return f"it ended {self._broken_handshakes} handshakes in a row; {reason}"

    def reconnect_if_idle(self, now: float) -> None:
        if now - self._last_event > IDLE_SECONDS:
            self._reconnect()

    def _reconnect(self) -> None:
        """Drop the connection with the messages queued for it, and connect again."""
        self._last_event = time.monotonic()
        try:
            self._socket.disconnect(self._address)
        except zmq.ZMQError as err:  # zmq has already given it up
            if err.errno != errno.ENOENT:
                raise
        self._socket.connect(self._address)

    def close(self) -> None:
        self._monitor.close()
        self._socket.close()
        self._poller.close()
