"""What depends on the number of machines, chosen once when the group is formed; here for one machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

from torch import Tensor

from gtrain.graph.store import Store
from gtrain.strategy.group import Group
from gtrain_pbg.buckets import Bucket, ScheduledBucket, bucket_order
from gtrain_pbg.checkpoints import EpochProgress
from gtrain_pbg.config import PBGConfig
from gtrain_pbg.edges import filled, mixed, passes_of
from gtrain_pbg.typed import TypedTables
from gtrain_pbg.worker import BucketBatches, BucketSource, timed_wait


class Deployment:
    """The machines of a job, as seen by one of its workers.

    This one is for a single machine: partitions are in memory and in files, and the order of the buckets is known.

    Args:
        settings: of the strategy.
        group: all workers.

    Attributes:
        slots: partitions in memory at a time.
        folder: name of the folder in the run's folder where the machine has files of partitions.
        group: all workers.
        machine: the workers of this machine.
        exchanging: held while parameters are exchanged with other machines; None on a single machine.
    """

    folder = "partitions"
    exchanging: threading.Lock | None = None

    def __init__(self, settings: PBGConfig, group: Group) -> None:
        self._settings, self.group, self.machine = settings, group, group
        self.slots = min(settings.num_partitions, settings.buffer_partitions or settings.num_partitions)

    def evaluation_share(self) -> tuple[int, int]:
        """Return this worker's number among the workers that are not lost, and their number."""
        return self.group.rank, self.group.size

    def connect(self, tables: TypedTables, run_dir: Path, publishes: bool) -> None:
        """Connect the tables with the store that machines share; a single machine has none.

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
        start: Callable[[int], EpochProgress],
        limit: int | None,
    ) -> BucketSource:
        """Return the source of the worker's buckets.

        Args:
            tables: of all entity types.
            shared: memory of the machine's workers.
            store: the graph.
            start: returns where an epoch starts.
            limit: ``trainer.limit_train_batches``, as an int.
        """

        def order(epoch: int, seed: int) -> list[tuple[Bucket, int]]:
            return buckets_of(store, self._settings, self.slots, (seed, epoch), start(epoch).chunk)

        return PlannedBuckets(tables, self.group, order, lambda epoch: start(epoch).step, limit)


class PlannedBuckets:
    """A :class:`~gtrain_pbg.worker.BucketSource`: all workers compute the same plan of swaps in advance.

    Args:
        tables: of all entity types.
        group: the workers; rank 0 moves partitions.
        order: returns the buckets of an epoch with their edge chunks, by its number and the seed.
        skipped: returns the number of steps of an epoch that are trained already, by its number.
        limit: ``trainer.limit_train_batches``, as an int: the epoch ends with the bucket in which it is reached.
    """

    def __init__(
        self,
        tables: TypedTables,
        group: Group,
        order: Callable[[int, int], list[tuple[Bucket, int]]],
        skipped: Callable[[int], int],
        limit: int | None = None,
    ) -> None:
        self._tables, self._group, self._order, self._limit = tables, group, order, limit
        self._skipped = skipped
        self.skipped = self.offset = 0
        self._leads = group.rank == 0
        self._plan: list[ScheduledBucket] = []
        self._yielded, self._next_epoch = 0, (0, 0)
        self._pending: list[Future[None]] = []
        self.done = 0

    def begin(self, batches: BucketBatches, epoch: int) -> int:
        buckets = self._order(epoch, batches.edges.seed)
        if self._limit is not None:
            buckets = batches.within(buckets, self._limit)
        self.skipped = self.offset = self._skipped(epoch)
        while buckets and self.offset >= (steps := batches.count(*buckets[0])):
            self.offset -= steps
            buckets = buckets[1:]
        self._plan, self._yielded = self._tables.buffer.plan(buckets), 0
        self._next_epoch = epoch + 1, batches.edges.seed
        return sum(batches.count(bucket, chunk) for bucket, chunk in buckets) - self.offset

    def buckets(self) -> Iterator[ScheduledBucket]:
        for scheduled in self._plan:
            with timed_wait(self._group.counters, "partitions", reads=True):
                self._finish_swaps()
                if self._leads and scheduled.before:
                    self._tables.begin_swaps(scheduled.before).result()
            # Every worker computes the same plan, so slots need no message.
            self._tables.buffer.slot_of = dict(scheduled.after)
            # The bucket's partitions must be in memory before any worker goes on.
            self._group.barrier()
            if self._leads:
                tables = self._tables
                self._pending = [tables.begin_swaps(scheduled.during), tables.begin_reading_ahead(scheduled.soon)]
            self._yielded += 1
            yield scheduled

    def following(self) -> tuple[Bucket, int, int] | None:
        epoch, seed = self._next_epoch
        if self._yielded < len(self._plan):
            scheduled = self._plan[self._yielded]
            return scheduled.bucket, scheduled.chunk, epoch - 1
        first = self._order(epoch, seed)[:1]
        return (*first[0], epoch) if first else None

    def trained(self, scheduled: ScheduledBucket, edges: int) -> None:
        self._tables.trained(scheduled.bucket)
        if scheduled.last:
            with timed_wait(self._group.counters, "partitions", reads=True):
                self._finish_swaps()
                if self._leads:
                    self._tables.settle()
        elif scheduled.ends_chunk:
            self.done = scheduled.chunk + 1

    def counts(self) -> dict[str, float]:
        return {}

    def _finish_swaps(self) -> None:
        """Wait for pending reads and writes, and raise their errors."""
        for future in self._pending:
            future.result()
        self._pending = []


def buckets_of(
    store: Store, settings: PBGConfig, slots: int, key: tuple[int, int], first: int = 0
) -> list[tuple[Bucket, int]]:
    """Return the buckets of an epoch on one machine in their order, with the numbers of their edge chunks.

    Args:
        store: buckets without edges are left out.
        settings: of the strategy.
        slots: partitions in memory at a time.
        key: the seed and the epoch.
        first: chunk with which the epoch starts.
    """
    nonempty = filled(store)
    return [
        (bucket, chunk)
        for chunk in range(first, passes_of(store, settings.num_edge_chunks))
        for bucket in bucket_order(settings.bucket_order, settings.num_partitions, slots, mixed(*key, chunk))
        if bucket in nonempty
    ]
