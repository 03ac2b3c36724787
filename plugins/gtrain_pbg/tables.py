"""A table in partitions: some in slots of memory that the workers of a machine share, the others in a store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtrain.errors import ConfigError
from gtrain.graph.owners import owner_of
from gtrain.graph.store.manifest import safe_name
from gtrain.nn import Csr, RemoteTableStorage, TableSpec
from gtrain.nn.rules import Rule, Settings
from gtrain.nn.table import INIT_ROWS
from gtrain.strategy import tensor_files
from gtrain.wire.shared import SharedTensors
from gtrain_pbg.buckets import PartitionBuffer
from gtrain_pbg.partition_store import (
    ARRAYS,
    ROWS,
    STATE,
    LocalPartitions,
    PartitionStore,
    ReuseWaits,
    check_count,
    file_name,
    partition_key,
)
from gtrain_pbg.step.layout import PartitionRows

TensorShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Partitioning:
    """How the rows of a table are partitioned.

    Attributes:
        offsets: int64 ``[P + 1]``; partition p has the global ids ``offsets[p] .. offsets[p+1]-1``.
        orig_id: for each partition, ids of the source data, ascending.
    """

    offsets: Tensor
    orig_id: tuple[Tensor, ...]

    @property
    def count(self) -> int:
        """P."""
        return len(self.orig_id)

    @cached_property
    def all_orig_ids(self) -> Tensor:
        """Ids of the source data by global id, ``[N]``; all evaluation batches share this tensor."""
        return torch.cat(self.orig_id)

    def size(self, partition: int) -> int:
        """Return the number of rows of a partition."""
        return int(self.offsets[partition + 1] - self.offsets[partition])

    @property
    def largest(self) -> int:
        """Rows of the largest partition."""
        return int(self.offsets.diff().max())


class PartitionedTable:
    """PartitionRows and optimizer state of one table, in slots of shared memory and in a store.

    It is created in files of the machine. If machines share a store, :meth:`publish` moves it there.

    Args:
        spec: of the table.
        partitions: how it is partitioned.
        buffer: which partitions are in which slots; shared by all tables that are partitioned alike.
        state_width: numbers of optimizer state per row.
        dtype: of rows and state.
        folder: of the files.
        shared: memory: rows ``[slots, largest, width]`` and state ``[slots, largest, state_width]``.
        name: prefix of its files and its shared memory.

    Attributes:
        store: of partitions that are in no slot.
        synchronize: brings the slots up to date, where a device has newer copies.
    """

    def __init__(
        self,
        spec: TableSpec,
        partitions: Partitioning,
        buffer: PartitionBuffer,
        state_width: int,
        dtype: torch.dtype,
        folder: Path,
        shared: SharedTensors,
        name: str = "table",
    ) -> None:
        self.spec, self.partitions, self.dtype = spec, partitions, dtype
        self.buffer, self.name = buffer, name
        self._state_width, self._shared = state_width, shared
        self._local = LocalPartitions(folder)
        self.store: PartitionStore = self._local
        self.synchronize: Callable[[], None] = lambda: None
        self._heads: dict[int, Tensor] = {}

    @property
    def whole(self) -> bool:
        """Whether every partition is in a slot for good."""
        return not self.store.shared and self.buffer.slots >= self.partitions.count

    # ------------------------------------------------------------------------------------------ contents

    def initialize(self, start: float) -> None:
        """Set all rows to their initial values, the same as with ``strategy=single``; called by the leader.

        Args:
            start: initial value of the optimizer's state.
        """
        size, width = self.partitions.size, self.spec.dim
        writing = {
            p: self._local.create(self._file_key(p), ROWS, (size(p), width), self.dtype)
            for p in range(self.partitions.count)
            if p not in self.buffer.slot_of
        }
        for begin in range(0, self.spec.rows, INIT_ROWS):
            end = min(begin + INIT_ROWS, self.spec.rows)
            # Block by block, in the order of original ids: the values do not depend on the partitioning.
            initial = self.spec.initial(begin, end).to(self.dtype)
            for partition, orig_id in enumerate(self.partitions.orig_id):
                # orig_id ascends within a partition, so a block's rows are a range of each partition.
                low, high = torch.searchsorted(orig_id, torch.tensor([begin, end])).tolist()
                rows = initial[orig_id[low:high] - begin]
                if partition in writing:
                    writing[partition].add(rows)
                else:
                    self._slot(partition)[ROWS][low:high] = rows
        for partition in range(self.partitions.count):
            if partition in writing:
                writing[partition].done()
                state = torch.full((size(partition), self._state_width), start, dtype=self.dtype)
                tensor_files.write(self._local.path(self._file_key(partition), STATE), state)
            else:
                self._slot(partition)[STATE].fill_(start)

    def overwrite(self, partition: int, sources: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Overwrite rows of a partition; on the leader, before training.

        Args:
            partition: its number.
            sources: ids of the source data (-1: ignored) and rows, ``[n]`` and ``[n, width]``.
        """
        in_memory, path = partition in self.buffer.slot_of, self._local.path(self._file_key(partition), ROWS)
        rows = self._slot(partition)[ROWS] if in_memory else tensor_files.mapped(path).clone()
        first, last = (int(self.partitions.offsets[partition + end]) for end in (0, 1))
        for ids, values in sources:
            global_ids = torch.where(ids >= 0, self.global_ids[ids.clamp(min=0)].long(), -1)
            chosen = ((global_ids >= first) & (global_ids < last)).nonzero().flatten()
            rows[global_ids[chosen] - first] = values[chosen].to(self.dtype)
        if not in_memory:
            tensor_files.write(path, rows)

    def publish(self, next_lease: Callable[[], int]) -> None:
        """Move all partitions from the machine's files to the shared store; called once, by one process of the job."""
        for partition in range(self.partitions.count):
            key = self._file_key(partition)
            paths = {array: self._local.path(key, array) for array in ARRAYS}
            self.store.adopt(self._key(partition), next_lease(), paths)
            self._local.discard(key)

    def save(self, folder: Path, changed: Collection[int]) -> list[str]:
        """Write all partitions into a checkpoint; files that are on the disk already are linked.

        Args:
            folder: the checkpoint.
            changed: partitions in slots that differ from the store.
        """
        names = []
        for partition in range(self.partitions.count):
            targets = self._files(folder, partition)
            if self.whole:
                for array, tensor in self._slot(partition).items():
                    tensor_files.write(targets[array], tensor)
            else:
                if partition in changed and partition in self.buffer.slot_of:
                    self.evict(partition, self.buffer.slot_of[partition])
                self.store.keep(self._key(partition), targets, self._tensors(0, partition))
            names += [path.name for path in targets.values()]
        return names

    def load(self, folder: Path, next_lease: Callable[[], int], adopts: bool, fills: bool) -> None:
        """Load the partitions of a checkpoint.

        Args:
            folder: the checkpoint.
            next_lease: numbers the versions.
            adopts: whether this process hands them to the store.
            fills: whether it reads those that have slots.

        Raises:
            CheckpointError: the checkpoint has another number of partitions.
        """
        check_count(folder, self.name, self.partitions.count)
        for partition in range(self.partitions.count if adopts else 0):
            version = next_lease() if self.store.shared else 0
            self.store.adopt(self._key(partition), version, self._files(folder, partition))
        for partition, slot in self.buffer.slot_of.items() if fills else ():
            self.fill(partition, slot)

    # ------------------------------------------------------------------------------------------ training

    def rows(self, slot: int, partition: int) -> PartitionRows:
        """Return a partition that is in a slot, for the training step."""
        if slot not in self._heads:
            self._heads[slot] = torch.full((self.partitions.largest,), -1, dtype=torch.int32)
        tensors = self._tensors(slot, partition)
        return PartitionRows(tensors[ROWS], tensors[STATE], self._heads[slot][: self.partitions.size(partition)])

    def evict(self, partition: int, slot: int, lease: int = 0) -> ReuseWaits:
        """Save a partition that is in a slot; see :meth:`PartitionStore.save`."""
        return self.store.save(self._key(partition), lease, self._tensors(slot, partition))

    def fill(self, partition: int, slot: int, lease: int = 0, waits: ReuseWaits | None = None) -> None:
        """Load a partition into a slot, right behind its predecessor, which may still be being copied out."""
        tensors = {array: tensor for array, tensor in self._tensors(slot, partition).items() if tensor.shape[1]}
        self.store.load(self._key(partition), tensors, lease, waits)

    def read_ahead(self, partition: int) -> None:
        """Prefetch a partition for which no slot is free yet."""
        self.store.read_ahead(self._key(partition))

    # ------------------------------------------------------------------------------------------ reading

    def read(self, partition: int) -> Tensor:
        """Return the rows of a partition, in memory or mapped from its file."""
        self.synchronize()
        if partition in self.buffer.slot_of:
            return self._slot(partition)[ROWS]
        return self.store.read(self._key(partition), self._tensors(0, partition)[ROWS])

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ids of the source data and rows, partition by partition."""
        for partition, orig_id in enumerate(self.partitions.orig_id):
            yield orig_id, self.read(partition)

    def fetch(self, ids: Tensor) -> Tensor:
        """Return rows by ids of the source data, from memory or the store."""
        self.synchronize()
        rows = torch.empty(ids.numel(), self.spec.dim, dtype=self.dtype)
        global_ids = self.global_ids[ids].long()
        owner = owner_of(global_ids, self.partitions.offsets)
        for partition in owner.unique().tolist():
            selected = (owner == partition).nonzero().flatten()
            local_ids = global_ids[selected] - self.partitions.offsets[partition]
            if partition in self.buffer.slot_of:
                rows[selected] = self._slot(partition)[ROWS][local_ids]
            else:
                stored = rows.new_empty(len(selected), self.spec.dim)
                self.store.select(self._key(partition), local_ids, stored)
                rows[selected] = stored
        return rows

    @cached_property
    def global_ids(self) -> Tensor:
        """Global ids by id of the source data, ``[N]``."""
        global_ids = torch.empty(self.spec.rows, dtype=torch.int32 if self.spec.rows < 2**31 else torch.int64)
        for first, orig_id in zip(self.partitions.offsets.tolist(), self.partitions.orig_id, strict=False):
            global_ids[orig_id] = torch.arange(first, first + len(orig_id), dtype=global_ids.dtype)
        return global_ids

    # ------------------------------------------------------------------------------------------ inside

    def _key(self, partition: int) -> str:
        """Return the key of a partition in the store."""
        return partition_key(safe_name(self.spec.name if self.store.shared else self.name), partition)

    def _file_key(self, partition: int) -> str:
        """Return the key of a partition among the machine's files."""
        return partition_key(safe_name(self.name), partition)

    def _files(self, folder: Path, partition: int) -> dict[str, Path]:
        """Return a partition's files in a checkpoint, by array."""
        return {array: folder / file_name(array, partition, self.name) for array in ARRAYS}

    def _slot(self, partition: int) -> dict[str, Tensor]:
        return self._tensors(self.buffer.slot_of[partition], partition)

    def _tensors(self, slot: int, partition: int) -> dict[str, Tensor]:
        """Return the arrays of a partition in a slot."""
        size = self.partitions.size(partition)
        return {array: self._shared[f"{self.name}.{array}"][slot, :size] for array in ARRAYS}


class PartitionedTableStorage(RemoteTableStorage):
    """Placement of a table's rows for evaluation and export; the training step changes partitions directly.

    Args:
        rows: the table.
    """

    def __init__(self, rows: PartitionedTable) -> None:
        super().__init__(rows.spec)
        self.rows = rows

    def fetch(self, ids: Tensor) -> Tensor:
        return self.rows.fetch(ids.cpu()).to(ids.device)

    def push(self, ids: Tensor, gradients: Tensor) -> None:
        raise ConfigError(
            "the module asked for gradients of the table by autograd; strategy=pbg trains by the module's recipe().",
            hint="set strategy=single or ps for a module with its own training step.",
        )

    def multiply(self, rows: Csr) -> tuple[Tensor, Any]:
        raise ConfigError("strategy=pbg serves tables of embeddings, not products.", hint="set strategy=single or ps.")

    def push_product(self, pending: Any, gradient: Tensor) -> None:
        raise AssertionError("multiply() raises")

    def update(self, rule: Rule, settings: Settings) -> None:
        """Nothing: rows were updated when they were trained."""

    def zero_grad(self) -> None:
        """Nothing: gradients are not stored."""

    def read(self, begin: int, end: int) -> Tensor:
        return self.rows.fetch(torch.arange(begin, end))

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        device = self.anchor.device
        return ((ids.to(device), rows.to(device)) for ids, rows in self.rows.blocks())

    def state(self) -> dict[str, Any]:
        # Partitions are files of the checkpoint.
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        assert not state
