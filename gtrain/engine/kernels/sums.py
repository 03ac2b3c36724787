"""Reductions over a block of edges: weighted sums of source rows (SpMM), the weights' gradient (SDDMM), and extremes.

Maxima and minima run over several blocks, with the number of messages that attain them.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from gtrain.engine.edges import CompressedEdges
from gtrain.engine.kernels.plain import ExtremeState
from gtrain.engine.kernels.rows import add, add_scaled, copy, data, dot, prefetch_row
from gtrain.engine.kernels.threads import as_numpy, form_for, run_over_rows, runs_compiled
from gtrain.engine.precision import rows_at_once, sum_dtype
from gtrain.kernels.options import inlined
from gtrain.kernels.threads import num_threads, run_in_threads

_DOT_ROWS = 1 << 12  # fewer rows are not worth another thread


def spmm(block: CompressedEdges, x: Tensor, out: Tensor, weight: Tensor | None = None) -> None:
    """Add ``weight[edge] * x[column]`` of each edge to the row of ``out``.

    Args:
        block: E_b edges by row.
        x: ``[S, H, C]``, rows that the block's columns name.
        out: ``[T, H, C]``, added to in place; of bfloat16, each row is summed in float32 and rounded once.
        weight: ``[E, H]``, at the positions that ``block.edges`` names; None: 1.
    """
    if runs_compiled([weight], [out], [x], rounds=True):
        run_over_rows(block, _spmm_rounded if out.dtype == torch.bfloat16 else _spmm, x, out, weight)
    else:
        form_for(x).spmm(block, x, out, weight)


def sddmm(block: CompressedEdges, a: Tensor, b: Tensor, out: Tensor) -> None:
    """Set each edge's row of ``out`` to the inner product ``<a[row], b[column]>``, head by head.

    Args:
        block: E_b edges by row.
        a: ``[R, H, C]``, rows that the block's rows name.
        b: ``[K, H, C]``, rows that its columns name.
        out: ``[E, H]``, set at the positions that ``block.edges`` names.
    """
    if runs_compiled([], [out], [a, b]):
        run_over_rows(block, _sddmm, a, b, out)
    else:
        form_for(a).sddmm(block, a, b, out)


def row_dots(a: Tensor, b: Tensor, out: Tensor, low: int, high: int) -> None:
    """Set the rows ``low .. high-1`` of ``out`` to the inner products ``<a[row], b[row]>``, head by head.

    Args:
        a, b: ``[R, H, C]``.
        out: ``[R, H]``.
        low, high: the rows.
    """
    if runs_compiled([], [out], [a, b]):
        cuts = torch.linspace(low, high, 1 + min(num_threads(), -(-(high - low) // _DOT_ROWS))).long().tolist()
        arrays = [as_numpy(tensor) for tensor in (a, b, out)]
        run_in_threads([partial(_row_dots, *arrays, *ends) for ends in pairwise(cuts)])  # type: ignore[call-arg]
        return
    count = rows_at_once(a)
    for start in range(low, high, count):
        part = slice(start, min(start + count, high))
        torch.sum(a[part] * b[part], -1, dtype=out.dtype, out=out[part])


def load_sums(edge: CompressedEdges, dtype: torch.dtype) -> None:
    """Compile the sparse product for one dtype, or load it from the cache.

    Args:
        edge: a block of one edge, from row 0 to column 0.
        dtype: of the rows.
    """
    rows, weight = torch.zeros(1, 1, 1, dtype=dtype), torch.zeros(1, 1, dtype=sum_dtype(dtype))
    for out in {dtype, weight.dtype}:
        spmm(edge, rows, rows.to(out))
        spmm(edge, rows, rows.to(out), weight)


@inlined()
def _add_edges(
    total: Any, to: int, block: Any, k: int, source: Any, weight: Any, heads: int, channels: int, end: int
) -> None:
    """``total[to:] += weight[e] * x[j]`` of the edges of row k; a row is ``heads * channels`` numbers."""
    width, column, position = heads * channels, data(block.columns), data(block.edges)
    for e in range(block.ptr[k], block.ptr[k + 1]):
        prefetch_row(source, column, e, end, width)
        start = column[e] * width
        if weight is None:
            add(total, to, source, start, width)
        else:
            # Weights are in the order of ``edge_index``, not of the block, so they too are read at random.
            prefetch_row(data(weight), position, e, end, heads)
            for h in range(heads):
                c = h * channels
                add_scaled(total, to + c, source, start + c, weight[position[e], h], channels)


@njit(cache=True, nogil=True)
def _spmm(block: Any, x: Any, out: Any, weight: Any, first: int, last: int) -> None:
    """Rows ``first .. last-1`` of :func:`spmm`: ``out[i, h] += sum over edges j -> i of weight[e, h] * x[j, h]``."""
    heads, channels = x.shape[1], x.shape[2]
    width, end = heads * channels, block.ptr[last]
    source, total = data(x), data(out)
    for k in range(first, last):
        _add_edges(total, block.rows[k] * width, block, k, source, weight, heads, channels, end)


@njit(cache=True, nogil=True)
def _spmm_rounded(block: Any, x: Any, out: Any, weight: Any, first: int, last: int) -> None:
    """As :func:`_spmm`, for a result of bfloat16: a row is summed in float32 beside it."""
    heads, channels = x.shape[1], x.shape[2]
    width, end = heads * channels, block.ptr[last]
    source, total = data(x), data(out)
    sums = np.empty(width, np.float32)
    for k in range(first, last):
        # In the loop, so that the array outlives the pointer: numba frees an array after its last use.
        to, row = block.rows[k] * width, data(sums)
        copy(row, 0, total, to, width)
        _add_edges(row, 0, block, k, source, weight, heads, channels, end)
        copy(total, to, row, 0, width)


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


@njit(cache=True, nogil=True)
def _row_dots(a: Any, b: Any, out: Any, first: int, last: int) -> None:
    """Rows ``first .. last-1`` of :func:`row_dots`."""
    heads, channels = a.shape[1], a.shape[2]
    left, right, result = data(a), data(b), data(out)
    for at in range(first * heads, last * heads):
        result[at] = dot(left, at * channels, right, at * channels, channels)


def extreme_state(num_targets: int, x: Tensor, largest: bool) -> ExtremeState:
    """Return the state before the first block, for sources like ``x`` ``[S, C]``."""
    shape = (num_targets, *x.shape[1:])
    return ExtremeState(x.new_full(shape, float("-inf") if largest else float("inf")), x.new_zeros(shape))


def extreme_forward(block: CompressedEdges, x: Tensor, largest: bool, state: ExtremeState) -> None:
    """Merge a block into ``state``.

    Args:
        block: edges by target.
        x: ``[S, C]``, source rows.
        largest: maximum, not minimum.
        state: changed in place.
    """
    if runs_compiled([x], state):
        run_over_rows(block, _extreme_forward, x, largest, state)
    else:
        form_for(x).extreme_forward(block, x, largest, state)


def extreme_backward(block: CompressedEdges, x: Tensor, out: Tensor, share: Tensor, dx: Tensor) -> None:
    """Add ``share[target]`` to the gradient of each message that equals ``out[target]``.

    Args:
        block: edges by source.
        x: ``[S, C]``, source rows.
        out: ``[T, C]``, the extremes over all blocks.
        share: ``[T, C]``, the gradient divided by the number of messages that attain the extreme.
        dx: ``[S, C]``, added to in place.
    """
    if runs_compiled([x, out, share], [dx]):
        run_over_rows(block, _extreme_backward, x, out, share, dx)
    else:
        form_for(x).extreme_backward(block, x, out, share, dx)


@inlined()
def _merge(out: Any, ties: Any, to: int, x: Any, start: int, largest: bool, count: int) -> None:
    """Merge one message; a NaN replaces the extreme and remains."""
    for c in range(count):
        new, old, attained = x[start + c], out[to + c], ties[to + c]
        # new != new is the test for NaN; once the extreme is NaN, no comparison is true and it remains.
        better = (new > old if largest else new < old) or new != new
        out[to + c] = new if better else old
        ties[to + c] = 1 if better else (attained + 1 if new == old else attained)


@njit(cache=True, nogil=True)
def _extreme_forward(block: Any, x: Any, largest: bool, state: Any, first: int, last: int) -> None:
    """Rows ``first .. last-1`` of :func:`extreme_forward`."""
    rows, ptr = block.rows, block.ptr
    width, end = x.shape[1], ptr[last]
    source, column, best, count = data(x), data(block.columns), data(state.out), data(state.ties)
    for k in range(first, last):
        to = rows[k] * width
        for e in range(ptr[k], ptr[k + 1]):
            prefetch_row(source, column, e, end, width)
            # Two calls, each with a constant: without a branch inside, the loop vectorises.
            if largest:
                _merge(best, count, to, source, column[e] * width, True, width)
            else:
                _merge(best, count, to, source, column[e] * width, False, width)


@inlined()
def _add_where_equal(dx: Any, x: Any, at: int, out: Any, share: Any, start: int, count: int) -> None:
    for c in range(count):
        old = dx[at + c]
        dx[at + c] = old + share[start + c] if x[at + c] == out[start + c] else old


@njit(cache=True, nogil=True)
def _extreme_backward(block: Any, x: Any, out: Any, share: Any, dx: Any, first: int, last: int) -> None:
    """Rows ``first .. last-1`` of :func:`extreme_backward`: ``dx[j] += share[i]`` where ``x[j] == out[i]``."""
    rows, ptr = block.rows, block.ptr
    width, end = x.shape[1], ptr[last]
    source, column, best, part, total = data(x), data(block.columns), data(out), data(share), data(dx)
    for k in range(first, last):
        at = rows[k] * width
        for e in range(ptr[k], ptr[k + 1]):
            prefetch_row(best, column, e, end, width)
            prefetch_row(part, column, e, end, width)
            _add_where_equal(total, source, at, best, part, column[e] * width, width)
