"""The table in partitions: those in memory, which the workers of a machine share, and those on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from gtrain.nn import TableSpec
from gtrain.nn.table import INIT_ROWS
from gtrain.wire.shared import SharedTensors
from gtrain_pbg import files
from gtrain_pbg.landing import Departure, Landings
from gtrain_pbg.step.batch import Rows
from gtrain_pbg.swaps import Buffer, Swap

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Partitions:
    """How a table is cut.

    Attributes:
        offsets: int64 ``[P + 1]``; partition p has the global ids ``offsets[p] .. offsets[p+1]-1``.
        orig_id: of each partition, ids of the source data, ascending.
    """

    offsets: Tensor
    orig_id: tuple[Tensor, ...]

    @property
    def count(self) -> int:
        """P."""
        return len(self.orig_id)

    @cached_property
    def all_orig_ids(self) -> Tensor:
        """Ids of the source data by global id, ``[N]``; all batches of evaluation share this tensor."""
        return torch.cat(self.orig_id)

    def size(self, partition: int) -> int:
        """Rows of a partition."""
        return int(self.offsets[partition + 1] - self.offsets[partition])

    @property
    def largest(self) -> int:
        """Rows of the largest."""
        return int(self.offsets.diff().max())


class PartitionedTable:
    """Rows and optimizer state of one table, in slots of shared memory and in files.

    One process, the leader, reads and writes files. Which partition is in which slot follows from the plan of an epoch
    (:class:`~gtrain_pbg.swaps.Buffer`), which every process makes alike.

    Args:
        spec: what the table is.
        partitions: how it is cut.
        buffer: which partitions are in memory; of all tables that are cut alike.
        state_width: numbers of optimizer state for each row.
        dtype: of rows and state.
        folder: where the leader keeps partitions that have no slot.
        shared: rows ``[slots, largest, width]`` and state ``[slots, largest, state_width]``.
        leader: whether this process reads and writes files.
        name: what its files and its shared memory are called after.
    """

    def __init__(
        self,
        spec: TableSpec,
        partitions: Partitions,
        buffer: Buffer,
        state_width: int,
        dtype: torch.dtype,
        folder: Path,
        shared: SharedTensors,
        leader: bool,
        name: str = "table",
    ) -> None:
        self.spec, self.partitions, self.dtype = spec, partitions, dtype
        self.buffer, self.name = buffer, name
        self._state_width, self._folder, self._shared, self._leader = state_width, folder, shared, leader
        self._sources: dict[int, Path] = {}
        self._changed: set[int] = set()
        self._heads: dict[int, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, "gtrain-pbg-swap") if leader else None
        self._landings = Landings()
        self._global: Tensor | None = None

    @staticmethod
    def tensors(
        slots: int, partitions: Partitions, width: int, state_width: int, dtype: torch.dtype, name: str = "table"
    ) -> Layout:
        """What :class:`~gtrain.wire.shared.SharedTensors` must hold for a table."""
        rows, columns = partitions.largest, {files.ROWS: width, files.STATE: state_width}
        return {f"{name}.{kind}": ((slots, rows, count), dtype) for kind, count in columns.items()}

    @property
    def whole(self) -> bool:
        """Whether every partition has a slot."""
        return self.buffer.slots >= self.partitions.count

    # ------------------------------------------------------------------------------------------ contents

    def initialize(self, start: float) -> None:
        """Give all rows their initial values, the same as ``single`` starts with. The leader calls it.

        Args:
            start: what the optimizer's state begins with.
        """
        self.place_first()
        away = [p for p in range(self.partitions.count) if p not in self.buffer.place]
        if away:
            self._folder.mkdir(parents=True, exist_ok=True)
        size, width = self.partitions.size, self.spec.dim
        writing = {p: files.Writing(self._path(files.ROWS, p), (size(p), width), self.dtype) for p in away}
        for begin in range(0, self.spec.rows, INIT_ROWS):
            end = min(begin + INIT_ROWS, self.spec.rows)
            made = self.spec.initial(begin, end).to(self.dtype)
            for partition, orig_id in enumerate(self.partitions.orig_id):
                low, high = torch.searchsorted(orig_id, torch.tensor([begin, end])).tolist()
                some = made[orig_id[low:high] - begin]
                if partition in writing:
                    writing[partition].add(some)
                else:
                    self._slot(files.ROWS, partition)[low:high] = some
        for partition in range(self.partitions.count):
            if partition in writing:
                writing[partition].done()
                state = torch.full((size(partition), self._state_width), start, dtype=self.dtype)
                files.write(self._path(files.STATE, partition), state)
            else:
                self._slot(files.STATE, partition).fill_(start)
        self._changed = set(self.buffer.place)

    def place_first(self) -> None:
        """Let the first partitions have the slots; :meth:`initialize` fills them, in the leader."""
        self.buffer.place = {p: p for p in range(min(self.buffer.slots, self.partitions.count))}
        self._sources = {}

    def overwrite(self, partition: int, sources: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Overwrite rows of a partition; on the leader, before training.

        Args:
            partition: the partition.
            sources: ids of the source data (-1: none) and rows, ``[n]`` and ``[n, width]``.
        """
        here = partition in self.buffer.place
        rows = self._slot(files.ROWS, partition) if here else files.mapped(self._source(files.ROWS, partition)).clone()
        first, last = (int(self.partitions.offsets[partition + end]) for end in (0, 1))
        for ids, values in sources:
            place = torch.where(ids >= 0, self.global_ids[ids.clamp(min=0)].long(), -1)
            chosen = ((place >= first) & (place < last)).nonzero().flatten()
            rows[place[chosen] - first] = values[chosen].to(self.dtype)
        if not here:
            files.write(self._path(files.ROWS, partition), rows)

    def save(self, folder: Path) -> list[str]:
        """Write all partitions into a checkpoint; files that lie on disk already get a second name there."""
        self.settle()
        names = []
        for partition in range(self.partitions.count):
            if partition in self.buffer.place and partition in self._changed and not self.whole:
                self._depart(partition, self.buffer.place[partition])
                self._landings.wait(partition)
                self._changed.discard(partition)
            for kind in files.KINDS:
                target = folder / files.file_name(kind, partition, self.name)
                if self.whole:
                    files.write(target, self._slot(kind, partition))
                else:
                    files.keep(self._source(kind, partition), target)
                names.append(target.name)
        return names

    def load(self, folder: Path) -> None:
        """Take the partitions of a checkpoint; those without a slot stay there until they change.

        Raises:
            CheckpointError: it has another number of them.
        """
        files.check_count(folder, self.name, self.partitions.count)
        self.place_first()
        self._sources = {p: folder for p in range(self.partitions.count)}
        self._changed = set()
        if not self._leader:
            return
        for partition in range(self.partitions.count):  # what is there is of another moment
            for kind in files.KINDS:
                self._path(kind, partition).unlink(missing_ok=True)
        for partition in self.buffer.place:
            files.read(self._source(files.ROWS, partition), self._slot(files.ROWS, partition))
            if self._state_width:
                files.read(self._source(files.STATE, partition), self._slot(files.STATE, partition))

    # ------------------------------------------------------------------------------------------ training

    def rows(self, slot: int, partition: int) -> Rows:
        """A partition that is in a slot, for the training step."""
        if slot not in self._heads:
            self._heads[slot] = torch.full((self.partitions.largest,), -1, dtype=torch.int32)
        size = self.partitions.size(partition)
        value, state = (self._memory(kind)[slot, :size] for kind in files.KINDS)
        return Rows(value, state, self._heads[slot][:size])

    def swap(self, swaps: tuple[Swap, ...]) -> Future[None] | None:
        """Begin to write what leaves slots and to read what comes, on the leader; None where there is nothing to do."""
        if self._thread is None or not swaps:
            return None
        return self._thread.submit(self._swap, swaps)

    def announce(self, swaps: tuple[Swap, ...]) -> Future[None] | None:
        """Begin to read what will come into the kernel's memory, on the leader: there is no slot for it yet."""
        if self._thread is None or not swaps:
            return None
        return self._thread.submit(self._announce, swaps)

    def _announce(self, swaps: tuple[Swap, ...]) -> None:
        for swap in swaps:
            self._landings.wait(swap.into)
            for kind in files.KINDS:
                files.announce(self._source(kind, swap.into))

    def _swap(self, swaps: tuple[Swap, ...]) -> None:
        """Read into each slot behind what is written from it: both are copies, and each has a core of its own."""
        for swap in swaps:
            leaving: dict[str, Departure] = {}
            if swap.out is not None and swap.out in self._changed:
                leaving = self._depart(swap.out, swap.slot)
                self._changed.discard(swap.out)
            self._landings.wait(swap.into)
            size = self.partitions.size(swap.into)
            for kind in files.KINDS:
                target = self._memory(kind)[swap.slot, :size]
                files.read(self._source(kind, swap.into), target, leaving[kind].wait if leaving else None)

    def trained(self, bucket: tuple[int, int]) -> None:
        """Note that partitions differ from their files."""
        self._changed |= set(bucket)

    def settle(self) -> None:
        """Wait for what is under way to memory and to the disk."""
        if self._thread is not None:
            self._thread.submit(self._landings.settle).result()

    # ------------------------------------------------------------------------------------------ reading

    def read(self, partition: int) -> Tensor:
        """Rows of a partition as they are, in memory or mapped from its file."""
        if partition in self.buffer.place:
            return self._slot(files.ROWS, partition)
        return files.mapped(self._source(files.ROWS, partition))

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids of the source data and rows, partition by partition; those without a slot are mapped files."""
        for partition, orig_id in enumerate(self.partitions.orig_id):
            yield orig_id, self.read(partition)

    def fetch(self, ids: Tensor) -> Tensor:
        """Rows of ids of the source data, wherever they are."""
        found = torch.empty(ids.numel(), self.spec.dim, dtype=self.dtype)
        place = self.global_ids[ids].long()
        owner = torch.searchsorted(self.partitions.offsets, place, right=True) - 1
        for partition in owner.unique().tolist():
            here = (owner == partition).nonzero().flatten()
            found[here] = self.read(partition)[place[here] - self.partitions.offsets[partition]]
        return found

    @property
    def global_ids(self) -> Tensor:
        """Global id of each id of the source data, ``[N]``."""
        if self._global is None:
            self._global = torch.empty(self.spec.rows, dtype=torch.int32 if self.spec.rows < 2**31 else torch.int64)
            for partition, orig_id in enumerate(self.partitions.orig_id):
                first = int(self.partitions.offsets[partition])
                self._global[orig_id] = torch.arange(first, first + len(orig_id), dtype=self._global.dtype)
        return self._global

    def close(self) -> None:
        """Let go of the thread; what is in memory stays as long as it is referenced."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._landings.close()
            self._thread = None

    # ------------------------------------------------------------------------------------------ inside

    def _slot(self, kind: str, partition: int) -> Tensor:
        return self._memory(kind)[self.buffer.place[partition], : self.partitions.size(partition)]

    def _memory(self, kind: str) -> Tensor:
        return self._shared[f"{self.name}.{kind}"]

    def _path(self, kind: str, partition: int) -> Path:
        return self._folder / files.file_name(kind, partition, self.name)

    def _source(self, kind: str, partition: int) -> Path:
        """The newest file of a partition: the leader's own, or that of the checkpoint that was loaded."""
        own = self._path(kind, partition)
        folder = self._sources.get(partition)
        return own if folder is None or own.exists() else folder / own.name

    def _depart(self, partition: int, slot: int) -> dict[str, Departure]:
        """Begin to write what a slot has of a partition, by kind."""
        self._folder.mkdir(parents=True, exist_ok=True)
        size, found = self.partitions.size(partition), {}
        for kind in files.KINDS:
            tensor = self._memory(kind)[slot, :size]
            writing = files.Writing(self._path(kind, partition), tuple(tensor.shape), tensor.dtype)
            found[kind] = Departure(writing, tensor)
        self._landings.begin(partition, list(found.values()))
        return found
