"""The graph shard: the piece of a graph that one rank holds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from gtrain.graph.shard.nodes import ShardNodes, shard_nodes
from gtrain.graph.shard.whole import whole_edges, whole_indptr, whole_nodes
from gtrain.graph.store import Store


@dataclass(frozen=True)
class GraphShard(ShardNodes):
    """One part of a graph, with the edges that point at its nodes.

    Its nodes are those of :class:`~gtrain.graph.shard.nodes.ShardNodes`, which says what global, local and orig ids
    are, and documents ``part``, ``num_parts``, ``offsets``, ``blocks``, ``block_ptr`` and ``halo``. With n own nodes,
    h halo nodes and E_p edges:

    Attributes:
        edge_index: int64 ``[2, E_p]``, local ids; row 0 the sources, ``0 .. n+h-1``, row 1 the targets, ``0 .. n-1``.
            Edges are grouped by the block of their source, block 0 first, and sorted by target and then source within
            a block; where the graph has ``edge_time``, by target, time and source.
        node_data: tensors ``[n, ...]`` of the own nodes, by name: ``orig_id`` (int64) always; ``x`` (dense, or
            ``torch.sparse_csr``), ``y``, ``train_mask``, ``val_mask``, ``test_mask`` (bool) and others where the data
            has them.
        edge_data: tensors ``[E_p, ...]`` in the order of ``edge_index``, by name: ``edge_id`` (int64, the edge's
            position in the source data) always; ``edge_weight``, ``edge_attr`` and others where the data has them.

    No field is ever None; what the data does not have is absent from ``node_data`` or ``edge_data``.

    Example: two parts own the global ids 0, 1 and 2, 3. The edges 0 -> 1, 3 -> 1 and 2 -> 0 point at part 0, whose
    shard has ``blocks (0, 1)``, ``halo ([], [2, 3])``, ``block_ptr [0, 2, 4]`` and, since block 0 comes first,
    ``edge_index [[0, 2, 3], [1, 0, 1]]``.
    """

    edge_index: Tensor
    node_data: dict[str, Tensor]
    edge_data: dict[str, Tensor]


def load_shard(store: Store, part: int) -> GraphShard:
    """Verify one part of a store and open it; node tensors stay memory-mapped.

    Raises:
        StoreError: a file of the part is damaged.
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
    """Verify a store and return the whole graph as one shard, part 0 of 1, its nodes in the order of the global ids.

    Raises:
        StoreError: a file is damaged, or the graph has node types or edge types.
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
    """Turn in-edges by column, with global sources, into a shard."""
    nodes = shard_nodes(part, offsets, [indices])
    edge_index, edge_data = block_edges(nodes, indptr, indices, edge_data)
    fields = {field.name: getattr(nodes, field.name) for field in dataclasses.fields(nodes)}
    return GraphShard(**fields, edge_index=edge_index, node_data=node_data, edge_data=edge_data)


def block_edges(
    sources: ShardNodes, indptr: Tensor, indices: Tensor, edge_data: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Turn in-edges by column, with global sources, into edges between local ids, grouped by the sources' blocks.

    Args:
        sources: the nodes that the edges read.
        indptr: int64 ``[n + 1]``; the in-edges of the own node i are ``indptr[i] .. indptr[i+1]-1``.
        indices: int64 ``[E_p]``, global ids.
        edge_data: tensors ``[E_p, ...]``.

    Returns:
        int64 ``[2, E_p]``, and ``edge_data`` in the same order.
    """
    target = torch.repeat_interleave(torch.arange(indptr.numel() - 1), indptr.diff())
    order, source = sources.by_block(indices)
    if order is None:
        return torch.stack([source, target]), edge_data
    return torch.stack([source, target[order]]), {name: tensor[order] for name, tensor in edge_data.items()}
