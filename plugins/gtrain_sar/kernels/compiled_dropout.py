"""The compiled twin of :meth:`.dropout.Dropout.mask`.

numba's cache notices a changed caller but no changed callee in another file: whoever edits this file removes
``__pycache__`` here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_27, _SHIFT_30, _SHIFT_31, _SHIFT_32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)


@njit(cache=True, nogil=True, forceinline=True)
def _kept(stream: Any, count: Any, threshold: int) -> Any:
    x = stream + np.uint64(count) * _GOLDEN
    x = (x ^ (x >> _SHIFT_30)) * _MIX_1
    x = (x ^ (x >> _SHIFT_27)) * _MIX_2
    return np.int64((x ^ (x >> _SHIFT_31)) >> _SHIFT_32) >= threshold


@njit(cache=True, nogil=True, forceinline=True)
def masks(part: Any, edges: Any, start: int, count: int, heads: int, stream: Any, threshold: int, scale: Any) -> None:
    """Set what coefficients of ``count`` edges are multiplied by."""
    for e in range(count):
        first = np.int64(edges[start + e]) * heads
        for h in range(heads):
            part[e * heads + h] = scale if _kept(stream, first + h, threshold) else 0
