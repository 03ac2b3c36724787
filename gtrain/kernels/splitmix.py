"""SplitMix64: stateless, counter-based random numbers and hashes with numpy.

Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014): number d of a stream is
``mix(stream + d * GOLDEN)``. Light to import. :mod:`gtrain.kernels.random` has the same for compiled loops, and
:mod:`gtrain.nn.dropout` for tensors on any device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# 2**64 divided by the golden ratio, odd; MIX_1 and MIX_2 are the multipliers of Stafford's variant 13, as in
# SplitMix64.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_27, _SHIFT_30, _SHIFT_31 = np.uint64(27), np.uint64(30), np.uint64(31)
_MASK = 2**64 - 1
_FIRST, _SECOND, _STEP = int(MIX_1), int(MIX_2), int(GOLDEN)  # for Python's own arithmetic


def mix(value: Any) -> Any:
    """Return the finaliser of SplitMix64, a bijection of uint64, for an array or in a compiled loop."""
    value = (value ^ (value >> _SHIFT_30)) * MIX_1
    value = (value ^ (value >> _SHIFT_27)) * MIX_2
    return value ^ (value >> _SHIFT_31)


def mix_one(value: int) -> int:
    """Return :func:`mix` of a Python integer modulo 2**64."""
    value &= _MASK
    value = (value ^ (value >> 30)) * _FIRST & _MASK
    value = (value ^ (value >> 27)) * _SECOND & _MASK
    return value ^ (value >> 31)


def key(*words: int) -> int:
    """Return a hash below 2**64 of integers; it depends on their order."""
    hashed = 0
    for word in words:
        hashed = mix_one(hashed + word + _STEP)
    return hashed


def below(bound: int, start: int, counter: NDArray[Any], draws: int) -> NDArray[np.int64]:
    """Return uniform integers below ``bound``, with a bias of at most bound / 2**53.

    Args:
        bound: at most 2**53.
        start: start of the stream, such as a :func:`key`.
        counter: int64 ``[B]``, counters within the stream.
        draws: K, numbers per counter.

    Returns:
        int64 ``[B, K]``; column k does not depend on K.
    """
    stream = mix(np.uint64(start) ^ (counter.astype(np.uint64) * GOLDEN))
    step = np.arange(1, draws + 1, dtype=np.uint64) * GOLDEN
    # 53 bits, the precision of float64, so that the product is the only rounding.
    unit = (mix(stream[:, None] + step) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    # The product may round up to ``bound``.
    return np.minimum((unit * bound).astype(np.int64), max(bound - 1, 0))
