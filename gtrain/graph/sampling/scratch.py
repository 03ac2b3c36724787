"""Buffers that batches reuse, one set per thread: page faults of fresh memory cost more than sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.graph.sampling import number
from gtrain.graph.sampling.number import NodeMap

Array = NDArray[Any]

DENSE_LIMIT = 50_000_000
"""Largest number of graph nodes with a dense table (4 bytes per node and thread); larger graphs use a hash map."""

FIRST_SLOTS = 1024
"""Initial slots of a hash map, a power of 2; it doubles as needed."""

_LAST_TURN = 2**31 - 1


def grown(array: Array, size: int, keep: int = 0) -> Array:
    """Return ``array`` if it has at least ``size`` items, else a larger array with the first ``keep`` items copied."""
    if array.size >= size:
        return array
    # Half as large again at least, so that the copies of a growing array cost O(1) per item.
    larger = np.empty(max(size, array.size + array.size // 2), array.dtype)
    larger[:keep] = array[:keep]
    return larger


def read_only(array: Array) -> Array:
    """Return a read-only view; all arrays of a graph are read-only, since numba compiles writable ones separately."""
    view = array[:]
    view.flags.writeable = False
    return view


def empty() -> Array:
    """Return an empty int64 array."""
    return np.empty(0, np.int64)


class EdgeBuffer:
    """The chosen edges of one type: the first ``size`` entries of ``row``, ``column`` and ``position`` are valid."""

    def __init__(self) -> None:
        self.row, self.column, self.position = empty(), empty(), empty()
        self.size = 0

    def reserve(self, extra: int) -> None:
        """Grow the arrays for ``extra`` more edges."""
        size = self.size + extra
        arrays = (self.row, self.column, self.position)
        self.row, self.column, self.position = (grown(array, size, self.size) for array in arrays)

    def extend(self, extra: int) -> tuple[Array, Array, Array]:
        """Add ``extra`` edges and return views of their ``row``, ``column`` and ``position``, to be filled."""
        new = slice(self.size, self.size + extra)
        self.size = new.stop
        return self.row[new], self.column[new], self.position[new]

    @property
    def free(self) -> tuple[Array, Array, Array]:
        """Views of ``position``, ``column`` and ``row`` behind the valid entries."""
        return self.position[self.size :], self.column[self.size :], self.row[self.size :]


class NodeNumbering:
    """The sampled nodes of one type in a batch, and their local ids.

    Args:
        num_nodes: nodes of this type in the graph.
        hashed: number nodes by (node, subgraph) in a hash map; otherwise by node in a dense table.
    """

    def __init__(self, num_nodes: int, hashed: bool) -> None:
        self.num_nodes, self.hashed = num_nodes, hashed
        self.node, self.batch = empty(), empty()
        self.count = self.turn = 0
        self.width = 1
        self.table = np.zeros((FIRST_SLOTS, 2), np.int64) if hashed else np.zeros(num_nodes, np.int32)

    def reset(self, num_subgraphs: int) -> None:
        """Start a new batch."""
        # The dense table stores turn + local id, so the next batch starts above the last one's largest entry.
        self.turn += 1 if self.hashed else max(1, self.count)
        if self.turn > _LAST_TURN - (0 if self.hashed else self.num_nodes):
            # The numbers of turns are used up: from here on old entries would look valid.
            self.table.fill(0)
            self.turn = 1
        self.count, self.width = 0, num_subgraphs

    def number(self, row: Array, column: Array, subgraph: Array) -> None:
        """Replace global ids in ``row`` by local ids; append new nodes.

        Args:
            row: global ids on entry, local ids on return.
            column: the local id of each edge's target; used by a hash map only.
            subgraph: the subgraph of each target by local id.
        """
        self._reserve(row.size)
        if not self.hashed:
            self.count = number.number_dense(self.table, self.turn, self.node, self.count, row)
            return
        self.count = number.number_hashed(self._map, self.count, row, column, subgraph)

    def keep(self, row: Array, column: Array, position: Array, subgraph: Array) -> int:
        """Drop edges whose source is not in the batch; return the number of the others, moved to the front."""
        if not self.hashed:
            return int(number.keep_dense(self.table, self.turn, row, column, position))
        return int(number.keep_hashed(self._map, row, column, position, subgraph))

    @property
    def _map(self) -> NodeMap:
        return NodeMap(self.table, self.turn, self.width, self.node, self.batch)

    def _reserve(self, extra: int) -> None:
        size = self.count + extra
        if not self.hashed:
            self.node = grown(self.node, min(size, self.num_nodes), self.count)
            return
        self.node = grown(self.node, size, self.count)
        self.batch = grown(self.batch, size, self.count)
        slots = self.table.shape[0]
        # At most half full, so that a search ends after about two steps.
        while slots < 2 * size:
            slots *= 2
        if slots > self.table.shape[0]:
            self.table = np.zeros((slots, 2), np.int64)
            number.rehash(self._map, self.count)


class SpanBuffer:
    """Buffers for the spans of a frontier, their candidates and the candidates' weights."""

    def __init__(self) -> None:
        self._begin, self._available, self._candidate = empty(), empty(), empty()
        self._weight: Array | None = None
        self._numbers = empty()

    def of(self, size: int) -> tuple[Array, Array]:
        """Return ``begin`` and ``available`` for a frontier of ``size`` nodes, not initialised."""
        self._begin, self._available = grown(self._begin, size), grown(self._available, size)
        return self._begin[:size], self._available[:size]

    def candidates(self, size: int) -> Array:
        """Return a buffer of at least ``size`` edges."""
        self._candidate = grown(self._candidate, size)
        return self._candidate

    def numbers(self, first: int, last: int) -> Array:
        """Return ``first .. last-1``; the caller must not write to it."""
        if self._numbers.size < last:
            # Computed once and sliced: arange per hop would write memory again.
            self._numbers = np.arange(last + last // 2)
        return self._numbers[first:last]

    def weights(self, weight: Array, position: Array) -> Array:
        """Return the weights at these positions, read-only."""
        if self._weight is None or self._weight.dtype != weight.dtype:
            self._weight = np.empty(0, weight.dtype)
        self._weight = grown(self._weight, position.size)
        gathered = self._weight[: position.size]
        # With its own range check numpy buffers the output.
        np.take(weight, position, out=gathered, mode="clip")
        return read_only(gathered)
