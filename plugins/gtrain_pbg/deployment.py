"""What depends on the number of machines, chosen once when the group is made; and one machine, whose order is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from gtrain.graph.store import Store
from gtrain.strategy.group import Group
from gtrain_pbg.config import PBGConfig
from gtrain_pbg.edges import filled, mixed, passes_of
from gtrain_pbg.order import Bucket, bucket_order
from gtrain_pbg.swaps import ScheduledBucket
from gtrain_pbg.typed import TypedTables
from gtrain_pbg.worker import BucketBatches, BucketSource, timed_wait


class Deployment(Protocol):
    """The machines of a job, for one of its workers.

    Attributes:
        slots: partitions in memory at a time.
        folder: where the machine has files of partitions, in the run's folder.
    """

    slots: int
    folder: str

    @property
    def group(self) -> Group:
        """All workers."""

    @property
    def machine(self) -> Group:
        """The workers of this machine."""

    def share(self) -> tuple[int, int]:
        """This worker's number among those that are left, and how many these are."""

    def connect(self, tables: TypedTables, run_dir: Path, publishes: bool) -> None:
        """Let the tables have the store that machines share, if they share one.

        Args:
            tables: not yet filled.
            run_dir: of the run.
            publishes: whether this worker fills the store.
        """

    def source(
        self,
        tables: TypedTables,
        shared: Mapping[str, Tensor],
        store: Store,
        first: Callable[[int], int],
        limit: int | None,
    ) -> BucketSource:
        """Where the worker's buckets come from.

        Args:
            tables: the tables.
            shared: memory of the machine's workers.
            store: the graph.
            first: says with which chunk an epoch begins.
            limit: ``trainer.limit_train_batches``, as an int.
        """


class SingleMachineDeployment:
    """A :class:`Deployment`: partitions are in memory and in files, and the order of the buckets is known.

    Args:
        settings: of the strategy.
        group: the workers.
    """

    folder = "partitions"

    def __init__(self, settings: PBGConfig, group: Group) -> None:
        self._settings, self._group = settings, group
        self.slots = min(settings.num_partitions, settings.buffer_partitions or settings.num_partitions)

    @property
    def group(self) -> Group:
        return self._group

    @property
    def machine(self) -> Group:
        return self._group

    def share(self) -> tuple[int, int]:
        return self._group.rank, self._group.size

    def connect(self, tables: TypedTables, run_dir: Path, publishes: bool) -> None:
        """Nothing: files stay on the machine."""

    def source(
        self,
        tables: TypedTables,
        shared: Mapping[str, Tensor],
        store: Store,
        first: Callable[[int], int],
        limit: int | None,
    ) -> BucketSource:
        def order(epoch: int, seed: int) -> Any:
            return buckets_of(store, self._settings, self.slots, (seed, epoch), first(epoch))

        return PlannedBuckets(tables, self._group, order, limit)


class PlannedBuckets:
    """A :class:`~gtrain_pbg.worker.BucketSource`: partitions are swapped by a plan that all workers make alike.

    Args:
        tables: the tables.
        group: the workers; the first moves partitions.
        order: the buckets of an epoch with their edge chunks, by its number and the seed; the same on all workers.
        limit: ``trainer.limit_train_batches``, as an int: the epoch ends with the bucket in which it is reached.
    """

    def __init__(
        self,
        tables: TypedTables,
        group: Group,
        order: Callable[[int, int], list[tuple[Bucket, int]]],
        limit: int | None = None,
    ) -> None:
        self._tables, self._group, self._order, self._limit = tables, group, order, limit
        self._leads = group.rank == 0
        self._plan: list[ScheduledBucket] = []
        self._under_way: list[Future[None]] = []
        self.done = 0

    def begin(self, batches: BucketBatches, epoch: int) -> int:
        buckets = self._order(epoch, batches.edges.seed)
        if self._limit is not None:
            buckets = batches.within(buckets, self._limit)
        self._plan = self._tables.buffer.plan(buckets)
        return sum(batches.count(bucket, chunk) for bucket, chunk in buckets)

    def visits(self) -> Iterator[ScheduledBucket]:
        for visit in self._plan:
            self._enter(visit)
            yield visit

    def _enter(self, visit: ScheduledBucket) -> None:
        """All workers have left the last bucket; its successor's partitions must be there before any goes on."""
        with timed_wait(self._group.counters, "partitions"):
            self._finish()
            if self._leads and visit.before:
                self._tables.begin_swaps(visit.before).result()
        self._tables.buffer.slot_of = dict(visit.after)
        self._group.barrier()
        if self._leads:
            self._under_way = [self._tables.begin_swaps(visit.during), self._tables.begin_reading_ahead(visit.soon)]

    def trained(self, visit: ScheduledBucket, edges: int) -> None:
        self._tables.trained(visit.bucket)
        if visit.ends_chunk and not visit.last:
            self.done = visit.chunk + 1
        if visit.last:
            with timed_wait(self._group.counters, "partitions"):
                self._finish()
                if self._leads:
                    self._tables.settle()

    def counts(self) -> dict[str, float]:
        return {}

    def _finish(self) -> None:
        """Wait for what is read and written, and raise what went wrong."""
        for under_way in self._under_way:
            under_way.result()
        self._under_way = []


def buckets_of(
    store: Store, settings: PBGConfig, slots: int, key: tuple[int, int], first: int = 0
) -> list[tuple[Bucket, int]]:
    """The buckets of an epoch on one machine in their order, with the numbers of their edge chunks.

    Args:
        store: those without edges are left out.
        settings: of the strategy.
        slots: partitions in memory at a time.
        key: the seed and the epoch.
        first: chunk with which the epoch begins.
    """
    there = filled(store)
    return [
        (bucket, chunk)
        for chunk in range(first, passes_of(store, settings.num_edge_chunks))
        for bucket in bucket_order(settings.bucket_order, settings.num_partitions, slots, mixed(*key, chunk))
        if bucket in there
    ]
