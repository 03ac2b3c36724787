"""Compiled kernels that find which in-edges of each frontier node may be chosen."""

from __future__ import annotations

from typing import Any

from numba import njit
from numpy.typing import NDArray

Array = NDArray[Any]


@njit(cache=True, nogil=True)
def spans(indptr: Array, nodes: Array, begin: Array, available: Array) -> None:
    """All in-edges of each frontier node."""
    for i in range(nodes.size):
        begin[i] = indptr[nodes[i]]
        available[i] = indptr[nodes[i] + 1] - begin[i]


@njit(cache=True, nogil=True)
def spans_until(
    indptr: Array,
    nodes: Array,
    edge_time: Any,
    limit: Any,
    begin: Array,
    available: Array,
) -> None:
    """The in-edges not later than each frontier node's limit: a prefix of each column, found by halving."""
    for i in range(nodes.size):
        first, low, high = indptr[nodes[i]], indptr[nodes[i]], indptr[nodes[i] + 1]
        latest = limit[i]
        while low < high:
            middle = (low + high) // 2
            if edge_time[middle] <= latest:
                low = middle + 1
            else:
                high = middle
        begin[i] = first
        available[i] = low - first


@njit(cache=True, nogil=True)
def candidates_until(loose_time: Any, limit: Any, begin: Array, available: Array, candidate: Array) -> int:
    """The in-edges not later than each frontier node's limit, listed in ``candidate``; spans point into it.

    Args:
        begin: on entry into the graph, on return into ``candidate``.
        available: on entry the column's length, on return the number of candidates.
        candidate: written; room for the sum of ``available``.

    Returns:
        The number of candidates of all spans.
    """
    count = 0
    for i in range(begin.size):
        first, latest = count, limit[i]
        for position in range(begin[i], begin[i] + available[i]):
            if loose_time[position] <= latest:
                candidate[count] = position
                count += 1
        begin[i] = first
        available[i] = count - first
    return count


@njit(cache=True, nogil=True)
def first_unsorted(indptr: Array, time: Array) -> int:
    """The first column whose times are not ascending, or -1."""
    for node in range(indptr.size - 1):
        for j in range(indptr[node] + 1, indptr[node + 1]):
            if time[j] < time[j - 1]:
                return node
    return -1


@njit(cache=True, nogil=True)
def room(available: Array, count: int, replace: bool) -> int:
    """An upper bound, exact without weights, of the number of edges that a pick will write."""
    total = 0
    for i in range(available.size):
        if count < 0 or (available[i] < count and (not replace or available[i] == 0)):
            total += available[i]
        else:
            total += count
    return total
