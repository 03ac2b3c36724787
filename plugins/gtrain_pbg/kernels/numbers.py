"""Numbers in loops: bfloat16 as 16 bits, and exponentials, in forms that LLVM turns into vector instructions.

Products of matrices may be in bfloat16; numba has no such type, so these arrays come as ``uint16``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from gtrain.kernels.exponential import exp_of_negative
from gtrain.kernels.options import FAST, STRICT, bare

_HALF = np.uint32(0x7FFF)
_LOW_BIT = np.uint32(1)
_SHIFT = np.uint32(16)


def number(x: Any) -> Any:
    """A number as it is computed with: float32 of what is stored as bfloat16."""
    raise NotImplementedError("compiled only")


def scaled(x: Any, row: Any, i: int, column: Any, k: int) -> Any:
    """The same, where an integer stands for ``x * row[i] * column[k]``."""
    raise NotImplementedError("compiled only")


def stored(x: Any, like: Any) -> Any:
    """A number as it is stored in an array with items like this one."""
    raise NotImplementedError("compiled only")


def _from_bfloat16(x: Any) -> Any:
    return np.uint32(np.uint32(x) << _SHIFT).view(np.float32)


def _to_bfloat16(x: Any, like: Any) -> Any:
    bits = np.float32(x).view(np.uint32)
    return np.uint16(np.uint32(bits + _HALF + ((bits >> _SHIFT) & _LOW_BIT)) >> _SHIFT)  # to the nearest, ties to even


def _from_integer(x: Any, row: Any, i: int, column: Any, k: int) -> Any:
    return np.float32(x) * (row[i] * column[k])


def _not_scaled(x: Any, row: Any, i: int, column: Any, k: int) -> Any:
    return number(x)


def _as_it_is(x: Any) -> Any:
    return x


def _as_given(x: Any, like: Any) -> Any:
    return x


@overload(number, jit_options={"fastmath": STRICT}, inline="always")
def _typed_number(x: Any) -> Any:
    return _from_bfloat16 if x is types.uint16 else _as_it_is


@overload(scaled, jit_options={"fastmath": STRICT}, inline="always")
def _typed_scaled(x: Any, row: Any, i: int, column: Any, k: int) -> Any:
    return _from_integer if x is types.int32 else _not_scaled


@overload(stored, jit_options={"fastmath": STRICT}, inline="always")
def _typed_stored(x: Any, like: Any) -> Any:
    return _to_bfloat16 if like is types.uint16 else _as_given


@bare(fastmath=STRICT)
def store(row: Any, target: Any, count: int) -> None:
    """Write the first numbers of a row as they are stored in ``target``."""
    for d in range(count):
        target[d] = stored(row[d], target[d])


@bare(fastmath=FAST)
def exponentials(x: Any, less: Any, count: int) -> Any:
    """``x[:count] = exp(x[:count] - less)``, none of which is more than 1; return their sum."""
    found = x.dtype.type(0)
    for i in range(count):
        power = exp_of_negative(x[i] - less)
        x[i] = power
        found += power
    return found


def key_of(x: Any) -> Any:
    """An integer of a number's bits, in the order of the numbers; vectors find the largest of integers."""
    raise NotImplementedError("compiled only")


def of_key(key: Any) -> Any:
    """The number of a :func:`key_of`."""
    raise NotImplementedError("compiled only")


def _key_single(x: Any) -> Any:
    bits = np.float32(x).view(np.int32)
    return np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF))  # of those with a sign, the other bits are turned over


def _key_double(x: Any) -> Any:
    bits = np.float64(x).view(np.int64)
    return np.int64(bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF))


def _of_key_single(key: Any) -> Any:
    return np.int32(key ^ ((key >> 31) & 0x7FFFFFFF)).view(np.float32)


def _of_key_double(key: Any) -> Any:
    return np.int64(key ^ ((key >> 63) & 0x7FFFFFFFFFFFFFFF)).view(np.float64)


@overload(key_of, inline="always")
def _typed_key(x: Any) -> Any:
    return _key_single if x is types.float32 else _key_double


@overload(of_key, inline="always")
def _typed_of_key(key: Any) -> Any:
    return _of_key_single if key is types.int32 else _of_key_double


@bare
def largest(x: Any, count: int) -> Any:
    """The largest of the first numbers, at least one; if some are no numbers, one of those without a sign."""
    found = key_of(x[0])
    for i in range(1, count):
        key = key_of(x[i])
        found = key if key > found else found
    return of_key(found)


@bare(fastmath=FAST)
def total(x: Any, count: int) -> Any:
    """The sum of the first numbers."""
    found = x.dtype.type(0)
    for i in range(count):
        found += x[i]
    return found
