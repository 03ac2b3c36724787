"""The compiled twin of :meth:`gtrain.nn.dropout.Mask.kept`, for the coefficients of a few edges at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gtrain.graph.sampling.random import GOLDEN, mix

_LOW, _SHIFT_32 = np.uint64(0xFFFFFFFF), np.uint64(32)


@njit(cache=True, nogil=True, forceinline=True)
def masks(part: Any, edges: Any, start: int, count: int, heads: int, stream: Any, threshold: int, scale: Any) -> None:
    """Set what coefficients of ``count`` edges are multiplied by; ``edges`` are their ids."""
    words = (heads + 1) // 2
    for e in range(count):
        first, at = stream + np.uint64(edges[start + e]) * np.uint64(words) * GOLDEN, e * heads
        for w in range(words):
            word = mix(first + np.uint64(w) * GOLDEN)
            part[at + 2 * w] = scale if np.int64(word & _LOW) >= threshold else 0
            if 2 * w + 1 < heads:
                part[at + 2 * w + 1] = scale if np.int64(word >> _SHIFT_32) >= threshold else 0
