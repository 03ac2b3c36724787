"""Batches: this worker's share of each step's seeds, made ahead of the step that is in training.

A batch is the whole graph, sampled neighbours, or rows of a store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.batches.edge_seeds import EdgeSeeds
from gtrain.data.batches.loader import SeedLoader, prefetched, target_type, with_edges, with_seeds
from gtrain.errors import ConfigError
from gtrain.graph.sampling import Columns, HeteroNeighborSampler, HeteroSample
from gtrain.graph.store.manifest import EdgeType
from gtrain.nn import select_rows
from gtrain_ps.worker.row_table import RowTable

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
        steps = enumerate(islice(loader.step_positions(len(self._seeds), epoch), skip, None))
        self._made = (self._make(number, chunk, (epoch, skip + number)) for number, chunk in steps)
        self._ready.clear()
        threaded = self._prefetch and not self._inline
        try:
            for batch in prefetched(self._made, self._prefetch, "gtrain-input") if threaded else self._drawn():
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


class SampledGraph:
    """A batch is the sampled neighbourhood of its seeds.

    What is drawn of a node depends on the data's seed, the epoch, the number of the step and the node, not on the
    worker. In a batch, nodes are in the order of discovery, seeds first; every tensor of the nodes and edges is that of
    the whole graph at the sampled ones, sparse ``x`` as a :class:`~gtrain.nn.Csr`.

    Args:
        graph: every node and edge, edges by target.
        loader: says what is sampled.

    Raises:
        ConfigError: something else was asked for than a number of neighbours.
    """

    def __init__(self, graph: Batch, loader: SeedLoader) -> None:
        self._graph, store = graph, loader.store
        options = loader.sampling_options()
        _check_plain(loader)
        self._names = {kind: store.node_tensors(kind) for kind in store.node_types}
        self._edge_names = {kind: [n for n in store.edge_tensors(kind) if n != "indices"] for kind in store.edge_types}
        self._target = target_type(store)
        columns = {kind: _columns(self._edges(kind).edge_index, self._counts(kind)) for kind in store.edge_types}
        counts = {kind: int(self._nodes(kind).num_nodes or 0) for kind in store.node_types}
        fan_out = options.fan_out(store.edge_types)
        self._sampler = HeteroNeighborSampler(columns, counts, fan_out, replace=options.replace, seed=loader.seed)

    def seeds(self, loader: SeedLoader) -> Tensor | EdgeSeeds:
        return loader.seeds(self._graph)

    def batch(self, seeds: Any, chosen: Tensor, epoch: int, step: int) -> Batch:
        found = self._sampler.sample({self._target: seeds[chosen].numpy()}, epoch=epoch, batch=step)
        made: Batch = HeteroData() if isinstance(self._graph, HeteroData) else Data()
        for kind in self._names:
            self._take_nodes(kind, found, made[kind] if isinstance(made, HeteroData) else made)
        for edge_type in self._edge_names:
            self._take_edges(edge_type, found, made[edge_type] if isinstance(made, HeteroData) else made)
        made.seeds, made.batch_size = torch.from_numpy(found.seeds[self._target]), chosen.numel()
        if isinstance(made, HeteroData):
            made.target = self._target
        return made

    def _take_nodes(self, kind: str, found: HeteroSample, made: Any) -> None:
        """Put the tensors of the sampled nodes of a type into a batch."""
        nodes, chosen = self._nodes(kind), torch.from_numpy(found.node[kind])
        made.num_nodes, made.n_id = chosen.numel(), nodes.n_id[chosen]
        for name in self._names[kind]:
            value = nodes[name]
            made[name] = select_rows(value, chosen) if value.layout == torch.sparse_csr else value[chosen]

    def _take_edges(self, kind: EdgeType, found: HeteroSample, made: Any) -> None:
        """Likewise of the sampled edges."""
        edges, chosen = self._edges(kind), torch.from_numpy(found.edge[kind])
        made.edge_index = torch.stack([torch.from_numpy(found.row[kind]), torch.from_numpy(found.col[kind])])
        for name in self._edge_names[kind]:
            made[name] = edges[name][chosen]

    def _nodes(self, kind: str) -> Any:
        return self._graph[kind] if isinstance(self._graph, HeteroData) else self._graph

    def _edges(self, kind: EdgeType) -> Any:
        return self._graph[kind] if isinstance(self._graph, HeteroData) else self._graph

    def _counts(self, kind: EdgeType) -> tuple[int, int]:
        return int(self._nodes(kind[0]).num_nodes or 0), int(self._nodes(kind[2]).num_nodes or 0)


def samples(loader: SeedLoader) -> bool:
    """Whether the batches of a loader are to be sampled: those of training, if the user gave a fan-out."""
    asked = loader.num_neighbors is not None or bool(loader.sampling.settings())
    return asked and loader.split == "train"


def _check_plain(loader: SeedLoader) -> None:
    """Refuse what is drawn by other rules than a number of neighbours."""
    other = [setting for setting in loader.sampling.settings() if not setting.startswith("data.replace=")]
    if other:
        raise ConfigError(
            f"{', '.join(other)} was set; strategy=ps draws neighbours by data.num_neighbors and data.replace alone.",
            hint="leave it out, or choose strategy=pyg.",
        )
    if loader.seeds_are_edges:
        raise ConfigError(
            "data.num_neighbors was set with data.task=link; strategy=ps draws neighbours of nodes.",
            hint="leave data.num_neighbors out, or choose strategy=pyg.",
        )


def _columns(edge_index: Tensor, counts: tuple[int, int]) -> Columns:
    """The edges of a type, which are ordered by target, for the sampler."""
    sources, targets = counts
    indptr = torch.zeros(targets + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(edge_index[1], minlength=targets), 0, out=indptr[1:])
    return Columns(indptr.numpy(), edge_index[0].contiguous().numpy(), num_sources=sources, checked=True)
