"""Compiled loops over edges. Import this module inside the functions that need it, never before a fork.

Each argument has one dtype (int64 unless stated), so that each kernel is compiled once; callers convert chunk by chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_RUN = 32  # edges of a run that insertion sort handles


class ColumnEdges(NamedTuple):
    """Edges that are sorted by column, each column a range of positions.

    Attributes:
        time: ``[e]``; empty if the edges have no times.
        source: ``[e]``.
        position: ``[e]``, the edges' positions in the source data.
    """

    time: Ints
    source: Ints
    position: Ints


class Balance(NamedTuple):
    """How many nodes of each group a part may have, and has.

    Attributes:
        group: int32 ``[N]``, balance group of each node.
        capacity: ``[groups]``, largest number of nodes of each group in a part.
        sizes: ``[groups, P]``, nodes of each group assigned to each part in this pass.
    """

    group: NDArray[np.int32]
    capacity: Ints
    sizes: Ints


@njit(cache=True, nogil=True)
def count(keys: Ints, counts: Ints) -> None:
    """Add the number of occurrences of each key to ``counts``."""
    for key in keys:
        counts[key] += 1


@njit(cache=True, nogil=True)
def scatter_to_columns(target: Ints, source: Ints, first: int, low: int, cursor: Ints, columns: ColumnEdges) -> None:
    """Copy the edges of a range of columns to their columns: the second pass of a counting sort, stable.

    Args:
        target: target of each edge, ``[e]``. Its column is ``target - low``; edges of other columns are skipped.
        source: source of each edge, ``[e]``.
        first: position of the first of these edges in the source data.
        low: target of the first column.
        cursor: ``[columns]``, next free slot of each column; advanced.
        columns: output; ``time`` is not written.
    """
    for e in range(target.size):
        column = target[e] - low
        if 0 <= column < cursor.size:
            slot = cursor[column]
            cursor[column] = slot + 1
            columns.source[slot] = source[e]
            columns.position[slot] = first + e


@njit(cache=True, nogil=True)
def sort_columns(indptr: Ints, time: Ints, source: Ints, position: Ints) -> None:
    """Sort each column ``indptr[c] .. indptr[c+1]-1`` by (time, source), stably and in place.

    Bottom-up merge sort over runs that insertion sort has sorted. ``time`` is empty if the edges have no times.
    """
    timed = time.size > 0
    edges = ColumnEdges(time, source, position)
    # The spare arrays are as long as the longest column, not the data; short columns need none.
    longest = 0
    for c in range(indptr.size - 1):
        longest = max(longest, indptr[c + 1] - indptr[c])
    capacity = longest if longest > _RUN else 0
    spare = ColumnEdges(
        np.empty(capacity if timed else 0, np.int64), np.empty(capacity, np.int64), np.empty(capacity, np.int64)
    )
    for c in range(indptr.size - 1):
        start, stop = indptr[c], indptr[c + 1]
        for low in range(start, stop, _RUN):
            _insert(edges, timed, low, min(low + _RUN, stop))
        width = _RUN
        while width < stop - start:
            for low in range(start, stop - width, 2 * width):
                middle, high = low + width, min(low + 2 * width, stop)
                _merge(edges, spare, timed, low, middle, high)
            width *= 2


@njit(cache=True, nogil=True)
def _insert(edges: ColumnEdges, timed: bool, low: int, high: int) -> None:
    """Sort the edges ``low .. high-1`` by insertion, stably and in place."""
    time, source, position = edges
    for i in range(low + 1, high):
        t = time[i] if timed else 0
        s, p = source[i], position[i]
        j = i - 1
        while j >= low and ((timed and time[j] > t) or ((not timed or time[j] == t) and source[j] > s)):
            if timed:
                time[j + 1] = time[j]
            source[j + 1], position[j + 1] = source[j], position[j]
            j -= 1
        if timed:
            time[j + 1] = t
        source[j + 1], position[j + 1] = s, p


@njit(cache=True, nogil=True)
def _merge(edges: ColumnEdges, spare: ColumnEdges, timed: bool, low: int, middle: int, high: int) -> None:
    """Merge the sorted runs ``low .. middle-1`` and ``middle .. high-1`` in place.

    The left run is copied aside first, so the output never overwrites an entry that is still to be read. Taking the
    right entry only if it is strictly smaller keeps the sort stable.
    """
    time, source, position = edges
    spare_time, spare_source, spare_position = spare
    left = middle - low
    for i in range(left):
        if timed:
            spare_time[i] = time[low + i]
        spare_source[i], spare_position[i] = source[low + i], position[low + i]
    i, j, k = 0, middle, low
    while i < left and j < high:
        earlier = timed and time[j] < spare_time[i]
        same = not timed or time[j] == spare_time[i]
        if earlier or (same and source[j] < spare_source[i]):
            if timed:
                time[k] = time[j]
            source[k], position[k] = source[j], position[j]
            j += 1
        else:
            if timed:
                time[k] = spare_time[i]
            source[k], position[k] = spare_source[i], spare_position[i]
            i += 1
        k += 1
    while i < left:
        if timed:
            time[k] = spare_time[i]
        source[k], position[k] = spare_source[i], spare_position[i]
        i, k = i + 1, k + 1


@njit(cache=True, nogil=True)
def assign(
    indptr: Ints,
    neighbour: Ints,
    first: int,
    balance: Balance,
    fennel: float,
    seed: int,
    part: NDArray[np.int32],
) -> None:
    """Assign consecutive nodes, one after the other, to the part with the highest score.

    The score of part p for node v (see :func:`gtrain.graph.partition.methods.stream_partition` for the sources), with
    ``fill = sizes[p] / capacity`` for the node's group::

        LDG      |N(v) and p| * (1 - fill)
        Fennel   |N(v) and p| - fennel * sqrt(fill)

    Args:
        indptr: ``[n + 1]``; node ``first + i`` has the neighbours ``indptr[i] .. indptr[i+1]-1``.
        neighbour: node ids.
        first: id of the first node.
        balance: limits the parts; its ``sizes`` are updated.
        fennel: weight of Fennel's cost of a full part, in neighbours; 0 selects LDG.
        seed: breaks ties between parts.
        part: int32 ``[N]``, part of each node in this pass or else in the last, -1 if not yet assigned; updated.
    """
    group, capacity, sizes = balance
    num_parts = sizes.shape[1]
    neighbours_in = np.zeros(num_parts, np.int64)  # (P,)
    for v in range(first, first + indptr.size - 1):
        start, stop = indptr[v - first], indptr[v - first + 1]
        for e in range(start, stop):
            # Self-loops and neighbours without a part do not count.
            if neighbour[e] != v and part[neighbour[e]] >= 0:
                neighbours_in[part[neighbour[e]]] += 1
        size_of, limit = sizes[group[v]], capacity[group[v]]
        # A multiplicative hash chooses the first part to try: ties must go to different parts for different nodes.
        rotation = (((v + 1) * 2654435761 + (seed + 1) * 40503) >> 7) % num_parts
        best, best_score, best_size = -1, 0.0, 0
        for i in range(num_parts):
            p = (i + rotation) % num_parts
            size = size_of[p]
            if size >= limit:
                continue
            fill = size / limit
            score = neighbours_in[p] - fennel * np.sqrt(fill) if fennel > 0 else neighbours_in[p] * (1.0 - fill)
            # Ties go to the smaller part, then to the first one tried.
            if best < 0 or score > best_score or (score == best_score and size < best_size):
                best, best_score, best_size = p, score, size
        # Reset the touched counts only: P may exceed the node's degree.
        for e in range(start, stop):
            if part[neighbour[e]] >= 0:
                neighbours_in[part[neighbour[e]]] = 0
        part[v] = best
        size_of[best] += 1
