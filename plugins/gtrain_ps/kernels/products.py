"""Sparse rows times a block of a table."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from numba import njit

from gtrain.kernels.memory import prefetch_next_row
from gtrain.kernels.options import FAST, inlined
from gtrain_ps.kernels.widths import Kernel, is_large

_PREFETCH_DISTANCE = 32  # entries; their rows are often in a cache already


def product_kernel(table: Any) -> Kernel:
    """Return :func:`forward` for a table, without its first argument."""
    width = table.shape[1]
    return _compiled_for(width) if is_large(table) else partial(forward, width)


@inlined(fastmath=FAST)
def forward(width: int, ids: Any, offsets: Any, values: Any, weighted: bool, table: Any, out: Any) -> None:
    """Multiply sparse rows by a block: Y = X W.

    Row i of Y is ``sum_j values[j] * table[ids[j]]`` over the entries ``offsets[i] <= j < offsets[i + 1]``. Four
    entries are added at a time, so that a row of Y is read and written once for four rows of W.

    Args:
        width: d.
        ids: int32 ``[Z]``.
        offsets: int64 ``[m + 1]``.
        values: ``[Z]``; read only if ``weighted``, else every value is 1.
        weighted: whether entries have values.
        table: ``[n, d]``.
        out: ``[m, d]``.
    """
    # Look-ahead positions are clamped to the last entry: prefetching it again is cheaper than a branch.
    last = len(ids) - 1
    for row in range(len(offsets) - 1):
        for column in range(width):
            out[row, column] = 0
        entry, end = offsets[row], offsets[row + 1]
        # One row of Y is read and written per four rows of W: these loops are bound by memory traffic, not by
        # arithmetic.
        while entry + 3 < end:
            for ahead in range(4):
                prefetch_next_row(table, ids[min(entry + ahead + _PREFETCH_DISTANCE, last)], width)
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
            prefetch_next_row(table, ids[min(entry + _PREFETCH_DISTANCE, last)], width)
            number = ids[entry]
            if weighted:
                u = values[entry]
                for column in range(width):
                    out[row, column] += u * table[number, column]
            else:
                for column in range(width):
                    out[row, column] += table[number, column]
            entry += 1


@cache
def _compiled_for(width: int) -> Any:
    @njit(cache=True, nogil=True)
    def kernel(*arguments: Any) -> None:
        forward(width, *arguments)

    return kernel
