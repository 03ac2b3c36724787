"""A partitioned graph as PyG's own loaders see it: a feature store and a graph store. ::

    feature_store, graph_store = ShardFeatureStore(features, store), ShardGraphStore(store, hosted)
    loader = NodeLoader((feature_store, graph_store), sampler, input_nodes=("paper", ids), batch_size=128)

Nodes are named by global id and edges by global edge position (:class:`gtrain_pyg.ranks.parts.PartBook`). PyG
fetches no edge tensors from a feature store; ``transform=feature_store.with_edge_tensors`` does.

Loaders that fork workers (``num_workers``) can use these where all parts are hosted: connections to other ranks do not
outlive a fork.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

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
from gtrain_pyg.ranks.parts import Kind

Batch = TypeVar("Batch", Data, HeteroData)


class ShardFeatureStore(PygFeatureStore):
    """The node tensors of a feature store, of whatever part.

    A tensor's ``group_name`` is its node type, or None in a graph without types; its ``index`` a tensor or an array of
    global ids, a slice of them, one of them, or None for all.

    Args:
        features: serves the tensors; those that it was made with are the store's.
        store: the graph.
    """

    def __init__(self, features: FeatureStore, store: Store) -> None:
        super().__init__()
        self._features, self._hetero = features, store.is_hetero

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """Each node tensor there is."""
        return [
            TensorAttr(kind if self._hetero else None, name)
            for kind, names in self._features.names.items()
            if isinstance(kind, str)
            for name in names
        ]

    def with_edge_tensors(self, batch: Batch) -> Batch:
        """Add the edge tensors to a batch of PyG's loaders, by its ``e_id``."""
        stores = {kind: batch[kind] for kind in batch.edge_types} if isinstance(batch, HeteroData) else {}
        stores = stores or {EDGE_TYPE: batch}
        ids: dict[Kind, Any] = {kind: edges.e_id.numpy() for kind, edges in stores.items() if "e_id" in edges}
        wanted = {kind: names for kind, names in self._features.names.items() if kind in ids}
        for kind, tensors in self._features.prefetch(ids, names=wanted).get().items():
            for name, tensor in tensors.items():
                stores[kind][name] = tensor
        return batch

    def _get_tensor(self, attr: TensorAttr) -> Tensor | None:
        return self._multi_get_tensor([attr])[0]

    def _multi_get_tensor(self, attrs: list[TensorAttr]) -> list[Tensor | None]:
        """All tensors at once: those of equal ids with one look-up, the remote rows with one request to each owner."""
        found: list[Tensor | None] = [None] * len(attrs)
        places: dict[tuple[str, int], list[int]] = {}
        for i, attr in enumerate(attrs):
            kind = attr.group_name or NODE_TYPE
            if attr.attr_name in self._features.names.get(kind, ()):
                places.setdefault((kind, id(attr.index)), []).append(i)
        for (kind, _), members in places.items():
            names = [str(attrs[i].attr_name) for i in members]
            ids = _ids(attrs[members[0]].index, self._features.shape(kind, names[0])[0])
            made = self._features.prefetch({kind: ids}, names={kind: names}).get()[kind]
            for i, name in zip(members, names, strict=True):
                found[i] = made[name]
        return found

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        kind, name = attr.group_name or NODE_TYPE, attr.attr_name
        if name not in self._features.names.get(kind, ()):
            return None
        rows, *shape = self._features.shape(kind, name)
        return (rows if attr.index is None else len(_ids(attr.index, rows)), *shape)

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> NoReturn:
        raise _read_only()

    def _remove_tensor(self, attr: TensorAttr) -> NoReturn:
        raise _read_only()


class ShardGraphStore(GraphStore):
    """The edges of all parts by column (CSC), as global ids, where this rank hosts all parts.

    PyG's loaders ask for the edges only when they are given no edges to draw seeds from; sampling never does.

    Args:
        store: the graph.
        hosted: the parts whose files this rank reads.
    """

    def __init__(self, store: Store, hosted: Sequence[int]) -> None:
        super().__init__()
        self._store, self._hosted = store, sorted(hosted)

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        """Each edge type there is; None in a graph without types."""
        return [self._attr(kind) for kind in self._store.edge_types]

    def _attr(self, kind: EdgeType) -> EdgeAttr:
        size = (self._store.num_nodes_of(kind[0]), self._store.num_nodes_of(kind[2]))
        return EdgeAttr(kind if self._store.is_hetero else None, EdgeLayout.CSC, is_sorted=True, size=size)

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[Tensor, Tensor] | None:
        """Sources int64 ``[E]``, and where each target's begin, int64 ``[N + 1]``; a copy."""
        kind = EDGE_TYPE if edge_attr.edge_type is None else edge_attr.edge_type
        if kind not in self._store.edge_types or edge_attr.layout != EdgeLayout.CSC:
            return None
        parts = range(self._store.num_parts)
        if missing := [part for part in parts if part not in self._hosted]:
            raise DataError(
                f"the whole edge_index of {kind} was asked for, and this rank reads parts {self._hosted} of "
                f"{len(parts)}: part {missing[0]} is another rank's",
                hint="give the loader the edges to draw seeds from, or set strategy.transport=shm within a machine",
            )
        indptr = [self._store.edge("indptr", part, kind) for part in parts]
        starts = np.cumsum([0, *(int(pointers[-1]) for pointers in indptr)]).tolist()
        columns = [pointers[:-1] + start for pointers, start in zip(indptr, starts, strict=False)]
        rows = torch.cat([self._store.edge("indices", part, kind) for part in parts])
        return rows.long(), torch.cat([*columns, torch.tensor([starts[-1]])])

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> NoReturn:
        raise _read_only()

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> NoReturn:
        raise _read_only()


def _ids(index: Any, rows: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What PyG may give as an index, as an array of ids."""
    if index is None or isinstance(index, slice):
        return np.arange(rows)[slice(None) if index is None else index]
    return np.atleast_1d(np.asarray(index)).astype(np.int64, copy=False)


def _read_only() -> DataError:
    return DataError(
        "a partitioned store cannot be changed through PyG's FeatureStore and GraphStore",
        hint="put the tensor into the source data, and have the store made anew",
    )
