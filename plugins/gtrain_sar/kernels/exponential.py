"""Exponentials of many numbers, in a form that LLVM turns into vector instructions.

float32 after Cody & Waite's range reduction with the polynomial of Cephes' ``expf`` (Moshier), 1 ulp; results below
the smallest normal number are 0. float64 is the library's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

_LOG2_E = np.float32(1.44269504088896341)
_LN_2_HIGH, _LN_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, which is then in the low bits
_ROUND_BITS = np.int32(0x4B400000 - 127)
_LEAST, _MOST = np.float32(-87.3), np.float32(88.0)
_ZERO, _ONE = np.float32(0), np.float32(1)
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


def _exp_single(x: Any) -> Any:
    v = _LEAST if x < _LEAST else x
    v = _MOST if v > _MOST else v
    t = v * _LOG2_E + _ROUND
    n = t - _ROUND
    r = v - n * _LN_2_HIGH - n * _LN_2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    power = np.int32((np.float32(t).view(np.int32) - _ROUND_BITS) << 23).view(np.float32)
    return _ZERO if x < _LEAST else (p * r * r + r + _ONE) * power


def _exp_double(x: Any) -> Any:
    return math.exp(x)


def _exp(x: Any) -> Any:
    """The exponential of a number, in its own precision."""
    raise NotImplementedError("compiled only")


# Reassociation would cancel the rounding, hence "contract" alone; NaN stays NaN through all steps.
@overload(_exp, jit_options={"fastmath": {"contract"}})
def _typed_exp(x: Any) -> Any:
    return _exp_single if x is types.float32 else _exp_double


@njit(cache=True, nogil=True, fastmath={"contract"})
def exponential(x: Any, count: int) -> None:
    """``x[:count] = exp(x[:count])``."""
    for i in range(count):
        x[i] = _exp(x[i])
