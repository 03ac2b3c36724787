"""The table of several machines: each has the two partitions that it trains, the others are in a depot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gtrain.graph.manifest import safe_name
from gtrain_pbg import files
from gtrain_pbg.machines.board import Grant, partition_key
from gtrain_pbg.machines.depot import Depot
from gtrain_pbg.tables import PartitionedTable


class SpreadTable(PartitionedTable):
    """Rows and optimizer state of one table, of which this machine has two or three slots.

    The machine's leader moves partitions; others learn from it which partition is in which slot. Outside of training
    nothing is in a slot, and every process reads from the depot.
    """

    _bundle: str
    _depot: Depot
    _publishes: bool
    _next_lease: Callable[[], int]
    _leases: dict[int, int]
    _leaving: dict[int, Future[None]]
    _coming: Future[None] | None

    def connect(self, bundle: str, depot: Depot, publishes: bool, next_lease: Callable[[], int]) -> None:
        """Say where partitions are.

        Args:
            bundle: name by which the lock server has leases of the partitions of all tables.
            depot: where they are while no machine trains them.
            publishes: whether this process is the one that fills the depot.
            next_lease: gives a number larger than that of any lease so far.
        """
        self._bundle = bundle
        self._depot, self._publishes, self._next_lease = depot, publishes, next_lease
        self._leases, self._leaving, self._coming = {}, {}, None

    @property
    def whole(self) -> bool:
        return False

    def place_first(self) -> None:
        self.buffer.place, self._sources = {}, {}

    def publish(self) -> None:
        """Let the depot have all partitions from their initial files. One process of the job calls it, once."""
        for partition in range(self.partitions.count):
            paths = {kind: self._path(kind, partition) for kind in files.KINDS}
            self._depot.adopt(self._key(partition), self._next_lease(), paths)
            for path in paths.values():
                path.unlink()
        with suppress(OSError):  # other tables' files may be there yet
            self._folder.rmdir()

    # ------------------------------------------------------------------------------------------ training

    def bring(self, grant: Grant, released: Callable[[list[str]], None]) -> None:
        """Bring the partitions of a bucket into slots. While it is trained, others are written back, and one is read.

        Args:
            grant: the bucket.
            released: told which partitions are written back.
        """
        self._arrive()
        kept = set(grant.bucket) | ({grant.ahead} if grant.ahead is not None else set())
        self._leave(released, set(self.buffer.place) - kept)
        for partition in sorted(set(grant.bucket) - set(self.buffer.place)):
            self._taken(partition, self._room(), grant)()
        if grant.ahead is not None and grant.ahead not in self.buffer.place:
            assert self._thread is not None  # which has written back what is in the slot before it reads
            self._coming = self._thread.submit(self._taken(grant.ahead, self._next_room(), grant))

    def _taken(self, partition: int, slot: int, grant: Grant) -> Callable[[], None]:
        """Have a slot for a partition; what is returned reads it."""
        lease = grant.leases[partition_key(self._bundle, partition)]
        self.buffer.place[partition], self._leases[partition] = slot, lease
        return partial(self._depot.load, self._key(partition), self._tensors(slot, partition), lease)

    def _arrive(self) -> None:
        """Wait for what is read ahead."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.result()

    def give_back(self, released: Callable[[list[str]], None]) -> None:
        """Write all partitions back, and have no lease of them any more."""
        self._arrive()
        self._leave(released, set(self.buffer.place))
        self.settle()

    def settle(self) -> None:
        """Wait until what leaves is written back.

        Raises:
            DataError, RemoteError: it could not be.
        """
        for slot in list(self._leaving):
            self._leaving.pop(slot).result()

    def _leave(self, released: Callable[[list[str]], None], partitions: set[int]) -> None:
        """Begin to write partitions back."""
        assert self._thread is not None
        for partition in sorted(partitions):
            slot, key = self.buffer.place.pop(partition), self._key(partition)
            told = key, self._leases.pop(partition), self._tensors(slot, partition)
            bundle = partition_key(self._bundle, partition)
            self._leaving[slot] = self._thread.submit(self._write_back, *told, partial(released, [bundle]))

    def _write_back(self, key: str, lease: int, tensors: Mapping[str, Tensor], released: Callable[[], None]) -> None:
        self._depot.save(key, lease, tensors)
        released()

    def _room(self) -> int:
        """A slot without a partition; waits for one that is written back if need be."""
        slot = self._next_room()
        if slot in self._leaving:
            self._leaving.pop(slot).result()
        return slot

    def _next_room(self) -> int:
        """A slot without a partition, or else the first of those from which one is written back."""
        free = set(range(self.buffer.slots)) - set(self.buffer.place.values())
        return min(free - self._leaving.keys(), default=next((slot for slot in self._leaving if slot in free), -1))

    def forget(self) -> None:
        """Nothing is in a slot any more."""
        self.buffer.place = {}

    # ------------------------------------------------------------------------------------------ checkpoints

    def save(self, folder: Path) -> list[str]:
        names = []
        for partition in range(self.partitions.count):
            targets = {kind: folder / files.file_name(kind, partition, self.name) for kind in files.KINDS}
            self._depot.keep(self._key(partition), targets, self._tensors(0, partition))
            names += [path.name for path in targets.values()]
        return names

    def load(self, folder: Path) -> None:
        files.check_count(folder, self.name, self.partitions.count)
        self.place_first()
        for partition in range(self.partitions.count if self._publishes else 0):
            sources = {kind: folder / files.file_name(kind, partition, self.name) for kind in files.KINDS}
            self._depot.adopt(self._key(partition), self._next_lease(), sources)

    # ------------------------------------------------------------------------------------------ reading

    def read(self, partition: int) -> Tensor:
        rows = torch.empty(self.partitions.size(partition), self.spec.dim, dtype=self.dtype)
        self._depot.load(self._key(partition), {files.ROWS: rows})
        return rows

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        for partition, orig_id in enumerate(self.partitions.orig_id):
            yield orig_id, self.read(partition)

    def fetch(self, ids: Tensor) -> Tensor:
        found = torch.empty(ids.numel(), self.spec.dim, dtype=self.dtype)
        place = self.global_ids[ids].long()
        owner = torch.searchsorted(self.partitions.offsets, place, right=True) - 1
        for partition in owner.unique().tolist():
            here = (owner == partition).nonzero().flatten()
            wanted, back = (place[here] - self.partitions.offsets[partition]).unique(return_inverse=True)
            rows = torch.empty(len(wanted), self.spec.dim, dtype=self.dtype)
            self._depot.select(self._key(partition), wanted, rows)
            found[here] = rows[back]
        return found

    # ------------------------------------------------------------------------------------------ inside

    def _key(self, partition: int) -> str:
        return partition_key(safe_name(self.spec.name), partition)

    def _tensors(self, slot: int, partition: int) -> Mapping[str, Tensor]:
        size = self.partitions.size(partition)
        return {kind: self._memory(kind)[slot, :size] for kind in files.KINDS}
