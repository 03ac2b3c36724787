"""Sampling as PyG's own loaders ask for it: a ``BaseSampler`` over the ranks' parts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
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

from gtrain.graph.store.manifest import EDGE_TYPE, NODE_TYPE
from gtrain_pyg.batches import as_tensor
from gtrain_pyg.sampling.sampler import DistributedSampler
from gtrain_pyg.sampling.subgraph import Subgraph

Output: TypeAlias = SamplerOutput | HeteroSamplerOutput


class ShardSampler(BaseSampler):
    """Lets ``torch_geometric.loader.NodeLoader`` and ``LinkLoader`` sample from a partitioned graph.

    Nodes are global ids, and edges positions in the store, which :class:`gtrain_pyg.stores.ShardFeatureStore` and
    :class:`~gtrain_pyg.stores.ShardGraphStore` understand. Each call draws other neighbours.

    Args:
        sampler: grows the subgraphs.
        num_nodes: nodes of each type over all parts.
        hetero: whether outputs are by type.
        epoch: names the random numbers together with the number of the call.
    """

    def __init__(
        self, sampler: DistributedSampler, num_nodes: Mapping[str, int], *, hetero: bool, epoch: int = 0
    ) -> None:
        self._sampler, self._num_nodes, self._hetero = sampler, dict(num_nodes), hetero
        self.epoch = epoch
        self._calls = itertools.count()

    def sample_from_nodes(self, index: NodeSamplerInput, **kwargs: object) -> Output:
        """Sample around nodes."""
        kind = index.input_type or NODE_TYPE
        found = self._sample({kind: index.node}, None if index.time is None else {kind: index.time})
        found.metadata = (index.input_id, index.time)
        return found

    def sample_from_edges(self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None) -> Output:
        """Sample around the ends of edges, and of random ones."""

        def sample(seeds: Tensor | dict[str, Tensor], times: Tensor | dict[str, Tensor] | None) -> Output:
            if isinstance(seeds, Tensor):
                assert times is None or isinstance(times, Tensor)
                return self._sample({NODE_TYPE: seeds}, None if times is None else {NODE_TYPE: times})
            assert times is None or isinstance(times, dict)
            return self._sample(seeds, times)

        num_nodes = self._num_nodes if self._hetero else self._num_nodes[NODE_TYPE]
        return edge_sample(index, sample, num_nodes, self._sampler.options.disjoint, None, neg_sampling)

    def _sample(self, seeds: Mapping[str, Tensor], times: Mapping[str, Tensor] | None) -> Output:
        roots = {kind: ids.long().numpy() for kind, ids in seeds.items()}
        limits = None if times is None else {kind: time.long().numpy() for kind, time in times.items()}
        found = self._sampler.sample(roots, epoch=self.epoch, batch=next(self._calls), seed_time=limits)
        return typed_output(found) if self._hetero else plain_output(found)


def plain_output(found: Subgraph) -> SamplerOutput:
    """A subgraph of a homogeneous graph in PyG's terms."""
    row, col = as_tensor(found.edge_index[EDGE_TYPE])
    return SamplerOutput(
        node=as_tensor(found.node[NODE_TYPE]),
        row=row,
        col=col,
        edge=as_tensor(found.edge[EDGE_TYPE]),
        batch=None if found.batch is None else as_tensor(found.batch[NODE_TYPE]),
        num_sampled_nodes=found.num_sampled_nodes[NODE_TYPE],
        num_sampled_edges=found.num_sampled_edges[EDGE_TYPE],
    )


def typed_output(found: Subgraph) -> HeteroSamplerOutput:
    """A subgraph of a heterogeneous graph in PyG's terms."""
    index = {kind: as_tensor(pair) for kind, pair in found.edge_index.items()}
    return HeteroSamplerOutput(
        node={kind: as_tensor(ids) for kind, ids in found.node.items()},
        row={kind: pair[0] for kind, pair in index.items()},
        col={kind: pair[1] for kind, pair in index.items()},
        edge={kind: as_tensor(edge) for kind, edge in found.edge.items()},
        batch=None if found.batch is None else {kind: as_tensor(batch) for kind, batch in found.batch.items()},
        num_sampled_nodes=found.num_sampled_nodes,
        num_sampled_edges=found.num_sampled_edges,
    )
