"""Compiled loops over edges; import this module inside the functions that need it, never in front of a fork.

The arguments of each kernel have one dtype each (int64 unless said), so that each is compiled once; the callers convert
chunk by chunk.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_RUN = 32


@njit(cache=True, nogil=True)
def count(keys: Ints, counts: Ints) -> None:
    """Add the number of occurrences of each key to ``counts``."""
    for key in keys:
        counts[key] += 1


@njit(cache=True, nogil=True)
def place(
    key: Ints, value: Ints, first: int, low: int, high: int, cursor: Ints, out_value: Ints, out_position: Ints
) -> None:
    """Put the edges whose key is in ``low .. high-1`` where their key's cursor points, in the order they come.

    Args:
        key: target of each edge.
        value: source of each edge.
        first: position of the first of these edges in the source data.
        low: smallest key that is wanted.
        high: largest, plus 1.
        cursor: ``[high - low]``, next free place of each key; advanced.
        out_value: receives the sources.
        out_position: receives the positions.
    """
    for e in range(key.size):
        k = key[e]
        if low <= k < high:
            at = cursor[k - low]
            cursor[k - low] = at + 1
            out_value[at] = value[e]
            out_position[at] = first + e


@njit(cache=True, nogil=True)
def sort_columns(indptr: Ints, time: Ints, source: Ints, position: Ints) -> None:
    """Sort each column ``indptr[c] .. indptr[c+1]-1`` by (time, source), stably and in place.

    Runs of 32 by insertion, merged bottom up; ``time`` is empty where edges have none.
    """
    timed = time.size > 0
    longest = 0
    for c in range(indptr.size - 1):
        longest = max(longest, indptr[c + 1] - indptr[c])
    room = longest if longest > _RUN else 0
    spare_time = np.empty(room if timed else 0, np.int64)
    spare_source = np.empty(room, np.int64)
    spare_position = np.empty(room, np.int64)
    for c in range(indptr.size - 1):
        start, stop = indptr[c], indptr[c + 1]
        for low in range(start, stop, _RUN):
            _insert(time, source, position, timed, low, min(low + _RUN, stop))
        width = _RUN
        while width < stop - start:
            for low in range(start, stop - width, 2 * width):
                middle, high = low + width, min(low + 2 * width, stop)
                _merge(time, source, position, timed, low, middle, high, spare_time, spare_source, spare_position)
            width *= 2


@njit(cache=True, nogil=True)
def _insert(time: Ints, source: Ints, position: Ints, timed: bool, low: int, high: int) -> None:
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
def _merge(
    time: Ints,
    source: Ints,
    position: Ints,
    timed: bool,
    low: int,
    middle: int,
    high: int,
    spare_time: Ints,
    spare_source: Ints,
    spare_position: Ints,
) -> None:
    """Merge two sorted neighbours: the left one is moved aside, and the result grows from ``low``."""
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
    group: NDArray[np.int32],
    capacity: Ints,
    fennel: float,
    seed: int,
    sizes: NDArray[np.int64],
    part: NDArray[np.int32],
) -> None:
    """Put consecutive nodes, one after the other, into the part that suits each best; see :mod:`.streaming`.

    Args:
        indptr: ``[n + 1]``; node ``first + i`` has the neighbours ``indptr[i] .. indptr[i+1]-1``.
        neighbour: node ids.
        first: id of the first node.
        group: int32 ``[N]``, what a node counts as where balance is concerned.
        capacity: nodes of each group that a part takes at most.
        fennel: weight of Fennel's cost of a full part, in neighbours; 0 chooses LDG.
        seed: decides between parts that are equal.
        sizes: ``[groups, P]``, nodes of each group that each part has got in this pass; updated.
        part: int32 ``[N]``, the part of each node in this pass or else the last, -1 where there is none; updated.
    """
    num_parts = sizes.shape[1]
    found = np.zeros(num_parts, np.int64)
    for v in range(first, first + indptr.size - 1):
        start, stop = indptr[v - first], indptr[v - first + 1]
        for e in range(start, stop):
            if neighbour[e] != v and part[neighbour[e]] >= 0:
                found[part[neighbour[e]]] += 1
        own, room = sizes[group[v]], capacity[group[v]]
        # A multiplicative hash: any order of the parts will do, if it differs from node to node and seed to seed.
        turn = (((v + 1) * 2654435761 + (seed + 1) * 40503) >> 7) % num_parts
        best, best_score, best_size = -1, 0.0, 0
        for i in range(num_parts):
            p = (i + turn) % num_parts
            size = own[p]
            if size >= room:
                continue
            fill = size / room
            score = found[p] - fennel * np.sqrt(fill) if fennel > 0 else found[p] * (1.0 - fill)
            if best < 0 or score > best_score or (score == best_score and size < best_size):
                best, best_score, best_size = p, score, size
        for e in range(start, stop):
            if part[neighbour[e]] >= 0:
                found[part[neighbour[e]]] = 0
        part[v] = best
        own[best] += 1
