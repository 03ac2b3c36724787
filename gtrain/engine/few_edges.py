"""Sums over few edges in the order in which they come: sorting them first would take longer than the sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from gtrain.engine.kernels.rows import add, add_scaled, data
from gtrain.engine.kernels.threads import as_numpy

FEW = 1 << 13
"""Fewer edges than these are summed by one thread, sorted or not."""
DTYPES = (torch.float32, torch.float64)
"""Of the rows."""


class FewEdges:
    """Edges between two sets of nodes, as one step uses them.

    Args:
        edge_index: int64 ``[2, E]`` on the CPU.
        num_sources: nodes at which edges start.
        num_targets: nodes at which they end.

    Raises:
        IndexError: an edge names a node that does not exist.
    """

    def __init__(self, edge_index: Tensor, num_sources: int, num_targets: int) -> None:
        self._ends = as_numpy(edge_index)
        self._in_degree = np.zeros(num_targets, np.int64)
        outside = _count(self._ends, num_sources, self._in_degree)
        if outside >= 0:
            source, target = self._ends[:, outside]
            raise IndexError(
                f"'edge_index' has an edge from node {source} to node {target}, of {num_sources} sources and "
                f"{num_targets} targets."
            )

    def inverse_degree(self, dtype: torch.dtype) -> Tensor:
        """Return 1 over the in-degree, or 1 where that is 0, ``[num_targets]``."""
        return torch.from_numpy(np.reciprocal(np.maximum(self._in_degree, 1), dtype=_NUMPY[dtype]))

    def add_to_targets(self, rows: Tensor, total: Tensor, share: Tensor | None) -> None:
        """Add the row of each edge's source, times its target's share, to the target's row of ``total``, in place."""
        _add(self._ends, 1, as_numpy(rows), as_numpy(total), as_numpy(share))

    def add_to_sources(self, rows: Tensor, total: Tensor, share: Tensor | None) -> None:
        """Add the row of each edge's target, times the target's share, to the source's row of ``total``, in place."""
        _add(self._ends, 0, as_numpy(rows), as_numpy(total), as_numpy(share))


_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


@njit(cache=True, nogil=True)
def _count(ends: Any, num_sources: int, in_degree: Any) -> int:
    """Count the edges of each target; return the first edge that names no node, or -1."""
    for e in range(ends.shape[1]):
        source, target = ends[0, e], ends[1, e]
        if source < 0 or source >= num_sources or target < 0 or target >= len(in_degree):
            return e
        in_degree[target] += 1
    return -1


@njit(cache=True, nogil=True)
def _add(ends: Any, into: int, x: Any, out: Any, share: Any) -> None:
    """Add the row of ``x`` at one end of each edge, times its target's share, to the row of ``out`` at the other end.

    Shapes:
        ends ``[2, E]``: sources and targets; ``into`` is the row of the ends that ``out`` belongs to; share ``[T]`` or
        None.
    """
    width, source, total = x.shape[1], data(x), data(out)
    for e in range(ends.shape[1]):
        to, of = ends[into, e], ends[1 - into, e]
        if share is None:
            add(total, to * width, source, of * width, width)
        else:
            add_scaled(total, to * width, source, of * width, share[ends[1, e]], width)
