"""Compiled kernels that find the eligible in-edges of each frontier node.

Shapes for a frontier of f nodes: nodes, limit, begin, available ``(f,)``; indptr ``(N + 1,)``; times ``(E,)``.
"""

from __future__ import annotations

from typing import Any

from numba import njit
from numpy.typing import NDArray

Array = NDArray[Any]


@njit(cache=True, nogil=True)
def spans(indptr: Array, nodes: Array, begin: Array, available: Array) -> None:
    """Write the span of all in-edges of each frontier node."""
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
    """Write the span of in-edges not later than each node's limit: a prefix of the column, by binary search."""
    for i in range(nodes.size):
        # Times ascend within a column: ``low`` ends at the first edge that is too late.
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
def candidates_until(source_time: Any, limit: Any, begin: Array, available: Array, candidate: Array) -> int:
    """List the in-edges not later than each frontier node's limit in ``candidate``.

    Args:
        source_time: time of each edge, in any order within a column.
        limit: latest time for each frontier node.
        begin: start of each span: on entry in the graph's columns, on return in ``candidate``.
        available: on entry the column's length, on return the number of candidates.
        candidate: output, positions of edges; at least as long as the sum of ``available``.

    Returns:
        The number of candidates of all spans.
    """
    count = 0
    for i in range(begin.size):
        # ``candidate`` is filled span after span, so that begin can point into it from here on.
        first, latest = count, limit[i]
        for position in range(begin[i], begin[i] + available[i]):
            if source_time[position] <= latest:
                candidate[count] = position
                count += 1
        begin[i] = first
        available[i] = count - first
    return count


@njit(cache=True, nogil=True)
def first_unsorted(indptr: Array, time: Array) -> int:
    """Return the first column whose times do not ascend, or -1."""
    for node in range(indptr.size - 1):
        for j in range(indptr[node] + 1, indptr[node + 1]):
            if time[j] < time[j - 1]:
                return node
    return -1


@njit(cache=True, nogil=True)
def capacity(available: Array, count: int, replace: bool) -> int:
    """Return an upper bound, exact without weights, on the number of edges that a pick writes."""
    total = 0
    for i in range(available.size):
        if count < 0 or (available[i] < count and (not replace or available[i] == 0)):
            total += available[i]
        else:
            total += count
    return total
