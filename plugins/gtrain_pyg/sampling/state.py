"""The state of one thread's batch: the nodes and edges sampled so far, and the frontier grouped by owner."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from gtrain.graph.sampling import scratch
from gtrain.graph.sampling.hop import Frontier
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.graph_structure import GraphStructure
from gtrain_pyg.peers import Array
from gtrain_pyg.sampling.kernels import group_by_owner


class SamplerState:
    """Memory of one thread, reused from batch to batch.

    Args:
        structure: of the graph.
        disjoint: whether each seed has a separate subgraph.
        pool: memory of the edges.

    Attributes:
        nodes: by node type, the nodes sampled so far.
        edges: by edge type, the edges so far: ``row`` and ``column`` local ids, ``position`` global edge positions.
        copied: by edge type, the edges chosen in this hop from replicas of other parts.
        frontiers: by node type, the frontier.
        spans: scratch memory of the kernels.
        seed_time: the time of each subgraph's seed; None without times.
    """

    def __init__(self, structure: GraphStructure, disjoint: bool, pool: BufferPool) -> None:
        book, store = structure.book, structure.store
        self.nodes = {}
        for node_type in store.node_types:
            size = book.count(node_type)
            self.nodes[node_type] = scratch.NodeNumbering(size, disjoint or size > scratch.DENSE_LIMIT)
        self.edges = {edge_type: BatchEdges(pool) for edge_type in store.edge_types}
        self.copied = {edge_type: scratch.EdgeBuffer() for edge_type in store.edge_types}
        self.frontiers = {node_type: FrontierByOwner(book.offsets[node_type]) for node_type in store.node_types}
        self.spans = scratch.SpanBuffer()
        self.seed_time: Array | None = None
        self._disjoint = disjoint

    def begin(self, num_subgraphs: int, seed_time: Array | None) -> None:
        """Clear everything for a new batch."""
        self.seed_time = seed_time
        for nodes in self.nodes.values():
            nodes.reset(max(1, num_subgraphs))
        for edges in self.edges.values():
            edges.begin()

    def group_frontiers(self, low: Mapping[str, int], high: Mapping[str, int], node_types: set[str]) -> None:
        """Group the frontiers ``low .. high-1`` of these node types by owner, and clear those of other types."""
        for name, frontier in self.frontiers.items():
            if name in node_types and low[name] < high[name]:
                local_ids = self.spans.numbers(low[name], high[name])
                frontier.begin(self.nodes[name], local_ids, disjoint=self._disjoint, seed_time=self.seed_time)
            else:
                frontier.clear()


class FrontierByOwner:
    """The f frontier nodes of one type, grouped by part, in the order of the frontier within each.

    Args:
        offsets: int64 ``[P + 1]``, the first global id of each part.

    Attributes:
        bounds: ``P + 1`` numbers; part p has the nodes ``bounds[p] .. bounds[p+1]-1`` of the grouped frontier.
    """

    def __init__(self, offsets: Array) -> None:
        self._offsets = offsets
        # A rank number in 16 bits where it fits: the array is written and read once per hop.
        self._owner = np.empty(0, np.int16 if offsets.size < 1 << 15 else np.int32)
        self._starts = np.zeros(offsets.size, np.int64)
        self._target, self._node, self._subgraph, self._limit = (scratch.empty() for _ in range(4))
        self._grouped = Frontier(*(scratch.empty() for _ in range(3)))
        self.clear()

    def begin(self, nodes: scratch.NodeNumbering, local_ids: Array, *, disjoint: bool, seed_time: Array | None) -> None:
        """Group nodes by owner.

        Args:
            nodes: the nodes sampled so far.
            local_ids: int64 ``[f]``, consecutive local ids of the frontier's nodes.
            disjoint: whether nodes have subgraphs.
            seed_time: the time of each subgraph's seed; None without times.
        """
        size, low = local_ids.size, int(local_ids[0])
        node, target = nodes.node[low : low + size], local_ids
        subgraph = nodes.batch[low : low + size] if disjoint else self._subgraph[:0]
        # With a single part the frontier is grouped already.
        if self._starts.size > 2:
            self._owner, self._node = scratch.grown(self._owner, size), scratch.grown(self._node, size)
            self._target = scratch.grown(self._target, size)
            group_by_owner(node, low, self._offsets, self._owner, self._starts, self._target, self._node)
            node, target = self._node[:size], self._target[:size]
            if disjoint:
                self._subgraph = scratch.grown(self._subgraph, size)
                # mode="clip": with its own range check numpy would buffer the output.
                subgraph = np.take(subgraph, target - low, out=self._subgraph[:size], mode="clip")
            self.bounds = self._starts.tolist()
        else:
            self.bounds = [0, size]
        limit = None
        if seed_time is not None:
            self._limit = scratch.grown(self._limit, size)
            limit = np.take(seed_time, subgraph, out=self._limit[:size], mode="clip")
        self._grouped = Frontier(node, subgraph, target, limit)

    def clear(self) -> None:
        """Remove all nodes."""
        self.bounds = [0] * self._starts.size

    def size(self, part: int) -> int:
        """Return the number of nodes that a part owns."""
        return self.bounds[part + 1] - self.bounds[part]

    def of_part(self, part: int) -> Frontier:
        """Return a part's nodes, by their numbers within the part; targets are local ids."""
        return self._grouped[self.bounds[part] : self.bounds[part + 1]]


class BatchEdges(scratch.EdgeBuffer):
    """Edges whose arrays become those of the sampled subgraph, most of them without a copy.

    Args:
        pool: their memory.
    """

    def __init__(self, pool: BufferPool) -> None:
        super().__init__()
        self._pool = pool
        self._expected = 0  # edges of a batch
        self.begin()

    def begin(self) -> None:
        """Release the memory, for a new batch."""
        self._set_memory(np.empty((2, 0), np.int64), np.empty(0, np.int64))
        self.size = 0

    def reserve(self, extra: int) -> None:
        """Make room for more edges."""
        size = self.size + extra
        if size <= self.row.size:
            return
        # The last batch's size is a good guess, so that a batch rarely grows more than once.
        room = max(size, self._expected, self.row.size * 3 // 2)
        former = self.row, self.column, self.position
        self._set_memory(self._pool.take((2, room), np.int64), self._pool.take((room,), np.int64))
        for new, old in zip((self.row, self.column, self.position), former, strict=True):
            new[: self.size] = old[: self.size]

    def move(self, edges: slice, start: int) -> None:
        """Move edges to ``start``, where there must be room; the ranges may overlap."""
        for array in (self.row, self.column, self.position):
            _move(array, edges, start)

    def hand_over(self) -> tuple[Array, Array]:
        """Return ``edge_index`` ``[2, size]`` and ``position`` ``[size]``, and release both."""
        # A sixteenth more: batches differ a little in size.
        self._expected = self.size + self.size // 16
        flat, room = self._ends.reshape(-1), self._ends.shape[1]
        _move(flat, slice(room, room + self.size), self.size)  # closes the gap between the two rows
        index, position = flat[: 2 * self.size].reshape(2, self.size), self.position[: self.size]
        self.begin()
        return index, position

    def _set_memory(self, ends: Array, position: Array) -> None:
        self._ends, (self.row, self.column), self.position = ends, ends, position


def _move(array: Array, items: slice, start: int) -> None:
    """Move items within one contiguous array with memmove; numpy would copy overlapping ranges first."""
    if items.start != start:
        first, width = array.ctypes.data, array.itemsize
        ctypes.memmove(first + start * width, first + items.start * width, (items.stop - items.start) * width)
