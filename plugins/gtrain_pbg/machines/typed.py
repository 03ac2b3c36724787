"""The tables of all entity types on several machines: a lease of a partition is one of all tables that are cut.

Types that are not cut are in the memory of every machine; the parameter servers keep them alike.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from gtrain.wire.shared import SharedTensors
from gtrain_pbg.machines.board import Grant
from gtrain_pbg.machines.depot import Depot
from gtrain_pbg.machines.table import SpreadTable
from gtrain_pbg.order import Bucket
from gtrain_pbg.swaps import Buffer, Visit
from gtrain_pbg.tables import PartitionedTable
from gtrain_pbg.typed import TypeCut, TypedTables

Released = Callable[[list[str]], None]
"""Told which partitions are written back, by the keys of their leases."""
BUNDLE = "types"
"""What the lock server calls the partitions of several tables."""


class SpreadTypes(TypedTables):
    """Rows and optimizer state of the tables of all types, of which this machine has two or three partitions each."""

    def _make(self, cut: TypeCut, width: int, place: tuple[torch.dtype, Path, SharedTensors, bool]) -> PartitionedTable:
        return SpreadTable(cut.spec, cut.partitions, Buffer(self.buffer.slots), width, *place, cut.name)

    @property
    def _spread(self) -> list[SpreadTable]:
        return [table for table in self.tables if isinstance(table, SpreadTable)]

    @property
    def bundle(self) -> str:
        """Name by which the lock server has the partitions."""
        return self._spread[0].spec.name if len(self._spread) == 1 else BUNDLE

    @property
    def whole(self) -> bool:
        return False

    def connect(self, depot: Depot, publishes: bool, next_lease: Callable[[], int]) -> None:
        """Say where partitions are; see :meth:`SpreadTable.connect`."""
        self._depot = depot
        self._publishing, self._missing = threading.Lock(), Counter[str]()
        for table in self._spread:
            table.connect(self.bundle, depot, publishes, next_lease)

    def publish(self) -> None:
        """Let the depot have all partitions from their initial files, and nothing else. One process calls it, once."""
        self._depot.clear()
        for table in self._spread:
            table.publish()

    def visit(self, grant: Grant) -> Visit:
        """A bucket that was granted and whose partitions are in slots."""
        place = self._spread[0].buffer.place
        head, tail = grant.bucket
        return Visit(grant.bucket, grant.chunk, (place[head], place[tail]), (), ())

    def place(self, bucket: Bucket, slots: tuple[int, int]) -> None:
        """Note which slots the machine's leader has brought partitions into."""
        for table in self._spread:
            table.buffer.place = dict(zip(bucket, slots, strict=True))

    def bring(self, grant: Grant, released: Released) -> None:
        """Bring the partitions of a bucket into slots; all tables choose the same ones."""
        for table in self._spread:
            table.bring(grant, self._together(released))

    def give_back(self, released: Released) -> None:
        """Write all partitions back, and have no lease of them any more."""
        for table in self._spread:
            table.give_back(self._together(released))

    def settle(self) -> None:
        """Wait until what leaves is written back."""
        for table in self._spread:
            table.settle()

    def forget(self) -> None:
        """Nothing is in a slot any more."""
        for table in self._spread:
            table.forget()

    def _together(self, released: Released) -> Released:
        """Tells of a partition once every table has written its own."""

        def each(keys: list[str]) -> None:
            with self._publishing:
                self._missing.update(keys)
                done = [key for key in keys if self._missing[key] == len(self._spread)]
                for key in done:
                    del self._missing[key]
            if done:
                released(done)

        return each
