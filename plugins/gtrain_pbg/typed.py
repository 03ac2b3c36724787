"""The tables of all entity types, which are cut alike and come and go together.

A partition of the store has rows of every type that is cut, those of one type after those of another. A type that is
not cut lies in partition 0, as PyTorch-BigGraph has it, and its table is in memory all the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from gtrain.graph.entities import entity_types
from gtrain.graph.store import Store
from gtrain.nn import TableSpec
from gtrain.wire.shared import SharedTensors
from gtrain_pbg import files
from gtrain_pbg.order import Bucket
from gtrain_pbg.step.batch import Rows
from gtrain_pbg.swaps import Buffer, Swap, Visit
from gtrain_pbg.tables import Layout, PartitionedTable, Partitions


@dataclass(frozen=True)
class TypeCut:
    """How one type is cut.

    Attributes:
        name: the type; files and shared memory are called after it.
        spec: what its table is.
        partitions: of its rows.
        begins: for each partition of the store the row at which the type's entities begin.
    """

    name: str
    spec: TableSpec
    partitions: Partitions
    begins: tuple[int, ...]

    @property
    def is_cut(self) -> bool:
        """Whether it has the store's partitions, and not one that is always there."""
        return self.partitions.count == len(self.begins)


def cuts_of(store: Store, specs: Sequence[TableSpec]) -> list[TypeCut]:
    """Return how each type is cut.

    Args:
        store: the graph, whose nodes of all types have one numbering.
        specs: what each type's table is; the table of a featurized type has rows for features, and is not cut.
    """
    parts = [store.node("orig_id", part) for part in range(store.num_parts)]
    together = store.facts.get("unpartitioned") or []
    found = []
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
        found.append(TypeCut(name, spec, Partitions(sizes.cumsum(0), own), tuple(low for low, _ in spans)))
    return found


class TypedTables:
    """Rows and optimizer state of the tables of all types.

    Args:
        cuts: the types.
        nodes: how the nodes of all types are cut.
        slots: partitions in memory at a time.
        state_widths: numbers of optimizer state for each row, by type.
        dtype: of rows and state.
        folder: where the leader keeps partitions that have no slot.
        shared: what :meth:`tensors` asks for.
        leader: whether this process reads and writes files.

    Attributes:
        tables: by type.
        nodes: how the nodes of all types are cut.
        buffer: which partitions are in which slots.
    """

    def __init__(
        self,
        cuts: Sequence[TypeCut],
        nodes: Partitions,
        slots: int,
        state_widths: Sequence[int],
        dtype: torch.dtype,
        folder: Path,
        shared: SharedTensors,
        leader: bool,
    ) -> None:
        self.cuts, self.nodes, self.dtype, self.buffer = cuts, nodes, dtype, Buffer(slots)
        place = dtype, folder, shared, leader
        self.tables = [
            self._make(cut, width, place)
            if cut.is_cut
            else PartitionedTable(cut.spec, cut.partitions, Buffer(1), width, *place, cut.name)
            for cut, width in zip(cuts, state_widths, strict=True)
        ]

    def _make(self, cut: TypeCut, width: int, place: tuple[torch.dtype, Path, SharedTensors, bool]) -> PartitionedTable:
        """The table of a type that is cut."""
        return PartitionedTable(cut.spec, cut.partitions, self.buffer, width, *place, cut.name)

    @staticmethod
    def tensors(cuts: Sequence[TypeCut], slots: int, state_widths: Sequence[int], dtype: torch.dtype) -> Layout:
        """What :class:`~gtrain.wire.shared.SharedTensors` must hold."""
        found: Layout = {}
        for cut, width in zip(cuts, state_widths, strict=True):
            number = slots if cut.is_cut else 1
            found |= PartitionedTable.tensors(number, cut.partitions, cut.spec.dim, width, dtype, cut.name)
        return found

    def in_common(self, shared: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What of the shared memory belongs to no table that is cut: parameters, and tables that are always there."""
        moved = {f"{cut.name}.{kind}" for cut in self.cuts if cut.is_cut for kind in files.KINDS}
        return {name: shared[name] for name in shared if name not in moved}

    @property
    def whole(self) -> bool:
        """Whether every partition has a slot."""
        return all(table.whole for table in self.tables)

    def initialize(self, start: float) -> None:
        """Give all rows their initial values; see :meth:`PartitionedTable.initialize`."""
        for table in self.tables:
            table.initialize(start)

    def place_first(self) -> None:
        """Let the first partitions have the slots."""
        for table in self.tables:
            table.place_first()

    def save(self, folder: Path) -> list[str]:
        """Write all partitions into a checkpoint."""
        return [name for table in self.tables for name in table.save(folder)]

    @contextmanager
    def placed(self, place: Mapping[int, int]) -> Iterator[None]:
        """In the middle of an epoch: take these partitions for those in slots, and not those that it ends with."""
        planned, self.buffer.place = self.buffer.place, dict(place)
        try:
            yield
        finally:
            self.buffer.place = planned

    def load(self, folder: Path) -> None:
        """Take the partitions of a checkpoint."""
        for table in self.tables:
            table.load(folder)

    def rows(self, number: int, end: int, visit: Visit) -> Rows:
        """A type's rows at the heads' end (0) or the tails' end (1) of a bucket."""
        if not self.cuts[number].is_cut:
            return self.tables[number].rows(0, 0)
        return self.tables[number].rows(visit.slots[end], visit.bucket[end])

    def begin(self, number: int, end: int, visit: Visit) -> int:
        """The row of the bucket's partition at which a type's rows begin."""
        return self.cuts[number].begins[visit.bucket[end]]

    def swap(self, swaps: tuple[Swap, ...]) -> list[Future[None]]:
        """Begin to write what leaves slots and to read what comes."""
        futures = [table.swap(swaps) for table in self._cut]
        return [future for future in futures if future is not None]

    def announce(self, swaps: tuple[Swap, ...]) -> list[Future[None]]:
        """Let the kernel read what will come into slots."""
        futures = [table.announce(swaps) for table in self._cut]
        return [future for future in futures if future is not None]

    @property
    def _cut(self) -> list[PartitionedTable]:
        return [table for table, how in zip(self.tables, self.cuts, strict=True) if how.is_cut]

    def settle(self) -> None:
        """Wait for what is under way to memory and to the disk."""
        for table in self.tables:
            table.settle()

    def trained(self, bucket: Bucket) -> None:
        """Note that partitions differ from their files."""
        for table, cut in zip(self.tables, self.cuts, strict=True):
            table.trained(bucket if cut.is_cut else (0, 0))
