"""Rows rounded to 8 bits, each with a scale of its own, for products of integers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gtrain_pbg.kernels.numbers import ROUND, STRICT, number

_MOST = np.float32(127)
_SIGNLESS, _INFINITE = np.uint16(0x7FFF), np.uint16(0x7F80)
_ROUND_BITS = np.int32(0x4B400000)  # those of ``ROUND``


@njit(cache=True, nogil=True)
def _largest(row: Any) -> Any:
    """Bits of the largest absolute value: without the sign they are in the order of the numbers."""
    found = np.uint16(0)
    for d in range(row.size):
        bits = np.uint16(row[d] & _SIGNLESS)
        found = bits if bits > found else found
    return found


@njit(cache=True, nogil=True, fastmath=STRICT)
def _round(row: Any, factor: Any, target: Any) -> None:
    for d in range(row.size):
        near = np.float32(number(row[d]) * factor + ROUND)
        target[d] = np.int8(near.view(np.int32) - _ROUND_BITS)


@njit(cache=True, nogil=True, fastmath=STRICT)
def round_rows(rows: Any, result: Any, scale: Any) -> None:
    """Write ``rows[z]`` as ``scale[z] * result[z]``, as nearly as 8 bits can.

    Args:
        rows: ``[n, D]`` bfloat16 bits.
        result: int8 ``[n, D]``.
        scale: float32 ``[n]``; NaN where a row has what is no finite number.
    """
    for z in range(rows.shape[0]):
        bits = _largest(rows[z])
        most = number(bits)
        if bits >= _INFINITE:
            scale[z] = np.float32(np.nan)
            result[z, :] = 1
        elif most < np.float32(1e-36):  # its inverse would be infinite
            scale[z] = np.float32(0)
            result[z, :] = 0
        else:
            scale[z] = most / _MOST
            _round(rows[z], _MOST / most, result[z])
