"""What a thread knows of the batch that it samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from gtrain.graph.sampling import scratch
from gtrain_pyg.edges import BatchEdges
from gtrain_pyg.sampling.frontier import Cut
from gtrain_pyg.structure.hosted import Structure

Array = NDArray[Any]


class Tables:
    """Memory of one thread, reused from batch to batch.

    Args:
        structure: of the graph.
        disjoint: whether each seed has a subgraph of its own.
        pool: of the edges' memory.

    Attributes:
        nodes: by node type, the nodes found so far.
        edges: by edge type, the edges so far: ``row`` and ``column`` local ids, ``position`` global edge positions.
        picked: by edge type, what was chosen in this hop of other parts' edges that are copied.
        cuts: by node type, the frontier.
        spans: of the kernels.
        seed_time: the time of each subgraph's seed; None without times.
    """

    def __init__(self, structure: Structure, disjoint: bool, pool: Any) -> None:
        book = structure.book
        sizes = {name: book.count(name) for name in structure.node_types}
        hashed = {name: disjoint or size > scratch.DENSE_LIMIT for name, size in sizes.items()}
        self.nodes = {name: scratch.Nodes(size, hashed[name]) for name, size in sizes.items()}
        self.edges = {kind: BatchEdges(pool) for kind in structure.edge_types}
        self.picked = {kind: scratch.Edges() for kind in structure.edge_types}
        self.cuts = {name: Cut(book.offsets[name]) for name in structure.node_types}
        self.spans = scratch.Spans()
        self.seed_time: Array | None = None
        self._disjoint = disjoint

    def begin(self, num_subgraphs: int, seed_time: Array | None) -> None:
        """Forget everything, for a new batch."""
        self.seed_time = seed_time
        for nodes in self.nodes.values():
            nodes.begin(max(1, num_subgraphs))
        for edges in self.edges.values():
            edges.begin()

    def cut(self, low: Mapping[str, int], high: Mapping[str, int], wanted: set[str]) -> None:
        """Group the frontiers of these node types by owner; those of others are empty."""
        for name, cut in self.cuts.items():
            if name in wanted and low[name] < high[name]:
                numbers = self.spans.numbers(low[name], high[name])
                cut.begin(self.nodes[name], numbers, low[name], disjoint=self._disjoint, seed_time=self.seed_time)
            else:
                cut.clear()
