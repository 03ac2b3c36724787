"""How often a rank's batches visit each node, reckoned from the graph's structure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EdgeType

Array = NDArray[Any]
FanOut = Mapping[EdgeType, tuple[int, ...]]


def expected_visits(store: Store, seeds: Mapping[str, Any], batch_size: int, fan_out: FanOut) -> dict[str, Array]:
    """The probability that a node is in one of this rank's batches.

    Hop by hop, a target that is new with probability q chooses each of its d in-edges with probability min(1, k/d), so
    that a source expects the sum of q min(1, k/d) choices and is reached with probability 1 - exp(-sum). Choices are
    taken for independent and uniform, also where sampling is weighted or temporal. GNNLab (Yang et al., EuroSys 2022,
    section 6) counts visits of sampled batches instead; that costs an epoch of sampling, this a pass over the edges of
    all parts for each hop.

    Args:
        store: the graph; the edges of all parts are read.
        seeds: by node type, int64 global ids that this rank's batches are grown from.
        batch_size: seeds of one batch of this rank, over all types.
        fan_out: by edge type, the most in-edges chosen at each hop; -1 all.

    Returns:
        by node type float32 ``[N]``.
    """
    total = sum(len(ids) for ids in seeds.values())
    share = min(1.0, batch_size / max(1, total))
    missed = {kind: np.ones(store.num_nodes_of(kind), np.float32) for kind in store.node_types}
    fresh = {kind: np.zeros(store.num_nodes_of(kind), np.float32) for kind in store.node_types}
    for kind, ids in seeds.items():
        fresh[kind][ids] = share
        missed[kind] -= fresh[kind]
    for hop in range(max((len(counts) for counts in fan_out.values()), default=0)):
        reached = _hop(store, fresh, {kind: counts[hop] for kind, counts in fan_out.items() if hop < len(counts)})
        for kind, choices in reached.items():
            np.multiply(-np.expm1(-choices), missed[kind], out=fresh[kind])
            missed[kind] -= fresh[kind]
    return {kind: 1 - never for kind, never in missed.items()}


def _hop(store: Store, fresh: Mapping[str, Array], fan_out: Mapping[EdgeType, int]) -> dict[str, Array]:
    """Expected choices of each node as a source."""
    reached = {kind: np.zeros(weights.size, np.float32) for kind, weights in fresh.items()}
    for (source, relation, target), count in fan_out.items():
        edge_type, offsets = (source, relation, target), store.offsets_of(target).tolist()
        for part in range(store.num_parts if count else 0):
            weights = fresh[target][offsets[part] : offsets[part + 1]]
            if weights.any():
                indptr, indices = (store.edge(name, part, edge_type).numpy() for name in ("indptr", "indices"))
                _spread(indptr, indices, weights, count, reached[source])
    return reached


@njit(cache=True, nogil=True)
def _spread(indptr: Array, indices: Array, weights: Array, count: int, reached: Array) -> None:
    for i in range(weights.size):
        degree = indptr[i + 1] - indptr[i]
        if weights[i] > 0 and degree:
            share = weights[i] if count < 0 or count >= degree else weights[i] * np.float32(count / degree)
            for e in range(indptr[i], indptr[i + 1]):
                reached[indices[e]] += share
