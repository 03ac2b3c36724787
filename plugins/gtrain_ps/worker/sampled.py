"""Batches of sampled neighbours, drawn by each worker from the whole graph."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.batches.edge_seeds import EdgeSeeds
from gtrain.data.batches.loader import SeedLoader, target_type
from gtrain.errors import ConfigError
from gtrain.graph.sampling import Columns, HeteroNeighborSampler, HeteroSample
from gtrain.graph.store.manifest import EdgeType
from gtrain.nn import select_rows

Batch: TypeAlias = Data | HeteroData


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
