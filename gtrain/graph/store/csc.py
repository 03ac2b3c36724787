"""Out-of-core sort of edges into columns (CSC): a counting sort over ranges of targets.

One pass over the edges counts the in-edges of each node. Then, range of targets by range of targets, one more pass
places the edges that point into the range by a counting sort (Knuth, The Art of Computer Programming 3, section 5.2,
algorithm D), and each column is sorted. Memory: one range (:data:`RANGE_EDGES` edges or the in-edges of one node) and a
few numbers per node; the edges may be memory maps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gtrain.errors import DataError
from gtrain.graph.store.files import Array, chunks, release

Ints = NDArray[np.int64]

RANGE_EDGES = 3 << 24
"""Edges sorted in memory at a time, unless one node has more in-edges: 16 bytes each, 24 with times."""

RELEASE_EVERY = 32
"""Chunks after which a pass releases the mapped pages that it has read."""

SMALL_EDGES = 1 << 20
"""Number of edges up to which numpy sorts, since the first call of a compiled kernel takes seconds."""


@dataclass
class EdgeView:
    """Input of the sort.

    Attributes:
        source: source of each edge, ``[E]``, original ids.
        target: target of each edge, ``[E]``, original ids.
        source_ids: global id of each source by original id; None if they are equal.
        target_ids: global id of each target by original id; None if they are equal.
        num_sources: number of nodes of the sources' type.
        num_targets: number of nodes of the targets' type.
        time: time of each edge, ``[E]``, the first sort key of a column; None if edges have no times.
        symmetric: add the reverse of each edge. Edge positions are then meaningless, and ids must not need mapping.
        origin: name of the edges, for messages.
    """

    source: Array
    target: Array
    source_ids: Array | None
    target_ids: Array | None
    num_sources: int
    num_targets: int
    time: Array | None = None
    symmetric: bool = False
    origin: str = "edge_index"

    @property
    def num_edges(self) -> int:
        return len(self.source) * (2 if self.symmetric else 1)

    def pieces(self) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield pieces of edges: position of the first, sources (original ids) and targets (global ids), int64."""
        for number, rows in enumerate(chunks(0, len(self.source)), start=1):
            source = _mapped(self.source[rows], None)
            target = _mapped(self.target[rows], self.target_ids)
            yield rows.start, source, target
            if self.symmetric:
                yield rows.start, target, source
            if number % RELEASE_EVERY == 0 or rows.stop == len(self.source):
                release(self.source)
                release(self.target)

    def check(self) -> None:
        """Raise DataError if the id of an edge's source or target is out of range."""
        for name, ids, limit in (
            ("source", self.source, self.num_sources),
            ("target", self.target, self.num_targets),
        ):
            for rows in chunks(0, len(ids)):
                lowest, highest = int(ids[rows].min()), int(ids[rows].max())
                if lowest < 0 or highest >= limit:
                    edge = rows.start + int(np.flatnonzero((ids[rows] < 0) | (ids[rows] >= limit))[0])
                    raise DataError(
                        f"{self.origin}: the {name} of edge {edge} is {int(ids[edge])}, and there are {limit} "
                        "such nodes",
                        hint=f"correct the edge to a node in 0..{limit - 1}, or raise the number of nodes",
                    )
            release(ids)


@dataclass
class ColumnRange:
    """The in-edges of consecutive nodes.

    Attributes:
        indptr: ``[n + 1]``, from 0; the range's node i has the edges ``indptr[i] .. indptr[i+1]-1``.
        source: global ids of the sources, ``[e]``.
        edge_id: positions of the edges in the source data, ``[e]``.
    """

    indptr: Ints
    source: Ints
    edge_id: Ints


class SortedColumns:
    """The in-edges of all nodes, sorted range by range on demand.

    Attributes:
        indptr: column starts over all nodes, ``[N + 1]``.
    """

    def __init__(self, view: EdgeView, *, sort: bool = True, limit: int = 0, small: int | None = None) -> None:
        """Count the in-edges.

        Args:
            view: the edges; :meth:`EdgeView.check` must have passed.
            sort: sort each column by (time, source); if false, the edges of a column keep their order.
            limit: edges in memory at a time; 0 means :data:`RANGE_EDGES`.
            small: number of edges up to which numpy sorts; None means :data:`SMALL_EDGES`.
        """
        self._view, self._sort, self._limit = view, sort, limit or RANGE_EDGES
        self._compiled = view.num_edges > (SMALL_EDGES if small is None else small)
        self.indptr = self._count()
        self._start = self._stop = 0
        self._buffers = (np.empty(0, np.int64), np.empty(0, np.int64))
        self._range = ColumnRange(np.zeros(1, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))

    def between(self, first: int, last: int) -> Iterator[ColumnRange]:
        """Yield the columns of the nodes ``first .. last-1`` in pieces.

        Ascending calls sort each range once. A piece is valid until the next one is requested: buffers are reused.
        """
        while first < last:
            if not self._start <= first < self._stop:
                self._load(first)
            stop = min(last, self._stop)
            indptr = self._range.indptr[first - self._start : stop - self._start + 1]
            edges = slice(int(indptr[0]), int(indptr[-1]))
            yield ColumnRange(indptr - indptr[0], self._range.source[edges], self._range.edge_id[edges])
            first = stop

    def _count(self) -> Ints:
        counts = np.zeros(self._view.num_targets + 1, dtype=np.int64)
        if self._compiled:
            from gtrain.graph import kernels

            for _, _, target in self._view.pieces():
                # Shifted by one, so that the cumulative sum below gives the starts of the columns.
                kernels.count(target, counts[1:])
        else:
            for _, _, target in self._view.pieces():
                counts[1:] += np.bincount(target, minlength=self._view.num_targets)
        return np.cumsum(counts, out=counts)

    def _load(self, start: int) -> None:
        """Sort the range of nodes from ``start``: as many nodes as the limit allows, at least one."""
        base = self.indptr[start]
        # The last node whose column still fits within the limit.
        stop = int(np.searchsorted(self.indptr, base + self._limit, side="right")) - 1
        stop = min(max(stop, start + 1), self._view.num_targets)
        indptr = self.indptr[start : stop + 1] - base
        sort = self._counting_sort if self._compiled else self._numpy_sort
        self._start, self._stop, self._range = start, stop, sort(start, stop, indptr)

    def _counting_sort(self, start: int, stop: int, indptr: Ints) -> ColumnRange:
        from gtrain.graph import kernels

        count = int(indptr[-1])
        if count > self._buffers[0].size:
            self._buffers = (np.empty(0, np.int64), np.empty(0, np.int64))  # free the smaller buffers first
            self._buffers = (np.empty(count, np.int64), np.empty(count, np.int64))
        source, edge_id = (buffer[:count] for buffer in self._buffers)
        columns = kernels.ColumnEdges(np.empty(0, np.int64), source, edge_id)
        cursor = indptr[:-1].copy()
        for first, sources, targets in self._view.pieces():
            kernels.scatter_to_columns(targets, sources, first, start, cursor, columns)
        _map_in_place(source, self._view.source_ids)
        if self._sort:
            kernels.sort_columns(indptr, self._times(edge_id), source, edge_id)
        return ColumnRange(indptr, source, edge_id)

    def _times(self, edge_id: Ints) -> Ints:
        if self._view.time is None:
            return np.empty(0, dtype=np.int64)
        times = np.empty(edge_id.size, dtype=np.int64)
        for rows in chunks(0, edge_id.size):
            times[rows] = self._view.time[edge_id[rows]]
        release(self._view.time)
        return times

    def _numpy_sort(self, start: int, stop: int, indptr: Ints) -> ColumnRange:
        """Return what :meth:`_counting_sort` returns, without compiled kernels."""
        empty = np.empty(0, dtype=np.int64)
        pieces = [(empty, empty, empty)] + [
            (first + inside, source[inside], target[inside])
            for first, source, target in self._view.pieces()
            for inside in [np.flatnonzero((target >= start) & (target < stop))]
        ]
        edge_id, source, target = (np.concatenate(column) for column in zip(*pieces, strict=True))
        _map_in_place(source, self._view.source_ids)
        keys: list[Ints] = [source] if self._sort else []
        if self._sort and self._view.time is not None:
            keys.append(self._times(edge_id))
        # The last key is the first to sort by.
        order = np.lexsort([*keys, target])
        return ColumnRange(indptr, source[order], edge_id[order])


def _mapped(ids: Array, table: Array | None) -> Ints:
    """Return global ids (int64) of original ids."""
    # A copy, since numba compiles a kernel again for read-only arrays, such as those of a memory map.
    return np.array(ids if table is None else table[ids], dtype=np.int64)


def _map_in_place(ids: Ints, table: Array | None) -> None:
    """Replace original ids by global ids, in place."""
    if table is not None:
        for rows in chunks(0, ids.size):
            ids[rows] = table[ids[rows]]
