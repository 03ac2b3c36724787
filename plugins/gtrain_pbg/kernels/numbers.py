"""Numbers in loops: bfloat16 as 16 bits, and exponentials, in forms that LLVM turns into vector instructions.

Products of matrices may be in bfloat16; numba has no such type, so these arrays come as ``uint16``.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

STRICT = {"contract"}  # reassociation would cancel the rounding of ``exponential``; NaN stays NaN
LOOSE = {"contract", "reassoc", "nsz", "arcp"}

compiled: Any = partial(njit, cache=True, nogil=True, forceinline=True, no_cfunc_wrapper=True)
"""Compiles a function, into those that call it.

One that is not part of its caller may be another copy of it in the process that compiles than in those that read the
cache, optimised differently: a run would then round differently from the run that it repeats.
"""
bare: Any = partial(compiled, _nrt=False)
"""Compiles a function that makes no arrays, and returns one only to such functions.

It does not count references to what it is given, which takes longer than a row of a hundred numbers.
"""

_LOG2_E = np.float32(1.44269504088896341)
ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, which is then in the low bits
ROUND_BITS = np.int32(0x4B400000)  # those of ``ROUND``
_LEAST = np.float32(-126)
_ONE = np.float32(1)
_P1, _P2, _P3 = np.float32(0.6931469), np.float32(0.24022239), np.float32(0.05550835)
_P4, _P5 = np.float32(0.00967167), np.float32(0.00132353)
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


def exponential(x: Any) -> Any:
    """The exponential of a number that is not positive, in its own precision; in float32 at least 2**-126."""
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


def _exp_single(x: Any) -> Any:
    """A power of 2: the whole part of its exponent in bits, the rest by a polynomial with an error of 1e-7 at most."""
    y = x * _LOG2_E
    v = _LEAST if y < _LEAST else y
    t = v + ROUND
    r = v - (t - ROUND)
    p = ((((_P5 * r + _P4) * r + _P3) * r + _P2) * r + _P1) * r + _ONE
    whole = np.int32((np.float32(t).view(np.int32) - ROUND_BITS) << 23)
    return np.int32(np.float32(p).view(np.int32) + whole).view(np.float32)


def _exp_double(x: Any) -> Any:
    return math.exp(x)


@overload(number, jit_options={"fastmath": STRICT}, inline="always")
def _typed_number(x: Any) -> Any:
    return _from_bfloat16 if x is types.uint16 else _as_it_is


@overload(scaled, jit_options={"fastmath": STRICT}, inline="always")
def _typed_scaled(x: Any, row: Any, i: int, column: Any, k: int) -> Any:
    return _from_integer if x is types.int32 else _not_scaled


@overload(stored, jit_options={"fastmath": STRICT}, inline="always")
def _typed_stored(x: Any, like: Any) -> Any:
    return _to_bfloat16 if like is types.uint16 else _as_given


@overload(exponential, jit_options={"fastmath": STRICT, "forceinline": True})
def _typed_exponential(x: Any) -> Any:
    return _exp_single if x is types.float32 else _exp_double


@bare(fastmath=STRICT)
def store(row: Any, target: Any, count: int) -> None:
    """Write the first numbers of a row as they are stored in ``target``."""
    for d in range(count):
        target[d] = stored(row[d], target[d])


@bare(fastmath=LOOSE)
def exponentials(x: Any, less: Any, count: int) -> Any:
    """``x[:count] = exp(x[:count] - less)``, none of which is more than 1; return their sum."""
    found = x.dtype.type(0)
    for i in range(count):
        power = exponential(x[i] - less)
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


@bare(fastmath=LOOSE)
def total(x: Any, count: int) -> Any:
    """The sum of the first numbers."""
    found = x.dtype.type(0)
    for i in range(count):
        found += x[i]
    return found
