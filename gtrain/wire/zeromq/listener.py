"""A server's socket: bound or adopted, guarded, and watched for handshakes that fail."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq

from gtrain.errors import ConfigError
from gtrain.wire.addresses import is_local
from gtrain.wire.counters import Counters
from gtrain.wire.errors import WireError
from gtrain.wire.limits import Limits
from gtrain.wire.zeromq.authenticator import Authenticator
from gtrain.wire.zeromq.refusals import ENDED, RefusalLog
from gtrain.wire.zeromq.security import Security, require_security
from gtrain.wire.zeromq.sockets import Frames, Monitor, Waiter, configure, hurry, receive, send

LINGER_MILLISECONDS = 2000
"""How long answers may take to leave when the server ends."""
BACKLOG = 1024
ENDING_SECONDS = 2.0
UNTRACED_SECONDS = 2.0
"""How long the log waits for the address of a peer that ends its connections at once."""
_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)  # HANDSHAKE_FAILED_AUTH is the doorkeeper's, who knows the key
_MECHANISM_MISMATCH, _CRYPTOGRAPHIC = 0x11000002, 0x11000001  # ZMQ_PROTOCOL_ERROR_ZMTP_*


def plan_address(address: str | None, descriptor: int | None, security: Security | None) -> str:
    """The address to bind: the one given, or that of a bound socket; checked.

    Raises:
        ConfigError: neither or both are given, the socket is not bound, or others can reach it and there are no keys.
    """
    if (address is None) == (descriptor is None):
        raise ConfigError(
            "a server needs an address or a descriptor, and not both", hint="give address= or descriptor="
        )
    planned = address if address is not None else _address_of(descriptor or 0)
    require_security(planned, is_local(planned), security)
    return planned


def _address_of(descriptor: int) -> str:
    """The address that a socket is bound to."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as bound:
            name, family = bound.getsockname(), bound.family
    except OSError as err:
        raise ConfigError(
            f"descriptor {descriptor} is no socket: {err.strerror}", hint="bind a stream socket before the fork"
        ) from err
    if family == socket.AF_UNIX and isinstance(name, str) and name:
        return f"ipc://{name}"
    if family in (socket.AF_INET, socket.AF_INET6) and name[1]:
        return f"tcp://[{name[0]}]:{name[1]}" if ":" in name[0] else f"tcp://{name[0]}:{name[1]}"
    raise ConfigError(f"descriptor {descriptor} is a socket that is not bound", hint="bind it before the fork")


class Listener:
    """The ROUTER socket of a server, in a context of its own (zmq asks for keys within a context).

    Args:
        address: what to bind.
        descriptor: a bound socket to use for it, or None.
        security: keys, or None.
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
        self._name, self._secured = name, security is not None
        self._refusals = RefusalLog(name, counters)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, limits, address)
        self._socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        if security is not None:
            self._door = Authenticator(self._context, security, name, self._refusals)
            security.guard(self._socket)
        self._monitor = Monitor(self._socket, _EVENTS)
        self._waiter = Waiter(int(self._socket.getsockopt(zmq.FD)), self._monitor.descriptor)
        self._peers: dict[int, str | None] = {}  # addresses of connections by descriptor
        self._failure: str | None = None
        self._untraced: dict[str, float] = {}  # when a peer was refused that had gone before its address was read
        self._closed = False
        self._closing = threading.RLock()  # a signal handler may close it
        self._bind(address, descriptor)
        self.endpoint = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT)) if descriptor is None else address

    def _bind(self, address: str, descriptor: int | None) -> None:
        """Bind, or adopt a copy of the descriptor, which zmq may close."""
        try:
            if descriptor is not None:
                adopted = socket.socket(fileno=os.dup(descriptor))
                adopted.listen(BACKLOG)
                adopted.setblocking(False)
                self._socket.setsockopt(zmq.USE_FD, adopted.detach())
            elif address.startswith("ipc://"):
                refuse_a_second_server(address.removeprefix("ipc://"))
            self._socket.bind(address)
        except OSError as err:  # ZMQError is none
            self.close()
            raise no_place(self._name, address, err) from err
        except zmq.ZMQError as err:
            self.close()
            raise WireError(
                f"{self._name} cannot bind {address}: {err.strerror}",
                hint="use port 0 or a free one, an address of this machine, or a folder that exists",
            ) from err

    def receive(self) -> Frames | None:
        """The next message, its first frame where it came from; None if there is none."""
        return receive(self._socket)

    def send(self, routing: bytes, header: bytes, frames: Sequence[memoryview]) -> int:
        """Send a message to a connection, if it is still there; return its bytes."""
        return send(self._socket, [routing, header], frames)

    def wait(self, seconds: float) -> None:
        """Return when something may have happened, after ``seconds`` at the latest."""
        self._waiter.wait(min(seconds, UNTRACED_SECONDS) if self._untraced else seconds)

    def wake(self) -> None:
        """End the waiting of the loop; from any thread."""
        with self._closing:
            if not self._closed:
                self._waiter.wake()

    def watch(self) -> None:
        """Look at what happened to connections, if the last waiting said that something did."""
        self._report_untraced(time.monotonic() - UNTRACED_SECONDS)
        if self._monitor.descriptor not in self._waiter.ready:
            return
        for event, value in self._monitor.read():
            if event == zmq.EVENT_ACCEPTED:
                self._peers[value] = _peer_name(value)
                hurry()  # by now zmq's threads are there
            elif event == zmq.EVENT_DISCONNECTED:
                peer = self._peers.pop(value, None)
                if self._failure is not None:
                    self._refused(peer, self._failure)
                self._failure = None
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                continue
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:  # the loss of that connection is reported next
                self._failure = self._reason(value)
            elif self._secured:  # a peer without keys may be the first to notice, and leave
                self._failure = self._reason(_MECHANISM_MISMATCH)

    def _reason(self, error: int) -> str:
        """Why a handshake failed, in words."""
        if error == _MECHANISM_MISMATCH:
            return ENDED if self._secured else "it uses keys, and this server none"
        if error == _CRYPTOGRAPHIC:
            return "it does not know this job's keys"
        return "it does not speak this protocol"

    def _refused(self, peer: str | None, reason: str) -> None:
        """Count a failed handshake, and log it; one without an address only if its next attempt shows none either."""
        self._refusals.count()
        if peer is not None:
            self._untraced.pop(reason, None)
            self._refusals.report(peer, reason)
        elif not self._refusals.is_logged(reason):
            self._untraced.setdefault(reason, time.monotonic())

    def _report_untraced(self, before: float) -> None:
        """Log refusals from before a time whose peers had gone before their address could be read."""
        for reason in [reason for reason, since in self._untraced.items() if since < before]:
            del self._untraced[reason]
            if not self._refusals.is_logged(reason):
                self._refusals.report("an address that has gone", reason)

    def close(self) -> None:
        """Close the socket; answers already given leave if their clients take them within two seconds."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._report_untraced(time.monotonic())
        self._monitor.close()
        self._socket.close()
        self._context.term()
        self._waiter.close()


def _peer_name(descriptor: int) -> str | None:
    """The address at the other end of a connection, if the connection is still there."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family == socket.AF_UNIX:
                return "a process of this machine"
            return str(connection.getpeername()[0])
    except OSError:
        return None


def no_place(name: str, address: str, err: OSError) -> WireError:
    """What a server raises that cannot listen where it is told to."""
    return WireError(
        f"{name} cannot listen at {address}: {err.strerror}",
        hint="end the server that is there, or choose another address",
    )


def refuse_a_second_server(path: str) -> None:
    """A socket's path is not taken from a server that is alive; one that was just killed may need a moment to end."""
    deadline = time.monotonic() + ENDING_SECONDS
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(ENDING_SECONDS)
            try:
                probe.connect(path)
            except OSError:
                return
        time.sleep(0.02)
    raise OSError(errno.EADDRINUSE, "another server is bound to it")
