"""Random numbers of the sampling kernels: counter-based, without state.

SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): number d of a stream
is ``mix(stream + d * GOLDEN)``. Each frontier node has a stream of its own, a hash of (key, node id, subgraph), so that
what is drawn depends on no order, thread, process or machine.

numba's cache notices a changed caller but no changed callee in another file: whoever edits this file removes
``__pycache__`` here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_12, _SHIFT_27, _SHIFT_30, _SHIFT_31 = np.uint64(12), np.uint64(27), np.uint64(30), np.uint64(31)
_TO_UNIT = 2.0**-52


@njit(cache=True, nogil=True)
def mix(x: Any) -> Any:
    """SplitMix64's finaliser: a bijection of uint64 that scatters neighbouring values."""
    x = (x ^ (x >> _SHIFT_30)) * _MIX_1
    x = (x ^ (x >> _SHIFT_27)) * _MIX_2
    return x ^ (x >> _SHIFT_31)


@njit(cache=True, nogil=True)
def stream(key: Any, node: int, subgraph: int) -> Any:
    """The start of the stream of a frontier node: a hash of all three."""
    return mix(mix(key ^ (np.uint64(node) * GOLDEN)) + np.uint64(subgraph) * _MIX_2)


@njit(cache=True, nogil=True)
def unit(first: Any, draw: int) -> float:
    """The ``draw``-th number of a stream, uniform on (0, 1), both ends excluded so that its logarithm exists."""
    return (np.float64(mix(first + np.uint64(draw) * GOLDEN) >> _SHIFT_12) + 0.5) * _TO_UNIT


@njit(cache=True, nogil=True)
def below(first: Any, draw: int, bound: int) -> int:
    """Uniform on ``0 .. bound-1``; off by at most bound / 2**52, for bounds up to 2**52."""
    return np.int64(unit(first, draw) * np.float64(bound))  # type: ignore[return-value]
