"""float32 exponentials that LLVM vectorizes; float64 calls the C library.

Both float32 functions write the argument as n * ln 2 + r with an integer n (Cody and Waite, *Software Manual for the
Elementary Functions*, 1980), put n into the exponent bits of the result and evaluate a polynomial in r:

* :func:`exp` is Cephes' ``expf`` (Moshier): ``e**r = 1 + r + r**2 p(r)``, error 1 ulp. Arguments of any size: results
  below the smallest normal number are 0, those above e**88 are e**88.
* :func:`exp_of_negative` is for arguments <= 0, as in softmax and softplus: a polynomial of 2**r with a relative error
  of 1e-7 and six operations fewer; results are at least 2**-126.

Only ``STRICT`` is possible: reassociation would cancel the rounding to n. NaN is preserved.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types

from gtrain.kernels.options import STRICT, by_type

# 1.5 * 2**23: adding it rounds to an integer, which is then in the low bits.
ROUND = np.float32(12582912.0)
ROUND_BITS = np.int32(0x4B400000)  # the bit pattern of ``ROUND``
_LOG2_E, _ONE, _ZERO = np.float32(1.44269504088896341), np.float32(1), np.float32(0)

# ln 2 in two parts. The high one has 9 significant bits, so that its product with n, at most 127, is exact.
_LN_2_HIGH, _LN_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
# An exponent is stored with a bias of 127.
_BIAS_BITS = np.int32(ROUND_BITS - 127)
# e**-87.3 is just above the smallest normal number, e**88 below the largest: n stays within the exponent's range.
_LEAST, _MOST = np.float32(-87.3), np.float32(88.0)
_E0, _E1, _E2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_E3, _E4, _E5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)

# The smallest exponent of a normal number.
_LEAST_POWER = np.float32(-126)
_P1, _P2, _P3 = np.float32(0.6931469), np.float32(0.24022239), np.float32(0.05550835)
_P4, _P5 = np.float32(0.00967167), np.float32(0.00132353)


@by_type(lambda x: _exp_single if x is types.float32 else _exp_double, jit_options={"fastmath": STRICT})
def exp(x: Any) -> Any:
    """Return e**x, in the precision of x."""


@by_type(
    lambda x: _exp_of_negative_single if x is types.float32 else _exp_double,
    jit_options={"fastmath": STRICT, "forceinline": True},
)
def exp_of_negative(x: Any) -> Any:
    """Return e**x for x <= 0, in the precision of x; in float32 at least 2**-126."""


def _exp_single(x: Any) -> Any:
    v = _LEAST if x < _LEAST else x
    v = _MOST if v > _MOST else v
    t = v * _LOG2_E + ROUND
    n = t - ROUND
    r = v - n * _LN_2_HIGH - n * _LN_2_LOW
    p = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5
    # The low bits of t are n; with the bias, shifted into the exponent, they are the number 2**n.
    power = np.int32((np.float32(t).view(np.int32) - _BIAS_BITS) << 23).view(np.float32)
    return _ZERO if x < _LEAST else (p * r * r + r + _ONE) * power


def _exp_of_negative_single(x: Any) -> Any:
    y = x * _LOG2_E
    v = _LEAST_POWER if y < _LEAST_POWER else y
    t = v + ROUND
    r = v - (t - ROUND)
    p = ((((_P5 * r + _P4) * r + _P3) * r + _P2) * r + _P1) * r + _ONE
    # p is between 2**-0.5 and 2**0.5; adding n to its exponent bits multiplies it by 2**n. At n = -126 r is not
    # negative, so that the exponent does not drop below that of a normal number.
    whole = np.int32((np.float32(t).view(np.int32) - ROUND_BITS) << 23)
    return np.int32(np.float32(p).view(np.int32) + whole).view(np.float32)


def _exp_double(x: Any) -> Any:
    return math.exp(x)


@njit(cache=True, nogil=True, fastmath=STRICT)
def exp_all(x: Any, count: int) -> None:
    """``x[:count] = exp(x[:count])``."""
    for i in range(count):
        x[i] = exp(x[i])
