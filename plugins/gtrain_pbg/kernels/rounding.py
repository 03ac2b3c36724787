"""Rows rounded to 8 bits, for products of integers.

What gradients are computed from is rounded up or down at random, with probabilities that make the mean right: of a
thousand probabilities, most are less than half of the least number that 8 bits tell from 0, and all of them count. The
fractions that decide it come from a table, ``dither`` float32 ``[SPAN + columns]``, evenly spread over -0.5 to 0.5;
row z reads it from ``z * STRIDE % SPAN`` on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from gtrain.kernels.exponential import ROUND, ROUND_BITS
from gtrain.kernels.options import STRICT, inlined
from gtrain_pbg.kernels.numbers import number, store

SPAN, STRIDE = 4096, 1021  # the rows of a chunk that read the same fractions are 4096 apart

_MOST = np.float32(127)
_SIGNLESS, _INFINITE = np.uint16(0x7FFF), np.uint16(0x7F80)
_ROOM = np.float32(126)  # and what is added makes at most 127 of it
_POSITIVE, _NO_NUMBER = np.int32(0x7FFFFFFF), np.int32(0x7F800000)


@inlined
def _largest(row: Any) -> Any:
    """Bits of the largest absolute value: without the sign they are in the order of the numbers."""
    found = np.uint16(0)
    for d in range(row.size):
        bits = np.uint16(row[d] & _SIGNLESS)
        found = bits if bits > found else found
    return found


@inlined(fastmath=STRICT)
def _round(row: Any, factor: Any, target: Any) -> None:
    for d in range(row.size):
        near = np.float32(number(row[d]) * factor + ROUND)
        target[d] = np.int8(near.view(np.int32) - ROUND_BITS)


@inlined(fastmath=STRICT)
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


@inlined(fastmath=STRICT)
def _dithered(row: Any, factor: Any, dither: Any, z: int, target: Any) -> None:
    at = z * STRIDE % SPAN
    fraction = dither[at : at + target.size]  # an index that is a sum is checked for its sign, one by one
    for k in range(target.size):
        near = np.float32(np.float32(np.float32(row[k]) * factor + fraction[k]) + ROUND)
        target[k] = np.int8(near.view(np.int32) - ROUND_BITS)


@inlined(fastmath=STRICT)
def level(rows: Any, scale: Any, dither: Any, result: Any) -> Any:
    """Write ``rows[z] * scale[z]`` as ``factor * result[z]``, at random, and return the factor.

    Args:
        rows: int8 ``[n, D]``.
        scale: float32 ``[n]``, not negative.
        dither: as above.
        result: int8 ``[n, D]``, may be ``rows``.
    """
    most = np.float32(0)
    for z in range(scale.size):
        if not scale[z] <= most:
            most = scale[z]
    if not (np.float32(1e-36) < most < np.float32(np.inf)):
        result[:, :] = 0
        return most
    for z in range(scale.size):
        _dithered(rows[z], scale[z] / most * (_ROOM / _MOST), dither, z, result[z])
    return most * (_MOST / _ROOM)


def keep(work: Any, columns: int, dither: Any, i: int, row: Any) -> Any:
    """Store the first numbers as row i; return by what they are to be multiplied."""
    raise NotImplementedError("compiled only")


@inlined(fastmath=STRICT)
def _most(work: Any, columns: int) -> Any:
    """The largest absolute value, found by its bits; what is no number is larger than any."""
    found = np.int32(0)
    for k in range(columns):
        bits = np.int32(np.float32(work[k]).view(np.int32) & _POSITIVE)
        found = bits if bits > found else found
    return found


@inlined(fastmath=STRICT)
def keep_rounded(work: Any, columns: int, dither: Any, i: int, row: Any) -> Any:
    """:func:`keep` in 8 bits: 0 for the scale where all numbers are, NaN where one is no finite number."""
    bits = _most(work, columns)
    most = np.int32(bits).view(np.float32)
    if bits >= _NO_NUMBER or most < np.float32(1e-36):
        row[:] = 0
        return np.float32(np.nan) if bits >= _NO_NUMBER else np.float32(0)
    _dithered(work, _ROOM / most, dither, i, row)
    return most / _ROOM


def _keep_all(work: Any, columns: int, dither: Any, i: int, row: Any) -> Any:
    store(work, row, columns)
    return np.float32(1)


@overload(keep, jit_options={"forceinline": True})
def _typed_keep(work: Any, columns: int, dither: Any, i: int, row: Any) -> Any:
    return keep_rounded.py_func if row.dtype is types.int8 else _keep_all


@inlined
def gather(
    products: Any, scale: Any, first: Any, edge: Any, other: Any, by_answer: Any, rows: Any, scratch: Any, result: Any
) -> None:
    """Gradients of rows: from products of integers, and from the answers' scores, which these leave out.

    Args:
        products: int32 ``[n, D]``.
        scale: float32 ``[n]``, by which they are multiplied.
        first, edge, other: the edges of row z are ``edge[first[z]:first[z + 1]]``, and the score of e is the product
            with ``rows[other[e]]``.
        by_answer: by edge, the gradient by its score.
        rows: ``[k, D]`` bfloat16 bits.
        scratch: float32 ``[D]``.
        result: ``[n, D]`` bfloat16 bits.
    """
    for z in range(products.shape[0]):
        _scaled(products[z], scale[z], scratch)
        for at in range(first[z], first[z + 1]):
            e = edge[at]
            _add(rows[other[e]], by_answer[e], scratch)
        store(scratch, result[z], scratch.size)


@inlined(fastmath=STRICT)
def _scaled(row: Any, factor: Any, target: Any) -> None:
    for d in range(target.size):
        target[d] = np.float32(row[d]) * factor


@inlined(fastmath=STRICT)
def _add(row: Any, factor: Any, target: Any) -> None:
    for d in range(target.size):
        target[d] += number(row[d]) * factor
