"""Spans of requests, at clients and at servers, for a trace of a job; off unless :func:`start` was called."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

MOST = 200_000
"""Spans that a process keeps, the first ones."""


@dataclass
class RequestLog:
    """The requests that this process has sent, and those that it has executed.

    A span has ``method``, ``client``, ``incarnation`` and ``sequence`` of the request, ``peer`` (at the client, the
    server), ``nbytes`` (at the client) and ``start`` and ``end`` in ns since 1970.
    """

    sent: list[dict[str, Any]] = field(default_factory=list)
    executed: list[dict[str, Any]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, spans: list[dict[str, Any]], start: int, **span: Any) -> None:
        """Append a span that ends now; called by any thread."""
        with self._lock:
            if len(spans) < MOST:
                spans.append({**span, "start": start, "end": time.time_ns()})


_active: RequestLog | None = None


def start() -> None:
    """Begin to record the requests of this process."""
    global _active
    _active = RequestLog()


def stop() -> RequestLog:
    """End the recording, and return it; empty if there was none."""
    global _active
    log, _active = _active or RequestLog(), None
    return log


def active() -> RequestLog | None:
    """Return the recording in progress; None without one."""
    return _active
