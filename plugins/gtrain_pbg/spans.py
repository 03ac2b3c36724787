"""An epoch on one machine: what its workers take for steps, and the borders of buckets, where they meet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from gtrain.graph.store import Store
from gtrain.strategy.counters import Counters
from gtrain.strategy.group import Group
from gtrain_pbg.config import PBGConfig
from gtrain_pbg.edges import BucketEdges, EdgeList, batches_of, filled, mixed, passes_of
from gtrain_pbg.order import Bucket, bucket_order
from gtrain_pbg.swaps import Visit
from gtrain_pbg.training import BucketTraining, held_out
from gtrain_pbg.typed import TypedTables

SPAN_EDGES = 50_000
"""Edges of one ``training_step``, about: Lightning's own work in a step takes a quarter of a millisecond and more."""


class Span:
    """Some batches of one bucket, what Lightning takes for one.

    Attributes:
        visit: the bucket.
        first, last: whether a worker's training of the bucket begins, and ends, with it.
        final: whether it is the last of the epoch.
        behind: the last bucket of the edge chunk before, where a chunk begins with it that is not the epoch's first.
        batches: the edges.
        held: edges that are held back.
    """

    def __init__(self, visit: Visit, batches: list[EdgeList], held: EdgeList) -> None:
        self.visit, self.batches, self.held = visit, batches, held
        self.first = self.last = self.final = False
        self.behind: Visit | None = None


class Cut:
    """Cuts a worker's share of a bucket into batches and spans.

    Args:
        edges: where edges come from.
        batch_size: edges of a batch.
        kinds: of relations, of which each batch has one; see :func:`~gtrain_pbg.edges.kinds_of`.
        worker: number of this worker; workers: how many share a bucket.
    """

    def __init__(self, edges: BucketEdges, batch_size: int, kinds: Tensor | None, worker: int, workers: int) -> None:
        self.edges, self._batch_size, self._kinds = edges, batch_size, kinds
        self._worker, self._workers = worker, workers

    def pieces(self, bucket: tuple[int, int], chunk: int, epoch: int) -> tuple[list[list[EdgeList]], EdgeList]:
        """The spans of a bucket, perhaps without edges; and this worker's edges that are held back."""
        mine, held = self.edges.share(bucket, chunk, epoch, self._worker, self._workers)
        generator = torch.Generator().manual_seed(mixed(self.edges.seed, epoch, chunk, *bucket, self._worker))
        batches = list(batches_of(mine, self._batch_size, self._kinds, generator))
        count = self.count(bucket, chunk)
        borders = [len(batches) * number // count for number in range(count + 1)]
        pieces = [batches[begin:end] for begin, end in pairwise(borders)]
        return pieces, held.select(torch.arange(len(held)).tensor_split(self._workers)[self._worker])

    def count(self, bucket: tuple[int, int], chunk: int) -> int:
        """Spans of a chunk of a bucket, the same number on all workers."""
        share = -(-self.edges.size(bucket, chunk) // self._workers)
        return max(1, -(-share // max(SPAN_EDGES, self._batch_size)))

    def within(self, buckets: Sequence[tuple[Bucket, int]], limit: int) -> list[tuple[Bucket, int]]:
        """The first buckets, with their chunks, that have ``limit`` spans together; the last may have more."""
        taken, spans = [], 0
        for bucket, chunk in buckets:
            if spans >= limit:
                break
            taken.append((bucket, chunk))
            spans += self.count(bucket, chunk)
        return taken


class EpochStart:
    """The first span of an epoch, made when it is trained or when the second is fetched.

    Lightning fetches one batch before a resumed run knows its epoch.

    Args:
        spans: of the epoch.
    """

    def __init__(self, spans: Iterator[Span]) -> None:
        self._spans = spans

    @cached_property
    def span(self) -> Span | None:
        """The span; None if the epoch has none."""
        return next(self._spans, None)


class Spans:
    """An epoch of one worker: at least one span for each bucket, perhaps without edges.

    Args:
        cut: makes them.
        epoch: says which epoch begins.
        visits: the buckets of an epoch, the same on all workers.
        limit: ``trainer.limit_train_batches``: spans of an epoch; None: all. The buckets of an epoch end with it on
            all workers, which have the same number of spans in each bucket.
    """

    def __init__(
        self, cut: Cut, epoch: Callable[[], int], visits: Callable[[int], list[Visit]], limit: int | None = None
    ) -> None:
        self._cut, self._epoch, self._visits, self._limit = cut, epoch, visits, limit

    def __iter__(self) -> Iterator[EpochStart | Span]:
        spans = self._spans()
        first = EpochStart(spans)
        yield first
        if first.span is not None:
            yield from spans

    def _spans(self) -> Iterator[Span]:
        epoch = self._epoch()
        visits = self._visits(epoch)
        left = self._limit
        for number, visit in enumerate(visits):
            pieces, held = self._cut.pieces(visit.bucket, visit.chunk, epoch)
            if left is not None:
                pieces = pieces[:left]
                left -= len(pieces)
            for place, piece in enumerate(pieces):
                span = Span(visit, piece, held)
                span.first, span.last = place == 0, place + 1 == len(pieces)
                span.final = span.last and number + 1 == len(visits)
                if span.first and number and visits[number - 1].chunk < visit.chunk:
                    span.behind = visits[number - 1]
                yield span


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


class Trainee:
    """A worker's training: partitions come and go at the borders of buckets, where all workers meet.

    Args:
        table: the tables.
        group: the workers.
        training: trains.
        held_out: whether edges are held back.
    """

    def __init__(self, table: TypedTables, group: Group, training: BucketTraining, held_out: bool) -> None:
        self._table, self._group, self._training, self._held_out = table, group, training, held_out
        self._under_way: list[Future[None]] = []

    def train(self, span: Span) -> tuple[float, float, dict[str, float]]:
        """Train on a span.

        Returns:
            The weighted sum of the losses, that of the weights, and what is to be logged.
        """
        visit = span.visit
        if span.first:
            self._enter(visit)
        if span.first:
            self._training.score_before(span.held, visit)
        total, weight = self._training.train(span.batches, visit)
        if span.last:
            self._leave(visit, span.final)
            self._training.score_after(span.held, visit)
            self._group.barrier()
        if span.final and self._held_out:
            return total, weight, held_out(self._group.all_reduce(self._training.take_held_out()))
        return total, weight, {}

    def _enter(self, visit: Visit) -> None:
        """All workers have left the last bucket; its successor's partitions must be there before any goes on."""
        with standing_still(self._group.counters, "partitions"):
            self._finish()
            for under_way in self._table.swap(visit.before):
                under_way.result()
        self._group.barrier()
        self._under_way = [*self._table.swap(visit.during), *self._table.announce(visit.soon)]

    def _leave(self, visit: Visit, final: bool) -> None:
        self._table.trained(visit.bucket)
        self._group.barrier()
        if final:
            with standing_still(self._group.counters, "partitions"):
                self._finish()
                self._table.settle()

    def _finish(self) -> None:
        """Wait for what is read and written, and raise what went wrong."""
        for under_way in self._under_way:
            under_way.result()
        self._under_way = []


@contextmanager
def standing_still(counters: Counters, name: str) -> Iterator[None]:
    """Count a stretch of time in which a worker waits for something and does not train."""
    began = time.perf_counter()
    with counters.span(f"wait: {name}"):
        yield
    counters.waited(began, began)
