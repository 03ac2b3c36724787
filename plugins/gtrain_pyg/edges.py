"""The chosen edges of a batch in memory that the batch keeps."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.graph.sampling import scratch

Array = NDArray[Any]


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

    def move(self, found: slice, start: int) -> None:
        """Move edges to where ``start`` is; there must be room, and they may overlap with where they were."""
        for array in (self.row, self.column, self.position):
            _move(array, found, start)

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


def _move(array: Array, found: slice, start: int) -> None:
    """Within one contiguous array; numpy would make a copy first."""
    if found.start != start:
        first, width = array.ctypes.data, array.itemsize
        ctypes.memmove(first + start * width, first + found.start * width, (found.stop - found.start) * width)
