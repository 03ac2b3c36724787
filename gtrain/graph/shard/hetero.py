"""The shard of a graph with types: the piece of it that one rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gtrain.graph.shard.graph import block_edges
from gtrain.graph.shard.nodes import ShardNodes, shard_nodes
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EdgeType


@dataclass(frozen=True)
class HeteroShard:
    """One part of a graph with types, with the edges of every type that point at its nodes.

    Each node type has local ids of its own: the shard's own nodes of that type first, then its halo, owner by owner.
    The halo of a type is the union over all edge types that start there, so that a node's row is fetched once for all
    of them. See :class:`~gtrain.graph.shard.nodes.ShardNodes` for global and local ids.

    Attributes:
        part: the part that this shard is, ``0 .. P-1``.
        num_parts: P.
        nodes: for each node type the nodes that this shard owns and reads. Every type is there, also one of which the
            part owns no node, or which no edge starts at (its halo is empty).
        edge_index: for each edge type (type of the sources, relation, type of the targets) int64 ``[2, E]``; row 0 the
            sources, local ids of the first type, own and halo; row 1 the targets, local ids of the last type, own only.
            Edges are grouped by the block of their source, block 0 first, and sorted by target and then source within
            a block; where they have ``edge_time``, by target, time and source. E may be 0.
        node_data: for each node type, tensors ``[n, ...]`` of the own nodes by name: ``orig_id`` (int64) always; ``x``
            (dense, or ``torch.sparse_csr``), ``y``, ``train_mask``, ``val_mask``, ``test_mask`` (bool) and others where
            the data has them.
        edge_data: for each edge type, tensors ``[E, ...]`` in the order of its ``edge_index`` by name: ``edge_id``
            (int64, the edge's position among those of its type in the source data) always; others where the data has
            them.

    No field is ever None. Held-out edges are no part of a shard.

    Example: parts 0 and 1 own one author (0 | 1) and two papers (0, 1 | 2, 3) each. Of the edges author writes paper
    0 -> 0 and 1 -> 1, and of the edges paper cites paper 2 -> 0 and 1 -> 0, part 0 has all, for they point at its
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
    """Verify one part of a store and open it; node tensors stay memory-mapped.

    Raises:
        StoreError: a file of the part is damaged.
    """
    store.verify(part)
    sources = {edge_type: store.edge("indices", part, edge_type).long() for edge_type in store.edge_types}
    nodes = {
        kind: shard_nodes(part, store.offsets_of(kind), (ids for edge, ids in sources.items() if edge[0] == kind))
        for kind in store.node_types
    }
    edge_index, edge_data = {}, {}
    for edge_type, ids in sources.items():
        names = [name for name in store.edge_tensors(edge_type) if name != "indices"]
        data = {name: store.edge(name, part, edge_type) for name in names}
        indptr = store.edge("indptr", part, edge_type)
        edge_index[edge_type], edge_data[edge_type] = block_edges(nodes[edge_type[0]], indptr, ids, data)
    node_data = {kind: {n: store.node(n, part, kind) for n in store.node_tensors(kind)} for kind in store.node_types}
    return HeteroShard(part, store.num_parts, nodes, edge_index, node_data, edge_data)
