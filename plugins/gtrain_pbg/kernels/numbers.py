"""Arithmetic in kernels: bfloat16 as 16 bits, exponentials and sums, in forms that LLVM turns into vector instructions.

Matrix products may be in bfloat16. numba lacks that type, so these arrays come as ``uint16``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from gtrain.kernels.exponential import exp_of_negative
from gtrain.kernels.options import FAST, STRICT, bare, by_type

_HALF = np.uint32(0x7FFF)
_LOW_BIT = np.uint32(1)
_SHIFT = np.uint32(16)
_OPTIONS: Any = {"jit_options": {"fastmath": STRICT}, "inline": "always"}


@by_type(lambda x: _from_bfloat16 if x is types.uint16 else _unchanged, **_OPTIONS)
def number(x: Any) -> Any:
    """Decode a stored number: float32 of bfloat16 bits, any other number unchanged."""


@by_type(lambda x, row, i, column, k: _from_integer if x is types.int32 else _not_scaled, **_OPTIONS)
def scaled(x: Any, row: Any, i: int, column: Any, k: int) -> Any:
    """Decode a stored product: ``x * row[i] * column[k]`` of an int32, :func:`number` of any other type."""


@by_type(lambda x, like: _to_bfloat16 if like is types.uint16 else _unchanged_like, **_OPTIONS)
def stored(x: Any, like: Any) -> Any:
    """Encode a number for an array whose items are of the type of ``like``."""


def _from_bfloat16(x: Any) -> Any:
    return np.uint32(np.uint32(x) << _SHIFT).view(np.float32)


def _to_bfloat16(x: Any, like: Any) -> Any:
    # bfloat16 is the upper half of a float32; 0x7FFF plus the lowest bit that stays rounds to nearest, ties to even
    bits = np.float32(x).view(np.uint32)
    return np.uint16(np.uint32(bits + _HALF + ((bits >> _SHIFT) & _LOW_BIT)) >> _SHIFT)


def _from_integer(x: Any, row: Any, i: int, column: Any, k: int) -> Any:
    return np.float32(x) * (row[i] * column[k])


def _not_scaled(x: Any, row: Any, i: int, column: Any, k: int) -> Any:
    return number(x)


def _unchanged(x: Any) -> Any:
    return x


def _unchanged_like(x: Any, like: Any) -> Any:
    return x


@bare(fastmath=STRICT)
def store(row: Any, target: Any, count: int) -> None:
    """Write the first ``count`` numbers of a row, encoded for ``target``."""
    for d in range(count):
        target[d] = stored(row[d], target[d])


@bare(fastmath=STRICT)
def add(row: Any, target: Any, count: int) -> None:
    """``target[:count] += row[:count]``."""
    for d in range(count):
        target[d] += number(row[d])


@bare(fastmath=STRICT)
def add_scaled(row: Any, factor: Any, target: Any, count: int) -> None:
    """``target[:count] += factor * row[:count]``."""
    for d in range(count):
        target[d] += number(row[d]) * factor


@bare(fastmath=FAST)
def exponentials(x: Any, less: Any, count: int) -> Any:
    """``x[:count] = exp(x[:count] - less)``, where ``less`` is at least their maximum; return their sum."""
    total = x.dtype.type(0)
    for i in range(count):
        power = exp_of_negative(x[i] - less)
        x[i] = power
        total += power
    return total


@by_type(lambda x: _key_single if x is types.float32 else _key_double, inline="always")
def key_of(x: Any) -> Any:
    """Return an integer for a float, ordered as the floats: LLVM vectorizes the maximum of integers."""


@by_type(lambda key: _of_key_single if key is types.int32 else _of_key_double, inline="always")
def of_key(key: Any) -> Any:
    """Return the float of a :func:`key_of`."""


def _key_single(x: Any) -> Any:
    bits = np.float32(x).view(np.int32)
    # Of negative numbers, all bits but the sign are inverted.
    return np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF))


def _key_double(x: Any) -> Any:
    bits = np.float64(x).view(np.int64)
    return np.int64(bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF))


def _of_key_single(key: Any) -> Any:
    return np.int32(key ^ ((key >> 31) & 0x7FFFFFFF)).view(np.float32)


def _of_key_double(key: Any) -> Any:
    return np.int64(key ^ ((key >> 63) & 0x7FFFFFFFFFFFFFFF)).view(np.float64)


@bare
def largest(x: Any, count: int) -> Any:
    """Return the maximum of the first ``count`` numbers (at least one); a positive NaN counts as the largest."""
    best = key_of(x[0])
    for i in range(1, count):
        key = key_of(x[i])
        best = key if key > best else best
    return of_key(best)


@bare(fastmath=FAST)
def total(x: Any, count: int) -> Any:
    """Return the sum of the first ``count`` numbers."""
    result = x.dtype.type(0)
    for i in range(count):
        result += x[i]
    return result
