"""Telling the user how far reading has come, and reading ahead."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

log = logging.getLogger("gtrain")
T = TypeVar("T")

EVERY_SECONDS = 5.0
MANY = 100_000
"""Edges from which on a rate means something."""


class Progress:
    """Logs a line every few seconds: edges read, edges/s, share of the bytes.

    Args:
        name: what is read.
        total: bytes of all files.
    """

    def __init__(self, name: str, total: int) -> None:
        self._name = name
        self._total = total
        self._began = self._said = time.monotonic()

    def update(self, edges: int, read: int) -> None:
        """Say how far it has come, if that was not said lately.

        Args:
            edges: edges read so far.
            read: bytes read so far.
        """
        now = time.monotonic()
        if now - self._said < EVERY_SECONDS:
            return
        self._said = now
        rate, share = edges / (now - self._began), 100 * read / max(1, self._total)
        log.info("reading %s: %s edges, %s edges/s, %.0f %%", self._name, f"{edges:,}", f"{rate:,.0f}", share)

    def finish(self, edges: int, nodes: int) -> None:
        """Say what was read."""
        seconds = time.monotonic() - self._began
        rate = f", {edges / seconds:,.0f} edges/s" if edges >= MANY else ""
        log.info(
            "read %s: %s edges between %s nodes in %.1f s%s", self._name, f"{edges:,}", f"{nodes:,}", seconds, rate
        )


def ahead(items: Iterator[T], depth: int = 3) -> Iterator[T]:
    """Yield the items of an iterator that runs in a thread of its own, up to ``depth`` of them ahead."""
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="gtrain-ingest") as pool:

        def submit() -> Future[T | object]:
            return pool.submit(next, items, end)

        waiting = deque(submit() for _ in range(depth))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(submit())
            yield item  # type: ignore[misc]
