"""Partitioners that pass over the graph a piece at a time: for graphs beyond METIS's memory.

LDG (Stanton and Kliot, KDD 2012) puts a node where most of its neighbours are, weighted by the room that is left there,
``|N(v) and P| * (1 - |P| / C)``. Fennel (Tsourakakis et al., WSDM 2014) subtracts the cost of a full part instead,
``|N(v) and P| - alpha * gamma * |P| ** (gamma - 1)``, with gamma = 1.5 and alpha = sqrt(k) * m / n ** 1.5 for k parts,
n nodes and m edges.

Ours differ in two ways. The nodes are streamed several times, in the order of their ids; a node that is not placed yet
in a pass counts where the last pass put it (Nishimura and Ugander, KDD 2013), so that a poor order costs less. And the
nodes are in *groups* (training nodes and others; or node types), each of which is balanced for itself: no part takes
more than ``1 + slack`` times its share of any group, rounded up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.graph.store.csc import EdgeView, SortedColumns

Ints = NDArray[np.int64]

SLACK = 0.05
"""How far above its share of a group a part may go."""

PASSES = 5
"""Times that the nodes are streamed."""


def stream_partition(
    source: NDArray[Any],
    target: NDArray[Any],
    num_nodes: int,
    num_parts: int,
    method: str,
    *,
    group: NDArray[Any] | None = None,
    seed: int = 0,
    slack: float = SLACK,
    passes: int = PASSES,
) -> Ints:
    """Assign each node to a part.

    The neighbours of a range of nodes are collected by a pass over the edges (:mod:`.csc`), which may be memory maps.
    What is held is one range, and 12 bytes for each node.

    Args:
        source: sources of the edges, ``[E]``; directions do not matter, and parallel edges count as often as they are
            there.
        target: targets, ``[E]``.
        num_nodes: N.
        num_parts: P.
        method: ``ldg`` or ``fennel``.
        group: ``[N]`` small integers from 0, what to balance; None balances the nodes alone.
        seed: decides between parts that are equal.
        slack: how far above its share of a group a part may go, as a fraction of the share.
        passes: times to stream the nodes.

    Returns:
        The part of each node, ``[N]`` int64; a part is without a node only where there are few.
    """
    from gtrain.graph import kernels

    groups = np.zeros(num_nodes, np.int32) if group is None else group.astype(np.int32)
    members = np.bincount(groups)
    capacity = np.ceil(members / num_parts * (1 + slack)).astype(np.int64)
    view = EdgeView(source, target, None, None, num_nodes, num_nodes, symmetric=True)
    view.check()
    columns = SortedColumns(view, sort=False)
    # At a full part, alpha * gamma * (n/k) ** 0.5 with the alpha of the paper is 1.5 * m/n.
    fennel = 1.5 * len(source) / max(num_nodes, 1) + 1e-9 if method == "fennel" else 0.0
    part = np.full(num_nodes, -1, dtype=np.int32)
    for _ in range(passes):
        sizes = np.zeros((members.size, num_parts), dtype=np.int64)
        first = 0
        for piece in columns.between(0, num_nodes):
            kernels.assign(piece.indptr, piece.source, first, groups, capacity, fennel, seed, sizes, part)
            first += piece.indptr.size - 1
    return part.astype(np.int64)
