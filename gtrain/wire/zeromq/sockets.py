"""zmq's contexts and sockets: made after a fork, never inherited; and what the monitor of a socket reports."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import select
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from gtrain.wire.limits import Limits
from gtrain.wire.unix.stream import KERNEL_BUFFER, Piece

SLICE_MICROSECONDS = 100
_NAME = "ZMQbg/IO"
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")  # sched_attr: size, policy, flags, nice, priority, runtime and four more
_SCHED_OTHER = 0


def hurry() -> None:
    """Ask for short slices for all of zmq's threads in this process that are scheduled like most; call it once made."""
    if _SCHED_SETATTR is None or not Path("/proc/self/task").is_dir():
        return
    for task in Path("/proc/self/task").iterdir():
        try:
            thread = int(task.name)
            if (task / "comm").read_text().startswith(_NAME) and os.sched_getscheduler(thread) == _SCHED_OTHER:
                _shorten(thread)
        except OSError:  # it has just ended
            continue


def _shorten(thread: int) -> None:
    """Ask for a thread; whether the kernel does it makes no difference to anything but time."""
    nice, nanoseconds = os.getpriority(os.PRIO_PROCESS, thread), 1000 * SLICE_MICROSECONDS
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, _SCHED_OTHER, 0, nice, 0, nanoseconds, 0, 0, 0, 0)
    ctypes.CDLL(None).syscall(_SCHED_SETATTR, thread, attributes, 0)


COPIED_BYTES = 512 << 10
"""A smaller frame is copied: without a copy, pyzmq wakes a thread of its own when the frame's memory is free again."""
Frames = Sequence[zmq.Frame | Piece]
_POLLIN = int(zmq.POLLIN)
_MORE, _LAST = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)
_contexts: dict[int, zmq.Context[Any]] = {}
_making = threading.Lock()


def process_context() -> zmq.Context[Any]:
    """The context that all clients of this process share; a forked child makes its own."""
    with _making:
        pid = os.getpid()
        if pid not in _contexts:
            _contexts[pid] = zmq.Context()
        return _contexts[pid]


def _unlock() -> None:
    """In a forked child: another thread may have held the lock at the fork."""
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_unlock)


def configure(sock: zmq.Socket[Any], limits: Limits, address: str) -> None:
    """Options that both ends share.

    zmq's high-water marks count messages and drop silently at a ROUTER: they are off, and bytes are counted above.
    """
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        sock.setsockopt(option, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, max(limits.max_frame_bytes, limits.max_header_bytes))
    if address.startswith("ipc://"):
        for option in (zmq.SNDBUF, zmq.RCVBUF):
            sock.setsockopt(option, KERNEL_BUFFER)
    else:  # no buffer sizes: a fixed one would end TCP's own tuning, and be smaller
        sock.setsockopt(zmq.IPV6, int("[" in address))
        sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
        sock.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        sock.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
        sock.setsockopt(zmq.TCP_KEEPALIVE_CNT, 6)


def has_input(sock: zmq.Socket[Any]) -> bool:
    """Whether a message can be received. Asking first costs a third of an attempt that raises Again."""
    return bool(int(sock.get(zmq.EVENTS)) & _POLLIN)


def receive(sock: zmq.Socket[Any]) -> Frames | None:
    """All frames of the next message without a copy, or None if there is none yet."""
    if not has_input(sock):
        return None
    frame = sock.recv(copy=False)
    frames = [frame]
    while frame.more:
        frame = sock.recv(copy=False)
        frames.append(frame)
    return frames


def send(sock: zmq.Socket[Any], small: Sequence[bytes], large: Sequence[memoryview]) -> int:
    """Send one message, large frames of ``large`` without a copy; return the bytes of all but the routing id.

    Raises:
        zmq.Again: there is no connection to give it to, not even one that is being made.
    """
    frames: list[Any] = [*small, *large]
    last = len(frames) - 1
    for place, frame in enumerate(frames):
        copied = place < len(small) or frame.nbytes < COPIED_BYTES
        sock.send(frame, _MORE if place < last else _LAST, copy=copied)
    return len(small[-1]) + sum(frame.nbytes for frame in large)


class Monitor:
    """What happens to the connections of a socket.

    Args:
        sock: the socket.
        events: sum of ``zmq.EVENT_*``.
    """

    def __init__(self, sock: zmq.Socket[Any], events: int) -> None:
        self._watched = sock
        self._socket: zmq.Socket[Any] = sock.get_monitor_socket(events)
        self.descriptor = int(self._socket.getsockopt(zmq.FD))
        self.waiting()  # zmq signals only to a reader that has looked and found nothing

    def waiting(self) -> bool:
        """Whether there are events to read."""
        return has_input(self._socket)

    def read(self) -> Iterator[tuple[int, int]]:
        """Each event since the last reading, with its value."""
        while self.waiting():
            event = recv_monitor_message(self._socket, zmq.NOBLOCK)
            yield int(event["event"]), int(event["value"])

    def close(self) -> None:
        """Stop."""
        self._watched.disable_monitor()
        self._socket.close(linger=0)


SPIN_SECONDS = 0.0001
"""How long a thread looks before it sleeps: on a quiet machine waking it costs more than a small request does."""
SPIN_AGAIN = 16
"""A thread that looked in vain sleeps at once so many times before it tries whether looking pays now."""


class Waiter:
    """Waits for any of some descriptors or for another thread's word.

    Args:
        descriptors: to read from; with zmq they say "look at the socket", not that there is a message.

    Attributes:
        ready: those that the last waiting found.
    """

    def __init__(self, *descriptors: int) -> None:
        self.ready: list[int] = []
        self._sleeps = 0  # to come, before the next looking
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        for descriptor in (*descriptors, self._event):
            self._poll.register(descriptor, select.EPOLLIN)

    def watch(self, descriptor: int) -> None:
        """Wait for input of one more, until it is closed."""
        self._poll.register(descriptor, select.EPOLLIN)

    def want_room(self, descriptor: int, wanted: bool) -> None:
        """Wait for room to write to one of them too, or not any more; any thread may say so while another waits."""
        self._poll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def look(self) -> list[int]:
        """Those that are ready now; another thread's word stays for the next waiting."""
        return [descriptor for descriptor, _ in self._poll.poll(0) if descriptor != self._event]

    def wait(self, seconds: float) -> None:
        """Return when something may have happened, after ``seconds`` at the latest.

        Where that was worth it last time, it looks a few times before it sleeps: an answer to a small request is often
        there before the kernel could put a thread to sleep and wake it again. Where processes share a core, a thread
        that looks keeps others from work, and the kernel has it wait for longer afterwards.
        """
        found = self._look(min(seconds, SPIN_SECONDS)) if not self._sleeps else []
        self._sleeps = 0 if found else (self._sleeps or SPIN_AGAIN) - 1
        self.ready = [descriptor for descriptor, _ in found or self._poll.poll(max(0.0, seconds) + 0.001)]
        if self._event in self.ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event)

    def _look(self, seconds: float) -> list[tuple[int, int]]:
        """Look until something is there, for so long at the most."""
        found = self._poll.poll(0)
        end = time.perf_counter() + seconds
        while not found and time.perf_counter() < end:
            os.sched_yield()
            found = self._poll.poll(0)
        return found

    def wake(self) -> None:
        """End the waiting of another thread, or its next one."""
        os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Give the descriptors back."""
        self._poll.close()
        os.close(self._event)
