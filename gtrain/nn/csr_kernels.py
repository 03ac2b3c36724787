"""Compiled loops over the entries of sparse rows; import this module inside the functions that need it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from gtrain.kernels import ordering
from gtrain.kernels.threads import num_threads, run_in_threads

_RANGE_ENTRIES = 1 << 13  # fewer entries are not worth another thread
_RANGES_PER_THREAD = 4  # a thread that finishes early takes over some of the others' rows


def add_products(
    pointers: Tensor, ids: Tensor, positions: Tensor | None, values: Tensor | None, table: Tensor, out: Tensor
) -> None:
    """Add ``value * table[id]`` of each entry to the row of ``out`` that has it; rows are divided among threads.

    Args:
        pointers: int64 ``[n + 1]``, the entries of each row.
        ids: int32 or int64 ``[Z]``.
        positions: int32 ``[Z]``, the position of each entry's value; None: the entry's own.
        values: ``[Z]``, of the dtype of ``table``; None: 1.
        table: float32 or float64 ``[m, d]``, contiguous.
        out: ``[n, d]``, contiguous, of the dtype of ``table``.
    """
    tensors = (pointers, ids, positions, values, table, out)
    arrays: list[Any] = [None if tensor is None else tensor.detach().numpy() for tensor in tensors]
    loop: Any = _add_products  # mypy takes a list for one argument
    run_in_threads([partial(loop, *arrays, first, last) for first, last in _ranges(arrays[0])])


def _ranges(pointers: Any) -> list[tuple[int, int]]:
    """Divide rows into ranges with about equally many entries."""
    threads = num_threads()
    count = min(threads * _RANGES_PER_THREAD if threads > 1 else 1, int(pointers[-1]) // _RANGE_ENTRIES)
    inner = np.searchsorted(pointers, np.linspace(0, pointers[-1], max(count, 1) + 1)[1:-1])
    bounds = np.unique([0, *inner, len(pointers) - 1]).tolist()
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def by_column(ids: Tensor, rows: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort entries by column, and by row within a column (counting sort).

    Args:
        ids: int32 ``[Z]``, the column of each entry, below ``columns``.
        rows: int32 ``[Z]``, the row of each entry, ascending.
        columns: F.

    Returns:
        ``pointers`` int64 ``[F + 1]``, the entries of each column; int32 ``[Z]``, the row of each entry; and int32
        ``[Z]``, the position of each entry in ``ids``.
    """
    pointers = torch.zeros(columns + 1, dtype=torch.int64)
    _, present = ordering.count(ids.numpy(), pointers.numpy())
    unused = np.empty(present, np.int64), np.empty(present + 1, np.int64)
    ordering.lay_out(pointers.numpy(), *unused)
    pointers[-1] = ids.numel()
    starts, positions = pointers.clone(), torch.arange(ids.numel(), dtype=torch.int32)
    sorted_rows, sorted_positions = torch.empty_like(rows), torch.empty_like(positions)
    arrays = (ids, rows, positions, starts, sorted_rows, sorted_positions)
    ordering.order_both(*(array.numpy() for array in arrays))
    return pointers, sorted_rows, sorted_positions


@njit(cache=True, nogil=True)
def _add_products(
    pointers: Any, ids: Any, positions: Any, values: Any, table: Any, out: Any, first: int, last: int
) -> None:
    """Rows ``first .. last-1`` of :func:`add_products`: ``out[i] += sum of value[e] * table[id[e]]`` of i's e."""
    for i in range(first, last):
        for e in range(pointers[i], pointers[i + 1]):
            row = table[ids[e]]
            if values is None:
                for c in range(out.shape[1]):
                    out[i, c] += row[c]
            else:
                value = values[e] if positions is None else values[positions[e]]
                for c in range(out.shape[1]):
                    out[i, c] += value * row[c]
