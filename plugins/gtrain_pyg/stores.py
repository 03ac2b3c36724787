"""A partitioned graph for PyG's own loaders: a feature store and a graph store. ::

    feature_store, graph_store = ShardFeatureStore(features, store), ShardGraphStore(store, hosted)
    loader = NodeLoader((feature_store, graph_store), sampler, input_nodes=("paper", ids), batch_size=128)

Nodes are identified by global id and edges by global edge position (:class:`gtrain_pyg.ranks.parts.PartBook`). PyG
does not fetch edge tensors from a feature store; ``transform=feature_store.with_edge_tensors`` does.

Loaders that fork workers (``num_workers``) can use these if all parts are hosted: connections to other ranks do not
survive a fork.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, GraphStore, HeteroData, TensorAttr
from torch_geometric.data import FeatureStore as PygFeatureStore
from torch_geometric.data.graph_store import EdgeAttr, EdgeLayout

from gtrain.errors import DataError
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EDGE_TYPE, NODE_TYPE, EdgeType
from gtrain_pyg.features.feature_store import FeatureStore
from gtrain_pyg.ranks.parts import Array

Batch = TypeVar("Batch", Data, HeteroData)


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
