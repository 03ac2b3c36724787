"""Compiled loops of the extremes."""

from __future__ import annotations

from typing import Any

from numba import njit

from gtrain_sar.kernels.lanes import data
from gtrain_sar.kernels.rows import ahead


@njit(cache=True, nogil=True, forceinline=True)
def _merge(out: Any, ties: Any, to: int, x: Any, start: int, largest: bool, count: int) -> None:
    """Merge one message; NaN stays what it is."""
    for c in range(count):
        new, old, attained = x[start + c], out[to + c], ties[to + c]
        better = (new > old if largest else new < old) or new != new
        out[to + c] = new if better else old
        ties[to + c] = 1 if better else (attained + 1 if new == old else attained)


@njit(cache=True, nogil=True)
def forward(
    rows: Any, ptr: Any, columns: Any, x: Any, largest: bool, out: Any, ties: Any, first: int, last: int
) -> None:
    """Rows ``first .. last-1`` of a block; see :func:`.extreme.extreme_forward`."""
    width, end = x.shape[1], ptr[last]
    source, column, best, count = data(x), data(columns), data(out), data(ties)
    for k in range(first, last):
        to = rows[k] * width
        for e in range(ptr[k], ptr[k + 1]):
            ahead(source, column, e, end, width)
            if largest:
                _merge(best, count, to, source, column[e] * width, True, width)
            else:
                _merge(best, count, to, source, column[e] * width, False, width)


@njit(cache=True, nogil=True, forceinline=True)
def _add_where_equal(dx: Any, x: Any, at: int, out: Any, share: Any, start: int, count: int) -> None:
    for c in range(count):
        old = dx[at + c]
        dx[at + c] = old + share[start + c] if x[at + c] == out[start + c] else old


@njit(cache=True, nogil=True)
def backward(rows: Any, ptr: Any, columns: Any, x: Any, out: Any, share: Any, dx: Any, first: int, last: int) -> None:
    """Rows ``first .. last-1`` of a block; see :func:`.extreme.extreme_backward`."""
    width, end = x.shape[1], ptr[last]
    source, column, best, part, total = data(x), data(columns), data(out), data(share), data(dx)
    for k in range(first, last):
        at = rows[k] * width
        for e in range(ptr[k], ptr[k + 1]):
            ahead(best, column, e, end, width)
            ahead(part, column, e, end, width)
            _add_where_equal(total, source, at, best, part, column[e] * width, width)
