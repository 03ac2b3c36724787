"""Batches: this worker's share of each step's seeds, made ahead of the step that is in training."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.batches.edge_seeds import EdgeSeeds
from gtrain.data.batches.loader import SeedLoader, with_edges, with_seeds
from gtrain_ps.worker.rows import RowTable
from gtrain_ps.worker.sampled import SampledGraph, samples

Batch: TypeAlias = Data | HeteroData
Deal = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""A module's ``deal``: which edges of a step a worker gets; see :meth:`gtrain.model.kg.embedding.KGEmbedding.deal`."""
SendAhead = Callable[[Batch, int], None]
"""Gets a batch and its number among those asked for in this epoch, before it is asked for."""


class Source(Protocol):
    """What batches are made of."""

    def seeds(self, loader: SeedLoader) -> Tensor | EdgeSeeds:
        """The split's seeds, in the order of the source data."""

    def batch(self, seeds: Any, chosen: Tensor, epoch: int, step: int) -> Batch:
        """A batch of some of them, for a step of an epoch."""


class WholeGraph:
    """Every batch is the whole graph, with seeds of its own.

    Args:
        graph: every node and edge.
    """

    def __init__(self, graph: Batch) -> None:
        self._graph = graph

    def sampled(self, loader: SeedLoader) -> Source:
        """What the batches of a loader are made of: neighbourhoods, where training is to sample."""
        return SampledGraph(self._graph, loader) if samples(loader) else self

    def seeds(self, loader: SeedLoader) -> Tensor | EdgeSeeds:
        return loader.seeds(self._graph)

    def batch(self, seeds: Any, chosen: Tensor, epoch: int, step: int) -> Batch:
        if isinstance(seeds, Tensor):
            return with_seeds(self._graph, seeds[chosen])
        return with_edges(self._graph, seeds, chosen, epoch)


class RowSource:
    """A batch is the rows of its seeds, read from a store that may be larger than memory; there are no edges.

    Args:
        table: the rows.
        names: which of ``y`` and ``orig_id`` a batch is to have.
    """

    def __init__(self, table: RowTable, names: Sequence[str] = ("y",)) -> None:
        self._table, self._names = table, names

    def seeds(self, loader: SeedLoader) -> Tensor:
        return self._table.rows_of(loader.split)

    def batch(self, seeds: Any, chosen: Tensor, epoch: int, step: int) -> Batch:
        return self._table.batch(seeds[chosen], self._names)


class Shares:
    """The batches of one worker: the same number on every worker, some perhaps without a seed.

    Args:
        loader: what the batches are of.
        source: what they are made of.
        worker: this worker, and how many there are.
        prefetch: batches that are made ahead; 0: none.
        inline: whether they are made by :meth:`draw`, and not by a thread of their own.
        ahead: is told of each batch as soon as it is made.
        done: is told when no more batches are asked for.
        deal: shares the edges of a step among the workers; None: each has as many as the others, in their order.
    """

    def __init__(
        self,
        loader: SeedLoader,
        source: Source,
        worker: tuple[int, int],
        prefetch: int,
        ahead: SendAhead,
        done: Callable[[], None],
        inline: bool = False,
        deal: Deal | None = None,
    ) -> None:
        self._loader, self._prefetch, self._inline = loader, prefetch, inline
        self._made: Iterator[Batch] = iter(())
        self._ready: deque[Batch] = deque()
        self._source: Source = source
        self._rank, self._size = worker
        self._ahead, self._done, self._deal = ahead, done, deal
        self._seeds: Tensor | EdgeSeeds | None = None
        self._state = {"epoch": -1, "done": 0}
        if isinstance(source, WholeGraph):
            self._source = source.sampled(loader)

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its batches were taken."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on behind these batches, in this epoch; an epoch that is asked for later begins at its beginning."""
        self._state = dict(state)
        self._loader.epoch = state["epoch"] + (state["epoch"] < 0 or state["done"] >= len(self))

    def __iter__(self) -> Iterator[Batch]:
        loader = self._loader
        epoch = loader.next_epoch()
        skip = self._state["done"] if self._state["epoch"] == epoch else 0
        self._state = {"epoch": epoch, "done": skip}
        if self._seeds is None:
            self._seeds = self._source.seeds(loader)
        steps = enumerate(islice(chunks(loader, len(self._seeds), epoch), skip, None))
        self._made = (self._make(number, chunk, (epoch, skip + number)) for number, chunk in steps)
        self._ready.clear()
        threaded = self._prefetch and not self._inline
        try:
            for batch in _in_thread(self._made, self._prefetch) if threaded else self._drawn():
                self._state["done"] += 1
                yield batch
        finally:
            self._done()

    def draw(self) -> None:
        """Make what is wanted ahead and not there yet, where no thread does."""
        if self._inline:
            self._ready.extend(islice(self._made, self._prefetch - len(self._ready)))

    def _drawn(self) -> Iterator[Batch]:
        """All batches, those first that are ready."""
        while True:
            if not self._ready:
                self._ready.extend(islice(self._made, 1))
            if not self._ready:
                return
            yield self._ready.popleft()

    def _make(self, number: int, chunk: Tensor, place: tuple[int, int]) -> Batch:
        """A step's batch, the ``number``-th of this pass; ``place`` is its epoch, and its number there."""
        count, seeds = chunk.numel(), self._seeds
        share: Tensor | slice = slice(self._rank * count // self._size, (self._rank + 1) * count // self._size)
        numbers: Tensor | None = None
        if isinstance(seeds, EdgeSeeds) and self._deal is not None and self._size > 1:
            relation = seeds.extra["type"][chunk] if "type" in seeds.extra else torch.zeros_like(chunk)
            share, numbers = self._deal(relation, self._rank, self._size)
        batch = self._source.batch(seeds, chunk[share], *place)
        if isinstance(seeds, EdgeSeeds):
            batch.random_key = self._loader.random_key(*place)
        if numbers is not None:
            batch.edge_label_chunk = numbers
        batch.step_rows = count
        self._ahead(batch, number)
        return batch


def chunks(loader: SeedLoader, count: int, epoch: int) -> Iterator[Tensor]:
    """The seeds of each step of an epoch, as places among the split's seeds: those of :meth:`SeedLoader.steps`."""
    order = torch.arange(count)
    if loader.batch_size is None:
        yield order
        return
    if loader.shuffle:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(loader.seed + epoch))
    yield from order.split(loader.batch_size)


def _in_thread(made: Iterator[Batch], most: int) -> Iterator[Batch]:
    """Draw from an iterator in a thread, so many ahead; the thread ends when this generator is closed."""
    ready: queue.Queue[Any] = queue.Queue(most)
    room = threading.Semaphore(most)
    closed = threading.Event()
    end = object()

    def draw() -> None:
        try:
            while not closed.is_set():
                room.acquire()
                if closed.is_set():
                    return
                batch = next(made, end)
                ready.put(batch)
                if batch is end:
                    return
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=draw, name="gtrain-input", daemon=True)
    thread.start()
    try:
        while True:
            batch = ready.get()
            if batch is end:
                return
            if isinstance(batch, BaseException):
                raise batch
            room.release()
            yield batch
    finally:
        closed.set()
        room.release()
        thread.join()
