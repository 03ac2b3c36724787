"""Graph shards: the part of a graph that one rank holds, homogeneous or heterogeneous."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from gtrain.graph.shard.nodes import ShardNodes, shard_nodes
from gtrain.graph.shard.whole import whole_edges, whole_indptr, whole_nodes
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EdgeType


@dataclass(frozen=True)
class GraphShard(ShardNodes):
    """One part of a homogeneous graph, with the edges that point at its nodes.

    :class:`~gtrain.graph.shard.nodes.ShardNodes` defines global, local and original ids, and documents ``part``,
    ``num_parts``, ``offsets``, ``blocks``, ``block_ptr`` and ``halo``. With n owned nodes, h halo nodes and E_p edges:

    Attributes:
        edge_index: int64 ``[2, E_p]``, local ids; row 0 the sources, ``0 .. n+h-1``, row 1 the targets, ``0 .. n-1``.
            Edges are grouped by the block of their source, block 0 first, and sorted by target and then source within
            a block; if the graph has ``edge_time``, by target, time and source.
        node_data: tensors ``[n, ...]`` of the owned nodes, by name: always ``orig_id`` (int64); if the data has them
            ``x`` (dense, or ``torch.sparse_csr``), ``y``, ``train_mask``, ``val_mask``, ``test_mask`` (bool) and
            others.
        edge_data: tensors ``[E_p, ...]`` in the order of ``edge_index``, by name: always ``edge_id`` (int64, the edge's
            position in the source data); if the data has them ``edge_weight``, ``edge_attr`` and others.

    No field is None; a tensor that the data lacks is absent from ``node_data`` or ``edge_data``.

    Example: two parts own the global ids 0, 1 and 2, 3. The edges 0 -> 1, 3 -> 1 and 2 -> 0 point at part 0, whose
    shard has ``blocks (0, 1)``, ``halo ([], [2, 3])``, ``block_ptr [0, 2, 4]`` and, since block 0 comes first,
    ``edge_index [[0, 2, 3], [1, 0, 1]]``.
    """

    edge_index: Tensor
    node_data: dict[str, Tensor]
    edge_data: dict[str, Tensor]


def load_shard(store: Store, part: int) -> GraphShard:
    """Verify one part of a homogeneous store and open it; node tensors stay memory-mapped.

    Raises:
        StoreError: a file of the part is damaged, or the graph is heterogeneous.
    """
    store.verify(part)
    return _shard(
        part,
        store.offsets,
        indptr=store.edge("indptr", part),
        indices=store.edge("indices", part).to(torch.int64),
        node_data={name: store.node(name, part) for name in store.node_tensors()},
        edge_data={name: store.edge(name, part) for name in store.edge_tensors() if name != "indices"},
    )


def load_whole(store: Store) -> GraphShard:
    """Verify a store and return the whole graph as one shard (part 0 of 1); local ids equal global ids.

    Raises:
        StoreError: a file is damaged, or the graph is heterogeneous.
    """
    if store.num_parts == 1:
        return load_shard(store, 0)
    for part in range(store.num_parts):
        store.verify(part)
    return _shard(
        0,
        torch.tensor([0, store.num_nodes]),
        indptr=whole_indptr(store),
        indices=whole_edges(store, "indices").to(torch.int64),
        node_data={name: whole_nodes(store, name) for name in store.node_tensors()},
        edge_data={name: whole_edges(store, name) for name in store.edge_tensors() if name != "indices"},
    )


def _shard(
    part: int,
    offsets: Tensor,
    indptr: Tensor,
    indices: Tensor,
    node_data: dict[str, Tensor],
    edge_data: dict[str, Tensor],
) -> GraphShard:
    """Build a shard from CSC edges with global source ids."""
    nodes = shard_nodes(part, offsets, [indices])
    edge_index, edge_data = block_edges(nodes, indptr, indices, edge_data)
    fields = {field.name: getattr(nodes, field.name) for field in dataclasses.fields(nodes)}
    return GraphShard(**fields, edge_index=edge_index, node_data=node_data, edge_data=edge_data)


def block_edges(
    sources: ShardNodes, indptr: Tensor, indices: Tensor, edge_data: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Convert CSC edges with global source ids to edges between local ids, grouped by the blocks of the sources.

    Args:
        sources: the nodes that the edges read.
        indptr: int64 ``[n + 1]``; the in-edges of the owned node i are ``indptr[i] .. indptr[i+1]-1``.
        indices: int64 ``[E_p]``, global ids.
        edge_data: tensors ``[E_p, ...]``.

    Returns:
        ``edge_index`` int64 ``[2, E_p]``, and ``edge_data`` in the same order.
    """
    target = torch.repeat_interleave(torch.arange(indptr.numel() - 1), indptr.diff())
    order, source = sources.by_block(indices)
    if order is None:
        return torch.stack([source, target]), edge_data
    return torch.stack([source, target[order]]), {name: tensor[order] for name, tensor in edge_data.items()}


@dataclass(frozen=True)
class HeteroShard:
    """One part of a heterogeneous graph, with the edges of every type that point at its nodes.

    Each node type has a separate local numbering: first the owned nodes of that type, then its halo, owner by owner.
    The halo of a type is the union over all edge types that start there, so that a node's row is fetched once for all
    of them. See :class:`~gtrain.graph.shard.nodes.ShardNodes` for global and local ids.

    Attributes:
        part: number of this part, ``0 .. P-1``.
        num_parts: P.
        nodes: for each node type, the owned nodes and the halo. Every type has an entry, even if the part owns no node
            of it, or if no edge starts at it (its halo is then empty).
        edge_index: for each edge type (type of the sources, relation, type of the targets) int64 ``[2, E]``; row 0 the
            sources, local ids of the first type, owned or halo; row 1 the targets, local ids of the last type, owned.
            Edges are grouped by the block of their source, block 0 first, and sorted by target and then source within
            a block; if they have ``edge_time``, by target, time and source. E may be 0.
        node_data: for each node type, tensors ``[n, ...]`` of the owned nodes by name: always ``orig_id`` (int64); if
            the data has them ``x`` (dense, or ``torch.sparse_csr``), ``y``, ``train_mask``, ``val_mask``,
            ``test_mask`` (bool) and others.
        edge_data: for each edge type, tensors ``[E, ...]`` in the order of its ``edge_index`` by name: always
            ``edge_id`` (int64, the edge's position among the edges of its type in the source data); others if the data
            has them.

    No field is None. Held-out edges are not in a shard.

    Example: parts 0 and 1 own one author (0 | 1) and two papers (0, 1 | 2, 3) each. Of the edges author writes paper
    0 -> 0 and 1 -> 1, and of the edges paper cites paper 2 -> 0 and 1 -> 0, part 0 has all, because they point at its
    papers. Its authors have ``halo ([], [1])`` and ``block_ptr [0, 1, 2]``, its papers ``halo ([], [2])`` and
    ``block_ptr [0, 2, 3]``; ``edge_index`` is ``[[0, 1], [0, 1]]`` for writes and, block 0 first, ``[[1, 2], [0, 0]]``
    for cites.
    """

    part: int
    num_parts: int
    nodes: dict[str, ShardNodes]
    edge_index: dict[EdgeType, Tensor]
    node_data: dict[str, dict[str, Tensor]]
    edge_data: dict[EdgeType, dict[str, Tensor]]


def load_hetero_shard(store: Store, part: int) -> HeteroShard:
    """Verify one part of a store and open it as a heterogeneous shard; node tensors stay memory-mapped.

    Raises:
        StoreError: a file of the part is damaged.
    """
    store.verify(part)
    sources = {edge_type: store.edge("indices", part, edge_type).long() for edge_type in store.edge_types}
    nodes = {
        name: shard_nodes(part, store.offsets_of(name), (ids for edge, ids in sources.items() if edge[0] == name))
        for name in store.node_types
    }
    edge_index, edge_data = {}, {}
    for edge_type, ids in sources.items():
        names = [name for name in store.edge_tensors(edge_type) if name != "indices"]
        data = {name: store.edge(name, part, edge_type) for name in names}
        indptr = store.edge("indptr", part, edge_type)
        edge_index[edge_type], edge_data[edge_type] = block_edges(nodes[edge_type[0]], indptr, ids, data)
    node_data = {t: {name: store.node(name, part, t) for name in store.node_tensors(t)} for t in store.node_types}
    return HeteroShard(part, store.num_parts, nodes, edge_index, node_data, edge_data)
