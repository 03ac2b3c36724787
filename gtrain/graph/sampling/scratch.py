"""Memory that is reused from batch to batch, since fresh pages cost more than sampling. One set for each thread."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.graph.sampling import number

Array = NDArray[Any]

DENSE_LIMIT = 50_000_000
"""Graph nodes up to which a dense table (4 bytes a node and thread) is kept; beyond, a hash map of the batch's size."""

FIRST_SLOTS = 1024
"""Slots that a hash map begins with, a power of 2; it doubles as needed."""

_LAST_TURN = 2**31 - 1


def grown(array: Array, size: int, keep: int = 0) -> Array:
    """An array of at least this size: the same one, or a larger one with the first ``keep`` values copied."""
    if array.size >= size:
        return array
    larger = np.empty(max(size, array.size + array.size // 2), array.dtype)
    larger[:keep] = array[:keep]
    return larger


def read_only(array: Array) -> Array:
    """A view that cannot be written to: numba compiles for such arrays apart, and a graph's are all of this kind."""
    view = array[:]
    view.flags.writeable = False
    return view


def empty() -> Array:
    """An int64 array that is yet to grow."""
    return np.empty(0, np.int64)


class Edges:
    """The chosen edges of one type: ``row``, ``column`` and ``position``, of which the first ``size`` are filled."""

    def __init__(self) -> None:
        self.row, self.column, self.position = empty(), empty(), empty()
        self.size = 0

    def reserve(self, extra: int) -> None:
        """Make room for more edges."""
        size = self.size + extra
        self.row = grown(self.row, size, self.size)
        self.column = grown(self.column, size, self.size)
        self.position = grown(self.position, size, self.size)

    def extend(self, extra: int) -> tuple[Array, Array, Array]:
        """``row``, ``column`` and ``position`` of so many more edges, to be filled; there must be room for them."""
        new = slice(self.size, self.size + extra)
        self.size = new.stop
        return self.row[new], self.column[new], self.position[new]

    @property
    def free(self) -> tuple[Array, Array, Array]:
        """``position``, ``column`` and ``row`` from where they are not filled."""
        return self.position[self.size :], self.column[self.size :], self.row[self.size :]


class Nodes:
    """The nodes of one type found so far in a batch, and their local ids.

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

    def begin(self, num_subgraphs: int) -> None:
        """Forget the nodes, for a new batch."""
        self.turn += 1 if self.hashed else max(1, self.count)
        if self.turn > _LAST_TURN - (0 if self.hashed else self.num_nodes):
            self.table.fill(0)
            self.turn = 1
        self.count, self.width = 0, num_subgraphs

    def number(self, row: Array, column: Array, subgraph: Array) -> None:
        """Replace global ids in ``row`` by local ids; nodes not seen before are appended.

        Args:
            row: global ids on entry, local ids on return.
            column: where in ``subgraph`` each one's subgraph stands; read by a hash map only.
            subgraph: the subgraph of each local id of the targets' type.
        """
        self._reserve(row.size)
        if not self.hashed:
            self.count = number.number_dense(self.table, self.turn, self.node, self.count, row)
            return
        self.count = number.number_hashed(
            self.table, self.turn, self.width, self.node, self.batch, self.count, row, column, subgraph
        )

    def keep(self, row: Array, column: Array, position: Array, subgraph: Array) -> int:
        """Drop edges from nodes that were not found; the others move to the front, with local ids in ``row``."""
        if not self.hashed:
            return int(number.keep_dense(self.table, self.turn, row, column, position))
        return int(number.keep_hashed(self.table, self.turn, self.width, row, column, position, subgraph))

    def _reserve(self, extra: int) -> None:
        size = self.count + extra
        if not self.hashed:
            self.node = grown(self.node, min(size, self.num_nodes), self.count)
            return
        self.node = grown(self.node, size, self.count)
        self.batch = grown(self.batch, size, self.count)
        slots = self.table.shape[0]
        while slots < 2 * size:
            slots *= 2
        if slots > self.table.shape[0]:
            self.table = np.zeros((slots, 2), np.int64)
            number.rehash(self.table, self.turn, self.width, self.node, self.batch, self.count)


class Spans:
    """Where the in-edges of a frontier begin and how many of them may be chosen."""

    def __init__(self) -> None:
        self._begin, self._available, self._candidate = empty(), empty(), empty()
        self._weight: Array | None = None
        self._numbers = empty()

    def of(self, size: int) -> tuple[Array, Array]:
        """``begin`` and ``available`` of a frontier of this size, not filled."""
        self._begin, self._available = grown(self._begin, size), grown(self._available, size)
        return self._begin[:size], self._available[:size]

    def candidates(self, size: int) -> Array:
        """Room for so many edges."""
        self._candidate = grown(self._candidate, size)
        return self._candidate

    def numbers(self, first: int, last: int) -> Array:
        """``first .. last-1``; not to be written to."""
        if self._numbers.size < last:
            self._numbers = np.arange(last + last // 2)
        return self._numbers[first:last]

    def weights(self, weight: Array, position: Array) -> Array:
        """The weights at these positions, read-only."""
        if self._weight is None or self._weight.dtype != weight.dtype:
            self._weight = np.empty(0, weight.dtype)
        self._weight = grown(self._weight, position.size)
        found = self._weight[: position.size]
        np.take(weight, position, out=found, mode="clip")  # what numpy checks by itself it copies first
        return read_only(found)
