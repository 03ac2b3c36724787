"""METIS partitioning: few cut edges and balanced work, for graphs that fit in memory several times over."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.errors import ConfigError, DataError
from gtrain.graph.partition.adjacency import Adjacency, node_weights

try:
    import pymetis
except ModuleNotFoundError:  # pymetis has wheels for x86-64 only
    pymetis = None  # type: ignore[assignment]

Ints = NDArray[np.int64]
GROUP_NODES = 4096
"""Approximate number of nodes of a locality group: with rows of 1 KiB a group fills 4 MiB."""
MAX_GROUPS = 256
"""Largest number of groups per part: METIS takes longer for more groups, and larger groups still help."""
FEW_PARTS = 8
"""Largest number of parts for which recursive bisection is tried: for few parts it may cut fewer edges."""


def available() -> bool:
    """Return whether pymetis is installed."""
    return pymetis is not None


def fits(graph: Adjacency) -> bool:
    """Return whether METIS is installed and can count the edges of a graph."""
    return available() and graph.adjacent.size < 2**31


def check_available() -> None:
    """Raise a ConfigError unless pymetis is installed."""
    if not available():
        raise ConfigError(
            "data.partitioner=metis is set, but pymetis is not installed.",
            hint="pip install pymetis (without a wheel for this platform it needs a C++ compiler), or set "
            "data.partitioner=ldg.",
        )


def metis_partition(graph: Adjacency, num_parts: int, weights: NDArray[np.int32], *, seed: int = 0) -> Ints:
    """Run METIS (Karypis and Kumar 1998).

    More than :data:`FEW_PARTS` parts are cut k-way; the largest may weigh 3 % more than the mean (METIS's default).
    For fewer parts recursive bisection, which balances better, is tried too, and the result with fewer cut edges wins.

    Args:
        graph: the symmetric graph.
        num_parts: P.
        weights: weight of each node, ``[N]``, whose total is below 2^31.
        seed: seed of METIS.

    Returns:
        The part of each node, ``[N]``; on tiny graphs a part may be empty.

    Raises:
        ConfigError: pymetis is not installed.
        DataError: the graph has too many edges.
    """
    check_available()
    if not fits(graph):
        raise DataError(
            f"METIS counts edges in 32 bits, and the symmetric graph has {graph.adjacent.size}",
            hint="set data.partitioner=kaminpar or ldg",
        )
    adjacency = pymetis.CSRAdjacency(graph.starts.astype(np.int32), graph.adjacent)
    # METIS takes a seed of 32 bits.
    options = pymetis.Options(seed=seed % 2**31)
    results = (
        pymetis.part_graph(num_parts, adjacency, vweights=weights, recursive=recursive, options=options)
        for recursive in ((True, False) if num_parts <= FEW_PARTS else (False,))
    )
    best = min(results, key=lambda result: result.edge_cuts)
    return np.asarray(best.vertex_part, dtype=np.int64)


def group_nodes(
    source: NDArray[Any], target: NDArray[Any], parts: NDArray[Any], num_parts: int, *, seed: int = 0
) -> NDArray[np.int32] | None:
    """Cluster each part's nodes into locality groups of neighbours, with METIS.

    A layer reads the rows of each node's neighbours. In the order of the source data these are scattered over the
    part's memory; within a group of some thousand nodes most of them share a range that fits the CPU cache. A sum over
    neighbours then takes about half the time (88 edges per node, rows of 1 KiB).

    Args:
        source, target: the edges, ``[E]`` integer each.
        parts: the part of each node, ``[N]`` integer.
        num_parts: P.
        seed: seed of METIS.

    Returns:
        The group of each node within its part, ``[N]``; None if no part is large enough for two groups.
    """
    sizes = np.bincount(parts, minlength=num_parts)
    if num_parts < 2 or sizes.max() < 2 * GROUP_NODES:
        return None
    groups = np.zeros(parts.size, dtype=np.int32)
    offset = np.empty(parts.size, dtype=np.int64)  # of each node within its part
    # Only edges within a part matter for the order of its nodes.
    inner = np.flatnonzero(parts[source] == parts[target])
    edges, nodes_by_part = inner[np.argsort(parts[target[inner]], kind="stable")], np.argsort(parts, kind="stable")
    last_edge = np.cumsum(np.bincount(parts[target[inner]], minlength=num_parts))
    last_node = np.cumsum(sizes)
    for part in np.flatnonzero(sizes >= 2 * GROUP_NODES).tolist():
        nodes = nodes_by_part[last_node[part] - sizes[part] : last_node[part]]
        offset[nodes] = np.arange(nodes.size)
        inside = edges[last_edge[part - 1] if part else 0 : last_edge[part]]
        if inside.size:
            count = min(MAX_GROUPS, nodes.size // GROUP_NODES)
            ends = offset[source[inside]], offset[target[inside]]
            weights = node_weights(ends[1], nodes.size, None)
            groups[nodes] = metis_partition(Adjacency.of(*ends, nodes.size), count, weights, seed=seed)
    return groups
