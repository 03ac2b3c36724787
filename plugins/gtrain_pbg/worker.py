"""A worker's epoch: buckets from a source, cut into what Lightning takes for batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from gtrain.strategy.counters import Counters
from gtrain.strategy.group import Group
from gtrain_pbg.edges import BucketEdges, EdgeList, batches_of, mixed
from gtrain_pbg.order import Bucket
from gtrain_pbg.swaps import ScheduledBucket
from gtrain_pbg.training import BucketTraining, held_out

STEP_EDGES = 50_000
"""Edges of one ``training_step``, about: Lightning's own work in a step takes a quarter of a millisecond and more."""
Trained = tuple[float, float, dict[str, float]]
"""Weighted sum of the losses, sum of the weights, and what is to be logged."""
NOTHING: Trained = (0.0, 0.0, {})


class BucketBatches:
    """Cuts a worker's share of a bucket into batches, and these into turns.

    Args:
        edges: where edges come from.
        batch_size: edges of a batch.
        kinds: of relations, of which each batch has one; see :func:`~gtrain_pbg.edges.batching_keys`.
        worker: number of this worker; workers: how many share a bucket.
    """

    def __init__(self, edges: BucketEdges, batch_size: int, kinds: Tensor | None, worker: int, workers: int) -> None:
        self.edges, self._batch_size, self._kinds = edges, batch_size, kinds
        self._worker, self._workers = worker, workers

    def steps_of(self, bucket: tuple[int, int], chunk: int, epoch: int) -> tuple[list[list[EdgeList]], EdgeList]:
        """The batches of a bucket by turns, perhaps without edges; and this worker's edges that are held back."""
        mine, held = self.edges.share(bucket, chunk, epoch, self._worker, self._workers)
        generator = torch.Generator().manual_seed(mixed(self.edges.seed, epoch, chunk, *bucket, self._worker))
        batches = list(batches_of(mine, self._batch_size, self._kinds, generator))
        count = self.count(bucket, chunk)
        borders = [len(batches) * number // count for number in range(count + 1)]
        pieces = [batches[begin:end] for begin, end in pairwise(borders)]
        return pieces, held.select(torch.arange(len(held)).tensor_split(self._workers)[self._worker])

    def count(self, bucket: tuple[int, int], chunk: int) -> int:
        """Turns of a chunk of a bucket, the same number on all workers."""
        share = -(-self.edges.size(bucket, chunk) // self._workers)
        return max(1, -(-share // max(STEP_EDGES, self._batch_size)))

    def within(self, buckets: Sequence[tuple[Bucket, int]], limit: int) -> list[tuple[Bucket, int]]:
        """The first buckets, with their chunks, that have ``limit`` turns together; the last may have more."""
        taken, turns = [], 0
        for bucket, chunk in buckets:
            if turns >= limit:
                break
            taken.append((bucket, chunk))
            turns += self.count(bucket, chunk)
        return taken


class BucketSource(Protocol):
    """Gives a worker its buckets, with their partitions in memory; all workers of a machine get the same ones.

    Attributes:
        done: edge chunks of the epoch that are trained, where a checkpoint may be written before its next one; else 0.
    """

    done: int

    def begin(self, batches: BucketBatches, epoch: int) -> int | None:
        """Begin an epoch.

        Returns:
            Its number of turns; None: it is not known before the epoch is over.
        """

    def visits(self) -> Iterator[ScheduledBucket | None]:
        """The buckets of the epoch; None: a turn without edges, before which ``done`` was set."""

    def trained(self, visit: ScheduledBucket, edges: int) -> None:
        """Called when all workers of the machine have trained a bucket, with the sum of their edges."""

    def counts(self) -> dict[str, float]:
        """What is to be logged of an epoch."""


class BucketWorker:
    """A worker's training. All workers of a machine train each bucket together and meet at its end.

    Args:
        source: of buckets.
        training: trains.
        machine: the workers of this machine.
        everyone: all workers.
        clock: says which epoch this is.
        held_out: whether edges are held back.
        limit: ``trainer.limit_train_batches``: turns of an epoch; None: all.

    Attributes:
        over: whether the epoch is.
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
        self._work: Iterator[Trained] | None = None
        self._turns: int | None = None
        self.over = True

    @property
    def done(self) -> int:
        """Edge chunks of the epoch that are trained, where a checkpoint may be written before its next one; else 0."""
        return self._source.done

    def prepare(self, batches: BucketBatches) -> None:
        """An epoch is to begin, whose number may not be known yet."""
        self._batches, self._work, self.over = batches, None, False

    def begin(self) -> int | None:
        """Begin the epoch, if that is not done; return its number of turns, or None where it is not known."""
        if self._work is None:
            epoch = self._clock()
            turns = self._source.begin(self._batches, epoch)
            self._turns = turns if turns is None or self._limit is None else min(turns, self._limit)
            self._work = self._epoch(self._batches, epoch)
        return self._turns

    def train(self) -> Trained:
        """Train on the batches of a turn."""
        self.begin()
        assert self._work is not None
        self._source.done = 0
        return next(self._work, NOTHING)

    def _epoch(self, batches: BucketBatches, epoch: int) -> Iterator[Trained]:
        left = self._limit
        for visit in self._source.visits():
            if visit is None:
                yield NOTHING
                continue
            pieces, held = batches.steps_of(visit.bucket, visit.chunk, epoch)
            if left is not None:
                pieces = pieces[:left]
                left -= len(pieces)
            for loss, weight in self._bucket(visit, pieces, held):
                yield loss, weight, self._end() if self.over else {}
        if not self.over:
            self.over = True
            yield 0.0, 0.0, self._end()

    def _bucket(
        self, visit: ScheduledBucket, pieces: list[list[EdgeList]], held: EdgeList
    ) -> Iterator[tuple[float, float]]:
        """Train on a bucket, by turns; the last one leaves it."""
        self._training.score_before(held, visit)
        if self._held_out:
            self._machine.barrier()  # the others would train rows that are ranked here
        edges, trained = 0, (0.0, 0.0)
        for number, piece in enumerate(pieces, 1):
            trained = self._training.train(piece, visit)
            edges += sum(map(len, piece))
            if number < len(pieces):
                yield trained
        edges = int(self._machine.all_reduce(torch.tensor(edges)))  # all workers of the machine are done
        self._source.trained(visit, edges)
        self._training.score_after(held, visit)
        self._machine.barrier()
        self.over = visit.last
        yield trained

    def _end(self) -> dict[str, float]:
        """What is to be logged of the epoch, the edges that were held back of all workers."""
        ranks = held_out(self._everyone.all_reduce(self._training.take_held_out())) if self._held_out else {}
        return {**self._source.counts(), **ranks}


class StepPlaceholder:
    """What Lightning takes for a batch: about :data:`STEP_EDGES` edges, which the worker reads when it trains them."""


class EpochSteps:
    """An epoch of one worker.

    Args:
        worker: trains.
        batches: of buckets.
    """

    def __init__(self, worker: BucketWorker, batches: BucketBatches) -> None:
        self._worker, self._batches = worker, batches

    def __iter__(self) -> Iterator[StepPlaceholder]:
        self._worker.prepare(self._batches)
        yield StepPlaceholder()  # Lightning fetches one batch before a resumed run knows its epoch
        total, number = self._worker.begin(), 1
        while not self._worker.over and (total is None or number < total):
            number += 1
            yield StepPlaceholder()


@contextmanager
def timed_wait(counters: Counters, name: str) -> Iterator[None]:
    """Count a stretch of time in which a worker waits for something and does not train."""
    start = time.perf_counter()
    with counters.span(f"wait: {name}"):
        yield
    counters.waited(start, start)
