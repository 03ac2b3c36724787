"""Cache of the remote rows that are needed most, filled once and then read-only: nothing is evicted.

:func:`expected_visits` estimates from the graph's structure which nodes are needed most. A cached node has all tensors
of a batch, so nothing is requested for it. The ranks of a machine can share a cache. ::

    visits = expected_visits(store, {"node": train_ids}, batch_size, fan_out)
    fill_cache(features, visits, cache_bytes)       # after every rank serves its rows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numba import njit

from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EdgeType
from gtrain_pyg.features import kernels
from gtrain_pyg.features.feature_store import FeatureCache, FeatureStore
from gtrain_pyg.features.tables import arrays_of
from gtrain_pyg.peers import Array

FanOut = Mapping[EdgeType, tuple[int, ...]]
ShareArrays = Callable[[Callable[[], dict[str, Array]]], dict[str, Array]]

FILL_BYTES = 16 << 20
"""Bytes of rows per request while a cache is filled."""
BITMAP_BYTES = 12 / 64
"""Bytes of the bitmap of cached ids, per node of the type."""


def fill_cache(
    features: FeatureStore, visits: Mapping[str, Array], nbytes: int, share: ShareArrays | None = None
) -> FeatureCache:
    """Fill a feature store's cache with the most visited remote nodes; their owners must be serving.

    Args:
        features: reads these nodes from the cache afterwards.
        visits: by node type, visits of each node, ``[N]``; only their order matters.
        nbytes: most bytes of the cache.
        share: takes a function that computes the arrays, and returns those that one rank of the machine has computed;
            None: this rank computes its own.

    Raises:
        WireError: an owner failed.
    """

    def fetch() -> dict[str, Array]:
        return {
            f"{node_type}/{name}": array
            for node_type, ids in most_visited(features, visits, nbytes).items()
            if ids.size
            for name, array in _fetch(features, node_type, ids, len(visits[node_type])).items()
        }

    cache = FeatureCache()
    for key, array in (fetch() if share is None else share(fetch)).items():
        node_type, _, name = key.rpartition("/")
        array.flags.writeable = False  # numba compiles its loops once, for arrays that are read-only
        cache.arrays.setdefault(node_type, {})[name] = array
    features.set_cache(cache)
    return cache


def most_visited(features: FeatureStore, visits: Mapping[str, Array], nbytes: int) -> dict[str, Array]:
    """Return the remote nodes with most visits per byte that fit into ``nbytes``: ascending ids by node type."""
    node_types = [node_type for node_type in visits if features.names.get(node_type)]
    if not node_types:
        return {}
    remote = {}
    for node_type in node_types:
        visited = np.flatnonzero(visits[node_type] > 0)
        remote[node_type] = visited[features.is_remote(node_type, visited)]
    budget = nbytes - sum(BITMAP_BYTES * len(visits[node_type]) for node_type in node_types)
    return choose_rows(remote, visits, {t: features.row_bytes(t) for t in node_types}, budget)


def choose_rows(
    candidates: Mapping[str, Array], visits: Mapping[str, Array], row_bytes: Mapping[str, float], nbytes: float
) -> dict[str, Array]:
    """Return the nodes with most visits per byte whose rows fit into ``nbytes``.

    Args:
        candidates: by node type, ascending ids.
        visits: by node type, visits of each node, ``[N]``.
        row_bytes: by node type, bytes of a row.
        nbytes: most bytes of all rows.

    Returns:
        By node type, ascending ids.
    """
    if not candidates:
        return {}
    # Greedy by visits per byte, over all node types: wide rows must be visited more often.
    worth = np.concatenate([visits[t][ids] / row_bytes[t] for t, ids in candidates.items()])
    cost = np.concatenate([np.full(ids.size, row_bytes[t]) for t, ids in candidates.items()])
    order = np.argsort(-worth, kind="stable")
    fits = np.zeros(order.size, bool)
    fits[order[np.cumsum(cost[order]) <= nbytes]] = True
    bounds = np.cumsum([ids.size for ids in candidates.values()])[:-1]
    return {t: ids[chosen] for (t, ids), chosen in zip(candidates.items(), np.split(fits, bounds), strict=True)}


def _fetch(features: FeatureStore, node_type: str, ids: Array, count: int) -> dict[str, Array]:
    """Request the rows of ascending ids; return the arrays of :class:`FeatureCache`."""
    # A bit per node, and per word the number of bits before it: together they give a cached node's row.
    bits, ranks = np.zeros(count // 64 + 1, np.uint64), np.zeros(count // 64 + 1, np.uint32)
    kernels.rank_bits(ids, bits, ranks)
    step = max(1, int(FILL_BYTES / max(1.0, features.row_bytes(node_type))))
    dense: dict[str, Array] = {}
    sparse: dict[str, list[list[Array]]] = {}
    for start in range(0, ids.size, step):
        rows = features.prefetch({node_type: ids[start : start + step]}, as_stored=True).get()[node_type]
        for name, tensor in rows.items():
            arrays = [array.numpy() for array in arrays_of(tensor)]
            if len(arrays) > 1:
                sparse.setdefault(name, []).append([array.copy() for array in arrays])
                continue
            if name not in dense:
                dense[name] = np.empty((ids.size, *arrays[0].shape[1:]), arrays[0].dtype)
            dense[name][start : start + step] = arrays[0]
    features.pool.trim()
    arrays_by_name: dict[str, Array] = {"bits": bits, "ranks": ranks}
    arrays_by_name.update((f"{name}.0", array) for name, array in dense.items())
    for name, blocks in sparse.items():
        lengths = np.concatenate([np.diff(block[0]) for block in blocks])
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(blocks[0][0].dtype)
        arrays_by_name[f"{name}.0"] = indptr
        for i in range(1, len(blocks[0])):
            arrays_by_name[f"{name}.{i}"] = np.concatenate([block[i] for block in blocks])
    return arrays_by_name


def expected_visits(
    store: Store, seeds: Mapping[str, Any], batch_size: int, fan_out: FanOut, parts: Sequence[int] | None = None
) -> dict[str, Array]:
    """Estimate the probability that a node is in one of this rank's batches.

    Hop by hop, a target that is new with probability q chooses each of its d in-edges with probability min(1, k/d), so
    that a source expects the sum of q min(1, k/d) choices and is reached with probability 1 - exp(-sum). The estimate
    assumes independent, uniform choices, even if sampling is weighted or temporal. GNNLab (Yang et al., EuroSys 2022,
    section 6) counts visits of sampled batches instead, which costs an epoch of sampling; the estimate costs a pass
    over the edges of all parts per hop.

    Args:
        store: the graph.
        seeds: by node type, int64 global ids of this rank's seeds.
        batch_size: seeds of one batch of this rank, over all types.
        fan_out: by edge type, the most in-edges chosen at each hop; -1 all.
        parts: the parts whose edges are read, so that in-neighbours of others' nodes are reached less often than they
            are; None: all.

    Returns:
        By node type, float32 ``[N]``.
    """
    total = sum(len(ids) for ids in seeds.values())
    share = min(1.0, batch_size / max(1, total))
    missed = {node_type: np.ones(store.num_nodes_of(node_type), np.float32) for node_type in store.node_types}
    fresh = {node_type: np.zeros(store.num_nodes_of(node_type), np.float32) for node_type in store.node_types}
    for node_type, ids in seeds.items():
        fresh[node_type][ids] = share
        missed[node_type] -= fresh[node_type]
    for hop in range(max((len(counts) for counts in fan_out.values()), default=0)):
        counts_of = {t: counts[hop] for t, counts in fan_out.items() if hop < len(counts)}
        reached = _hop(store, fresh, counts_of, range(store.num_parts) if parts is None else parts)
        for node_type, choices in reached.items():
            # Reached at this hop, and not before.
            np.multiply(-np.expm1(-choices), missed[node_type], out=fresh[node_type])
            missed[node_type] -= fresh[node_type]
    return {node_type: 1 - never for node_type, never in missed.items()}


def _hop(
    store: Store, fresh: Mapping[str, Array], fan_out: Mapping[EdgeType, int], parts: Sequence[int]
) -> dict[str, Array]:
    """Return the expected choices of each node as a source, float32 ``[N]`` by node type.

    ``fresh`` has the probability that each node is new in the frontier, ``[N]`` by node type.
    """
    reached = {node_type: np.zeros(weights.size, np.float32) for node_type, weights in fresh.items()}
    for edge_type, count in fan_out.items():
        source, _, target = edge_type
        offsets = store.offsets_of(target).tolist()
        for part in parts if count else ():
            weights = fresh[target][offsets[part] : offsets[part + 1]]
            if weights.any():
                indptr, indices = (store.edge(name, part, edge_type).numpy() for name in ("indptr", "indices"))
                _add_choices(indptr, indices, weights, count, reached[source])
    return reached


@njit(cache=True, nogil=True)
def _add_choices(indptr: Array, indices: Array, weights: Array, count: int, reached: Array) -> None:
    """Add q min(1, k/d) to the sources of each target's in-edges.

    Args:
        indptr, indices: columns of one part; sources are global ids.
        weights: float32 ``[n_p]``, q of each target.
        count: k, -1 all.
        reached: float32 ``[N]``, added to.
    """
    for i in range(weights.size):
        degree = indptr[i + 1] - indptr[i]
        if weights[i] > 0 and degree:
            # count / degree in float64, rounded once: min(1, k/d).
            share = weights[i] if count < 0 or count >= degree else weights[i] * np.float32(count / degree)
            for e in range(indptr[i], indptr[i + 1]):
                reached[indices[e]] += share
