"""Assemble the whole graph from all parts of a store, with nodes in the order of the global ids."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from gtrain.graph.store import Store
from gtrain.graph.store.manifest import HELD_OUT, EdgeType
from gtrain.graph.store.tables import csr_tensor


def load_whole_hetero(store: Store) -> HeteroData:
    """Verify a store and return the whole graph.

    Returns:
        A ``HeteroData`` in global ids. For each node type: ``num_nodes``, ``orig_id`` and the data's tensors. For each
        edge type: ``edge_index`` (int64 ``[2, E]``, ordered by target, then time if edges have times, then source),
        ``edge_id`` and the data's tensors; and if a split holds edges out, ``train_edge_index``, ``val_edge_index`` or
        ``test_edge_index``, and their tensors with the same prefix, in the order of the source data.

    Raises:
        StoreError: a file is damaged.
    """
    for part in range(store.num_parts):
        store.verify(part)
    data = HeteroData()
    for node_type in store.node_types:
        data[node_type].num_nodes = store.num_nodes_of(node_type)
        for name in store.node_tensors(node_type):
            data[node_type][name] = whole_nodes(store, name, node_type)
    for edge_type in store.edge_types:
        edges = data[edge_type]
        degrees = whole_indptr(store, edge_type).diff()
        targets = torch.repeat_interleave(torch.arange(degrees.numel()), degrees)
        edges.edge_index = torch.stack([whole_edges(store, "indices", edge_type).to(torch.int64), targets])
        for name in store.edge_tensors(edge_type):
            if name != "indices":
                edges[name] = whole_edges(store, name, edge_type)
        for split in HELD_OUT:
            columns = held_out_edges(store, split, edge_type)
            if columns:
                edges[f"{split}_edge_index"] = torch.stack([columns.pop("source"), columns.pop("target")])
            for name, column in columns.items():
                edges[f"{split}_{name}"] = column
    return data


def held_out_edges(store: Store, split: str, edge_type: EdgeType | None = None) -> dict[str, Tensor]:
    """Return the held-out edges of all parts, in the order of the source data.

    Args:
        store: the store.
        split: ``train``, ``val`` or ``test``.
        edge_type: the edge type; None means the only one.

    Returns:
        ``source`` and ``target`` (global ids, int64 ``[E_split]``) and the data's tensors (``edge_type``...) by name;
        empty if the split holds out no edges.
    """
    names = store.held_out_tensors(split, edge_type)
    if not names:
        return {}
    parts = range(store.num_parts)
    columns = {name: torch.cat([store.held_out(name, part, split, edge_type) for part in parts]) for name in names}
    order = torch.argsort(columns.pop("edge_id"))
    return {name: column[order] for name, column in columns.items()}


def whole_nodes(store: Store, name: str, node_type: str | None = None) -> Tensor:
    """Return a node tensor of all parts, dense or ``torch.sparse_csr``."""
    pieces = [store.node(name, part, node_type) for part in range(store.num_parts)]
    if len(pieces) == 1:
        return pieces[0]
    if pieces[0].layout == torch.strided:
        return torch.cat(pieces)
    rows = torch.cat([piece.crow_indices().diff() for piece in pieces])
    indptr = torch.cat([rows.new_zeros(1), rows.cumsum(0, dtype=rows.dtype)])
    indices = torch.cat([piece.col_indices() for piece in pieces])
    values = torch.cat([piece.values() for piece in pieces])
    return csr_tensor(indptr, indices, values, (rows.numel(), pieces[0].size(1)))


def whole_edges(store: Store, name: str, edge_type: EdgeType | None = None) -> Tensor:
    """Return an edge tensor of all parts."""
    pieces = [store.edge(name, part, edge_type) for part in range(store.num_parts)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def whole_indptr(store: Store, edge_type: EdgeType | None = None) -> Tensor:
    """Return the column starts over the targets of all parts, ``[N + 1]``."""
    degrees = torch.cat([store.edge("indptr", part, edge_type).diff() for part in range(store.num_parts)])
    return torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
