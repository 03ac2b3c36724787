"""Random numbers and hashes of compiled loops, after :mod:`gtrain.kernels.splitmix`.

Each frontier node of sampling has a stream of its own, a hash of (key, node id, subgraph), so that what is drawn
depends on no order, thread, process or machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gtrain.kernels import splitmix
from gtrain.kernels.splitmix import GOLDEN, MIX_2

_SHIFT_12, _SHIFT_32 = np.uint64(12), np.uint64(32)
_TO_UNIT = 2.0**-52

mix: Any = njit(cache=True, nogil=True)(splitmix.mix)


@njit(cache=True, nogil=True)
def stream(key: Any, node: int, subgraph: int) -> Any:
    """The start of the stream of a frontier node: a hash of all three."""
    return mix(mix(key ^ (np.uint64(node) * GOLDEN)) + np.uint64(subgraph) * MIX_2)


@njit(cache=True, nogil=True)
def unit(first: Any, draw: int) -> float:
    """The ``draw``-th number of a stream, uniform on (0, 1), both ends excluded so that its logarithm exists."""
    return (np.float64(mix(first + np.uint64(draw) * GOLDEN) >> _SHIFT_12) + 0.5) * _TO_UNIT


@njit(cache=True, nogil=True)
def below(first: Any, draw: int, bound: int) -> int:
    """Uniform on ``0 .. bound-1``; off by at most bound / 2**52, for bounds up to 2**52."""
    return np.int64(unit(first, draw) * np.float64(bound))  # type: ignore[return-value]


@njit(cache=True, nogil=True)
def slot_of(key: int, mask: int) -> int:
    """Where a hash map of ``mask + 1`` slots, a power of 2, looks for a key first.

    Multiplicative hashing (Knuth, TAOCP 3, 6.4), the high half folded onto the low bits that the mask keeps.
    """
    x = np.uint64(key) * GOLDEN
    return np.int64((x ^ (x >> _SHIFT_32)) & np.uint64(mask))  # type: ignore[return-value]
