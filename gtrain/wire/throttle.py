"""Log lines that a peer can cause, kept from filling a disk."""

from __future__ import annotations

import logging
import time


class Throttle:
    """Logs a kind of event at most once in a while, with the number of those left out.

    Args:
        log: where to.
        seconds: how long after one line the next of the same kind may come.
    """

    def __init__(self, log: logging.Logger, seconds: float = 10.0) -> None:
        self._log, self._seconds = log, seconds
        self._last: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warning(self, kind: str, text: str) -> None:
        """Log a warning, unless one of that kind was logged a moment ago.

        Args:
            kind: one of a few words of ours, never a peer's.
            text: the line.
        """
        now = time.monotonic()
        if now - self._last.get(kind, -self._seconds) < self._seconds:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._last[kind] = now
        left_out = self._left_out.pop(kind, 0)
        self._log.warning("%s%s", text, f" ({left_out} more like this were not shown)" if left_out else "")
