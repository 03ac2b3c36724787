"""The order of nodes within a part: neighbours near each other, so that a node's sources are in the cache already.

A layer reads the rows of each node's neighbours. In the order of the source data these lie all over the part's memory;
in groups of some thousands that METIS finds, most of them lie in a stretch that the processor's cache holds. A sum over
neighbours then takes about half the time (88 edges a node, rows of one KiB).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.graph.partition.metis import metis_partition

GROUP_NODES = 4096
"""Nodes of a group, about: with rows of one KiB they fill 4 MiB."""
MOST_GROUPS = 256
"""Groups of a part at most: METIS takes longer for more of them, and larger ones still help."""


def group_nodes(
    source: NDArray[Any], target: NDArray[Any], parts: NDArray[Any], num_parts: int, *, seed: int = 0
) -> NDArray[np.int32] | None:
    """Gather each part's nodes into groups with many edges among themselves.

    Args:
        source, target: the edges, ``[E]`` integer each.
        parts: the part of each node, ``[N]`` integer.
        num_parts: P.
        seed: of METIS.

    Returns:
        The group of each node within its part, ``[N]``; None where no part is large enough for two groups.
    """
    sizes = np.bincount(parts, minlength=num_parts)
    if num_parts < 2 or sizes.max() < 2 * GROUP_NODES:
        return None
    groups = np.zeros(parts.size, dtype=np.int32)
    place = np.empty(parts.size, dtype=np.int64)
    inner = np.flatnonzero(parts[source] == parts[target])
    edges, nodes_by_part = inner[np.argsort(parts[target[inner]], kind="stable")], np.argsort(parts, kind="stable")
    last_edge = np.cumsum(np.bincount(parts[target[inner]], minlength=num_parts))
    last_node = np.cumsum(sizes)
    for part in np.flatnonzero(sizes >= 2 * GROUP_NODES).tolist():
        nodes = nodes_by_part[last_node[part] - sizes[part] : last_node[part]]
        place[nodes] = np.arange(nodes.size)
        mine = edges[last_edge[part - 1] if part else 0 : last_edge[part]]
        if not mine.size:
            continue
        count = min(MOST_GROUPS, nodes.size // GROUP_NODES)
        groups[nodes] = metis_partition(place[source[mine]], place[target[mine]], nodes.size, count, seed=seed)
    return groups
