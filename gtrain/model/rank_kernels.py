"""Compiled counts of better scores; import this module inside the functions that need it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba import njit
from torch import Tensor

from gtrain.kernels.threads import num_threads, run_in_threads


def add_counts(scores: Tensor, first: int, own: Tensor, better: Tensor, equal: Tensor) -> None:
    """Count in each row the scores that are better than its own, and those that are the same; NaN is better.

    Args:
        scores: float32 or float64 ``[B, n]``, contiguous, on the CPU.
        first: columns before this one do not count.
        own: ``[B]``, of the same dtype.
        better: int64 ``[B]``, to which is added.
        equal: likewise.
    """
    arrays = [tensor.numpy() for tensor in (scores, own, better, equal)]
    bounds = np.linspace(0, len(scores), num_threads() + 1).astype(np.int64).tolist()
    loop: Any = _add_counts  # mypy takes a list for one argument
    ranges = zip(bounds[:-1], bounds[1:], strict=True)
    run_in_threads([partial(loop, *arrays, first, start, stop) for start, stop in ranges])


@njit(cache=True, nogil=True)
def _add_counts(scores: Any, own: Any, better: Any, equal: Any, first: int, start: int, stop: int) -> None:
    """Rows ``start .. stop-1`` of :func:`add_counts`; 32-bit counters fill the registers as the scores do."""
    for i in range(start, stop):
        mine, above, same = own[i], np.int32(0), np.int32(0)
        for j in range(first, scores.shape[1]):
            score = scores[i, j]
            above += np.int32(not (score <= mine))
            same += np.int32(score == mine)
        better[i] += above
        equal[i] += same
