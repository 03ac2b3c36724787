"""The tables of all entity types, which are cut alike and come and go together.

A partition of the store has rows of every type that is cut, those of one type after those of another. A type that is
not cut lies in partition 0, as PyTorch-BigGraph has it, and its table is in memory all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from gtrain.graph.store import Store
from gtrain.graph.store.entities import entity_types
from gtrain.nn import TableSpec
from gtrain.wire.shared import SharedTensors
from gtrain_pbg import files
from gtrain_pbg.order import Bucket
from gtrain_pbg.partition_store import PartitionStore, ReuseWaits
from gtrain_pbg.step.layout import PartitionRows
from gtrain_pbg.swaps import PartitionBuffer, ScheduledBucket, Swap
from gtrain_pbg.tables import PartitionedTable, Partitioning, TensorShapes

T = TypeVar("T")
Released = Callable[[int], None]
"""Called with a partition that is saved, whose lease may end."""
BUNDLE = "types"
"""What the lock server calls the partitions of several tables."""


@dataclass(frozen=True)
class TypePartitioning:
    """How the rows of one entity type are partitioned.

    Attributes:
        name: the type; files and shared memory are called after it.
        spec: what its table is.
        partitions: of its rows.
        begins: for each partition of the store the row at which the type's entities begin.
    """

    name: str
    spec: TableSpec
    partitions: Partitioning
    begins: tuple[int, ...]

    @property
    def is_partitioned(self) -> bool:
        """Whether it has the store's partitions, not a single one that stays in memory."""
        return self.partitions.count == len(self.begins)


def partition_types(store: Store, specs: Sequence[TableSpec]) -> list[TypePartitioning]:
    """Return how each type is partitioned.

    Args:
        store: the graph, whose nodes of all types have one numbering.
        specs: what each type's table is; the table of a featurized type has rows for features, and is not cut.
    """
    parts = [store.node("orig_id", part) for part in range(store.num_parts)]
    together = store.facts.get("unpartitioned") or []
    types = []
    for spec, kind in zip(specs, entity_types(store), strict=True):
        first, ends = kind.first, torch.tensor([kind.first, kind.first + kind.count])
        spans = [torch.searchsorted(orig_id, ends).tolist() for orig_id in parts]
        held = parts[:1] if spec.name in together else parts
        own = tuple(
            ids[low:high] - first if first else ids[low:high] for ids, (low, high) in zip(held, spans, strict=False)
        )
        if spec.name in (store.facts.get("features") or {}):
            own = (torch.arange(spec.rows),)
        sizes = torch.tensor([0, *(len(ids) for ids in own)])
        name = "table" if len(specs) == 1 else spec.name
        types.append(TypePartitioning(name, spec, Partitioning(sizes.cumsum(0), own), tuple(low for low, _ in spans)))
    return types


class TypedTables:
    """PartitionRows and optimizer state of the tables of all types.

    Which partition is in which slot follows from a plan, which all processes of a machine know. One of them, the
    leader, moves partitions between slots and the store.

    Args:
        types: the types.
        nodes: how the nodes of all types are cut.
        slots: partitions in memory at a time.
        state_widths: numbers of optimizer state for each row, by type.
        dtype: of rows and state.
        folder: where files of partitions are that have no slot.
        shared: what :meth:`tensors` asks for.
        leader: whether this process moves partitions.

    Attributes:
        tables: by type.
        nodes: how the nodes of all types are cut.
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
        self._mover = ThreadPoolExecutor(1, "gtrain-pbg-swap")
        self._each = ThreadPoolExecutor(max(1, len(self._partitioned)), "gtrain-pbg-table")

    def connect(self, store: PartitionStore, publishes: bool, next_lease: Callable[[], int]) -> None:
        """Keep the partitions of types that are cut in a store that machines share.

        Args:
            store: the store.
            publishes: whether this process is the one of the job that fills it.
            next_lease: gives a number larger than that of any lease so far.
        """
        self._store, self._publishes, self._next_lease = store, publishes, next_lease
        for table in self._partitioned:
            table.store = store

    @staticmethod
    def tensors(
        types: Sequence[TypePartitioning], slots: int, state_widths: Sequence[int], dtype: torch.dtype
    ) -> TensorShapes:
        """What :class:`~gtrain.wire.shared.SharedTensors` must hold."""
        layout: TensorShapes = {}
        for entity, width in zip(types, state_widths, strict=True):
            number = slots if entity.is_partitioned else 1
            layout |= PartitionedTable.tensors(number, entity.partitions, entity.spec.dim, width, dtype, entity.name)
        return layout

    @property
    def whole(self) -> bool:
        """Whether every partition has a slot, and stays there."""
        return all(table.whole for table in self.tables)

    @property
    def in_shared_store(self) -> bool:
        """Whether machines share the partitions; slots are then empty outside of training."""
        return self._store is not None

    @property
    def bundle(self) -> str:
        """Name under which partitions of all tables that are cut are leased together."""
        return self._partitioned[0].spec.name if len(self._partitioned) == 1 else BUNDLE

    # ------------------------------------------------------------------------------------------ contents

    def initialize(self, start: float) -> None:
        """Give all rows their initial values; see :meth:`PartitionedTable.initialize`."""
        self.assign_first_slots()
        for table in self.tables:
            table.initialize(start)
        self._changed = set(self.buffer.slot_of)

    def assign_first_slots(self) -> None:
        """Let the first partitions have the slots, or none of those that machines share."""
        for table in self.tables:
            count = 0 if table.store.shared else min(table.buffer.slots, table.partitions.count)
            table.buffer.slot_of = {partition: partition for partition in range(count)}

    def publish(self) -> None:
        """Let the shared store, if there is one, have all partitions and nothing else. One process calls it, once."""
        if self._store is None:
            return
        self._store.clear()
        for table in self._partitioned:
            table.publish(self._next_lease)
        with suppress(OSError):  # the folder was not made
            self._folder.rmdir()

    def save(self, folder: Path) -> list[str]:
        """Write all partitions into a checkpoint."""
        self.settle()
        names = [name for table in self.tables for name in table.save(folder, self._changed)]
        if not self.whole:
            self._changed = set()
        return names

    def load(self, folder: Path) -> None:
        """Take the partitions of a checkpoint."""
        self.assign_first_slots()
        self._changed = set()
        for table in self.tables:
            adopts = self._publishes or not table.store.shared
            table.load(folder, self._next_lease, adopts, self._leader)

    def in_common(self, shared: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What of the shared memory belongs to no table that is cut: parameters, and tables that are always there."""
        moved = {f"{entity.name}.{kind}" for entity in self.types if entity.is_partitioned for kind in files.KINDS}
        return {name: shared[name] for name in shared if name not in moved}

    # ------------------------------------------------------------------------------------------ training

    def rows(self, number: int, end: int, visit: ScheduledBucket) -> PartitionRows:
        """A type's rows at the heads' end (0) or the tails' end (1) of a bucket."""
        if not self.types[number].is_partitioned:
            return self.tables[number].rows(0, 0)
        return self.tables[number].rows(visit.slots[end], visit.bucket[end])

    def begin(self, number: int, end: int, visit: ScheduledBucket) -> int:
        """The row of the bucket's partition at which a type's rows begin."""
        return self.types[number].begins[visit.bucket[end]]

    def trained(self, bucket: Bucket) -> None:
        """Note that partitions differ from the store."""
        self._changed |= set(bucket)

    def begin_swaps(
        self, swaps: Sequence[Swap], leases: Mapping[int, int] | None = None, released: Released | None = None
    ) -> Future[None]:
        """Begin :meth:`swap`, which goes on beside training."""
        return self._mover.submit(self.swap, swaps, leases, released)

    def swap(
        self, swaps: Sequence[Swap], leases: Mapping[int, int] | None = None, released: Released | None = None
    ) -> None:
        """Save what leaves slots and load what comes, one slot after the other; on the leader.

        Args:
            swaps: the slots.
            leases: of the partitions; None: they have none.
            released: called with each partition that all tables have saved.
        """
        for swap in swaps:
            self._swap(swap, leases or {}, released or (lambda partition: None))

    def _swap(self, swap: Swap, leases: Mapping[int, int], released: Released) -> None:
        slot, out, into = swap.slot, swap.out, swap.into
        free: list[ReuseWaits] = [{} for _ in self._partitioned]
        if out is not None and (out in self._changed or self.in_shared_store):
            free = self._all(lambda table, _: table.leave(out, slot, leases.get(out, 0)), free)
            self._changed.discard(out)
            released(out)
        if into is not None:
            self._all(lambda table, own: table.fill(into, slot, leases.get(into, 0), own), free)

    def _all(self, move: Callable[[PartitionedTable, ReuseWaits], T], free: list[ReuseWaits]) -> list[T]:
        """Move a partition of all tables that are cut, at the same time."""
        if len(self._partitioned) == 1:
            return [move(self._partitioned[0], free[0])]
        return list(self._each.map(move, self._partitioned, free))

    def begin_reading_ahead(self, swaps: Sequence[Swap]) -> Future[None]:
        """Let the kernel read what will come into slots; on the leader."""
        return self._mover.submit(self._read_ahead, [swap.into for swap in swaps if swap.into is not None])

    def _read_ahead(self, partitions: Sequence[int]) -> None:
        for table in self._partitioned:
            for partition in partitions:
                table.read_ahead(partition)

    def settle(self) -> None:
        """Wait for what is under way to memory and to the disk."""
        self._mover.submit(lambda: None).result()
        for table in self.tables:
            table.store.settle()
