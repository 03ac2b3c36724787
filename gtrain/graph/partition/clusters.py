"""Order the nodes of each part by clusters of neighbours, so that sums over neighbours read from the CPU's caches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gtrain.graph.partition.adjacency import Adjacency

CLUSTER_NODES = (64, 512, 4096, 32768)
"""Largest numbers of nodes of nested clusters: with rows of 1 KiB from 64 KiB to 32 MiB, for caches of every size."""

_ROUNDS = 3
"""Passes over the nodes before the clusters are contracted."""
_CONTRACTIONS = 6
"""Largest number of contractions with one limit of the clusters' sizes."""
_SHRINKS = 0.95
"""A contraction that leaves more than this fraction of the nodes is the last one with its limit."""


def locality_order(graph: Adjacency, parts: NDArray[np.int64], num_parts: int) -> NDArray[np.int32] | None:
    """Return an order of each part's nodes in which neighbours are near each other.

    A layer reads the rows of each node's neighbours. In the order of the source data these are scattered over the
    part's memory. Here the nodes of a cluster have consecutive ids, and so do the clusters within a larger cluster. The
    clusters are those of label propagation with a limit of their sizes (Meyerhenke, Sanders and Schulz, SEA 2014), in
    time linear in the edges: nodes join the neighbouring cluster to which they have most edges, clusters are contracted
    to nodes, and so on; then again with a larger limit. Unlike there, nodes are visited in the order of their ids.

    Args:
        graph: the symmetric graph.
        parts: the part of each node, ``[N]``.
        num_parts: P.

    Returns:
        The position of each node within its part, ``[N]``; None if no part is large enough for two clusters that fill
        a cache.
    """
    sizes = np.bincount(parts, minlength=num_parts)
    if num_parts < 2 or sizes.max() < 2 * CLUSTER_NODES[-2]:
        return None
    order = np.empty(parts.size, dtype=np.int32)
    for part in range(num_parts):
        nodes, inside = graph.part(parts, part)
        order[nodes] = _positions(inside)
    return order


def _positions(graph: Adjacency) -> NDArray[np.int32]:
    """Return the position of each node in the order of nested clusters, ``[n]``."""
    levels = list(_clusters(graph))
    positions = np.arange(levels[-1].max(initial=-1) + 1 if levels else graph.num_nodes, dtype=np.int32)
    # From the largest clusters to the nodes: members of a cluster are consecutive, in the order of their ids.
    for cluster in reversed(levels):
        order = np.argsort(positions[cluster], kind="stable")
        positions = np.empty(order.size, dtype=np.int32)
        positions[order] = np.arange(order.size, dtype=np.int32)
    return positions


def _clusters(graph: Adjacency) -> Iterator[NDArray[np.int32]]:
    """Contract the graph again and again; yield the cluster of each node of the graph before each contraction."""
    from gtrain.graph.partition import kernels

    empty = np.empty(0, dtype=np.int32)
    level = kernels.Weighted(graph.starts, graph.adjacent, empty, np.ones(graph.num_nodes, dtype=np.int32))
    for limit in CLUSTER_NODES:
        for _ in range(_CONTRACTIONS):
            cluster = kernels.propagate(level, limit, _ROUNDS)
            count = kernels.renumber(cluster)
            if count > _SHRINKS * cluster.size:
                break
            yield cluster
            level = kernels.contract(level, cluster, count)
