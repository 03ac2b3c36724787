"""Where partitions are while they are in no slot of memory: the interface, and files of one machine.

Several machines share partition servers (:mod:`gtrain_pbg.machines.partition_server`) or a folder
(:mod:`gtrain_pbg.machines.folder`).
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from gtrain_pbg import files

MAX_PENDING = 2
"""Partitions of a table that are written at a time: they are in the kernel's memory until the disk has them."""

ReuseWaits = Mapping[str, Callable[[int], None]]
"""By kind: blocks until the given number of bytes at the start of a tensor may be overwritten."""


class PartitionStore(ABC):
    """Partitions by key. ``tensors`` are rows and optimizer state by kind, see :mod:`gtrain_pbg.files`.

    Attributes:
        shared: whether other machines use it too. Partitions are then in slots only while a machine holds a lease of
            them. Each version of a partition has the number of the lease under which it was written.
    """

    shared: ClassVar[bool] = True

    def clear(self) -> None:  # noqa: B027 - optional
        """Delete what an earlier job has left: its leases have numbers that this one's may have too."""

    @abstractmethod
    def load(self, key: str, tensors: Mapping[str, Tensor], lease: int = 0, free: ReuseWaits | None = None) -> None:
        """Fill tensors with the newest version of a partition.

        Args:
            key: the partition.
            tensors: by kind; other kinds are not read.
            lease: of the reader; versions of older leases are refused from then on. 0: none.
            free: what :meth:`save` returned for the partition that had the same memory.
        """

    @abstractmethod
    def save(self, key: str, version: int, tensors: Mapping[str, Tensor]) -> ReuseWaits:
        """Write a version. A shared store has it on a disk when this returns; one machine's writes behind.

        Returns:
            When the tensors may be overwritten; kinds that are not in it may be at once.

        Raises:
            PeerLostError: there is a newer one, or it was granted to another: this machine has lost its lease.
            DataError, RemoteError: the disk is full.
        """

    @abstractmethod
    def select(self, key: str, rows: Tensor, target: Tensor) -> None:
        """Fill a tensor with some rows of a partition, by their numbers in it."""

    @abstractmethod
    def keep(self, key: str, targets: Mapping[str, Path], like: Mapping[str, Tensor]) -> None:
        """Write the newest version into a checkpoint; ``like`` has tensors of its size, whose content may change."""

    @abstractmethod
    def adopt(self, key: str, version: int, sources: Mapping[str, Path]) -> None:
        """Take a partition of a checkpoint as a version."""

    def read(self, key: str, like: Tensor) -> Tensor:
        """All rows of a partition, copied or mapped from a file; ``like`` has their shape and dtype."""
        rows = torch.empty_like(like)
        self.load(key, {files.ROWS: rows})
        return rows

    def read_ahead(self, key: str) -> None:  # noqa: B027 - optional
        """A partition will be loaded soon."""

    def settle(self) -> None:  # noqa: B027 - optional
        """Wait until the disk has all that was saved."""


class LocalPartitions(PartitionStore):
    """Files of one machine, or those of a loaded checkpoint where a partition has not changed since.

    One process writes; all read. Methods are called by one thread at a time.

    Args:
        folder: where the files are; made when the first is written.
    """

    shared = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._checkpoint: dict[str, Mapping[str, Path]] = {}  # files by key and kind
        self._writes = WriteBehind()

    def create(self, key: str, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> files.Writing:
        """Begin to write a partition's file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return files.Writing(self._own(key, kind), shape, dtype)

    def path(self, key: str, kind: str) -> Path:
        """The newest file of a partition."""
        own, checkpoint = self._own(key, kind), self._checkpoint.get(key)
        return own if checkpoint is None or own.exists() else checkpoint[kind]

    def discard(self, key: str) -> None:
        """Delete a partition's files."""
        for kind in files.KINDS:
            self._own(key, kind).unlink(missing_ok=True)

    def load(self, key: str, tensors: Mapping[str, Tensor], lease: int = 0, free: ReuseWaits | None = None) -> None:
        self._writes.wait(key)
        for kind, tensor in tensors.items():
            files.read(self.path(key, kind), tensor, (free or {}).get(kind))

    def save(self, key: str, version: int, tensors: Mapping[str, Tensor]) -> ReuseWaits:
        pending = {
            kind: PendingWrite(self.create(key, kind, tuple(tensor.shape), tensor.dtype), tensor)
            for kind, tensor in tensors.items()
        }
        self._writes.begin(key, list(pending.values()))
        return {kind: write.wait for kind, write in pending.items()}

    def select(self, key: str, rows: Tensor, target: Tensor) -> None:
        torch.index_select(files.mapped(self.path(key, files.ROWS)), 0, rows, out=target)

    def keep(self, key: str, targets: Mapping[str, Path], like: Mapping[str, Tensor]) -> None:
        self._writes.wait(key)
        for kind, target in targets.items():
            files.keep(self.path(key, kind), target)

    def adopt(self, key: str, version: int, sources: Mapping[str, Path]) -> None:
        """Read the checkpoint's files until the partition changes."""
        self._checkpoint[key] = sources
        self.discard(key)

    def read(self, key: str, like: Tensor) -> Tensor:
        return files.mapped(self.path(key, files.ROWS))

    def read_ahead(self, key: str) -> None:
        self._writes.wait(key)
        for kind in files.KINDS:
            files.announce(self.path(key, kind))

    def settle(self) -> None:
        self._writes.settle()

    def _own(self, key: str, kind: str) -> Path:
        return self.folder / f"{key}.{kind}.npy"


class PendingWrite:
    """A tensor that is written to a file, and whose memory is free for other rows piece by piece.

    Args:
        writing: the file.
        tensor: all its rows.
    """

    def __init__(self, writing: files.Writing, tensor: Tensor) -> None:
        self._writing, self._tensor = writing, tensor
        self._copied = 0
        self._failed: BaseException | None = None
        self._change = threading.Condition()

    def wait(self, nbytes: int = sys.maxsize) -> None:
        """Wait until this number of bytes at the start of the tensor may be overwritten.

        Raises:
            DataError: they could not be written.
        """
        with self._change:
            self._change.wait_for(lambda: self._copied >= nbytes or self._failed is not None)
        if self._failed is not None:
            raise self._failed

    def copy(self) -> None:
        """Copy the tensor into the kernel's memory; the disk thread calls it."""
        try:
            self._writing.add(self._tensor, self._reach)
        except BaseException as error:  # raised in whoever waits for this memory
            with self._change:
                self._failed = error
                self._change.notify_all()
            raise
        self._reach(sys.maxsize)  # memory behind the tensor is free, too

    def flush(self) -> None:
        """Wait for the disk to have the file."""
        self._writing.done()

    def _reach(self, nbytes: int) -> None:
        with self._change:
            self._copied = nbytes
            self._change.notify_all()


class WriteBehind:
    """Writes partitions to files in background threads, so that slots are soon free.

    Until a file is on the disk, its earlier version has the name; :meth:`wait` waits for the new one. All methods are
    called by one thread at a time.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_PENDING, "gtrain-pbg-disk")
        self._pending: dict[str, Future[None]] = {}

    def begin(self, key: str, writes: Sequence[PendingWrite]) -> None:
        """Begin to write the tensors of a partition.

        Raises:
            DataError: an earlier one could not be written.
        """
        for other in [key for key, future in self._pending.items() if future.done()]:
            self.wait(other)
        while len(self._pending) >= MAX_PENDING:
            self.wait(next(iter(self._pending)))
        self._pending[key] = self._threads.submit(_write, writes)

    def wait(self, key: str) -> None:
        """Wait until the disk has a partition, if it is being written."""
        future = self._pending.pop(key, None)
        if future is not None:
            future.result()

    def settle(self) -> None:
        """Wait until the disk has all of them."""
        for key in list(self._pending):
            self.wait(key)


def _write(writes: Sequence[PendingWrite]) -> None:
    for write in writes:
        write.copy()
    for write in writes:
        write.flush()
