"""Running maxima and minima over blocks of edges, with the number of messages that attain them."""

from __future__ import annotations

from typing import Any

from numba import njit
from torch import Tensor

from gtrain.kernels.options import inlined
from gtrain_sar.edges import CompressedEdges
from gtrain_sar.kernels import plain
from gtrain_sar.kernels.lanes import data
from gtrain_sar.kernels.plain import ExtremeState
from gtrain_sar.kernels.rows import prefetch_row
from gtrain_sar.kernels.threads import run_over_rows, runs_compiled


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
        run_over_rows(block, _forward, x, largest, state)
    else:
        plain.extreme_forward(block, x, largest, state)


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
        run_over_rows(block, _backward, x, out, share, dx)
    else:
        plain.extreme_backward(block, x, out, share, dx)


@inlined()
def _merge(out: Any, ties: Any, to: int, x: Any, start: int, largest: bool, count: int) -> None:
    """Merge one message; a NaN replaces the extreme and remains."""
    for c in range(count):
        new, old, attained = x[start + c], out[to + c], ties[to + c]
        better = (new > old if largest else new < old) or new != new
        out[to + c] = new if better else old
        ties[to + c] = 1 if better else (attained + 1 if new == old else attained)


@njit(cache=True, nogil=True)
def _forward(block: Any, x: Any, largest: bool, state: Any, first: int, last: int) -> None:
    """Rows ``first .. last-1`` of :func:`extreme_forward`."""
    rows, ptr = block.rows, block.ptr
    width, end = x.shape[1], ptr[last]
    source, column, best, count = data(x), data(block.columns), data(state.out), data(state.ties)
    for k in range(first, last):
        to = rows[k] * width
        for e in range(ptr[k], ptr[k + 1]):
            prefetch_row(source, column, e, end, width)
            # a constant in each call: the comparison inside the loop vectorises
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
def _backward(block: Any, x: Any, out: Any, share: Any, dx: Any, first: int, last: int) -> None:
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
