"""What a sampler returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from gtrain.graph.store.manifest import EdgeType

Array = NDArray[Any]


@dataclass(frozen=True)
class Subgraph:
    """A sampled subgraph, by type; every node type and edge type of the graph is listed. All arrays are int64.

    A *local id* numbers the n sampled nodes of a type in order of discovery: the seeds first, then hop by hop. Within a
    hop, the e edges of a type are ordered by the part that owns the target, then by the target's local id; so what is
    sampled is the same whoever samples it. A homogeneous graph has the one node type ``node`` and edge type
    ``(node, to, node)``.

    Attributes:
        node: ``[n]``, global ids. Disjoint: a node is listed once for each subgraph that it is in.
        edge_index: ``[2, e]``, local ids; row 0 the sources, of the edge type's first node type, row 1 the targets, of
            its last.
        edge: ``[e]``, global edge positions. Bidirectional: an added edge has the position of the sampled edge that it
            is the reverse of; an edge type that was completed from another one is not listed.
        batch: ``[n]``, the seed whose subgraph a node is in, counted through the seeds' types in order; None unless
            disjoint.
        seeds: ``[s]``, local ids of the seeds as given, by the types that seeds were given of. It is ``0 .. s-1``,
            unless a seed was given twice and the subgraphs are not disjoint: that node is then listed once.
        num_sampled_nodes: one number more than hops: distinct seeds, then new nodes of each hop.
        num_sampled_edges: edges of each hop; one number, that of all edges, unless directional.
    """

    node: dict[str, Array]
    edge_index: dict[EdgeType, Array]
    edge: dict[EdgeType, Array]
    batch: dict[str, Array] | None
    seeds: dict[str, Array]
    num_sampled_nodes: dict[str, list[int]]
    num_sampled_edges: dict[EdgeType, list[int]]
