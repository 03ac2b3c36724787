"""The result of sampling."""

from __future__ import annotations

from dataclasses import dataclass

from gtrain.graph.store.manifest import EdgeType
from gtrain_pyg.ranks.parts import Array


@dataclass(frozen=True)
class Subgraph:
    """A sampled subgraph, by type; every node type and edge type of the graph is listed. All arrays are int64.

    A *local id* numbers the n sampled nodes of a type in order of discovery: the seeds first, then hop by hop. Within a
    hop, the e edges of a type are ordered by the part that owns the target, then by the target's local id; so the
    order does not depend on the rank that samples. A homogeneous graph has the node type ``node`` and the edge type
    ``(node, to, node)``.

    Attributes:
        node: ``[n]``, global ids. Disjoint: a node is listed once per subgraph.
        edge_index: ``[2, e]``, local ids; row 0 the sources, of the edge type's first node type, row 1 the targets, of
            its last.
        edge: ``[e]``, global edge positions. Bidirectional: an added edge has the position of the sampled edge
            whose reverse it is; an edge type that was completed from another one is not listed.
        batch: ``[n]``, the seed whose subgraph a node is in, counted through the seeds' types in order; None unless
            disjoint.
        seeds: ``[s]``, local ids of the seeds in the caller's order, by the seeds' node types: ``0 .. s-1``, unless the
            subgraphs are not disjoint and the seeds contain duplicates, which are listed once.
        num_sampled_nodes: number of hops + 1 entries: distinct seeds, then the new nodes of each hop.
        num_sampled_edges: edges of each hop; only the total unless directional.
    """

    node: dict[str, Array]
    edge_index: dict[EdgeType, Array]
    edge: dict[EdgeType, Array]
    batch: dict[str, Array] | None
    seeds: dict[str, Array]
    num_sampled_nodes: dict[str, list[int]]
    num_sampled_edges: dict[EdgeType, list[int]]
