"""Storage of partitions that are not in memory: the interface, and files of one machine with write-behind.

Several machines share partition servers (:mod:`gtrain_pbg.machines.partition_server`) or a folder
(:mod:`gtrain_pbg.machines.folder`). A partition has two arrays, ``rows`` and ``state`` (of the optimizer), each a file
in the format of :mod:`gtrain.strategy.tensor_files`.
"""

from __future__ import annotations

import re
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from gtrain.errors import CheckpointError
from gtrain.graph.store.manifest import safe_name
from gtrain.memory import pages
from gtrain.strategy import tensor_files
from gtrain.strategy.tensor_files import Writing

ROWS, STATE = ARRAYS = ("rows", "state")
"""The arrays of a partition."""
PIECE = 1 << 18
"""Ids that are processed at a time."""
MAX_PENDING = 2
"""Partitions of a table that are written at a time: the page cache has them until the disk does."""

ReuseWaits = Mapping[str, Callable[[int], None]]
"""By array: a function that blocks until the given number of bytes at the start of a tensor may be overwritten."""


def partition_key(table: str, partition: int) -> str:
    """Return the key of a partition in a store, and of its lease on the wire."""
    return f"{table}-{partition}"


def file_name(array: str, partition: int, table: str = "table") -> str:
    """Return the name of the file of a partition's array."""
    return f"{partition_key(safe_name(table), partition)}.{array}.npy"


def check_count(folder: Path, table: str, partitions: int) -> None:
    """Check that a checkpoint has this number of partitions of a table.

    Raises:
        CheckpointError: it has another number.
    """
    names = re.compile(rf"{re.escape(safe_name(table))}-\d+\.{ROWS}\.npy")
    saved = sum(names.fullmatch(path.name) is not None for path in folder.iterdir())
    if saved != partitions:
        raise CheckpointError(
            f"{folder} has {saved} partitions of a table that has {partitions} here: "
            f"strategy.num_partitions={partitions} was set.",
            hint=f"set strategy.num_partitions={saved} (or the type's in data.entities), or start a run with "
            "strategy.warm_start.",
        )


class PartitionStore(ABC):
    """Partitions by key. ``tensors`` are by array, :data:`ARRAYS`.

    Attributes:
        shared: whether other machines use it too. A machine then has partitions in memory only while it holds a lease
            of them, and each version of a partition has the number of the lease under which it was written.
    """

    shared: ClassVar[bool] = True

    def clear(self) -> None:  # noqa: B027 - optional
        """Delete the partitions of an earlier job, whose leases may have the same numbers as this job's."""

    @abstractmethod
    def load(self, key: str, tensors: Mapping[str, Tensor], lease: int = 0, waits: ReuseWaits | None = None) -> None:
        """Fill tensors with the newest version of a partition.

        Args:
            key: of the partition.
            tensors: by array; other arrays are not read.
            lease: of the reader; versions of older leases are refused from then on. 0: none.
            waits: what :meth:`save` returned for the partition that had the same memory.
        """

    @abstractmethod
    def save(self, key: str, version: int, tensors: Mapping[str, Tensor]) -> ReuseWaits:
        """Write a version. A shared store has it on a disk on return; the store of one machine writes behind.

        Returns:
            Functions that block until tensors may be overwritten; other arrays may be at once.

        Raises:
            PeerLostError: a newer version exists, or another machine was granted the partition: the lease was lost.
            DataError, RemoteError: the disk is full.
        """

    @abstractmethod
    def select(self, key: str, rows: Tensor, target: Tensor) -> None:
        """Fill a tensor with some rows of a partition, by their numbers in it."""

    @abstractmethod
    def keep(self, key: str, targets: Mapping[str, Path], like: Mapping[str, Tensor]) -> None:
        """Write the newest version into a checkpoint; ``like`` has tensors of its size, which may be overwritten."""

    @abstractmethod
    def adopt(self, key: str, version: int, sources: Mapping[str, Path]) -> None:
        """Take a partition of a checkpoint as a version."""

    def read(self, key: str, like: Tensor) -> Tensor:
        """Return all rows of a partition, copied or mapped from a file; ``like`` has their shape and dtype."""
        # Not in the heap, which would retain a partition's memory in gaps that the next does not fit.
        rows = pages.zeros(like.nbytes).view(like.dtype).view(like.shape)
        self.load(key, {ROWS: rows})
        return rows

    def read_ahead(self, key: str) -> None:  # noqa: B027 - optional
        """Prefetch a partition that will be loaded soon."""

    def settle(self) -> None:  # noqa: B027 - optional
        """Wait until all saved partitions are on the disk."""


class FileStore(PartitionStore):
    """A :class:`PartitionStore` whose partitions are files that this process can read.

    Args:
        folder: of the files; made when the first is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def path(self, key: str, array: str) -> Path:
        """Return the file of a partition's newest version.

        Raises:
            DataError: the partition does not exist.
        """

    def load(self, key: str, tensors: Mapping[str, Tensor], lease: int = 0, waits: ReuseWaits | None = None) -> None:
        for array, tensor in tensors.items():
            tensor_files.read(self.path(key, array), tensor, (waits or {}).get(array))

    def select(self, key: str, rows: Tensor, target: Tensor) -> None:
        torch.index_select(tensor_files.mapped(self.path(key, ROWS)), 0, rows, out=target)

    def keep(self, key: str, targets: Mapping[str, Path], like: Mapping[str, Tensor]) -> None:
        for array, target in targets.items():
            tensor_files.keep(self.path(key, array), target)


class LocalPartitions(FileStore):
    """Files of one machine, or those of a loaded checkpoint where a partition has not changed since.

    One process writes; all read. Methods are called by one thread at a time.
    """

    shared = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._checkpoint: dict[str, Mapping[str, Path]] = {}  # files by key and array
        self._writes = WriteBehind()

    def create(self, key: str, array: str, shape: tuple[int, ...], dtype: torch.dtype) -> Writing:
        """Start to write a partition's file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return Writing(self._file(key, array), shape, dtype)

    def path(self, key: str, array: str) -> Path:
        file, checkpoint = self._file(key, array), self._checkpoint.get(key)
        # A file of this run is newer than that of the checkpoint it started from.
        return file if checkpoint is None or file.exists() else checkpoint[array]

    def discard(self, key: str) -> None:
        """Delete a partition's files."""
        for array in ARRAYS:
            self._file(key, array).unlink(missing_ok=True)

    def load(self, key: str, tensors: Mapping[str, Tensor], lease: int = 0, waits: ReuseWaits | None = None) -> None:
        self._writes.wait(key)
        super().load(key, tensors, lease, waits)

    def save(self, key: str, version: int, tensors: Mapping[str, Tensor]) -> ReuseWaits:
        pending = {
            array: PendingWrite(self.create(key, array, tuple(tensor.shape), tensor.dtype), tensor)
            for array, tensor in tensors.items()
        }
        self._writes.begin(key, list(pending.values()))
        return {array: write.wait for array, write in pending.items()}

    def keep(self, key: str, targets: Mapping[str, Path], like: Mapping[str, Tensor]) -> None:
        self._writes.wait(key)
        super().keep(key, targets, like)

    def adopt(self, key: str, version: int, sources: Mapping[str, Path]) -> None:
        """Read the checkpoint's files until the partition changes."""
        self._checkpoint[key] = sources
        self.discard(key)

    def read(self, key: str, like: Tensor) -> Tensor:
        return tensor_files.mapped(self.path(key, ROWS))

    def read_ahead(self, key: str) -> None:
        self._writes.wait(key)
        for array in ARRAYS:
            tensor_files.announce(self.path(key, array))

    def settle(self) -> None:
        self._writes.settle()

    def _file(self, key: str, array: str) -> Path:
        return self.folder / f"{key}.{array}.npy"


class PendingWrite:
    """A tensor that is being written to a file, and whose memory may be reused piece by piece.

    Args:
        writing: the file.
        tensor: all its rows.
    """

    def __init__(self, writing: Writing, tensor: Tensor) -> None:
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
        """Copy the tensor into the page cache; called by the disk thread."""
        try:
            self._writing.add(self._tensor, self._advance)
        except BaseException as error:
            self.fail(error)
            raise
        # Memory behind the tensor may be reused, too.
        self._advance(sys.maxsize)

    def fail(self, error: BaseException) -> None:
        """Have those who wait for this memory raise an error."""
        with self._change:
            self._failed = error
            self._change.notify_all()

    def flush(self) -> None:
        """Wait until the file is on the disk."""
        self._writing.done()

    def _advance(self, nbytes: int) -> None:
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
        """Start to write the tensors of a partition; wait while :data:`MAX_PENDING` partitions are being written.

        Raises:
            DataError: an earlier partition could not be written.
        """
        for other in [key for key, future in self._pending.items() if future.done()]:
            self.wait(other)
        while len(self._pending) >= MAX_PENDING:
            self.wait(next(iter(self._pending)))
        self._pending[key] = self._threads.submit(_write, writes)

    def wait(self, key: str) -> None:
        """Wait until a partition is on the disk, if it is being written."""
        future = self._pending.pop(key, None)
        if future is not None:
            future.result()

    def settle(self) -> None:
        """Wait until all partitions are on the disk."""
        for key in list(self._pending):
            self.wait(key)


def _write(writes: Sequence[PendingWrite]) -> None:
    for number, write in enumerate(writes):
        try:
            write.copy()
        except BaseException as error:
            for other in writes[number + 1 :]:
                other.fail(error)
            raise
    for write in writes:
        write.flush()
