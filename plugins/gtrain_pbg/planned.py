"""The buckets of one machine: their order is known when an epoch begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future

from gtrain.graph.store import Store
from gtrain.strategy.group import Group
from gtrain_pbg.config import PBGConfig
from gtrain_pbg.edges import filled, mixed, passes_of
from gtrain_pbg.order import Bucket, bucket_order
from gtrain_pbg.swaps import Visit
from gtrain_pbg.typed import TypedTables
from gtrain_pbg.worker import BucketBatches, standing_still


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
        self._plan: list[Visit] = []
        self._under_way: list[Future[None]] = []
        self.done = 0

    def begin(self, batches: BucketBatches, epoch: int) -> int:
        buckets = self._order(epoch, batches.edges.seed)
        if self._limit is not None:
            buckets = batches.within(buckets, self._limit)
        self._plan = self._tables.buffer.plan(buckets)
        return sum(batches.count(bucket, chunk) for bucket, chunk in buckets)

    def visits(self) -> Iterator[Visit]:
        for visit in self._plan:
            self._enter(visit)
            yield visit

    def _enter(self, visit: Visit) -> None:
        """All workers have left the last bucket; its successor's partitions must be there before any goes on."""
        with standing_still(self._group.counters, "partitions"):
            self._finish()
            if self._leads and visit.before:
                self._tables.begin_swaps(visit.before).result()
        self._tables.buffer.slot_of = dict(visit.after)
        self._group.barrier()
        if self._leads:
            self._under_way = [self._tables.begin_swaps(visit.during), self._tables.begin_reading_ahead(visit.soon)]

    def trained(self, visit: Visit, edges: int) -> None:
        self._tables.trained(visit.bucket)
        if visit.ends_chunk and not visit.last:
            self.done = visit.chunk + 1
        if visit.last:
            with standing_still(self._group.counters, "partitions"):
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
