"""Counter-based random numbers and hashes for compiled loops; see :mod:`gtrain.kernels.splitmix`.

In sampling, each frontier node has a separate stream, a hash of (key, node id, subgraph), so that draws do not depend
on order, thread, process or machine.
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
    """Return the start of the stream of a frontier node: a uint64 hash of key, node and subgraph."""
    # Two rounds: with one, the streams of (node, subgraph) and of a neighbouring pair could coincide.
    return mix(mix(key ^ (np.uint64(node) * GOLDEN)) + np.uint64(subgraph) * MIX_2)


@njit(cache=True, nogil=True)
def unit(first: Any, draw: int) -> float:
    """Return number ``draw`` of a stream, uniform on the open interval (0, 1), so that its logarithm is finite."""
    # 52 bits and a half: the result is a multiple of 2**-53 in 2**-53 .. 1 - 2**-53, exact in float64.
    return (np.float64(mix(first + np.uint64(draw) * GOLDEN) >> _SHIFT_12) + 0.5) * _TO_UNIT


@njit(cache=True, nogil=True)
def below(first: Any, draw: int, bound: int) -> int:
    """Return a uniform integer in ``0 .. bound-1``; bias at most bound / 2**52, for bounds up to 2**52."""
    return np.int64(unit(first, draw) * np.float64(bound))  # type: ignore[return-value]


@njit(cache=True, nogil=True)
def slot_of(key: int, mask: int) -> int:
    """Return the first slot to probe for a key in a hash map of ``mask + 1`` slots, a power of 2.

    Multiplicative hashing (Knuth, TAOCP 3, 6.4), with the high half folded onto the low bits that the mask selects.
    """
    x = np.uint64(key) * GOLDEN
    return np.int64((x ^ (x >> _SHIFT_32)) & np.uint64(mask))  # type: ignore[return-value]
