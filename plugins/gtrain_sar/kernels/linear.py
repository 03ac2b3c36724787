"""Sparse products over a block of edges: sums of source rows, and the gradient of their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from numba import njit
from torch import Tensor

from gtrain_sar.kernels import plain
from gtrain_sar.kernels.lanes import data
from gtrain_sar.kernels.rows import add, add_scaled, ahead, dot
from gtrain_sar.kernels.threads import array, arrays, compiled, over_rows

if TYPE_CHECKING:
    from gtrain_sar.edges import Compressed


def spmm(block: Compressed, x: Tensor, out: Tensor, weight: Tensor | None = None) -> None:
    """Add ``weight[edge] * x[column]`` of each edge to the row of ``out``.

    Args:
        block: E_b edges by row.
        x: ``[S, H, C]``, rows that columns name.
        out: ``[T, H, C]``, added to in place.
        weight: ``[E, H]``, at the positions that ``block.edges`` names; None: 1.
    """
    if not compiled([x, weight], [out]):
        return plain.spmm(block, x, out, weight)
    rows, ptr, columns, edges = arrays(block)
    a, b, w = array(x), array(out), None if weight is None else array(weight)

    def work(first: int, last: int) -> None:
        _spmm(rows, ptr, columns, edges, a, b, w, first, last)

    return over_rows(block, work)


def sddmm(block: Compressed, a: Tensor, b: Tensor, out: Tensor) -> None:
    """Set each edge's row of ``out`` to the inner product of its two ends, head by head.

    Args:
        block: E_b edges by row.
        a: ``[R, H, C]``, rows that the block's rows name.
        b: ``[K, H, C]``, rows that its columns name.
        out: ``[E, H]``, set at the positions that ``block.edges`` names.
    """
    if not compiled([a, b], [out]):
        return plain.sddmm(block, a, b, out)
    rows, ptr, columns, edges = arrays(block)
    left, right, result = array(a), array(b), array(out)

    def work(first: int, last: int) -> None:
        _sddmm(rows, ptr, columns, edges, left, right, result, first, last)

    return over_rows(block, work)


def load_sums(edge: Compressed, dtype: torch.dtype) -> None:
    """Load the sparse product for one type.

    Args:
        edge: a block of one edge, from row 0 to column 0.
        dtype: of the rows.
    """
    rows = torch.zeros(1, 1, 1, dtype=dtype)
    spmm(edge, rows, torch.zeros_like(rows))
    spmm(edge, rows, torch.zeros_like(rows), torch.zeros(1, 1, dtype=dtype))


@njit(cache=True, nogil=True)
def _spmm(rows: Any, ptr: Any, columns: Any, edges: Any, x: Any, out: Any, weight: Any, first: int, last: int) -> None:
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
def _sddmm(rows: Any, ptr: Any, columns: Any, edges: Any, a: Any, b: Any, out: Any, first: int, last: int) -> None:
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
