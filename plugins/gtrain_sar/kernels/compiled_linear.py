"""Compiled loops of the sparse products."""

from __future__ import annotations

from typing import Any

from numba import njit

from gtrain_sar.kernels.lanes import data
from gtrain_sar.kernels.rows import add, add_scaled, ahead, dot


@njit(cache=True, nogil=True)
def spmm(rows: Any, ptr: Any, columns: Any, edges: Any, x: Any, out: Any, weight: Any, first: int, last: int) -> None:
    """Rows ``first .. last-1`` of a block; see :func:`.linear.spmm`."""
    heads, channels = x.shape[1], x.shape[2]
    width, end = heads * channels, ptr[last]
    source, total, column, position = data(x), data(out), data(columns), data(edges)
    for k in range(first, last):
        to = rows[k] * width
        for e in range(ptr[k], ptr[k + 1]):
            ahead(source, column, e, end, width)
            start = column[e] * width
            if weight is None:
                add(total, to, source, start, width)
            else:
                ahead(data(weight), position, e, end, heads)
                for h in range(heads):
                    c = h * channels
                    add_scaled(total, to + c, source, start + c, weight[position[e], h], channels)


@njit(cache=True, nogil=True)
def sddmm(rows: Any, ptr: Any, columns: Any, edges: Any, a: Any, b: Any, out: Any, first: int, last: int) -> None:
    """Rows ``first .. last-1`` of a block; see :func:`.linear.sddmm`."""
    heads, channels = a.shape[1], a.shape[2]
    width, end = heads * channels, ptr[last]
    left, right, column, position, result = data(a), data(b), data(columns), data(edges), data(out)
    for k in range(first, last):
        start = rows[k] * width
        for e in range(ptr[k], ptr[k + 1]):
            ahead(right, column, e, end, width)
            ahead(result, position, e, end, heads)
            other, to = column[e] * width, position[e] * heads
            for h in range(heads):
                result[to + h] = dot(left, start + h * channels, right, other + h * channels, channels)
