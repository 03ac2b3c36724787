"""A worker's epoch: buckets from a source, trained in the portions that Lightning counts as batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from gtrain.strategy.counters import Counters
from gtrain.strategy.group import Group
from gtrain_pbg.buckets import Bucket, ScheduledBucket
from gtrain_pbg.edges import BucketEdges, EdgeList, batches_of, mixed
from gtrain_pbg.training import BucketTraining, held_out

STEP_EDGES = 50_000
"""Edges of one ``training_step``, about: Lightning's overhead per step is a quarter of a millisecond and more."""
Trained = tuple[float, float, dict[str, float]]
"""Weighted sum of the losses, sum of the weights, and metrics to log."""
NOTHING: Trained = (0.0, 0.0, {})


class BucketBatches:
    """Cuts a worker's share of a bucket into batches, and the batches into steps.

    Args:
        edges: reads the edges.
        batch_size: edges per batch.
        keys: for each relation, a number that the edges of a batch have in common; see
            :attr:`~gtrain_pbg.edges.RelationGroups.batching_keys`.
        worker: number of this worker.
        workers: how many share a bucket.
    """

    def __init__(self, edges: BucketEdges, batch_size: int, keys: Tensor | None, worker: int, workers: int) -> None:
        self.edges, self._batch_size, self._keys = edges, batch_size, keys
        self._worker, self._workers = worker, workers

    def steps_of(self, bucket: Bucket, chunk: int, epoch: int) -> tuple[list[list[EdgeList]], EdgeList]:
        """Return the batches of each step of a bucket (perhaps none), and this worker's edges that are held out."""
        mine, held = self.edges.share(bucket, chunk, epoch, self._worker, self._workers)
        # The order of a bucket's edges does not depend on when, or in which run, it is trained.
        generator = torch.Generator().manual_seed(mixed(self.edges.seed, epoch, chunk, *bucket, self._worker))
        batches = list(batches_of(mine, self._batch_size, self._keys, generator))
        count = self.count(bucket, chunk)
        # As many steps on every worker, because Lightning counts them; a share may have fewer batches than steps.
        steps = [batches[len(batches) * n // count : len(batches) * (n + 1) // count] for n in range(count)]
        return steps, held.select(torch.arange(len(held)).tensor_split(self._workers)[self._worker])

    def count(self, bucket: Bucket, chunk: int) -> int:
        """Return the number of steps of a bucket's chunk, the same on all workers."""
        share = -(-self.edges.size(bucket, chunk) // self._workers)
        return max(1, -(-share // max(STEP_EDGES, self._batch_size)))

    def within(self, buckets: Sequence[tuple[Bucket, int]], limit: int) -> list[tuple[Bucket, int]]:
        """Return the first buckets, with their chunks, that have ``limit`` steps together, or a few more."""
        taken, steps = [], 0
        for bucket, chunk in buckets:
            if steps >= limit:
                break
            taken.append((bucket, chunk))
            steps += self.count(bucket, chunk)
        return taken


class StepsAhead:
    """Cuts buckets into steps, the next one in a thread while the current one is trained."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "gtrain-pbg-edges")
        self._key: tuple[Bucket, int, int] | None = None
        self._steps: Future[tuple[list[list[EdgeList]], EdgeList]] | None = None

    def take(
        self, batches: BucketBatches, current: tuple[Bucket, int, int], following: tuple[Bucket, int, int] | None
    ) -> tuple[list[list[EdgeList]], EdgeList]:
        """Return the steps of a bucket (its partitions, its chunk and the epoch), and begin to cut the next one."""
        key, future = self._key, self._steps
        self._key, self._steps = following, None
        steps = future.result() if future is not None and key == current else batches.steps_of(*current)
        if following is not None:
            self._steps = self._thread.submit(batches.steps_of, *following)
        return steps


class BucketSource(Protocol):
    """Schedules a worker's buckets, with their partitions in memory; all workers of a machine get the same buckets.

    Attributes:
        done: number of trained edge chunks of the epoch, where a checkpoint may be written before the next one; else 0.
        skipped: number of steps of the epoch that an interrupted run has trained.
        offset: those of the first bucket that is left.
    """

    done: int
    skipped: int
    offset: int

    def begin(self, batches: BucketBatches, epoch: int) -> int | None:
        """Start an epoch.

        Returns:
            Its number of steps; None: unknown before the epoch is over.
        """

    def buckets(self) -> Iterator[ScheduledBucket | None]:
        """Yield the buckets of the epoch; None: a step without edges, before which ``done`` was set."""

    def following(self) -> tuple[Bucket, int, int] | None:
        """Return the bucket after the one that was yielded last, its chunk and its epoch; None: unknown."""

    def trained(self, scheduled: ScheduledBucket, edges: int) -> None:
        """Called when all workers of the machine have trained a bucket, with the sum of their edges."""

    def counts(self) -> dict[str, float]:
        """Return metrics of the epoch to log."""


class BucketWorker:
    """One worker's training. All workers of a machine train each bucket together and meet at its end.

    Args:
        source: of buckets.
        training: trains on their edges.
        machine: the workers of this machine.
        everyone: all workers.
        clock: returns the number of the current epoch.
        held_out: whether edges are held out.
        limit: ``trainer.limit_train_batches``: steps per epoch; None: all.

    Attributes:
        over: whether the epoch is over.
        trained_steps: steps of the epoch that this run has trained.
    """

    def __init__(
        self,
        source: BucketSource,
        training: BucketTraining,
        machine: Group,
        everyone: Group,
        clock: Callable[[], int],
        held_out: bool,
        limit: int | None = None,
    ) -> None:
        self._source, self._training, self._machine, self._everyone = source, training, machine, everyone
        self._clock, self._held_out, self._limit = clock, held_out, limit
        self._epoch: Iterator[Trained] | None = None
        self._steps: int | None = None
        self._ahead = StepsAhead() if training.is_fast else None
        self.over, self.trained_steps = True, 0

    @property
    def done(self) -> int:
        """See :attr:`BucketSource.done`."""
        return self._source.done

    def prepare(self, batches: BucketBatches) -> None:
        """Prepare an epoch, whose number may not be known yet."""
        self._batches, self._epoch, self.over, self.trained_steps = batches, None, False, 0
        # An epoch that was cut short may have left losses.
        self._training.drain()

    def begin(self) -> int | None:
        """Start the epoch unless it has started; return its number of steps, or None if that is unknown."""
        if self._epoch is None:
            epoch = self._clock()
            steps = self._source.begin(self._batches, epoch)
            limit = self._remaining
            self._steps = steps if steps is None or limit is None else min(steps, limit)
            self._epoch = self._train_epoch(self._batches, epoch)
        return self._steps

    @property
    def _remaining(self) -> int | None:
        """Steps that are left of ``limit``."""
        return None if self._limit is None else max(0, self._limit - self._source.skipped)

    def train(self) -> Trained:
        """Train on the batches of the next step."""
        self.begin()
        assert self._epoch is not None
        self._source.done = 0
        self.trained_steps += 1
        return next(self._epoch, NOTHING)

    def _train_epoch(self, batches: BucketBatches, epoch: int) -> Iterator[Trained]:
        remaining, offset = self._remaining, self._source.offset
        for scheduled in self._source.buckets():
            if scheduled is None:
                yield NOTHING
                continue
            current = scheduled.bucket, scheduled.chunk, epoch
            if self._ahead is None:
                steps, held = batches.steps_of(*current)
            else:
                steps, held = self._ahead.take(batches, current, self._source.following())
            steps = steps[offset:]
            offset = 0
            if remaining is not None:
                steps = steps[:remaining]
                remaining -= len(steps)
            for loss, weight in self._train_bucket(scheduled, steps, held):
                yield loss, weight, self._metrics() if self.over else {}
        if not self.over:
            self.over = True
            yield *self._training.drain(), self._metrics()

    def _train_bucket(
        self, scheduled: ScheduledBucket, steps: list[list[EdgeList]], held: EdgeList
    ) -> Iterator[tuple[float, float]]:
        """Train on a bucket, step by step; the last step leaves it."""
        self._training.score_before(held, scheduled)
        if self._held_out:
            # Wait for the ranks of all workers: training would change the rows that they read.
            self._machine.barrier()
        edges, trained = 0, (0.0, 0.0)
        for number, batches in enumerate(steps, 1):
            trained = self._training.train(batches, scheduled, steps[number] if number < len(steps) else None)
            edges += sum(map(len, batches))
            if number < len(steps):
                yield trained
        # Also a barrier: it returns when all workers of the machine are done.
        edges = int(self._machine.all_reduce(torch.tensor(edges)))
        self._source.trained(scheduled, edges)
        self._training.score_after(held, scheduled)
        self._machine.barrier()
        self.over = scheduled.last
        if self.over:
            left = self._training.drain()
            trained = trained[0] + left[0], trained[1] + left[1]
        yield trained

    def _metrics(self) -> dict[str, float]:
        """Return the epoch's metrics; those of held-out edges are over all workers."""
        ranks = held_out(self._everyone.all_reduce(self._training.take_held_out())) if self._held_out else {}
        return {**self._source.counts(), **ranks}


class StepPlaceholder:
    """What Lightning takes for a batch: about :data:`STEP_EDGES` edges, which the worker reads when it trains them."""


class EpochSteps:
    """The steps of one worker's epoch, as an iterable for Lightning.

    Args:
        worker: trains.
        batches: of buckets.
    """

    def __init__(self, worker: BucketWorker, batches: BucketBatches) -> None:
        self._worker, self._batches = worker, batches

    def __iter__(self) -> Iterator[StepPlaceholder]:
        self._worker.prepare(self._batches)
        # Lightning fetches one batch before a resumed run knows its epoch.
        yield StepPlaceholder()
        total, number = self._worker.begin(), 1
        while not self._worker.over and (total is None or number < total):
            number += 1
            yield StepPlaceholder()


@contextmanager
def timed_wait(counters: Counters, name: str, *, reads: bool = False) -> Iterator[None]:
    """Count the time that a worker waits for something instead of training; ``reads``: for data of a disk or server."""
    start = time.perf_counter()
    with counters.span(f"wait: {name}"):
        yield
    counters.waited(start, start, reads=reads)
