"""What a client's link and a server's listener provide, and what their two implementations share.

:mod:`gtrain.wire.unix` connects processes of one machine that use no keys; :mod:`gtrain.wire.zeromq` serves all other
addresses. :func:`uses_unix_sockets` decides.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from gtrain.wire.counters import Counters
from gtrain.wire.errors import WireError
from gtrain.wire.logs import RefusalLog

BACKLOG = 1024
"""Connections that may wait to be accepted."""
KERNEL_BUFFER = 4 << 20
"""Bytes that the kernel may buffer per Unix socket, bounded by net.core.wmem_max."""
RECONNECT_MILLISECONDS = 50
MAX_RECONNECT_MILLISECONDS = 1000
LINGER_MILLISECONDS = 2000
"""How long a closing server waits for clients to take their replies."""
SHUTDOWN_SECONDS = 2.0
"""How long a new server waits for a killed one to release its address."""
SPIN_SECONDS = 0.0001
"""How long a thread polls before it sleeps: on an idle machine a wake-up costs more than a small request does."""
SPIN_INTERVAL = 16
"""A thread that polled in vain sleeps at once this many times before it polls again."""


def uses_unix_sockets(address: str, secured: bool) -> bool:
    """Whether :mod:`gtrain.wire.unix` serves an address; everything else is ZeroMQ's."""
    return not secured and address.startswith("ipc://")


Frames = Sequence[memoryview]
"""The received frames of a message, bytes each. Over Unix sockets their memory is writable."""


@dataclass(slots=True)
class ConnectionChange:
    """What happened to a link's connection since the last check.

    Args:
        lost: the connection ended.
        connected: a connection was made, after the loss if there was one.
        refusal: why the server will never accept this process; None if it may.
    """

    lost: bool = False
    connected: bool = False
    refusal: str | None = None


class Link(ABC):
    """A client's connection to one server; reconnects by itself."""

    _poller: Poller

    @abstractmethod
    def send(self, header: bytes, frames: Sequence[memoryview]) -> int:
        """Send one message and return its size in bytes; 0 without a connection, and nothing was sent."""

    @abstractmethod
    def receive(self) -> Frames | None:
        """Return the next message, or None if none has arrived."""

    @abstractmethod
    def connection_change(self) -> ConnectionChange | None:
        """Return what happened to the connection since the last call; None if nothing did."""

    def wait(self, seconds: float) -> None:
        """Return when something may have happened, after ``seconds`` at the latest."""
        self._poller.wait(seconds)

    def wake(self) -> None:
        """End the :meth:`wait` of another thread."""
        self._poller.wake()

    @abstractmethod
    def close(self) -> None:
        """Close the connection; messages that were sent may still arrive."""

    @property
    def unsent(self) -> bool:
        """Whether data waits for this process to send it once the kernel has room."""
        return False

    def has_input(self) -> bool:
        """Whether a message has arrived for which :meth:`wait` may not return."""
        return False

    def suspected_refusal(self) -> str | None:
        """Why the server probably refuses this process, although it never says so; None without a sign of it."""
        return None

    def reconnect_if_idle(self, now: float) -> None:  # noqa: B027 (optional)
        """Connect again if nothing has been heard of the connection for long. Called while it is lost."""


class Listener(ABC):
    """A server's socket and its connections.

    Attributes:
        endpoint: the bound address.
    """

    endpoint: str
    _poller: Poller

    def __init__(self, name: str, counters: Counters) -> None:
        self._name, self._refusals, self._closed = name, RefusalLog(name, counters), False
        self._closing = threading.RLock()  # a signal handler may call close() while the thread is in it

    @abstractmethod
    def receive(self) -> Frames | None:
        """Return the next message, preceded by a frame with the sender's routing id; None if none has arrived."""

    @abstractmethod
    def send(self, routing: bytes, header: bytes, frames: Sequence[memoryview]) -> int:
        """Send a message to a connection, if it still exists; return its size in bytes."""

    def wait(self, seconds: float) -> None:
        """Return when something may have happened, after ``seconds`` at the latest."""
        self._poller.wait(seconds)

    def check_connections(self) -> None:  # noqa: B027 (optional)
        """Log connections that were refused. Called between requests."""

    def wake(self) -> None:
        """End the :meth:`wait` of the server's loop, from any thread."""
        with self._closing:
            if not self._closed:
                self._poller.wake()

    def close(self) -> None:
        """Close the socket; clients have :data:`LINGER_MILLISECONDS` to take the replies that were sent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._close()

    @abstractmethod
    def _close(self) -> None:
        """Close the sockets, once."""


class Poller:
    """Waits for input on descriptors, or for a wake-up by another thread.

    Args:
        descriptors: to wait for; those of zmq say "check the socket", not that a message has arrived.

    Attributes:
        ready: the descriptors that the last :meth:`wait` returned for.
    """

    def __init__(self, *descriptors: int) -> None:
        self.ready: list[int] = []
        self._sleeps = 0  # waits that skip the polling
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        for descriptor in (*descriptors, self._event):
            self.watch(descriptor)

    def watch(self, descriptor: int) -> None:
        """Wait for input of a further descriptor, until it is closed."""
        self._poll.register(descriptor, select.EPOLLIN)

    def watch_output(self, descriptor: int, enabled: bool) -> None:
        """Wait for room to write to a descriptor as well, or no longer. Other threads may be waiting meanwhile."""
        self._poll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if enabled else 0))

    def check(self) -> list[int]:
        """Return the descriptors that are ready now; a wake-up stays for the next :meth:`wait`."""
        return [descriptor for descriptor, _ in self._poll.poll(0) if descriptor != self._event]

    def wait(self, seconds: float) -> None:
        """Return when something may have happened, after ``seconds`` at the latest.

        Polls before it sleeps if that paid last time: the reply to a small request often arrives before the kernel
        could suspend and wake a thread. Where processes share a core, a polling thread keeps others from their work,
        and the scheduler lets it wait for longer afterwards.
        """
        events = self._spin(min(seconds, SPIN_SECONDS)) if not self._sleeps else []
        self._sleeps = 0 if events else (self._sleeps or SPIN_INTERVAL) - 1
        self.ready = [descriptor for descriptor, _ in events or self._poll.poll(max(0.0, seconds) + 0.001)]
        if self._event in self.ready:
            # Another thread may have read the wake-up.
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event)

    def _spin(self, seconds: float) -> list[tuple[int, int]]:
        """Poll until an event occurs, for ``seconds`` at most."""
        end = time.perf_counter() + seconds
        while not (events := self._poll.poll(0)) and time.perf_counter() < end:
            os.sched_yield()
        return events

    def wake(self) -> None:
        """End the :meth:`wait` of another thread, or its next one."""
        os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Close the descriptors of the poller."""
        self._poll.close()
        os.close(self._event)


def listen_error(name: str, address: str, error: OSError) -> WireError:
    """Return the error of a server that cannot listen at its address."""
    return WireError(
        f"{name} cannot listen at {address}: {error.strerror}",
        hint="stop the server that listens there, or choose another address",
    )


def refuse_second_server(path: str) -> None:
    """Refuse to take a Unix socket's path from a live server; a server that was just killed may take a moment to end.

    Raises:
        OSError: another server accepts connections at the path.
    """
    deadline = time.monotonic() + SHUTDOWN_SECONDS
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(SHUTDOWN_SECONDS)
            try:
                probe.connect(path)
            except OSError:
                return
        time.sleep(0.02)
    raise OSError(errno.EADDRINUSE, "another server is bound to it")
