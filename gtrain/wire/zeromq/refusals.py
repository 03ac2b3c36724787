"""Counts the connections that a server refuses, and logs each peer and reason once."""

from __future__ import annotations

import logging
import threading

from gtrain.wire.counters import Counters

log = logging.getLogger(__name__)
MAX_LOGGED = 1024
"""Pairs of address and reason that are remembered; further ones are counted only."""
ENDED = "it has no keys, or ended the handshake"
"""The reason for a handshake that stopped half-way."""


class RefusalLog:
    """Shared by the threads of a server that refuse connections.

    A refused client reconnects until it is closed, and closing it may stop a handshake half-way. That is reported only
    for an address whose refusal is not explained yet.

    Args:
        name: the server's, for messages.
        counters: ``refused`` is counted there.
    """

    def __init__(self, name: str, counters: Counters) -> None:
        self._name, self._counters = name, counters
        self._logged: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def count(self) -> None:
        """Count one refused connection."""
        self._counters.refused += 1

    def report(self, address: str, reason: str) -> None:
        """Log that a connection was refused, once per address and reason."""
        with self._lock:
            if self._is_logged(address, reason) or len(self._logged) >= MAX_LOGGED:
                return
            self._logged.add((address, reason))
        log.warning("%s refused a connection from %s: %s", self._name, address, reason)

    def is_logged(self, reason: str) -> bool:
        """Whether the log explains a refusal for this reason, of any address."""
        with self._lock:
            return self._is_logged(None, reason)

    def _is_logged(self, address: str | None, reason: str) -> bool:
        return any(address in (None, peer) and reason in (ENDED, logged) for peer, logged in self._logged)
