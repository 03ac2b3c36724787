"""Which of another part's frontier nodes are sampled from copied structure, and which its owner is asked about."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.graph.sampling.hop import Frontier
from gtrain_pyg.sampling.kernels import rows_of
from gtrain_pyg.structure.replica import Members

Array = NDArray[Any]


@dataclass(frozen=True)
class Share:
    """The f frontier nodes of one type that another part owns.

    Attributes:
        copied: those whose in-edges are copied, by their rows in the replica, named by global id.
        asked: the others, by their numbers within the part.
        rows: int64 ``[f]``, the row of each node, -1 for the others; None where there are no copies.
    """

    copied: Frontier
    asked: Frontier
    rows: Array | None = None

    @classmethod
    def of(cls, frontier: Frontier, members: Members | None, first: int) -> Share:
        """Divide a frontier.

        Args:
            frontier: numbers within the part.
            members: the nodes whose in-edges are copied; None: none are.
            first: the global id of the part's first node.
        """
        nobody = _some(frontier, frontier.node[:0])
        if members is None or not frontier.node.size:
            return cls(nobody, frontier)
        rows = np.empty(frontier.node.size, np.int64)
        found = rows_of(frontier.node, members.bits, members.before, rows)
        if found == 0:
            return cls(nobody, frontier, rows)
        name = frontier.node + first
        if found == rows.size:
            return cls(replace(frontier, node=rows, name=name), nobody, rows)
        here, there = np.flatnonzero(rows >= 0), np.flatnonzero(rows < 0)
        copied = _some(replace(frontier, node=rows, name=name), here)
        return cls(copied, _some(frontier, there), rows)


def _some(frontier: Frontier, places: Array) -> Frontier:
    """The nodes at some places."""
    return Frontier(
        frontier.node[places],
        frontier.subgraph[places] if frontier.subgraph.size else frontier.subgraph,
        frontier.target[places],
        None if frontier.limit is None else frontier.limit[places],
        None if frontier.name is None else frontier.name[places],
    )
