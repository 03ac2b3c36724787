"""A partitioned graph for PyG's own loaders: a feature store, a graph store and a sampler over the ranks' parts. ::

    feature_store, graph_store = ShardFeatureStore(features, store), ShardGraphStore(store, hosted)
    loader = NodeLoader((feature_store, graph_store), sampler, input_nodes=("paper", ids), batch_size=128)

Nodes are identified by global id and edges by global edge position (:class:`gtrain_pyg.peers.PartBook`). PyG
does not fetch edge tensors from a feature store; ``transform=feature_store.with_edge_tensors`` does.

Loaders that fork workers (``num_workers``) can use these if all parts are hosted: connections to other ranks do not
survive a fork.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, GraphStore, HeteroData, TensorAttr
from torch_geometric.data import FeatureStore as PygFeatureStore
from torch_geometric.data.graph_store import EdgeAttr, EdgeLayout
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
    SamplerOutput,
)
from torch_geometric.sampler.neighbor_sampler import edge_sample

from gtrain.errors import DataError
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EDGE_TYPE, NODE_TYPE, EdgeType
from gtrain.strategy.group import Group
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.features.feature_store import FeatureStore
from gtrain_pyg.graph_structure import GraphStructure
from gtrain_pyg.peers import Array, Hosting, NodeOrEdgeType, PartBook, Peers
from gtrain_pyg.sampling.sampler import DistributedSampler, Subgraph
from gtrain_pyg.seeds import as_tensor

Batch = TypeVar("Batch", Data, HeteroData)

Output: TypeAlias = SamplerOutput | HeteroSamplerOutput


class ShardFeatureStore(PygFeatureStore):
    """The node tensors of a feature store, of any part.

    A tensor's ``group_name`` is its node type, or None in a homogeneous graph; its ``index`` a tensor or an array of
    global ids, a slice, one id, or None for all.

    Args:
        features: serves the tensors, those of its ``names``.
        store: the graph.
    """

    def __init__(self, features: FeatureStore, store: Store) -> None:
        super().__init__()
        self._features, self._hetero = features, store.is_hetero

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """Return all node tensors."""
        return [
            TensorAttr(node_type if self._hetero else None, name)
            for node_type, names in self._features.names.items()
            if isinstance(node_type, str)
            for name in names
        ]

    def with_edge_tensors(self, batch: Batch) -> Batch:
        """Add the edge tensors to a batch of PyG's loaders, by its ``e_id``, and return it."""
        stores: dict[Any, Any] = {EDGE_TYPE: batch}
        if isinstance(batch, HeteroData):
            stores = {edge_type: batch[edge_type] for edge_type in batch.edge_types}
        ids = {edge_type: edges.e_id.numpy() for edge_type, edges in stores.items() if "e_id" in edges}
        names = {edge_type: self._features.names[edge_type] for edge_type in ids if edge_type in self._features.names}
        for edge_type, tensors in self._features.prefetch(ids, names=names).get().items():
            for name, tensor in tensors.items():
                stores[edge_type][name] = tensor
        return batch

    def _get_tensor(self, attr: TensorAttr) -> Tensor | None:
        return self._multi_get_tensor([attr])[0]

    def _multi_get_tensor(self, attrs: list[TensorAttr]) -> list[Tensor | None]:
        """Return all tensors at once: one look-up for those of equal ids, one request per owner for remote rows."""
        tensors: list[Tensor | None] = [None] * len(attrs)
        by_index: dict[tuple[str, int], list[int]] = {}
        for i, attr in enumerate(attrs):
            node_type = attr.group_name or NODE_TYPE
            if attr.attr_name in self._features.names.get(node_type, ()):
                by_index.setdefault((node_type, id(attr.index)), []).append(i)
        for (node_type, _), members in by_index.items():
            names = [str(attrs[i].attr_name) for i in members]
            ids = _ids(attrs[members[0]].index, self._features.shape(node_type, names[0])[0])
            rows = self._features.prefetch({node_type: ids}, names={node_type: names}).get()[node_type]
            for i, name in zip(members, names, strict=True):
                tensors[i] = rows[name]
        return tensors

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        node_type, name = attr.group_name or NODE_TYPE, attr.attr_name
        if name not in self._features.names.get(node_type, ()):
            return None
        rows, *shape = self._features.shape(node_type, name)
        return (rows if attr.index is None else len(_ids(attr.index, rows)), *shape)

    def _put_tensor(self, *_: Any) -> bool:
        raise _read_only()

    _remove_tensor = _put_tensor


class ShardGraphStore(GraphStore):
    """The edges of all parts by column (CSC), as global ids, if this rank hosts all parts.

    PyG's loaders read the edges only if the caller passes no seed edges; sampling never does.

    Args:
        store: the graph.
        hosted: the parts whose files this rank reads.
    """

    def __init__(self, store: Store, hosted: Sequence[int]) -> None:
        super().__init__()
        self._store, self._hosted = store, sorted(hosted)

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        """Return all edge types; None in a homogeneous graph."""
        return [self._attr(edge_type) for edge_type in self._store.edge_types]

    def _attr(self, edge_type: EdgeType) -> EdgeAttr:
        size = (self._store.num_nodes_of(edge_type[0]), self._store.num_nodes_of(edge_type[2]))
        return EdgeAttr(edge_type if self._store.is_hetero else None, EdgeLayout.CSC, is_sorted=True, size=size)

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[Tensor, Tensor] | None:
        """Return a copy of the sources, int64 ``[E]``, and of the targets' column pointers, int64 ``[N + 1]``."""
        edge_type = EDGE_TYPE if edge_attr.edge_type is None else edge_attr.edge_type
        if edge_type not in self._store.edge_types or edge_attr.layout != EdgeLayout.CSC:
            return None
        parts = range(self._store.num_parts)
        if missing := [part for part in parts if part not in self._hosted]:
            raise DataError(
                f"the whole edge_index of {edge_type} was requested, and this rank hosts parts {self._hosted} of "
                f"{len(parts)}: another rank hosts part {missing[0]}",
                hint="give the loader the seed edges, or set strategy.transport=shm within a machine",
            )
        indptr = [self._store.edge("indptr", part, edge_type) for part in parts]
        starts = np.cumsum([0, *(int(pointers[-1]) for pointers in indptr)]).tolist()
        columns = [pointers[:-1] + start for pointers, start in zip(indptr, starts, strict=False)]
        rows = torch.cat([self._store.edge("indices", part, edge_type) for part in parts])
        return rows.long(), torch.cat([*columns, torch.tensor([starts[-1]])])

    def _put_edge_index(self, *_: Any) -> bool:
        raise _read_only()

    _remove_edge_index = _put_edge_index


def _ids(index: Any, rows: int) -> Array:
    """Return the ids of any index that PyG may pass, int64 ``[n]``."""
    if index is None or isinstance(index, slice):
        return np.arange(rows)[slice(None) if index is None else index]
    return np.atleast_1d(np.asarray(index)).astype(np.int64, copy=False)


def _read_only() -> DataError:
    return DataError(
        "a partitioned store cannot be changed through PyG's FeatureStore and GraphStore",
        hint="put the tensor into the source data, and prepare the store again",
    )


class ShardSampler(BaseSampler):
    """Lets ``torch_geometric.loader.NodeLoader`` and ``LinkLoader`` sample from a partitioned graph.

    Nodes are global ids and edges are global edge positions, which :class:`ShardFeatureStore` and
    :class:`ShardGraphStore` understand. Each call draws different neighbours.

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
