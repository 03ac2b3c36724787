"""A server's ZeroMQ socket: bound or adopted, authenticated, and monitored for handshakes that fail."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import zmq

from gtrain.wire.counters import Counters
from gtrain.wire.errors import WireError
from gtrain.wire.limits import Limits
from gtrain.wire.logs import ENDED
from gtrain.wire.transport import (
    BACKLOG,
    LINGER_MILLISECONDS,
    Frames,
    Listener,
    Poller,
    listen_error,
    refuse_second_server,
)
from gtrain.wire.zeromq.security import Authenticator, Security
from gtrain.wire.zeromq.sockets import MECHANISM_MISMATCH, Monitor, configure, receive, send, shorten_slices

UNTRACED_SECONDS = 2.0
"""How long the log waits for the address of a peer that ends its connections at once."""
# Not HANDSHAKE_FAILED_AUTH: the authenticator, which knows the key, reports that.
_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_CRYPTOGRAPHIC = 0x11000001  # ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC


class ZmqListener(Listener):
    """A server's ROUTER socket, in its own context: zmq authenticates within a context.

    Args:
        address: the address to bind.
        descriptor: a bound socket to use instead, or None.
        security: the job's keys, or None.
        limits: of this side.
        name: the server's, for messages.
        counters: refusals are counted there.
    """

    def __init__(
        self,
        address: str,
        descriptor: int | None,
        security: Security | None,
        limits: Limits,
        name: str,
        counters: Counters,
    ) -> None:
        super().__init__(name, counters)
        self._secured = security is not None
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, limits, address)
        self._socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        if security is not None:
            self._authenticator = Authenticator(self._context, security, name, self._refusals)
            security.guard(self._socket)
        self._monitor = Monitor(self._socket, _EVENTS)
        self._poller = Poller(int(self._socket.getsockopt(zmq.FD)), self._monitor.descriptor)
        self._addresses: dict[int, str | None] = {}  # peers' addresses by descriptor of the connection
        self._failure: str | None = None
        self._untraced: dict[str, float] = {}  # time by reason: refused peers whose address could not be read
        self._bind(address, descriptor)
        self.endpoint = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT)) if descriptor is None else address

    def _bind(self, address: str, descriptor: int | None) -> None:
        """Bind, or adopt a copy of the descriptor, which zmq may close."""
        try:
            if descriptor is not None:
                adopted = socket.socket(fileno=os.dup(descriptor))
                adopted.listen(BACKLOG)
                adopted.setblocking(False)
                # zmq closes the descriptor that it adopts, hence the copy; the original stays with the agent.
                self._socket.setsockopt(zmq.USE_FD, adopted.detach())
            elif address.startswith("ipc://"):
                refuse_second_server(address.removeprefix("ipc://"))
            self._socket.bind(address)
        except OSError as err:  # a ZMQError is not an OSError
            self.close()
            raise listen_error(self._name, address, err) from err
        except zmq.ZMQError as err:
            self.close()
            raise WireError(
                f"{self._name} cannot bind {address}: {err.strerror}",
                hint="use port 0 or a free one, an address of this machine, or a folder that exists",
            ) from err

    def receive(self) -> Frames | None:
        return receive(self._socket)

    def send(self, routing: bytes, header: bytes, frames: Sequence[memoryview]) -> int:
        return send(self._socket, [routing, header], frames)

    def check_connections(self) -> None:
        self._report_untraced(time.monotonic() - UNTRACED_SECONDS)
        if self._monitor.descriptor not in self._poller.ready:
            return
        for event, value in self._monitor.read():
            match event:
                case zmq.EVENT_ACCEPTED:
                    self._addresses[value] = _peer_address(value)
                    shorten_slices()  # zmq's threads exist by now
                case zmq.EVENT_DISCONNECTED:
                    address = self._addresses.pop(value, None)
                    if self._failure is not None:
                        self._report(address, self._failure)
                    self._failure = None
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    # The next event is the loss of that connection.
                    self._failure = self._reason(value)
                case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL if self._secured:
                    # A peer without keys may be the first to notice, and close the connection.
                    self._failure = ENDED

    def _reason(self, error: int) -> str:
        """Return why a handshake failed, in words."""
        if error == MECHANISM_MISMATCH:
            return ENDED if self._secured else "it uses keys, and this server has none"
        if error == _CRYPTOGRAPHIC:
            return "it does not know this job's keys"
        return "it does not speak this protocol"

    def _report(self, address: str | None, reason: str) -> None:
        """Count and log a failed handshake; one without an address only if the next attempt shows none either."""
        self._refusals.count()
        if address is not None:
            self._untraced.pop(reason, None)
            self._refusals.report(address, reason)
        elif not self._refusals.is_logged(reason):
            self._untraced.setdefault(reason, time.monotonic())

    def _report_untraced(self, before: float) -> None:
        """Log refusals older than ``before`` whose peers had gone before their address could be read."""
        for reason in [reason for reason, since in self._untraced.items() if since < before]:
            del self._untraced[reason]
            if not self._refusals.is_logged(reason):
                self._refusals.report("an address that has gone", reason)

    def _close(self) -> None:
        self._report_untraced(time.monotonic())
        self._monitor.close()
        self._socket.close()
        self._context.term()
        self._poller.close()


def _peer_address(descriptor: int) -> str | None:
    """Return the address at the other end of a connection; None if the connection has ended."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family == socket.AF_UNIX:
                return "a process of this machine"
            return str(connection.getpeername()[0])
    except OSError:
        return None
