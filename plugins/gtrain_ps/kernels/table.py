"""Sparse rows times a block of a table, and the backward pass with the update of the block fused into it.

The updates are :mod:`gtrain.nn.rules`, row by row: the gradient of a row is summed up in a buffer that stays in the
first cache, and the row is changed at once, so no gradient of the table is ever in memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gtrain.graph.prefetch import prefetch_entry, prefetch_row
from gtrain_ps.kernels.fence import fence

_FAST = {"reassoc", "contract", "nsz", "arcp"}  # NaN and infinity stay what they are
_AHEAD = 12  # rows that are asked for before they are needed
_ENTRIES_AHEAD = 32  # likewise entries, whose rows are often in a cache


@njit(cache=True, nogil=True, fastmath=_FAST)
def forward(ids: Any, offsets: Any, values: Any, weighted: bool, table: Any, out: Any) -> None:
    """Sparse rows times a block: ``out[i] = sum of values[j] * table[ids[j]]`` over the entries j of row i.

    Args:
        ids: int32 ``[Z]``.
        offsets: int64 ``[m + 1]``.
        values: ``[Z]``; read only if ``weighted``, else every value is 1.
        table: ``[n, d]``.
        out: ``[m, d]``.
    """
    width, last = table.shape[1], len(ids) - 1
    for row in range(len(offsets) - 1):
        for column in range(width):
            out[row, column] = 0
        entry, end = offsets[row], offsets[row + 1]
        while entry + 3 < end:
            for ahead in range(4):
                prefetch_row(table, ids[min(entry + ahead + _ENTRIES_AHEAD, last)])
            a, b, c, e = ids[entry], ids[entry + 1], ids[entry + 2], ids[entry + 3]
            if weighted:
                u, v, w, x = values[entry], values[entry + 1], values[entry + 2], values[entry + 3]
                for column in range(width):
                    out[row, column] += (
                        u * table[a, column] + v * table[b, column] + w * table[c, column] + x * table[e, column]
                    )
            else:
                for column in range(width):
                    out[row, column] += table[a, column] + table[b, column] + table[c, column] + table[e, column]
            entry += 4
        while entry < end:
            prefetch_row(table, ids[min(entry + _ENTRIES_AHEAD, last)])
            number = ids[entry]
            if weighted:
                u = values[entry]
                for column in range(width):
                    out[row, column] += u * table[number, column]
            else:
                for column in range(width):
                    out[row, column] += table[number, column]
            entry += 1


@njit(cache=True, nogil=True, fastmath=_FAST)
def sum_row(first: int, following: Any, row_of: Any, values: Any, weighted: bool, gradient: Any, total: Any) -> float:
    """Sum up the gradient of one row of the table, and return the sum of its squares: 0 where it is 0.

    Entries are taken four at a time, so that the sum is read and written less often.
    """
    width, one = gradient.shape[1], values.dtype.type(1)
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


@njit(cache=True, nogil=True)
def begin_row(index: int, row: int, table: Any, marker: Any, backup: Any) -> None:
    """Keep a row, and then say that it is being changed: see :data:`gtrain_ps.server.block.MARKS`."""
    for column in range(table.shape[1]):
        backup[0, column] = table[row, column]
    fence()
    marker[2] = row
    fence()
    marker[3] = index
    fence()


@njit(cache=True, nogil=True)
def end_row(index: int, marker: Any) -> None:
    """Say that a row has been changed by this step."""
    fence()
    marker[1] = index + 1


@njit(cache=True, nogil=True, fastmath=_FAST)
def sgd(
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
        found, unique, first, following, row_of: of :func:`gtrain_ps.kernels.rows.group`.
        values, weighted: of the entries.
        gradient: ``[m, d]``, of the product.
        table: ``[n, d]``.
        rate, decay: learning rate and weight decay.
        safe: whether the process may be killed at any moment, and the next one goes on with the step.
        marker: int64 ``[4]``, how far this step is; see :data:`gtrain_ps.server.block.MARKS`.
        backup: what the row that is being changed, and its state, were before.
    """
    width, kind = table.shape[1], table.dtype.type
    lr, wd, total = kind(rate), kind(decay), np.empty(width, table.dtype)
    for index in range(marker[1] if safe else 0, found):
        ahead = unique[min(index + _AHEAD, found - 1)]
        prefetch_row(table, ahead)
        row = unique[index]
        norm = sum_row(first[index], following, row_of, values, weighted, gradient, total)
        if norm == 0:
            continue
        if safe:
            begin_row(index, row, table, marker, backup)
        for column in range(width):
            table[row, column] -= lr * (total[column] + wd * table[row, column])
        if safe:
            end_row(index, marker)


@njit(cache=True, nogil=True, fastmath=_FAST)
def adagrad(
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
    width, kind = table.shape[1], table.dtype.type
    lr, wd, small, total = kind(rate), kind(decay), kind(eps), np.empty(width, table.dtype)
    for index in range(marker[1] if safe else 0, found):
        ahead = unique[min(index + _AHEAD, found - 1)]
        prefetch_row(table, ahead)
        prefetch_row(squares, ahead)
        row = unique[index]
        norm = sum_row(first[index], following, row_of, values, weighted, gradient, total)
        if norm == 0:
            continue
        if safe:
            for column in range(width):
                backup[1, column] = squares[row, column]
            begin_row(index, row, table, marker, backup)
        for column in range(width):
            g = total[column] + wd * table[row, column]
            s = squares[row, column] + g * g
            squares[row, column] = s
            table[row, column] -= lr * g / (np.sqrt(s) + small)
        if safe:
            end_row(index, marker)


@njit(cache=True, nogil=True, fastmath=_FAST)
def rowwise_adagrad(
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
    width, kind = table.shape[1], table.dtype.type
    lr, wd, small, total = kind(rate), kind(decay), kind(eps), np.empty(width, table.dtype)
    lengths = np.empty(len(gradient), table.dtype)  # squared: most rows have one entry, and need no sum
    for index in range(len(gradient)):
        length = kind(0)
        for column in range(width):
            length += gradient[index, column] * gradient[index, column]
        lengths[index] = length
    for index in range(marker[1] if safe else 0, found):
        ahead = unique[min(index + _AHEAD, found - 1)]
        prefetch_row(table, ahead)
        prefetch_entry(squares, ahead)
        row = unique[index]
        entry = first[index]
        only, u = row_of[entry], values[entry] if weighted else kind(1)
        alone = following[entry] < 0 and wd == 0
        norm = u * u * lengths[only] if alone else sum_row(entry, following, row_of, values, weighted, gradient, total)
        if norm == 0:
            continue
        if safe:
            backup[1, 0] = squares[row]
            begin_row(index, row, table, marker, backup)
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


@njit(cache=True, nogil=True, fastmath=_FAST)
def lazy_adam(
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
    width, kind = table.shape[1], table.dtype.type
    lr, wd, small, total = kind(rate), kind(decay), kind(eps), np.empty(width, table.dtype)
    decay1, decay2, rest1, rest2 = kind(beta1), kind(beta2), kind(1.0 - beta1), kind(1.0 - beta2)
    for index in range(marker[1] if safe else 0, found):
        ahead = unique[min(index + _AHEAD, found - 1)]
        prefetch_row(table, ahead)
        prefetch_entry(times, ahead)
        prefetch_row(means, ahead)
        prefetch_row(squares, ahead)
        row = unique[index]
        norm = sum_row(first[index], following, row_of, values, weighted, gradient, total)
        if norm == 0:
            continue
        if safe:
            for column in range(width):
                backup[1, column] = means[row, column]
                backup[2, column] = squares[row, column]
            backup[3, 0] = times[row]
            begin_row(index, row, table, marker, backup)
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
