"""ZeroMQ's contexts and sockets, created after a fork and never inherited, and the monitor of a socket's events."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from gtrain.wire.limits import Limits
from gtrain.wire.transport import KERNEL_BUFFER, Frames

SLICE_MICROSECONDS = 100
COPIED_BYTES = 512 << 10
"""A smaller frame is copied: without a copy, pyzmq wakes a thread when zmq releases the frame's memory."""
UNACKNOWLEDGED_MILLISECONDS = 15_000
"""A connection whose data the other kernel has not acknowledged for this long is replaced by a new one.

The old one would stay idle after an outage: the kernel doubles the time between its attempts to send. A stopped process
keeps its connections, because its kernel acknowledges."""
MECHANISM_MISMATCH = 0x11000002
"""ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: one side uses keys, the other does not."""
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine())  # number of the system call
_SCHED_ATTR = struct.Struct("=IIQiIQQQII")  # size, policy, flags, nice, priority, runtime and four more
_SCHED_OTHER = 0
_POLLIN = int(zmq.POLLIN)
_MORE, _LAST = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)
_contexts: dict[int, zmq.Context[Any]] = {}
_contexts_lock = threading.Lock()


def shorten_slices() -> None:
    """Ask the kernel for short time slices for zmq's threads in this process. Call it once they exist.

    A message then does not wait until a computing thread has used up its slice. Without effect where the kernel lacks
    custom slices, or where a thread's scheduling policy was changed.
    """
    if _SCHED_SETATTR is None or not Path("/proc/self/task").is_dir():
        return
    for task in Path("/proc/self/task").iterdir():
        try:
            thread = int(task.name)
            if (task / "comm").read_text().startswith("ZMQbg/IO") and os.sched_getscheduler(thread) == _SCHED_OTHER:
                nice = os.getpriority(os.PRIO_PROCESS, thread)
                # In nanoseconds. For SCHED_OTHER the field is the requested slice (Linux 6.12).
                runtime = 1000 * SLICE_MICROSECONDS
                attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, _SCHED_OTHER, 0, nice, 0, runtime, 0, 0, 0, 0)
                ctypes.CDLL(None).syscall(_SCHED_SETATTR, thread, attributes, 0)
        except OSError:  # the thread has just ended
            continue


def process_context() -> zmq.Context[Any]:
    """Return the context that all clients of this process share; a forked child creates its own."""
    with _contexts_lock:
        pid = os.getpid()
        if pid not in _contexts:
            _contexts[pid] = zmq.Context()
        return _contexts[pid]


def _unlock() -> None:
    """Replace the lock in a forked child: another thread may have held it at the fork."""
    global _contexts_lock
    _contexts_lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)


def configure(sock: zmq.Socket[Any], limits: Limits, address: str) -> None:
    """Set the options that both ends share.

    zmq's high-water marks count messages, and a ROUTER drops silently beyond them: they are off. Clients and servers
    count bytes instead.
    """
    max_frame_bytes = max(limits.max_frame_bytes, limits.max_header_bytes)
    options = {zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.MAXMSGSIZE: max_frame_bytes}
    if address.startswith("ipc://"):
        options |= {zmq.SNDBUF: KERNEL_BUFFER, zmq.RCVBUF: KERNEL_BUFFER}
    else:
        # No buffer sizes: a fixed size would disable TCP's auto-tuning, and be smaller.
        keepalive = {zmq.TCP_KEEPALIVE_IDLE: 30, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 6}
        options |= {zmq.IPV6: int("[" in address), zmq.TCP_KEEPALIVE: 1, **keepalive}
        options[zmq.TCP_MAXRT] = UNACKNOWLEDGED_MILLISECONDS
    for option, value in options.items():
        sock.setsockopt(option, value)


def has_input(sock: zmq.Socket[Any]) -> bool:
    """Whether a message has arrived. This check costs a third of an attempt that raises Again."""
    return bool(int(sock.get(zmq.EVENTS)) & _POLLIN)


def receive(sock: zmq.Socket[Any]) -> Frames | None:
    """Return all frames of the next message without a copy, or None if none has arrived."""
    if not has_input(sock):
        return None
    frames = []
    while True:
        frame = sock.recv(copy=False)
        frames.append(frame.buffer)  # keeps the frame alive
        if not frame.more:
            return frames


def send(sock: zmq.Socket[Any], headers: Sequence[bytes], tensors: Sequence[memoryview]) -> int:
    """Send one message, large tensors without a copy; return the bytes of the last header and the tensors.

    Raises:
        zmq.Again: no connection exists, not even one that is being made.
    """
    frames: list[Any] = [*headers, *tensors]
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        copied = index < len(headers) or frame.nbytes < COPIED_BYTES
        sock.send(frame, _MORE if index < last else _LAST, copy=copied)
    return len(headers[-1]) + sum(frame.nbytes for frame in tensors)


class Monitor:
    """Reports what happens to the connections of a socket.

    Args:
        sock: the socket.
        events: sum of ``zmq.EVENT_*``.
    """

    def __init__(self, sock: zmq.Socket[Any], events: int) -> None:
        self._watched = sock
        self._socket: zmq.Socket[Any] = sock.get_monitor_socket(events)
        self.descriptor = int(self._socket.getsockopt(zmq.FD))
        # zmq signals only to a reader that has checked and found nothing.
        self.has_events()

    def has_events(self) -> bool:
        """Whether events are waiting."""
        return has_input(self._socket)

    def read(self) -> Iterator[tuple[int, int]]:
        """Yield each waiting event with its value."""
        while self.has_events():
            event = recv_monitor_message(self._socket, zmq.NOBLOCK)
            yield int(event["event"]), int(event["value"])

    def close(self) -> None:
        """Stop monitoring."""
        self._watched.disable_monitor()
        self._socket.close(linger=0)
