"""What a thread knows of the batch that it samples: nodes and edges so far, and the frontier by owner."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.graph.sampling import scratch
from gtrain.graph.sampling.hop import Frontier
from gtrain_pyg.sampling.kernels import by_owner
from gtrain_pyg.structure.hosted import Structure

Array = NDArray[Any]


class SamplerState:
    """Memory of one thread, reused from batch to batch.

    Args:
        structure: of the graph.
        disjoint: whether each seed has a subgraph of its own.
        pool: of the edges' memory.

    Attributes:
        nodes: by node type, the nodes found so far.
        edges: by edge type, the edges so far: ``row`` and ``column`` local ids, ``position`` global edge positions.
        picked: by edge type, what was chosen in this hop of other parts' edges that are copied.
        frontiers: by node type, the frontier.
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
        self.frontiers = {name: FrontierByOwner(book.offsets[name]) for name in structure.node_types}
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
        for name, cut in self.frontiers.items():
            if name in wanted and low[name] < high[name]:
                numbers = self.spans.numbers(low[name], high[name])
                cut.begin(self.nodes[name], numbers, low[name], disjoint=self._disjoint, seed_time=self.seed_time)
            else:
                cut.clear()


class FrontierByOwner:
    """The f frontier nodes of one type, grouped by part, in the order of the frontier within each.

    Args:
        offsets: int64 ``[P + 1]``, where the parts of the type begin.

    Attributes:
        bounds: ``P + 1`` places; part p has the nodes ``bounds[p] .. bounds[p+1]-1`` of the grouped frontier.
    """

    def __init__(self, offsets: Array) -> None:
        self._offsets = offsets
        self._owner = np.empty(0, np.int16 if offsets.size < 1 << 15 else np.int32)
        self._starts = np.zeros(offsets.size, np.int64)
        self._target, self._node, self._subgraph, self._limit = (scratch.empty() for _ in range(4))
        self._whole = Frontier(*(scratch.empty() for _ in range(3)))
        self.clear()

    def begin(self, nodes: scratch.Nodes, numbers: Array, low: int, *, disjoint: bool, seed_time: Array | None) -> None:
        """Group the nodes found from local id ``low`` on.

        Args:
            nodes: the nodes found so far.
            numbers: their local ids, from ``low`` on.
            low: the local id of the frontier's first node.
            disjoint: whether nodes have subgraphs.
            seed_time: the time of each subgraph's seed; None without times.
        """
        size = numbers.size
        node, target, places = nodes.node[low : low + size], numbers, None
        if self._starts.size > 2:
            node, target = self._group(node, low)
            places = target - low if disjoint else None
            self.bounds = self._starts.tolist()
        else:
            self.bounds = [0, size]
        subgraph, limit = self._subgraph[:0], None
        if disjoint:
            subgraph = nodes.batch[low : low + size]
            if places is not None:
                self._subgraph = scratch.grown(self._subgraph, size)
                subgraph = np.take(subgraph, places, out=self._subgraph[:size], mode="clip")
        if seed_time is not None:
            self._limit = scratch.grown(self._limit, size)
            limit = np.take(seed_time, subgraph, out=self._limit[:size], mode="clip")
        self._whole = Frontier(node, subgraph, target, limit)

    def clear(self) -> None:
        """Have no nodes."""
        self.bounds = [0] * self._starts.size

    def size(self, part: int) -> int:
        """How many nodes a part owns."""
        return self.bounds[part + 1] - self.bounds[part]

    def piece(self, part: int) -> Frontier:
        """A part's share; nodes by their numbers within the part, targets by their local ids."""
        return self._whole[self.bounds[part] : self.bounds[part + 1]]

    def _group(self, node: Array, low: int) -> tuple[Array, Array]:
        size = node.size
        self._owner, self._node = scratch.grown(self._owner, size), scratch.grown(self._node, size)
        self._target = scratch.grown(self._target, size)
        by_owner(node, low, self._offsets, self._owner, self._starts, self._target, self._node)
        return self._node[:size], self._target[:size]


class BatchEdges(scratch.Edges):
    """Edges whose arrays become those of the sampled subgraph, without a copy of most of them.

    Args:
        pool: where their memory comes from; see ``gtrain_pyg.buffers.BufferPool``.
    """

    def __init__(self, pool: Any) -> None:
        super().__init__()
        self._pool = pool
        self._ends = np.empty((2, 0), np.int64)  # row and column
        self._likely = 0  # edges of a batch

    def begin(self) -> None:
        """Have no edges and no memory, for a new batch."""
        self._hold(np.empty((2, 0), np.int64), np.empty(0, np.int64))
        self.size = 0

    def reserve(self, extra: int) -> None:
        """Make room for more edges."""
        size = self.size + extra
        if size <= self.row.size:
            return
        room = max(size, self._likely, self.row.size * 3 // 2)
        old = self.row, self.column, self.position
        self._hold(self._pool.take((2, room), np.int64), self._pool.take((room,), np.int64))
        for new, kept in zip((self.row, self.column, self.position), old, strict=True):
            new[: self.size] = kept[: self.size]

    def move(self, edges: slice, start: int) -> None:
        """Move edges to where ``start`` is; there must be room, and they may overlap with where they were."""
        for array in (self.row, self.column, self.position):
            _move(array, edges, start)

    def hand_out(self) -> tuple[Array, Array]:
        """``edge_index`` ``[2, size]`` and ``position`` ``[size]``; forgets both."""
        self._likely = self.size + self.size // 16
        flat, room = self._ends.reshape(-1), self._ends.shape[1]
        _move(flat, slice(room, room + self.size), self.size)
        index, position = flat[: 2 * self.size].reshape(2, self.size), self.position[: self.size]
        self.begin()
        return index, position

    def _hold(self, ends: Array, position: Array) -> None:
        self._ends, (self.row, self.column), self.position = ends, ends, position


def _move(array: Array, items: slice, start: int) -> None:
    """Within one contiguous array; numpy would make a copy first."""
    if items.start != start:
        first, width = array.ctypes.data, array.itemsize
        ctypes.memmove(first + start * width, first + items.start * width, (items.stop - items.start) * width)
