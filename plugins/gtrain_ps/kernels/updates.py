"""The backward pass of a product with a block of a table, with the update of the block fused into it.

The updates are :mod:`gtrain.nn.rules`, row by row: the gradient of a row is summed up in a buffer that stays in the
first cache, and the row is changed at once, so no gradient of the table is ever in memory.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
from numba import njit

from gtrain.graph.prefetch import prefetch_entry, prefetch_next_row
from gtrain_ps.kernels.fence import fence
from gtrain_ps.kernels.widths import FAST, Kernel, deserves_own

_AHEAD = 12  # rows that are asked for before they are needed


def update_of(rule: str, table: Any) -> Kernel:
    """The function of a rule's name for a table, without its first argument."""
    any_width, of_width = _LOOPS[rule]
    width = table.shape[1]
    made: Kernel = of_width(width) if deserves_own(table) else partial(any_width, width)
    return made


@njit(cache=True, nogil=True, fastmath=FAST, forceinline=True)
def sum_row(
    width: int, first: int, following: Any, row_of: Any, values: Any, weighted: bool, gradient: Any, total: Any
) -> float:
    """Sum up the gradient of one row of the table, and return the sum of its squares: 0 where it is 0.

    Entries are taken four at a time, so that the sum is read and written less often.
    """
    one = values.dtype.type(1)
    for column in range(width):
        total[column] = 0
    a = first
    while a >= 0:
        b = following[a]
        c = following[b] if b >= 0 else -1
        d = following[c] if c >= 0 else -1
        i, u = row_of[a], values[a] if weighted else one
        if d >= 0:
            j, v = row_of[b], values[b] if weighted else one
            k, w = row_of[c], values[c] if weighted else one
            m, x = row_of[d], values[d] if weighted else one
            for column in range(width):
                total[column] += u * gradient[i, column] + v * gradient[j, column]
                total[column] += w * gradient[k, column] + x * gradient[m, column]
            a = following[d]
        elif b >= 0:
            j, v = row_of[b], values[b] if weighted else one
            for column in range(width):
                total[column] += u * gradient[i, column] + v * gradient[j, column]
            a = c
        else:
            for column in range(width):
                total[column] += u * gradient[i, column]
            a = -1
    norm = total.dtype.type(0)
    for column in range(width):
        norm += total[column] * total[column]
    return norm


@njit(cache=True, nogil=True, forceinline=True)
def begin_row(width: int, index: int, row: int, table: Any, marker: Any, backup: Any) -> None:
    """Keep a row, and then say that it is being changed: see :data:`gtrain_ps.server.block.MARKS`."""
    for column in range(width):
        backup[0, column] = table[row, column]
    fence()
    marker[2] = row
    fence()
    marker[3] = index
    fence()


@njit(cache=True, nogil=True, forceinline=True)
def end_row(index: int, marker: Any) -> None:
    """Say that a row has been changed by this step."""
    fence()
    marker[1] = index + 1


@njit(cache=True, nogil=True, fastmath=FAST, forceinline=True)
def sgd(
    width: int,
    found: int,
    unique: Any,
    first: Any,
    following: Any,
    row_of: Any,
    values: Any,
    weighted: bool,
    gradient: Any,
    table: Any,
    rate: float,
    decay: float,
    safe: bool,
    marker: Any,
    backup: Any,
) -> None:
    """``w -= lr * g``.

    Args:
        width: d.
        found, unique, first, following, row_of: of :func:`gtrain_ps.kernels.rows.group`.
        values, weighted: of the entries.
        gradient: ``[m, d]``, of the product.
        table: ``[n, d]``.
        rate, decay: learning rate and weight decay.
        safe: whether the process may be killed at any moment, and the next one goes on with the step.
        marker: int64 ``[4]``, how far this step is; see :data:`gtrain_ps.server.block.MARKS`.
        backup: what the row that is being changed, and its state, were before.
    """
    kind = table.dtype.type
    lr, wd, total = kind(rate), kind(decay), np.empty(width, table.dtype)
    for index in range(marker[1] if safe else 0, found):
        ahead = unique[min(index + _AHEAD, found - 1)]
        prefetch_next_row(table, ahead, width)
        row = unique[index]
        norm = sum_row(width, first[index], following, row_of, values, weighted, gradient, total)
        if norm == 0:
            continue
        if safe:
            begin_row(width, index, row, table, marker, backup)
        for column in range(width):
            table[row, column] -= lr * (total[column] + wd * table[row, column])
        if safe:
            end_row(index, marker)


@njit(cache=True, nogil=True, fastmath=FAST, forceinline=True)
def adagrad(
    width: int,
    found: int,
    unique: Any,
    first: Any,
    following: Any,
    row_of: Any,
    values: Any,
    weighted: bool,
    gradient: Any,
    table: Any,
    squares: Any,
    rate: float,
    decay: float,
    eps: float,
    safe: bool,
    marker: Any,
    backup: Any,
) -> None:
    """``s += g^2; w -= lr * g / (sqrt(s) + eps)``; squares ``[n, d]``; see :func:`sgd`."""
    kind = table.dtype.type
    lr, wd, small, total = kind(rate), kind(decay), kind(eps), np.empty(width, table.dtype)
    for index in range(marker[1] if safe else 0, found):
        ahead = unique[min(index + _AHEAD, found - 1)]
        prefetch_next_row(table, ahead, width)
        prefetch_next_row(squares, ahead, width)
        row = unique[index]
        norm = sum_row(width, first[index], following, row_of, values, weighted, gradient, total)
        if norm == 0:
            continue
        if safe:
            for column in range(width):
                backup[1, column] = squares[row, column]
            begin_row(width, index, row, table, marker, backup)
        for column in range(width):
            g = total[column] + wd * table[row, column]
            s = squares[row, column] + g * g
            squares[row, column] = s
            table[row, column] -= lr * g / (np.sqrt(s) + small)
        if safe:
            end_row(index, marker)


@njit(cache=True, nogil=True, fastmath=FAST, forceinline=True)
def rowwise_adagrad(
    width: int,
    found: int,
    unique: Any,
    first: Any,
    following: Any,
    row_of: Any,
    values: Any,
    weighted: bool,
    gradient: Any,
    table: Any,
    squares: Any,
    rate: float,
    decay: float,
    eps: float,
    safe: bool,
    marker: Any,
    backup: Any,
) -> None:
    """``s += sum(g^2) / d; w -= lr * g / (sqrt(s) + eps)``; squares ``[n]``; see :func:`sgd`."""
    kind = table.dtype.type
    lr, wd, small, total = kind(rate), kind(decay), kind(eps), np.empty(width, table.dtype)
    lengths = np.empty(len(gradient), table.dtype)  # squared: most rows have one entry, and need no sum
    for index in range(len(gradient)):
        length = kind(0)
        for column in range(width):
            length += gradient[index, column] * gradient[index, column]
        lengths[index] = length
    for index in range(marker[1] if safe else 0, found):
        ahead = unique[min(index + _AHEAD, found - 1)]
        prefetch_next_row(table, ahead, width)
        prefetch_entry(squares, ahead)
        row = unique[index]
        entry = first[index]
        only, u = row_of[entry], values[entry] if weighted else kind(1)
        alone = following[entry] < 0 and wd == 0
        norm = (
            u * u * lengths[only]
            if alone
            else sum_row(width, entry, following, row_of, values, weighted, gradient, total)
        )
        if norm == 0:
            continue
        if safe:
            backup[1, 0] = squares[row]
            begin_row(width, index, row, table, marker, backup)
        if wd != 0:
            norm = kind(0)
            for column in range(width):
                total[column] += wd * table[row, column]
                norm += total[column] * total[column]
        s = squares[row] + norm / kind(width)
        squares[row] = s
        factor = lr / (np.sqrt(s) + small)
        if alone:
            factor *= u
            for column in range(width):
                table[row, column] -= factor * gradient[only, column]
        else:
            for column in range(width):
                table[row, column] -= factor * total[column]
        if safe:
            end_row(index, marker)


@njit(cache=True, nogil=True, fastmath=FAST, forceinline=True)
def lazy_adam(
    width: int,
    found: int,
    unique: Any,
    first: Any,
    following: Any,
    row_of: Any,
    values: Any,
    weighted: bool,
    gradient: Any,
    table: Any,
    times: Any,
    means: Any,
    squares: Any,
    rate: float,
    decay: float,
    eps: float,
    beta1: float,
    beta2: float,
    safe: bool,
    marker: Any,
    backup: Any,
) -> None:
    """Adam with the row's own number of updates; times ``[n]``, means and squares ``[n, d]``; see :func:`sgd`."""
    kind = table.dtype.type
    lr, wd, small, total = kind(rate), kind(decay), kind(eps), np.empty(width, table.dtype)
    decay1, decay2, rest1, rest2 = kind(beta1), kind(beta2), kind(1.0 - beta1), kind(1.0 - beta2)
    for index in range(marker[1] if safe else 0, found):
        ahead = unique[min(index + _AHEAD, found - 1)]
        prefetch_next_row(table, ahead, width)
        prefetch_entry(times, ahead)
        prefetch_next_row(means, ahead, width)
        prefetch_next_row(squares, ahead, width)
        row = unique[index]
        norm = sum_row(width, first[index], following, row_of, values, weighted, gradient, total)
        if norm == 0:
            continue
        if safe:
            for column in range(width):
                backup[1, column] = means[row, column]
                backup[2, column] = squares[row, column]
            backup[3, 0] = times[row]
            begin_row(width, index, row, table, marker, backup)
        times[row] += kind(1)
        scale = lr / (kind(1) - decay1 ** times[row])
        correction = kind(1) - decay2 ** times[row]
        for column in range(width):
            g = total[column] + wd * table[row, column]
            mean = means[row, column] + rest1 * (g - means[row, column])
            square = decay2 * squares[row, column] + rest2 * g * g
            means[row, column] = mean
            squares[row, column] = square
            table[row, column] -= scale * mean / (np.sqrt(square / correction) + small)
        if safe:
            end_row(index, marker)


# One maker for each rule: numba finds a compiled closure on the disk by the numbers in it, not by functions.


@cache
def _sgd(width: int) -> Any:
    @njit(cache=True, nogil=True)
    def of_width(*given: Any) -> None:
        sgd(width, *given)

    return of_width


@cache
def _adagrad(width: int) -> Any:
    @njit(cache=True, nogil=True)
    def of_width(*given: Any) -> None:
        adagrad(width, *given)

    return of_width


@cache
def _rowwise_adagrad(width: int) -> Any:
    @njit(cache=True, nogil=True)
    def of_width(*given: Any) -> None:
        rowwise_adagrad(width, *given)

    return of_width


@cache
def _lazy_adam(width: int) -> Any:
    @njit(cache=True, nogil=True)
    def of_width(*given: Any) -> None:
        lazy_adam(width, *given)

    return of_width


_LOOPS: dict[str, tuple[Any, Any]] = {
    "sgd": (sgd, _sgd),
    "adagrad": (adagrad, _adagrad),
    "rowwise_adagrad": (rowwise_adagrad, _rowwise_adagrad),
    "lazy_adam": (lazy_adam, _lazy_adam),
}
