"""Batches of this worker's share of each step's seeds, prefetched while earlier steps train.

A batch is the whole graph, a sampled neighbourhood, or rows of a store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
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
"""A module's ``deal``: a worker's edges of a step; see :meth:`gtrain.model.kg.embedding.KGEmbedding.deal`."""
Prefetch = Callable[[Batch, int], None]
"""Receives a batch and its number in this pass, as soon as it is built."""


class BatchSource(Protocol):
    """Builds batches from seeds."""

    def seeds(self, loader: SeedLoader) -> Tensor | EdgeSeeds:
        """Return the split's seeds, in the order of the source data."""

    def batch(self, seeds: Any, chosen: Tensor, epoch: int, step: int) -> Batch:
        """Return the batch of the seeds at the positions ``chosen``, for a step of an epoch."""


def samples(loader: SeedLoader) -> bool:
    """Whether a loader's batches are sampled neighbourhoods: the user set a fan-out, which training alone uses."""
    return loader.split == "train" and (loader.num_neighbors is not None or bool(loader.sampling.settings()))


class WholeGraph:
    """Every batch is the whole graph, with the step's seeds.

    Args:
        graph: all nodes and edges.
    """

    def __init__(self, graph: Batch) -> None:
        self._graph = graph

    def for_loader(self, loader: SeedLoader, *, trim: bool) -> BatchSource:
        """Return the source of a loader's batches: sampled neighbourhoods if the user set a fan-out for training.

        Args:
            loader: the loader.
            trim: whether layers may leave out sampled nodes that the seeds' results do not depend on.
        """
        return SampledGraph(self._graph, loader, trim) if samples(loader) else WholeGraph(loader.targeted(self._graph))

    def seeds(self, loader: SeedLoader) -> Tensor | EdgeSeeds:
        return loader.seeds(self._graph)

    def batch(self, seeds: Any, chosen: Tensor, epoch: int, step: int) -> Batch:
        if isinstance(seeds, Tensor):
            return with_seeds(self._graph, seeds[chosen])
        return with_edges(self._graph, seeds, chosen, epoch)


class RowSource:
    """A batch is the rows of its seeds, read from a store without edges that may be larger than memory.

    Args:
        table: the rows.
        names: tensors of a batch besides ``x``: ``y``, ``orig_id``.
    """

    def __init__(self, table: RowTable, names: Sequence[str] = ("y",)) -> None:
        self._table, self._names = table, names

    def seeds(self, loader: SeedLoader) -> Tensor:
        return self._table.rows_of(loader.split)

    def batch(self, seeds: Any, chosen: Tensor, epoch: int, step: int) -> Batch:
        return self._table.batch(seeds[chosen], self._names)


class WorkerBatches:
    """The batches of one worker: the same number on every worker, some possibly without seeds.

    Args:
        loader: the seeds and their order.
        source: builds the batches.
        worker: rank of this worker, and the number of workers.
        prefetch: number of batches that are built ahead; 0: none.
        on_batch: called with each batch as soon as it is built.
        on_end: called when a pass ends, perhaps with the start of the next; batches that were built may be unused.
        inline: whether :meth:`build_ahead` builds batches ahead, instead of a thread.
        deal: divides the edges of a step among the workers; None: into equal consecutive shares.
    """

    def __init__(
        self,
        loader: SeedLoader,
        source: BatchSource,
        worker: tuple[int, int],
        prefetch: int,
        on_batch: Prefetch,
        on_end: Callable[[], None],
        inline: bool = False,
        deal: Deal | None = None,
    ) -> None:
        self._loader, self._prefetch, self._inline = loader, prefetch, inline
        self._batches: Iterator[Batch] = iter(())
        self._ready: deque[Batch] = deque()
        self._pass: Generator[Batch] | None = None
        self._source = source
        self._rank, self._size = worker
        self._on_batch, self._on_end, self._deal = on_batch, on_end, deal
        self._seeds: Tensor | EdgeSeeds | None = None
        self._state = {"epoch": -1, "done": 0}

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and the number of its batches that were consumed."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume behind these batches of this epoch; later epochs start from their first batch."""
        self._state = dict(state)
        # An interrupted epoch is continued; a complete one, or none, is followed by the next.
        self._loader.epoch = state["epoch"] + (state["epoch"] < 0 or state["done"] >= len(self))

    def __iter__(self) -> Iterator[Batch]:
        self._end_pass()  # of an epoch that was left early; nobody may have closed its iterator
        loader = self._loader
        epoch = loader.next_epoch()
        skip = self._state["done"] if self._state["epoch"] == epoch else 0
        self._state = {"epoch": epoch, "done": skip}
        if self._seeds is None:
            self._seeds = self._source.seeds(loader)
        steps = enumerate(islice(loader.step_positions(len(self._seeds), epoch), skip, None))
        self._batches = (self._build(number, chunk, (epoch, skip + number)) for number, chunk in steps)
        batches = self._build_on_demand()
        if self._prefetch and not self._inline:
            batches = prefetched(self._batches, self._prefetch, "gtrain-input")
        self._pass = batches
        try:
            for batch in batches:
                self._state["done"] += 1
                yield batch
        finally:
            if self._pass is batches:
                self._end_pass()

    def _end_pass(self) -> None:
        """Stop building batches, and drop those that were built and not used."""
        batches, self._pass = self._pass, None
        if batches is not None:
            batches.close()  # it waits for the thread
            self._batches = iter(())
            self._ready.clear()
            self._on_end()

    def build_ahead(self) -> None:
        """Build the batches that are to be prefetched, if no thread does."""
        if self._inline:
            self._ready.extend(islice(self._batches, self._prefetch - len(self._ready)))

    def _build_on_demand(self) -> Generator[Batch]:
        """Yield all batches, starting with those that were built ahead."""
        while True:
            batch = self._ready.popleft() if self._ready else next(self._batches, None)
            if batch is None:
                return
            yield batch

    def _build(self, number: int, chunk: Tensor, step: tuple[int, int]) -> Batch:
        """Build a step's batch, the ``number``-th of this pass; ``step`` is its epoch, and its number there."""
        count, seeds = chunk.numel(), self._seeds
        # The step's seeds in consecutive shares, whose sizes differ by at most 1.
        share: Tensor | slice = slice(self._rank * count // self._size, (self._rank + 1) * count // self._size)
        numbers: Tensor | None = None
        if isinstance(seeds, EdgeSeeds) and self._deal is not None and self._size > 1:
            relation = seeds.extra["type"][chunk] if "type" in seeds.extra else torch.zeros_like(chunk)
            share, numbers = self._deal(relation, self._rank, self._size)
        batch = self._source.batch(seeds, chunk[share], *step)
        if isinstance(seeds, EdgeSeeds):
            batch.random_key = self._loader.random_key(*step)
        if numbers is not None:
            batch.edge_label_chunk = numbers
        batch.step_rows = count
        self._on_batch(batch, number)
        return batch


class SampledGraph:
    """A batch is the sampled neighbourhood of its seeds.

    The sampled neighbours of a node depend on the data's seed, the epoch, the step and the node, not on the worker. The
    nodes of a batch are in the order of discovery, seeds first. All tensors of nodes and edges are rows of the whole
    graph's tensors, sparse ``x`` as a :class:`~gtrain.nn.Csr`.

    Args:
        graph: all nodes and edges, edges sorted by target.
        loader: has the sampling options.
        trim: whether layers may leave out nodes that the seeds' results do not depend on; see
            :mod:`gtrain.model.inputs`.

    Raises:
        ConfigError: a sampling option other than the number of neighbours and ``replace`` was set.
    """

    def __init__(self, graph: Batch, loader: SeedLoader, trim: bool) -> None:
        self._graph, self._trim, store = graph, trim, loader.store
        options = loader.sampling_options()
        _check_sampling(loader)
        self._node_names = {node_type: store.node_tensors(node_type) for node_type in store.node_types}
        self._edge_names = {
            edge_type: [name for name in store.edge_tensors(edge_type) if name != "indices"]
            for edge_type in store.edge_types
        }
        self._target = target_type(store)
        counts = {node_type: int(self._part(node_type).num_nodes or 0) for node_type in store.node_types}
        columns = {
            edge_type: _columns(self._part(edge_type).edge_index, counts[edge_type[0]], counts[edge_type[2]])
            for edge_type in store.edge_types
        }
        fan_out = options.fan_out(store.edge_types)
        self._sampler = HeteroNeighborSampler(columns, counts, fan_out, replace=options.replace, seed=loader.seed)

    def seeds(self, loader: SeedLoader) -> Tensor | EdgeSeeds:
        return loader.seeds(self._graph)

    def batch(self, seeds: Any, chosen: Tensor, epoch: int, step: int) -> Batch:
        sample = self._sampler.sample({self._target: seeds[chosen].numpy()}, epoch=epoch, batch=step)
        batch: Batch = HeteroData() if isinstance(self._graph, HeteroData) else Data()
        for node_type in self._node_names:
            self._copy_nodes(node_type, sample, batch[node_type] if isinstance(batch, HeteroData) else batch)
        for edge_type in self._edge_names:
            self._copy_edges(edge_type, sample, batch[edge_type] if isinstance(batch, HeteroData) else batch)
        batch.seeds, batch.batch_size = torch.from_numpy(sample.seeds[self._target]), chosen.numel()
        batch.trim = self._trim
        if isinstance(batch, HeteroData):
            batch.target = self._target
        return batch

    def _copy_nodes(self, node_type: str, sample: HeteroSample, target: Any) -> None:
        """Copy the tensors of the sampled nodes of a type into a batch."""
        nodes, ids = self._part(node_type), torch.from_numpy(sample.node[node_type])
        target.num_nodes, target.n_id = ids.numel(), nodes.n_id[ids]
        target.num_sampled_nodes = sample.num_sampled_nodes[node_type]
        for name in self._node_names[node_type]:
            value = nodes[name]
            target[name] = select_rows(value, ids) if value.layout == torch.sparse_csr else value[ids]

    def _copy_edges(self, edge_type: EdgeType, sample: HeteroSample, target: Any) -> None:
        """Copy the tensors of the sampled edges of a type into a batch."""
        edges, ids = self._part(edge_type), torch.from_numpy(sample.edge[edge_type])
        ends = torch.from_numpy(sample.row[edge_type]), torch.from_numpy(sample.col[edge_type])
        target.edge_index, target.num_sampled_edges = torch.stack(ends), sample.num_sampled_edges[edge_type]
        for name in self._edge_names[edge_type]:
            target[name] = edges[name][ids]

    def _part(self, node_or_edge_type: Any) -> Any:
        """Return the nodes or edges of a type; a homogeneous graph has all in one object."""
        return self._graph[node_or_edge_type] if isinstance(self._graph, HeteroData) else self._graph


def _check_sampling(loader: SeedLoader) -> None:
    """Refuse sampling options other than the number of neighbours and ``replace``."""
    other = [setting for setting in loader.sampling.settings() if not setting.startswith("data.replace=")]
    if other:
        raise ConfigError(
            f"{', '.join(other)} was set; strategy=ps samples neighbours by data.num_neighbors and data.replace alone.",
            hint="leave it out, or choose strategy=pyg.",
        )
    if loader.seeds_are_edges:
        raise ConfigError(
            "data.num_neighbors was set with data.task=link; strategy=ps samples neighbours of nodes.",
            hint="leave data.num_neighbors out, or choose strategy=pyg.",
        )


def _columns(edge_index: Tensor, sources: int, targets: int) -> Columns:
    """Return the edges of a type, sorted by target, in the sampler's form."""
    indptr = torch.zeros(targets + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(edge_index[1], minlength=targets), 0, out=indptr[1:])
    return Columns(indptr.numpy(), edge_index[0].contiguous().numpy(), num_sources=sources, checked=True)
