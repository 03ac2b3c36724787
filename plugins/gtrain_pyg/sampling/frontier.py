"""A hop's frontier of one node type, by the parts that own its nodes; memory is reused."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.graph.sampling import scratch
from gtrain.graph.sampling.hop import Frontier
from gtrain_pyg.sampling.kernels import by_owner

Array = NDArray[Any]


class Cut:
    """The f frontier nodes of one type, grouped by part, in the order of the frontier within each.

    Args:
        offsets: int64 ``[P + 1]``, where the parts of the type begin.

    Attributes:
        bounds: ``P + 1`` places; part p has the nodes ``bounds[p] .. bounds[p+1]-1`` of the grouped frontier.
    """

    def __init__(self, offsets: Array) -> None:
        self._offsets = offsets
        self._owner = np.empty(0, np.int16 if offsets.size < 1 << 15 else np.int32)
        self._starts = np.zeros(offsets.size, np.int64)
        self._target, self._node, self._subgraph, self._limit = (scratch.empty() for _ in range(4))
        self._whole = Frontier(*(scratch.empty() for _ in range(3)))
        self.clear()

    def begin(self, nodes: scratch.Nodes, numbers: Array, low: int, *, disjoint: bool, seed_time: Array | None) -> None:
        """Group the nodes found from local id ``low`` on.

        Args:
            nodes: the nodes found so far.
            numbers: their local ids, from ``low`` on.
            low: the local id of the frontier's first node.
            disjoint: whether nodes have subgraphs.
            seed_time: the time of each subgraph's seed; None without times.
        """
        size = numbers.size
        node, target, places = nodes.node[low : low + size], numbers, None
        if self._starts.size > 2:
            node, target = self._group(node, low)
            places = target - low if disjoint else None
            self.bounds = self._starts.tolist()
        else:
            self.bounds = [0, size]
        subgraph, limit = self._subgraph[:0], None
        if disjoint:
            subgraph = nodes.batch[low : low + size]
            if places is not None:
                self._subgraph = scratch.grown(self._subgraph, size)
                subgraph = np.take(subgraph, places, out=self._subgraph[:size], mode="clip")
        if seed_time is not None:
            self._limit = scratch.grown(self._limit, size)
            limit = np.take(seed_time, subgraph, out=self._limit[:size], mode="clip")
        self._whole = Frontier(node, subgraph, target, limit)

    def clear(self) -> None:
        """Have no nodes."""
        self.bounds = [0] * self._starts.size

    def size(self, part: int) -> int:
        """How many nodes a part owns."""
        return self.bounds[part + 1] - self.bounds[part]

    def piece(self, part: int) -> Frontier:
        """A part's share; nodes by their numbers within the part, targets by their local ids."""
        return self._whole[self.bounds[part] : self.bounds[part + 1]]

    def _group(self, node: Array, low: int) -> tuple[Array, Array]:
        size = node.size
        self._owner, self._node = scratch.grown(self._owner, size), scratch.grown(self._node, size)
        self._target = scratch.grown(self._target, size)
        by_owner(node, low, self._offsets, self._owner, self._starts, self._target, self._node)
        return self._node[:size], self._target[:size]
