"""zmq's own threads, which carry every message: a few microseconds of work that others wait for.

Where processes share cores, the kernel lets a thread that is woken wait until the one that computes has had its slice,
some milliseconds. Since Linux 6.12 a thread may ask for shorter slices, and is then let in at once: it gets no more of
a core than before, but sooner. No rights are needed; an older kernel ignores it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from pathlib import Path

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
