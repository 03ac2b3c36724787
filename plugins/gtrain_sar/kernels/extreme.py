"""Running maxima and minima over blocks of edges, with the number of messages that attain them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import njit
from torch import Tensor

from gtrain_sar.kernels import plain
from gtrain_sar.kernels.lanes import data
from gtrain_sar.kernels.plain import ExtremeState
from gtrain_sar.kernels.rows import ahead
from gtrain_sar.kernels.threads import array, arrays, compiled, over_rows

if TYPE_CHECKING:
    from gtrain_sar.edges import Compressed


def extreme_state(num_targets: int, x: Tensor, largest: bool) -> ExtremeState:
    """The state before the first block, for sources like ``x`` ``[S, C]``."""
    shape = (num_targets, *x.shape[1:])
    return ExtremeState(x.new_full(shape, float("-inf") if largest else float("inf")), x.new_zeros(shape))


def extreme_forward(block: Compressed, x: Tensor, largest: bool, state: ExtremeState) -> None:
    """Merge a block into ``state``.

    Args:
        block: edges by target.
        x: ``[S, C]``, source rows.
        largest: maximum, not minimum.
        state: changed in place.
    """
    if not compiled([x], [*state]):
        return plain.extreme_forward(block, x, largest, state)
    rows, ptr, columns, _ = arrays(block)
    a, out, ties = array(x), array(state.out), array(state.ties)

    def work(first: int, last: int) -> None:
        _forward(rows, ptr, columns, a, largest, out, ties, first, last)

    return over_rows(block, work)


def extreme_backward(block: Compressed, x: Tensor, out: Tensor, share: Tensor, dx: Tensor) -> None:
    """Add ``share[target]`` to the gradient of each message that equals ``out[target]``.

    Args:
        block: edges by source.
        x: ``[S, C]``, source rows.
        out: ``[T, C]``, the extremes over all blocks.
        share: ``[T, C]``, what each of the messages that attain it gets of the gradient.
        dx: ``[S, C]``, added to in place.
    """
    if not compiled([x, out, share], [dx]):
        return plain.extreme_backward(block, x, out, share, dx)
    rows, ptr, columns, _ = arrays(block)
    a, b, c, d = array(x), array(out), array(share), array(dx)

    def work(first: int, last: int) -> None:
        _backward(rows, ptr, columns, a, b, c, d, first, last)

    return over_rows(block, work)


@njit(cache=True, nogil=True, forceinline=True)
def _merge(out: Any, ties: Any, to: int, x: Any, start: int, largest: bool, count: int) -> None:
    """Merge one message; NaN stays what it is."""
    for c in range(count):
        new, old, attained = x[start + c], out[to + c], ties[to + c]
        better = (new > old if largest else new < old) or new != new
        out[to + c] = new if better else old
        ties[to + c] = 1 if better else (attained + 1 if new == old else attained)


@njit(cache=True, nogil=True)
def _forward(
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
def _backward(rows: Any, ptr: Any, columns: Any, x: Any, out: Any, share: Any, dx: Any, first: int, last: int) -> None:
    """Rows ``first .. last-1`` of a block; see :func:`.extreme.extreme_backward`."""
    width, end = x.shape[1], ptr[last]
    source, column, best, part, total = data(x), data(columns), data(out), data(share), data(dx)
    for k in range(first, last):
        at = rows[k] * width
        for e in range(ptr[k], ptr[k + 1]):
            ahead(best, column, e, end, width)
            ahead(part, column, e, end, width)
            _add_where_equal(total, source, at, best, part, column[e] * width, width)
