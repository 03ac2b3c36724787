"""The tables of all entity types, which are partitioned alike and swapped together.

A partition of the store has rows of every partitioned type, those of one type after those of another. The rows of a
type that is not partitioned belong to partition 0, as in PyTorch-BigGraph, and its table is always in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from gtrain.graph.store import Store
from gtrain.graph.store.entities import entity_types
from gtrain.nn import TableSpec
from gtrain.wire.shared import SharedTensors
from gtrain_pbg.buckets import Bucket, PartitionBuffer, ScheduledBucket, Swap
from gtrain_pbg.partition_store import ARRAYS, ROWS, STATE, PartitionStore, ReuseWaits
from gtrain_pbg.step.layout import PartitionRows
from gtrain_pbg.tables import PartitionedTable, Partitioning, TensorShapes

T = TypeVar("T")
Released = Callable[[int], None]
"""Called with a partition that has been saved and whose lease may end."""
BUNDLE = "types"
"""Name of the leases of several tables' partitions."""


class DeviceCopies(Protocol):
    """Copies of partitions on a device, which may be newer than those in the slots."""

    def evicting(self, partition: int) -> None:
        """Called before a partition is evicted from its slot."""

    def filled(self, partition: int, host: int) -> None:
        """Called when a partition has been loaded into a slot."""

    def flush(self) -> None:
        """Bring the slots up to date."""

    def reset(self) -> None:
        """Called when the slots have other contents."""

    def refresh_common(self) -> None:
        """Called when the host's relation parameters and tables without partitions have other contents."""


@dataclass(frozen=True)
class TypePartitioning:
    """How the rows of one entity type are partitioned.

    Attributes:
        name: of the type; prefix of its files and its shared memory.
        spec: of its table.
        partitions: of its rows.
        begins: for each partition of the store, the row of its first entity.
    """

    name: str
    spec: TableSpec
    partitions: Partitioning
    begins: tuple[int, ...]

    @property
    def is_partitioned(self) -> bool:
        """Whether it has the store's partitions, rather than a single one that stays in memory."""
        return self.partitions.count == len(self.begins)


def partition_types(store: Store, specs: Sequence[TableSpec]) -> list[TypePartitioning]:
    """Return how each type is partitioned.

    Args:
        store: the graph, whose nodes of all types have one numbering.
        specs: of each type's table; the table of a featurized type has rows for features, and is not partitioned.
    """
    parts = [store.node("orig_id", part) for part in range(store.num_parts)]
    unpartitioned, features = store.facts.get("unpartitioned") or [], store.facts.get("features") or {}
    types = []
    for spec, entity in zip(specs, entity_types(store), strict=True):
        first, ends = entity.first, torch.tensor([entity.first, entity.first + entity.count])
        spans = [torch.searchsorted(orig_id, ends).tolist() for orig_id in parts]
        members = tuple(
            ids[low:high] - first if first else ids[low:high]
            for ids, (low, high) in zip(parts[:1] if spec.name in unpartitioned else parts, spans, strict=False)
        )
        if spec.name in features:
            members = (torch.arange(spec.rows),)
        offsets = torch.tensor([0, *(len(ids) for ids in members)]).cumsum(0)
        name = "table" if len(specs) == 1 else spec.name
        types.append(TypePartitioning(name, spec, Partitioning(offsets, members), tuple(low for low, _ in spans)))
    return types


class TypedTables:
    """PartitionRows and optimizer state of the tables of all types.

    All processes of a machine know which partition is in which slot. One of them, the leader, moves partitions between
    slots and the store.

    Args:
        types: how each type is partitioned.
        nodes: how the nodes of all types are partitioned.
        slots: partitions in memory at a time.
        state_widths: numbers of optimizer state per row, by type.
        dtype: of rows and state.
        folder: of the files of partitions that are in no slot.
        shared: memory of the shapes that :meth:`tensors` returns.
        leader: whether this process moves partitions.

    Attributes:
        tables: by type.
        nodes: how the nodes of all types are partitioned.
        buffer: which partitions are in which slots.
    """

    def __init__(
        self,
        types: Sequence[TypePartitioning],
        nodes: Partitioning,
        slots: int,
        state_widths: Sequence[int],
        dtype: torch.dtype,
        folder: Path,
        shared: SharedTensors,
        leader: bool,
    ) -> None:
        self.types, self.nodes, self.dtype, self.buffer = types, nodes, dtype, PartitionBuffer(slots)
        self._folder, self._leader = folder, leader
        self.tables = [
            PartitionedTable(
                entity.spec,
                entity.partitions,
                self.buffer if entity.is_partitioned else PartitionBuffer(1),
                width,
                dtype,
                folder,
                shared,
                entity.name,
            )
            for entity, width in zip(types, state_widths, strict=True)
        ]
        self._partitioned = [table for table, entity in zip(self.tables, types, strict=True) if entity.is_partitioned]
        self._store: PartitionStore | None = None
        self._publishes, self._next_lease = True, lambda: 0
        self._changed: set[int] = set()  # partitions in slots that differ from the store
        self._device: DeviceCopies | None = None
        # One thread: swaps must happen in their order.
        self._mover = ThreadPoolExecutor(1, "gtrain-pbg-swap")
        self._each = ThreadPoolExecutor(max(1, len(self._partitioned)), "gtrain-pbg-table")

    def connect(self, store: PartitionStore, publishes: bool, next_lease: Callable[[], int]) -> None:
        """Keep the partitions in a store that machines share.

        Args:
            store: the store.
            publishes: whether this process is the one of the job that fills it.
            next_lease: returns a number larger than that of any lease so far.
        """
        self._store, self._publishes, self._next_lease = store, publishes, next_lease
        for table in self._partitioned:
            table.store = store

    def attach(self, device: DeviceCopies) -> None:
        """Train on a device: its copies are written back before slots are read."""
        self._device = device
        for table in self.tables:
            table.synchronize = device.flush

    def detach(self) -> None:
        """Write the device's copies back, if there are any, and use the slots alone."""
        if self._device is not None:
            self._device.flush()
        self._device = None
        for table in self.tables:
            table.synchronize = lambda: None

    def refresh_common(self) -> None:
        """Copy what :meth:`in_common` returns to the device, if there is one."""
        if self._device is not None:
            self._device.refresh_common()

    @staticmethod
    def tensors(
        types: Sequence[TypePartitioning], slots: int, state_widths: Sequence[int], dtype: torch.dtype
    ) -> TensorShapes:
        """Return the shapes of all tables' :class:`~gtrain.wire.shared.SharedTensors`."""
        shapes: TensorShapes = {}
        for entity, width in zip(types, state_widths, strict=True):
            size = slots if entity.is_partitioned else 1, entity.partitions.largest
            for array, columns in ((ROWS, entity.spec.dim), (STATE, width)):
                shapes[f"{entity.name}.{array}"] = (*size, columns), dtype
        return shapes

    @property
    def whole(self) -> bool:
        """Whether every partition is in a slot for good."""
        return all(table.whole for table in self.tables)

    @property
    def in_shared_store(self) -> bool:
        """Whether machines share the partitions; slots are then empty outside training."""
        return self._store is not None

    @property
    def bundle(self) -> str:
        """Name under which the partitions of all tables are leased together."""
        return self._partitioned[0].spec.name if len(self._partitioned) == 1 else BUNDLE

    # ------------------------------------------------------------------------------------------ contents

    def initialize(self, start: float) -> None:
        """Set all rows to their initial values; see :meth:`PartitionedTable.initialize`."""
        self.assign_first_slots()
        for table in self.tables:
            table.initialize(start)
        self._changed = set(self.buffer.slot_of)

    def assign_first_slots(self) -> None:
        """Assign the slots to the first partitions; none if machines share the partitions."""
        for table in self.tables:
            count = 0 if table.store.shared else min(table.buffer.slots, table.partitions.count)
            table.buffer.slot_of = {partition: partition for partition in range(count)}

    def publish(self) -> None:
        """Fill the shared store, if any, with all partitions; called once, by one process."""
        if self._store is None:
            return
        self._store.clear()
        for table in self._partitioned:
            table.publish(self._next_lease)
        with suppress(OSError):  # the folder does not exist
            self._folder.rmdir()

    def save(self, folder: Path) -> list[str]:
        """Write all partitions into a checkpoint."""
        self.settle()
        if self._device is not None:
            self._device.flush()
        names = [name for table in self.tables for name in table.save(folder, self._changed)]
        if not self.whole:
            self._changed = set()
        return names

    def load(self, folder: Path) -> None:
        """Load the partitions of a checkpoint."""
        self.assign_first_slots()
        self._changed = set()
        for table in self.tables:
            table.load(folder, self._next_lease, self._publishes or not table.store.shared, self._leader)
        if self._device is not None:
            self._device.reset()

    def in_common(self, shared: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the shared memory of parameters and of tables that are not partitioned."""
        moved = {f"{entity.name}.{array}" for entity in self.types if entity.is_partitioned for array in ARRAYS}
        return {name: shared[name] for name in shared if name not in moved}

    # ------------------------------------------------------------------------------------------ training

    def rows(self, number: int, end: int, scheduled: ScheduledBucket) -> PartitionRows:
        """Return a type's rows at the heads' end (0) or the tails' end (1) of a bucket."""
        if not self.types[number].is_partitioned:
            return self.tables[number].rows(0, 0)
        return self.tables[number].rows(scheduled.slots[end], scheduled.bucket[end])

    def begin(self, number: int, end: int, scheduled: ScheduledBucket) -> int:
        """Return the row of the bucket's partition at which a type's rows begin."""
        return self.types[number].begins[scheduled.bucket[end]]

    def trained(self, bucket: Bucket) -> None:
        """Mark partitions as different from the store."""
        self._changed |= set(bucket)

    def begin_swaps(
        self, swaps: Sequence[Swap], leases: Mapping[int, int] | None = None, released: Released | None = None
    ) -> Future[None]:
        """Run :meth:`swap` in the background."""
        return self._mover.submit(self.swap, swaps, leases, released)

    def swap(
        self, swaps: Sequence[Swap], leases: Mapping[int, int] | None = None, released: Released | None = None
    ) -> None:
        """Save evicted partitions and load others, one slot after the other; on the leader.

        Args:
            swaps: one per slot.
            leases: of the partitions; None: none.
            released: called with each partition that all tables have saved.
        """
        for swap in swaps:
            self._swap(swap.slot, swap.out, swap.into, leases or {}, released)

    def _swap(
        self, slot: int, out: int | None, into: int | None, leases: Mapping[int, int], released: Released | None
    ) -> None:
        waits: list[ReuseWaits] = [{} for _ in self._partitioned]
        if out is not None and self._device is not None:
            self._device.evicting(out)
        # An unchanged partition is on the disk already, but a shared store needs it as a version of the lease.
        if out is not None and (out in self._changed or self.in_shared_store):
            waits = self._all(lambda table, _: table.evict(out, slot, leases.get(out, 0)), waits)
            self._changed.discard(out)
            if released is not None:
                released(out)
        if into is not None:
            self._all(lambda table, table_waits: table.fill(into, slot, leases.get(into, 0), table_waits), waits)
            if self._device is not None:
                self._device.filled(into, slot)

    def _all(self, move: Callable[[PartitionedTable, ReuseWaits], T], waits: list[ReuseWaits]) -> list[T]:
        """Move a partition of all tables at the same time."""
        return list(self._each.map(move, self._partitioned, waits))

    def begin_reading_ahead(self, swaps: Sequence[Swap]) -> Future[None]:
        """Prefetch the partitions that swaps will load; on the leader."""
        return self._mover.submit(self._read_ahead, [swap.into for swap in swaps if swap.into is not None])

    def _read_ahead(self, partitions: Sequence[int]) -> None:
        for table in self._partitioned:
            for partition in partitions:
                table.read_ahead(partition)

    def settle(self) -> None:
        """Wait for pending swaps and writes."""
        # The thread runs its tasks in order: when this one is done, all earlier ones are.
        self._mover.submit(lambda: None).result()
        for table in self.tables:
            table.store.settle()
