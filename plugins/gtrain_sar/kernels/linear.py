"""Sparse products over a block of edges: weighted sums of source rows (SpMM), and the weights' gradient (SDDMM)."""

from __future__ import annotations

from typing import Any

import torch
from numba import njit
from torch import Tensor

from gtrain_sar.edges import CompressedEdges
from gtrain_sar.kernels import plain
from gtrain_sar.kernels.lanes import data
from gtrain_sar.kernels.rows import add, add_scaled, dot, prefetch_row
from gtrain_sar.kernels.threads import run_over_rows, runs_compiled


def spmm(block: CompressedEdges, x: Tensor, out: Tensor, weight: Tensor | None = None) -> None:
    """Add ``weight[edge] * x[column]`` of each edge to the row of ``out``.

    Args:
        block: E_b edges by row.
        x: ``[S, H, C]``, rows that the block's columns name.
        out: ``[T, H, C]``, added to in place.
        weight: ``[E, H]``, at the positions that ``block.edges`` names; None: 1.
    """
    if runs_compiled([x, weight], [out]):
        run_over_rows(block, _spmm, x, out, weight)
    else:
        plain.spmm(block, x, out, weight)


def sddmm(block: CompressedEdges, a: Tensor, b: Tensor, out: Tensor) -> None:
    """Set each edge's row of ``out`` to the inner product ``<a[row], b[column]>``, head by head.

    Args:
        block: E_b edges by row.
        a: ``[R, H, C]``, rows that the block's rows name.
        b: ``[K, H, C]``, rows that its columns name.
        out: ``[E, H]``, set at the positions that ``block.edges`` names.
    """
    if runs_compiled([a, b], [out]):
        run_over_rows(block, _sddmm, a, b, out)
    else:
        plain.sddmm(block, a, b, out)


def load_sums(edge: CompressedEdges, dtype: torch.dtype) -> None:
    """Compile the sparse product for one dtype, or load it from the cache.

    Args:
        edge: a block of one edge, from row 0 to column 0.
        dtype: of the rows.
    """
    rows = torch.zeros(1, 1, 1, dtype=dtype)
    spmm(edge, rows, torch.zeros_like(rows))
    spmm(edge, rows, torch.zeros_like(rows), torch.zeros(1, 1, dtype=dtype))


@njit(cache=True, nogil=True)
def _spmm(block: Any, x: Any, out: Any, weight: Any, first: int, last: int) -> None:
    """Rows ``first .. last-1`` of :func:`spmm`: ``out[i, h] += sum over edges j -> i of weight[e, h] * x[j, h]``."""
    rows, ptr = block.rows, block.ptr
    heads, channels = x.shape[1], x.shape[2]
    width, end = heads * channels, ptr[last]
    source, total, column, position = data(x), data(out), data(block.columns), data(block.edges)
    for k in range(first, last):
        to = rows[k] * width
        for e in range(ptr[k], ptr[k + 1]):
            prefetch_row(source, column, e, end, width)
            start = column[e] * width
            if weight is None:
                add(total, to, source, start, width)
            else:
                prefetch_row(data(weight), position, e, end, heads)
                for h in range(heads):
                    c = h * channels
                    add_scaled(total, to + c, source, start + c, weight[position[e], h], channels)


@njit(cache=True, nogil=True)
def _sddmm(block: Any, a: Any, b: Any, out: Any, first: int, last: int) -> None:
    """Rows ``first .. last-1`` of :func:`sddmm`: ``out[e, h] = <a[i, h], b[j, h]>``."""
    rows, ptr = block.rows, block.ptr
    heads, channels = a.shape[1], a.shape[2]
    width, end = heads * channels, ptr[last]
    left, right, result = data(a), data(b), data(out)
    column, position = data(block.columns), data(block.edges)
    for k in range(first, last):
        start = rows[k] * width
        for e in range(ptr[k], ptr[k + 1]):
            prefetch_row(right, column, e, end, width)
            prefetch_row(result, position, e, end, heads)
            other, to = column[e] * width, position[e] * heads
            for h in range(heads):
                result[to + h] = dot(left, start + h * channels, right, other + h * channels, channels)
