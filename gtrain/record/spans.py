"""Spans of one rank for a trace of the job: batches, layers, waits, messages between ranks, and its bytes."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from gtrain.files import replace_text


class SpanLog:
    """The spans of one process; any thread may add to it.

    A span has ``track``, ``name``, ``start`` and ``end`` (ns since 1970), and ``thread``. The time of day is read
    once, so that spans agree with each other.

    Args:
        outer: makes the span of torch's profiler that goes with a named wait.
    """

    def __init__(self, outer: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._outer, self._offset = outer, time.time_ns() - time.perf_counter_ns()
        self._names = threading.local()
        self.spans: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Name the waits that this thread counts meanwhile, and the one around it that is counted next."""
        start, around = time.perf_counter(), getattr(self._names, "open", "")
        self._names.open = name
        try:
            with self._outer(name):
                yield
        finally:
            self._names.open, self._names.closed = around, (start, name)

    def add(self, track: str, name: str, start: float, end: float, **fields: Any) -> None:
        """Add a span from readings of ``time.perf_counter``."""
        times = {"start": self._ns(start), "end": self._ns(end)}
        thread = threading.current_thread()
        where = "" if thread is threading.main_thread() else thread.name
        self.spans.append({"track": track, "name": name, **times, "thread": where, **fields})

    def waited(self, posted: float, wait_start: float, now: float) -> None:
        """Add a wait, and the transfer that it waited for if that began earlier."""
        start, name = getattr(self._names, "closed", (-math.inf, ""))
        if start < wait_start:  # of another wait
            name = getattr(self._names, "open", "") or "wait: a reply"
        self.add("waits", name, wait_start, now)
        if posted != wait_start:
            self.add("exchanges", name.removeprefix("wait: "), posted, now)

    def sample(self, **values: float) -> None:
        """Add the values of counters at this time."""
        self.samples.append({"time": self._ns(time.perf_counter()), **values})

    def _ns(self, seconds: float) -> int:
        return round(seconds * 1e9) + self._offset


def write_spans(path: Path, label: str, content: dict[str, Any]) -> None:
    """Write the spans of a process, with its name and its machine.

    Args:
        path: the file.
        label: ``rank 2``, ``parameter 0``.
        content: lists of spans by name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    who = {"process": label, "host": socket.gethostname(), "pid": os.getpid()}
    replace_text(path, json.dumps({**who, **content}))
