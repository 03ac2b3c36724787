"""Files of partitions that were written, and that the disk does not have yet."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from gtrain_pbg.files import Writing

MOST = 2
"""Partitions on their way to the disk at a time: they are in the kernel's memory until then."""


class Landings:
    """Waits for the disk in a thread of its own, so that the slot of a partition is free as soon as it is copied.

    Until a file has landed, its earlier version is what is there. Whoever needs the new one waits for it by
    :meth:`wait`. All methods are called by one thread at a time.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "gtrain-pbg-disk")
        self._under_way: dict[int, Future[None]] = {}

    def begin(self, partition: int, writings: Sequence[Writing]) -> None:
        """Let the files of a partition, which have all their rows, reach the disk.

        Raises:
            DataError: an earlier one could not.
        """
        for other in [key for key, future in self._under_way.items() if future.done()]:
            self.wait(other)
        while len(self._under_way) >= MOST:
            self.wait(next(iter(self._under_way)))
        self._under_way[partition] = self._thread.submit(_land, writings)

    def wait(self, partition: int) -> None:
        """Wait until the disk has a partition, if it is under way."""
        future = self._under_way.pop(partition, None)
        if future is not None:
            future.result()

    def settle(self) -> None:
        """Wait until the disk has all of them."""
        for partition in list(self._under_way):
            self.wait(partition)

    def close(self) -> None:
        """Let go of the thread."""
        self._thread.shutdown(wait=True)


def _land(writings: Sequence[Writing]) -> None:
    for writing in writings:
        writing.done()
