"""The backward pass of a product with a block of a table, fused with the update of the block.

For Y = X W the gradient of row r of W is ``sum_j values[j] * dY[row_of[j]]`` over the entries j with id r. It is summed
in a buffer that stays in the L1 cache, and a rule of :mod:`gtrain_ps.kernels.rules` changes the row at once, so no
gradient of the table is ever in memory.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
from numba import njit

from gtrain.kernels.memory import prefetch_entry, prefetch_next_row
from gtrain.kernels.options import BARE, FAST, bare, by_type, inlined
from gtrain.kernels.rows import any_nonzero
from gtrain_ps.kernels.progress import DONE, end_row, start_row
from gtrain_ps.kernels.rules import change, factor, takes_factor
from gtrain_ps.kernels.widths import Kernel, is_large

_PREFETCH_DISTANCE = 12  # rows


def update_kernel(table: Any) -> Kernel:
    """Return :func:`update` for a table, without its first argument."""
    width = table.shape[1]
    kernel: Kernel = _compiled_for(width) if is_large(table) else partial(update, width)
    return kernel


@bare(fastmath=FAST)
def sum_row(width: int, first: int, grouped: Any, gradient: Any, total: Any) -> float:
    """Sum the gradient of one row of the table into ``total`` ``[d]``, and return the sum of its squares.

    Entries are added four at a time, so that the sum is read and written less often.

    Args:
        width: d.
        first: first entry of the row's chain.
        grouped: :class:`~gtrain_ps.kernels.rows.GroupedEntries`.
        gradient: dY ``[m, d]``.
        total: receives the gradient.
    """
    following, row_of, values, weighted = grouped.following, grouped.row_of, grouped.values, grouped.weighted
    one = values.dtype.type(1)
    for column in range(width):
        total[column] = 0
    a = first
    while a >= 0:
        b = following[a]
        # Four links of the chain are read ahead, so that their rows of dY are loaded together.
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


@inlined(fastmath=FAST)
def update(width: int, rule: Any, grouped: Any, gradient: Any, table: Any, state: Any, progress: Any) -> None:
    """Apply one step to a block, or the rest of a step that was interrupted.

    Args:
        width: d.
        rule: of :mod:`gtrain_ps.kernels.rules`.
        grouped: :class:`~gtrain_ps.kernels.rows.GroupedEntries` of the stacked rows X.
        gradient: dY ``[m, d]``.
        table: ``[n, d]``.
        state: the rule's tensors ``[n, d]`` or ``[n]``.
        progress: :class:`~gtrain_ps.kernels.progress.UpdateProgress`.
    """
    total = np.empty(width, table.dtype)
    lengths = np.empty(len(gradient) if takes_factor(rule) else 0, table.dtype)
    _update_rows(width, rule, grouped, gradient, table, state, progress, total, lengths)


@bare(fastmath=FAST)
def _update_rows(
    width: int,
    rule: Any,
    grouped: Any,
    gradient: Any,
    table: Any,
    state: Any,
    progress: Any,
    total: Any,
    lengths: Any,
) -> None:
    """Run :func:`update` with its scratch memory: ``total`` ``[d]``, and ``lengths``: |dY_i|^2 ``[m]``.

    Rules that take a factor need only the squared length of a row's gradient before they change the row. Most rows have
    a single entry: their gradient ``u * dY_i`` has the length ``u^2 |dY_i|^2``, so it is never summed or stored.
    """
    number, count, unique = table.dtype.type, grouped.num_ids, grouped.unique
    decay = number(rule.weight_decay)
    # |dY_i|^2 once per row of dY, although many rows of the table may read it.
    for index in range(len(lengths)):
        length = number(0)
        for column in range(width):
            length += gradient[index, column] * gradient[index, column]
        lengths[index] = length
    # After a restart: the rows before DONE have this step's change already.
    for index in range(progress.marker[DONE] if progress.safe else 0, count):
        ahead = unique[min(index + _PREFETCH_DISTANCE, count - 1)]
        prefetch_next_row(table, ahead, width)
        _prefetch_state(state, ahead, width)
        row, entry = unique[index], grouped.first[index]
        only, u = grouped.row_of[entry], grouped.values[entry] if grouped.weighted else number(1)
        alone = takes_factor(rule) and grouped.following[entry] < 0 and decay == 0
        # With weight decay the gradient depends on the row itself, so its length must be computed.
        norm = u * u * lengths[only] if alone else sum_row(width, entry, grouped, gradient, total)
        # A zero gradient changes nothing, neither state nor weight decay, as in gtrain.nn.rules; squares can underflow.
        if norm == 0 and not (u != 0 and any_nonzero(gradient[only]) if alone else any_nonzero(total)):
            continue
        if progress.safe:
            start_row(width, index, row, table, state, progress)
        if takes_factor(rule):
            if decay != 0:
                norm = number(0)
                for column in range(width):
                    total[column] += decay * table[row, column]
                    norm += total[column] * total[column]
            multiple = factor(rule, width, row, norm, state, table)
            # The row of dY is used in place: it was never copied to ``total``.
            if alone:
                multiple *= u
                for column in range(width):
                    table[row, column] -= multiple * gradient[only, column]
            else:
                for column in range(width):
                    table[row, column] -= multiple * total[column]
        else:
            change(rule, width, row, total, table, state)
        if progress.safe:
            end_row(index, progress)


@by_type(
    lambda state, row, width: (
        _prefetch_nothing if not len(state) else _prefetch_number if state[0].ndim == 1 else _prefetch_columns
    ),
    jit_options=BARE,
)
def _prefetch_state(state: Any, row: int, width: int) -> None:
    """Prefetch a row of each state tensor; the compiler unrolls the recursion over the tensors."""


def _prefetch_nothing(state: Any, row: int, width: int) -> None:
    pass


def _prefetch_number(state: Any, row: int, width: int) -> None:
    prefetch_entry(state[0], row)
    _prefetch_state(state[1:], row, width)


def _prefetch_columns(state: Any, row: int, width: int) -> None:
    prefetch_next_row(state[0], row, width)
    _prefetch_state(state[1:], row, width)


@cache
def _compiled_for(width: int) -> Any:
    @njit(cache=True, nogil=True)
    def kernel(*arguments: Any) -> None:
        update(width, *arguments)

    return kernel
