"""Counting sort of edges by one of their ends, in time that grows with edges plus rows."""

from __future__ import annotations

from typing import Any

from numba import njit


@njit(cache=True, nogil=True)
def count(rows: Any, counts: Any) -> tuple[bool, int]:
    """Count the edges of each row.

    Args:
        rows: ``[E]``, 0 .. R-1.
        counts: int64 ``[R + 1]``, zeros; row r's edges are counted at ``r``.

    Returns:
        Whether ``rows`` is ascending, and the number of rows with edges.
    """
    ascending, before, present = True, 0, 0
    for e in range(len(rows)):
        row = rows[e]
        ascending &= row >= before
        before = row
        present += counts[row] == 0
        counts[row] += 1
    return ascending, present


@njit(cache=True, nogil=True)
def lay_out(counts: Any, used: Any, ptr: Any) -> None:
    """Turn the counts into the positions at which rows start.

    Args:
        counts: int64 ``[R + 1]``, from :func:`count`; then the position of each row's first edge.
        used: int64 ``[m]``, set to the rows with edges, ascending.
        ptr: int64 ``[m + 1]``, set to the positions at which the edges of ``used`` start.
    """
    total = k = 0
    for row in range(len(counts) - 1):
        size = counts[row]
        counts[row] = total
        if size:
            used[k], ptr[k] = row, total
            k += 1
        total += size
    ptr[k] = total


@njit(cache=True, nogil=True)
def order(rows: Any, columns: Any, start: Any, out: Any) -> None:
    """Write each edge's column to its position: the next one of its row.

    Args:
        rows: ``[E]``.
        columns: int32 ``[E]``.
        start: int64 ``[R + 1]``, where each row's edges start; advanced.
        out: int32 ``[E]``.
    """
    for e in range(len(rows)):
        to = start[rows[e]]
        start[rows[e]] = to + 1
        out[to] = columns[e]


@njit(cache=True, nogil=True)
def order_both(rows: Any, columns: Any, edges: Any, start: Any, out_columns: Any, out_edges: Any) -> None:
    """:func:`order` of columns and of edge numbers, both int32."""
    for e in range(len(rows)):
        to = start[rows[e]]
        start[rows[e]] = to + 1
        out_columns[to], out_edges[to] = columns[e], edges[e]
