"""Partitions on their way from a slot to the disk."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from gtrain_pbg.files import Writing

MOST = 2
"""Partitions under way at a time: they are in the kernel's memory until the disk has them."""


class Departure:
    """A tensor that is written to a file, and whose memory is free for other rows piece by piece.

    Args:
        writing: the file.
        tensor: all its rows.
    """

    def __init__(self, writing: Writing, tensor: Tensor) -> None:
        self._writing, self._tensor = writing, tensor
        self._left = 0
        self._failed: BaseException | None = None
        self._change = threading.Condition()

    def wait(self, nbytes: int = sys.maxsize) -> None:
        """Wait until so many bytes from the tensor's beginning may be overwritten.

        Raises:
            DataError: they could not be written.
        """
        with self._change:
            self._change.wait_for(lambda: self._left >= nbytes or self._failed is not None)
        if self._failed is not None:
            raise self._failed

    def leave(self) -> None:
        """Copy the tensor into the kernel's memory; the disk thread calls it."""
        try:
            self._writing.add(self._tensor, self._reach)
        except BaseException as error:  # whoever waits must hear of it, whatever it is
            with self._change:
                self._failed = error
                self._change.notify_all()
            raise
        self._reach(sys.maxsize)  # memory behind the tensor is free, too

    def land(self) -> None:
        """Wait for the disk to have the file."""
        self._writing.done()

    def _reach(self, nbytes: int) -> None:
        with self._change:
            self._left = nbytes
            self._change.notify_all()


class Landings:
    """Copies partitions into files and waits for the disk, in threads of its own, so that slots are soon free.

    Until a file has landed, its earlier version is what is there. Whoever needs the new one waits for it by
    :meth:`wait`. All methods are called by one thread at a time.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MOST, "gtrain-pbg-disk")
        self._under_way: dict[int, Future[None]] = {}

    def begin(self, partition: int, departures: Sequence[Departure]) -> None:
        """Let the tensors of a partition leave for the disk.

        Raises:
            DataError: an earlier one could not be written.
        """
        for other in [key for key, future in self._under_way.items() if future.done()]:
            self.wait(other)
        while len(self._under_way) >= MOST:
            self.wait(next(iter(self._under_way)))
        self._under_way[partition] = self._threads.submit(_land, departures)

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
        """Let go of the threads."""
        self._threads.shutdown(wait=True)


def _land(departures: Sequence[Departure]) -> None:
    for departure in departures:
        departure.leave()
    for departure in departures:
        departure.land()
