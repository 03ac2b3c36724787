"""The samplers' results, with the fields of PyG's ``SamplerOutput`` and ``HeteroSamplerOutput``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

EdgeType = tuple[str, str, str]
Array = NDArray[Any]


@dataclass(frozen=True)
class Sample:
    """A sampled subgraph of a homogeneous graph; all arrays int64.

    A *local id* numbers the n sampled nodes in order of discovery: the seeds first, then hop by hop. With s seeds and e
    sampled edges, which are in the order of the hops and, within a hop, of their targets:

    Attributes:
        node: ``[n]``, ids in the graph. Disjoint: a node is listed once per subgraph that contains it.
        row: ``[e]``, local ids of the edges' sources.
        col: ``[e]``, local ids of the edges' targets; messages flow from ``row`` to ``col``.
        edge: ``[e]``, positions of the edges in the graph's columns.
        edge_id: ``[e]``, positions of the edges in the source data; None if the columns have no ``edge_id``.
        batch: ``[n]``, the position of the seed, ``0 .. s-1``, whose subgraph contains the node; None unless disjoint.
        seeds: ``[s]``, local ids of the seeds: ``0 .. s-1``, unless a seed repeats and subgraphs are not disjoint; then
            that node is listed once.
        num_sampled_nodes: hops + 1 entries: the number of distinct seeds, then of new nodes of each hop.
        num_sampled_edges: number of edges of each hop; induced: one entry, the number of all edges.
    """

    node: Array
    row: Array
    col: Array
    edge: Array
    edge_id: Array | None
    batch: Array | None
    seeds: Array
    num_sampled_nodes: list[int]
    num_sampled_edges: list[int]


@dataclass(frozen=True)
class HeteroSample:
    """A sampled subgraph of a heterogeneous graph: the fields of :class:`Sample` by node type or edge type.

    Every node type and edge type of the graph has an entry; arrays may be empty. Local ids are per node type. ``row``
    of the edge type (source, relation, target) holds local ids of ``source``, ``col`` of ``target``.

    Attributes:
        node, batch, num_sampled_nodes: by node type. ``batch`` is None unless disjoint.
        seeds: by the node types of the seeds. Disjoint: subgraphs are numbered through these types in order.
        row, col, edge, edge_id, num_sampled_edges: by edge type. ``edge_id`` has the edge types whose columns have it.
    """

    node: dict[str, Array]
    row: dict[EdgeType, Array]
    col: dict[EdgeType, Array]
    edge: dict[EdgeType, Array]
    edge_id: dict[EdgeType, Array]
    batch: dict[str, Array] | None
    seeds: dict[str, Array]
    num_sampled_nodes: dict[str, list[int]]
    num_sampled_edges: dict[EdgeType, list[int]]
