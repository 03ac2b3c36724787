"""Log lines that a peer can cause, bounded so that it cannot fill a disk."""

from __future__ import annotations

import logging
import threading
import time

from gtrain.wire.counters import Counters

log = logging.getLogger(__name__)
MAX_LOGGED = 1024
"""Pairs of address and reason that :class:`RefusalLog` remembers; it only counts further ones."""
ENDED = "it has no keys, or ended the handshake"
"""The reason for a handshake that stopped half-way."""


class RateLimitedLog:
    """Logs each event at most once per period, with the number of suppressed repetitions.

    Args:
        log: the logger.
        seconds: the period.
    """

    def __init__(self, log: logging.Logger, seconds: float = 10.0) -> None:
        self._log, self._seconds = log, seconds
        self._last: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def warning(self, event: str, text: str) -> None:
        """Log a warning, unless one for this event was logged less than a period ago.

        Args:
            event: name of the event; a constant of the caller, never a peer's text.
            text: the line.
        """
        now = time.monotonic()
        if now - self._last.get(event, -self._seconds) < self._seconds:
            self._suppressed[event] = self._suppressed.get(event, 0) + 1
            return
        self._last[event] = now
        suppressed = self._suppressed.pop(event, 0)
        self._log.warning("%s%s", text, f" ({suppressed} more like this were not shown)" if suppressed else "")


class RefusalLog:
    """Counts the connections that a server refuses, and logs each pair of address and reason once. Thread-safe.

    A refused client reconnects until it is closed, and closing it may stop a handshake half-way. That is reported only
    for an address whose refusal is not explained yet.

    Args:
        name: the server's, for messages.
        counters: ``refused`` is counted there.
    """

    def __init__(self, name: str, counters: Counters) -> None:
        self._name, self._counters = name, counters
        self._logged: set[tuple[str, str]] = set()
        self._lock = threading.RLock()

    def count(self) -> None:
        """Count one refused connection."""
        self._counters.refused += 1

    def report(self, address: str, reason: str) -> None:
        """Log that a connection was refused, once per address and reason."""
        with self._lock:
            if self.is_logged(reason, address) or len(self._logged) >= MAX_LOGGED:
                return
            self._logged.add((address, reason))
        log.warning("%s refused a connection from %s: %s", self._name, address, reason)

    def is_logged(self, reason: str, address: str | None = None) -> bool:
        """Whether the log explains a refusal for this reason, of any address if none is given."""
        with self._lock:
            return any(address in (None, peer) and reason in (ENDED, logged) for peer, logged in self._logged)
