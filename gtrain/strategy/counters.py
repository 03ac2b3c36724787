"""Counters of one process: bytes, seconds, memory."""

from __future__ import annotations

import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from gtrain.record.process_log import ProcessLog
from gtrain.record.spans import SpanLog


class Meter(Protocol):
    """A counter outside of :class:`Counters` that is read when recording starts and stops."""

    def start(self) -> None:
        """Recording starts."""

    def stop(self) -> None:
        """Recording stops."""


@dataclass
class Counters:
    """Communication of one rank while :attr:`recording`.

    Attributes:
        bytes_sent: payload bytes handed to the transport; an all-reduce counts its tensor once.
        bytes_received: payload bytes taken from the transport.
        bound_bytes: fewest payload bytes that could have been sent, as the strategy computes (:meth:`needed`); None
            if it states no bound.
        comm_seconds: from posting a transfer to its completion, summed over transfers.
        wait_seconds: the part of it during which the rank was blocked.
        blocked_seconds: seconds that the main thread, which trains, waited for other processes.
        read_seconds: seconds that the main thread waited for data.
        send_seconds: seconds that the main thread took to hand over messages.
        recording: whether to count: in training epochs, not in evaluation and set-up.
        meters: started and stopped with the recording.
        span: makes the context manager of a named time span; a timeline replaces it while it records.
        spans: receives every wait and transfer that is counted, while a timeline records; else None.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    bound_bytes: int | None = None
    comm_seconds: float = 0.0
    wait_seconds: float = 0.0
    blocked_seconds: float = 0.0
    read_seconds: float = 0.0
    send_seconds: float = 0.0
    recording: bool = False
    meters: list[Meter] = field(default_factory=list, repr=False, compare=False)
    span: Callable[[str], AbstractContextManager[Any]] = field(default=nullcontext, repr=False, compare=False)
    spans: SpanLog | None = field(default=None, repr=False, compare=False)

    def start(self) -> None:
        """Start to count, when a training epoch starts or continues."""
        self.recording = True
        for meter in self.meters:
            meter.start()

    def stop(self) -> None:
        """Stop counting."""
        if self.recording:
            for meter in reversed(self.meters):
                meter.stop()
        self.recording = False

    def sent(self, nbytes: int) -> None:
        """Count a payload that leaves this rank."""
        if self.recording:
            self.bytes_sent += nbytes

    def received(self, nbytes: int) -> None:
        """Count a payload that arrives at this rank."""
        if self.recording:
            self.bytes_received += nbytes

    def needed(self, nbytes: int) -> None:
        """Count bytes that any exact strategy of this kind has to send; 0 states a bound, too."""
        if self.recording:
            self.bound_bytes = (self.bound_bytes or 0) + nbytes

    def waited(self, posted: float, wait_start: float, *, reads: bool = False) -> None:
        """Count a transfer that is complete.

        Args:
            posted: reading of ``time.perf_counter`` when it was posted.
            wait_start: the same when the wait for it started.
            reads: whether it moved data between disk and memory.
        """
        if not self.recording:
            return
        now = time.perf_counter()
        self.comm_seconds += now - posted
        self.wait_seconds += now - wait_start
        if self.spans is not None:
            self.spans.waited(posted, wait_start, now)
        if threading.current_thread() is not threading.main_thread():
            return  # the main thread computes meanwhile, or waits for this one
        if reads:
            self.read_seconds += now - wait_start
        else:
            self.blocked_seconds += now - wait_start

    def handed_over(self, start: float) -> None:
        """Count the time of handing a message to the transport, which began at ``start`` (``time.perf_counter``)."""
        if self.recording and threading.current_thread() is threading.main_thread():
            self.send_seconds += time.perf_counter() - start

    def as_dict(self) -> dict[str, float]:
        """Return the four measured figures by name."""
        names = ("bytes_sent", "bytes_received", "comm_seconds", "wait_seconds")
        return {name: getattr(self, name) for name in names}


def rss_bytes() -> int:
    """Return the resident set size of this process in bytes."""
    return _status(rb"VmRSS")


def peak_rss_bytes() -> int:
    """Return the peak resident set size of this process in bytes."""
    return _status(rb"VmHWM")


def cpu_seconds() -> float:
    """Return the user and system CPU seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class PeakMemory:
    """Peak memory of this process; a thread samples its anonymous memory.

    Resident memory includes mapped files, whose pages the kernel drops when memory is short. It cannot drop anonymous
    and shared memory, but keeps no high-water mark of it.

    Args:
        log: receives the memory over time; None: nobody does.
    """

    INTERVAL = 0.02  # seconds

    def __init__(self, log: ProcessLog | None = None) -> None:
        self.log = log
        self._baseline_rss, self._baseline = rss_bytes(), anonymous_bytes()
        self._peak = self._baseline

    def start(self) -> None:
        """Start to sample; ends with the process."""
        threading.Thread(target=self._sample, name="gtrain-memory", daemon=True).start()

    def figures(self) -> dict[str, int]:
        """Return the entries of ``summary.json`` in bytes; the baselines were read when this object was made."""
        return {
            "peak_rss_bytes": peak_rss_bytes(),
            "baseline_rss_bytes": self._baseline_rss,
            "peak_anonymous_bytes": max(self._peak, anonymous_bytes()),
            "baseline_anonymous_bytes": self._baseline,
            "peak_device_bytes": peak_device_bytes(),
        }

    def _sample(self) -> None:
        while True:
            anonymous = anonymous_bytes()
            self._peak = max(self._peak, anonymous)
            if self.log is not None and self.log.is_due("memory"):
                self.log.write("memory", rss=rss_bytes(), anonymous=anonymous, device=device_bytes())
            time.sleep(self.INTERVAL)


def anonymous_bytes() -> int:
    """Return the resident memory of this process that is not backed by a file, shared memory included, in bytes."""
    return _status(rb"Rss(?:Anon|Shmem)")


def peak_device_bytes() -> int:
    """Return the peak memory of tensors on this process's GPU in bytes; 0 if it uses none."""
    torch = sys.modules.get("torch")  # servers may not have imported it
    return torch.cuda.max_memory_allocated() if torch is not None and torch.cuda.is_initialized() else 0


def device_bytes() -> int:
    """Return the memory of tensors on this process's GPU in bytes; 0 if it uses none."""
    torch = sys.modules.get("torch")
    return torch.cuda.memory_allocated() if torch is not None and torch.cuda.is_initialized() else 0


def _status(names: bytes) -> int:
    """Return the sum of the entries of ``/proc/PID/status`` whose names match, in bytes."""
    with open(f"/proc/{os.getpid()}/status", "rb") as status:
        text = status.read()
    return sum(int(kib) for kib in re.findall(rb"^" + names + rb":\s+(\d+)", text, re.MULTILINE)) * 1024
