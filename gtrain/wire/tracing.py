"""Spans of requests, at clients and at servers, for a trace of a job; off unless :func:`start` was called."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

MOST = 200_000
"""Spans of each kind that a process keeps: the first ones that were sent, and the first and the last half executed."""


class _BothEnds(list[dict[str, Any]]):
    """The first half of the spans; the last half is in :attr:`last`."""

    def __init__(self) -> None:
        super().__init__()
        self.last: deque[dict[str, Any]] = deque(maxlen=MOST // 2)


@dataclass
class RequestLog:
    """The requests that this process has sent, and those that it has executed.

    A span has ``method``, ``client``, ``incarnation`` and ``sequence`` of the request, ``peer`` (at the client, the
    server), ``nbytes`` (at the client) and ``start`` and ``end`` in ns since 1970.
    """

    sent: list[dict[str, Any]] = field(default_factory=list)
    executed: list[dict[str, Any]] = field(default_factory=_BothEnds)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, spans: list[dict[str, Any]], start: int, **span: Any) -> None:
        """Append a span that ends now; called by any thread."""
        with self._lock:
            ended = {**span, "start": start, "end": time.time_ns()}
            if isinstance(spans, _BothEnds):
                (spans if len(spans) < MOST // 2 else spans.last).append(ended)
            elif len(spans) < MOST:
                spans.append(ended)

    def kept_executed(self) -> list[dict[str, Any]]:
        """Return the spans of executed requests that are kept: an epoch that is traced may be the first or the last."""
        with self._lock:
            return [*self.executed, *(self.executed.last if isinstance(self.executed, _BothEnds) else ())]


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
