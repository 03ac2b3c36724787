"""Sampler for PyG's own loaders: a ``BaseSampler`` over the ranks' parts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from torch import Tensor
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
    SamplerOutput,
)
from torch_geometric.sampler.neighbor_sampler import edge_sample

from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EDGE_TYPE, NODE_TYPE
from gtrain.strategy.group import Group
from gtrain_pyg.batches import as_tensor
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.features.feature_store import FeatureStore
from gtrain_pyg.ranks.hosting import Hosting
from gtrain_pyg.ranks.parts import NodeOrEdgeType, PartBook
from gtrain_pyg.ranks.service import Peers
from gtrain_pyg.sampling.sampler import DistributedSampler
from gtrain_pyg.sampling.subgraph import Subgraph
from gtrain_pyg.stores import ShardFeatureStore, ShardGraphStore
from gtrain_pyg.structure.hosted import GraphStructure

Output: TypeAlias = SamplerOutput | HeteroSamplerOutput


class ShardSampler(BaseSampler):
    """Lets ``torch_geometric.loader.NodeLoader`` and ``LinkLoader`` sample from a partitioned graph.

    Nodes are global ids and edges are global edge positions, which :class:`gtrain_pyg.stores.ShardFeatureStore` and
    :class:`~gtrain_pyg.stores.ShardGraphStore` understand. Each call draws different neighbours.

    Args:
        sampler: grows the subgraphs.
        num_nodes: nodes of each type over all parts.
        hetero: return outputs by type.
        epoch: seed of the random numbers, with the number of the call.
    """

    def __init__(
        self, sampler: DistributedSampler, num_nodes: Mapping[str, int], *, hetero: bool, epoch: int = 0
    ) -> None:
        self._sampler, self._num_nodes, self._hetero = sampler, dict(num_nodes), hetero
        self.epoch = epoch
        self._calls = itertools.count()

    def sample_from_nodes(self, index: NodeSamplerInput, **kwargs: object) -> Output:
        """Sample around nodes."""
        node_type = index.input_type or NODE_TYPE
        output = self._sample({node_type: index.node}, None if index.time is None else {node_type: index.time})
        output.metadata = (index.input_id, index.time)
        return output

    def sample_from_edges(self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None) -> Output:
        """Sample around the endpoints of edges and of negative edges."""

        def sample(seeds: Tensor | dict[str, Tensor], times: Tensor | dict[str, Tensor] | None) -> Output:
            by_type = {NODE_TYPE: seeds} if isinstance(seeds, Tensor) else seeds
            return self._sample(by_type, {NODE_TYPE: times} if isinstance(times, Tensor) else times)

        num_nodes = self._num_nodes if self._hetero else self._num_nodes[NODE_TYPE]
        return edge_sample(index, sample, num_nodes, self._sampler.options.disjoint, None, neg_sampling)

    def _sample(self, seeds: Mapping[str, Tensor], times: Mapping[str, Tensor] | None) -> Output:
        roots = {node_type: ids.long().numpy() for node_type, ids in seeds.items()}
        limits = None if times is None else {node_type: time.long().numpy() for node_type, time in times.items()}
        subgraph = self._sampler.sample(roots, epoch=self.epoch, batch=next(self._calls), seed_time=limits)
        return hetero_output(subgraph) if self._hetero else homogeneous_output(subgraph)


def homogeneous_output(subgraph: Subgraph) -> SamplerOutput:
    """Return PyG's output for a subgraph of a homogeneous graph."""
    row, col = as_tensor(subgraph.edge_index[EDGE_TYPE])
    return SamplerOutput(
        node=as_tensor(subgraph.node[NODE_TYPE]),
        row=row,
        col=col,
        edge=as_tensor(subgraph.edge[EDGE_TYPE]),
        batch=None if subgraph.batch is None else as_tensor(subgraph.batch[NODE_TYPE]),
        num_sampled_nodes=subgraph.num_sampled_nodes[NODE_TYPE],
        num_sampled_edges=subgraph.num_sampled_edges[EDGE_TYPE],
    )


def hetero_output(subgraph: Subgraph) -> HeteroSamplerOutput:
    """Return PyG's output for a subgraph of a heterogeneous graph."""
    index = {t: as_tensor(pair) for t, pair in subgraph.edge_index.items()}
    return HeteroSamplerOutput(
        node={t: as_tensor(ids) for t, ids in subgraph.node.items()},
        row={t: pair[0] for t, pair in index.items()},
        col={t: pair[1] for t, pair in index.items()},
        edge={t: as_tensor(edge) for t, edge in subgraph.edge.items()},
        batch=None if subgraph.batch is None else {t: as_tensor(batch) for t, batch in subgraph.batch.items()},
        num_sampled_nodes=subgraph.num_sampled_nodes,
        num_sampled_edges=subgraph.num_sampled_edges,
    )


def open_for_loaders(
    store: Store, num_neighbors: Sequence[int], seed: int = 0
) -> tuple[ShardFeatureStore, ShardGraphStore, ShardSampler]:
    """Open a store for PyG's loaders in one process, which reads the files of all parts.

    Args:
        store: the partitioned graph; files are memory-mapped.
        num_neighbors: fan-out of each hop; -1 samples all neighbours.
        seed: of the random numbers.

    Returns:
        The feature store and graph store, which loaders take as ``data``, and the sampler. Nodes are global ids.
    """
    parts = range(store.num_parts)
    book, pool = PartBook.of(store), BufferPool()
    hosting = Hosting(0, tuple(0 for _ in parts), tuple(parts), complete=True, loopback=True)
    names: dict[NodeOrEdgeType, Sequence[str]] = {
        node_type: store.node_tensors(node_type) for node_type in store.node_types
    }
    features = FeatureStore(store, book, hosting.parts, None, pool, names)
    structure = GraphStructure(store, book, hosting)
    options = SamplingOptions(tuple(num_neighbors))
    sampler = DistributedSampler(structure, Peers(Group(), hosting), pool, options, seed=seed)
    counts = {node_type: store.num_nodes_of(node_type) for node_type in store.node_types}
    return (
        ShardFeatureStore(features, store),
        ShardGraphStore(store, hosting.parts),
        ShardSampler(sampler, counts, hetero=store.is_hetero),
    )
