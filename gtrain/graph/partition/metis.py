"""METIS: few cut edges and balanced work, for graphs that fit in memory several times over."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.errors import ConfigError, DataError

try:
    import pymetis
except ModuleNotFoundError:  # it has wheels for x86-64 only
    pymetis = None  # type: ignore[assignment]

Ints = NDArray[np.int64]
FEW_PARTS = 8
"""Up to so many parts recursive bisection may cut fewer edges."""


def available() -> bool:
    """Whether pymetis is installed."""
    return pymetis is not None


def check_available() -> None:
    """Raise a ConfigError unless pymetis is installed."""
    if not available():
        raise ConfigError(
            "data.partitioner=metis was set, and pymetis is not installed.",
            hint="pip install pymetis (without a wheel for this platform it needs a C++ compiler), or set "
            "data.partitioner=ldg.",
        )


def metis_partition(
    source: NDArray[Any],
    target: NDArray[Any],
    num_nodes: int,
    num_parts: int,
    *,
    seed: int = 0,
    train_mask: NDArray[np.bool_] | None = None,
) -> Ints:
    """Run METIS (Karypis and Kumar 1998) on the symmetric, loop-free, simple graph under the edges.

    More than :data:`FEW_PARTS` are cut k-way, where the largest may weigh 3 % more than the mean (METIS's own bound).
    Fewer parts are also made by recursive bisection, which balances better, and those with fewer cut edges are taken.

    Returns:
        The part of each node, ``[N]``; on tiny graphs a part may have none.

    Raises:
        ConfigError: pymetis is not installed.
    """
    check_available()
    starts, adjacent = _adjacency(source, target, num_nodes)
    graph, weights = pymetis.CSRAdjacency(starts, adjacent), _weights(target, num_nodes, train_mask)
    options = pymetis.Options(seed=seed % 2**31)
    ways = (
        pymetis.part_graph(num_parts, graph, vweights=weights, recursive=recursive, options=options)
        for recursive in ((True, False) if num_parts <= FEW_PARTS else (False,))
    )
    fewest = min(ways, key=lambda result: result.edge_cuts)
    return np.asarray(fewest.vertex_part, dtype=np.int64)


def _adjacency(
    source: NDArray[Any], target: NDArray[Any], num_nodes: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the CSR form that METIS wants: both directions of each edge once, no loops."""
    proper = np.asarray(source != target)
    source, target = source[proper].astype(np.int64), target[proper].astype(np.int64)
    keys = np.concatenate([source * num_nodes + target, target * num_nodes + source])
    keys.sort()
    if keys.size:
        keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])]
    if keys.size >= 2**31:
        raise DataError(
            f"METIS counts in 32 bits and the symmetric graph has {keys.size} edges", hint="set data.partitioner=ldg"
        )
    starts = np.zeros(num_nodes + 1, dtype=np.int64)
    np.cumsum(np.bincount(keys // num_nodes, minlength=num_nodes), out=starts[1:])
    return starts.astype(np.int32), (keys % num_nodes).astype(np.int32)


def _weights(target: NDArray[Any], num_nodes: int, train_mask: NDArray[np.bool_] | None) -> NDArray[np.int32]:
    """Return one weight for each node: a node, its in-edges and its training seed count alike on the average.

    METIS balances a single weight here, ``a + b * in-degree + c * is_train`` with b and c such that the three sums are
    equal. The in-degree counts, since a part stores the edges that point at its nodes.
    """
    terms = [np.ones(num_nodes), np.bincount(target, minlength=num_nodes).astype(float)]
    if train_mask is not None:
        terms.append(train_mask.astype(float))
    total = np.sum([term / term.mean() for term in terms if term.any()], axis=0)
    # METIS adds the weights up in 32 bits, so their sum has to stay below 2^31.
    scale = min(100.0, 2**29 / float(total.sum()))
    return np.maximum(1, np.rint(total * scale)).astype(np.int32)
