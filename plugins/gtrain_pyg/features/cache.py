"""The hottest rows of other ranks' parts, kept by this rank (or by the ranks of a machine together) and never changed.

Which nodes are hot is estimated from the graph's structure by :func:`expected_visits`. All tensors that batches get of
a cached node are here, so that it is not asked for at all. ::

    visits = expected_visits(store, {"node": train_ids}, batch_size, fan_out)
    fill_cache(features, visits, cache_bytes)       # after every rank serves its rows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EdgeType
from gtrain_pyg.features import kernels
from gtrain_pyg.features.feature_store import FeatureStore, HaloCache
from gtrain_pyg.features.tables import pieces_of

Array = NDArray[Any]
FanOut = Mapping[EdgeType, tuple[int, ...]]
Share = Callable[[Callable[[], dict[str, Array]]], dict[str, Array]]

FILL_BYTES = 16 << 20
"""Rows that are asked for at a time to fill a cache."""
MARK_BYTES = 12 / 64
"""Bytes of the marks that tell which nodes are in a cache, for each node of the type."""


def fill_cache(
    features: FeatureStore, visits: Mapping[str, Array], nbytes: int, share: Share | None = None
) -> HaloCache:
    """Give a feature store a cache of the most visited remote nodes; their owners have to be serving.

    Args:
        features: serves them from the cache afterwards.
        visits: by node type, how often each node is visited, ``[N]``; only their order counts.
        nbytes: most bytes of the cache.
        share: takes a function that makes the arrays, and returns them as one rank of the machine has made them; None:
            this rank makes its own.

    Raises:
        WireError: an owner failed to answer.
    """

    def make() -> dict[str, Array]:
        chosen = choose(features, visits, nbytes)
        made = {kind: _fetch(features, kind, ids, len(visits[kind])) for kind, ids in chosen.items() if ids.size}
        return {f"{kind}/{name}": array for kind, arrays in made.items() for name, array in arrays.items()}

    cache = HaloCache()
    for key, array in (make() if share is None else share(make)).items():
        kind, _, name = key.rpartition("/")
        array.flags.writeable = False
        cache.arrays.setdefault(kind, {})[name] = array
    features.put(cache)
    return cache


def choose(features: FeatureStore, visits: Mapping[str, Array], nbytes: int) -> dict[str, Array]:
    """The remote nodes with most visits for a byte that fit, and that are visited at all: ascending ids by type."""
    kinds = [kind for kind in visits if features.names.get(kind)]
    budget = nbytes - sum(MARK_BYTES * len(visits[kind]) for kind in kinds)
    ids, worth, cost = [], [], []
    for kind in kinds:
        remote = np.flatnonzero(visits[kind] > 0)
        remote = remote[features.is_remote(kind, remote)]
        row_bytes = features.row_bytes(kind)
        ids.append(remote)
        worth.append(visits[kind][remote] / row_bytes)
        cost.append(np.full(remote.size, row_bytes))
    if not ids:
        return {}
    order = np.argsort(-np.concatenate(worth), kind="stable")
    taken = order[np.cumsum(np.concatenate(cost)[order]) <= budget]
    bounds = np.cumsum([0, *(remote.size for remote in ids)])
    chosen = {}
    for kind, remote, start, stop in zip(kinds, ids, bounds[:-1], bounds[1:], strict=True):
        chosen[kind] = np.sort(remote[taken[(taken >= start) & (taken < stop)] - start])
    return chosen


def _fetch(features: FeatureStore, kind: str, ids: Array, count: int) -> dict[str, Array]:
    """Ask for the rows of ascending ids, and mark these."""
    bits, ranks = np.zeros(count // 64 + 1, np.uint64), np.zeros(count // 64 + 1, np.uint32)
    kernels.rank_bits(ids, bits, ranks)
    step = max(1, int(FILL_BYTES / max(1.0, features.row_bytes(kind))))
    columns: dict[str, _Column] = {}
    for start in range(0, ids.size, step):
        made = features.prefetch({kind: ids[start : start + step]}, as_stored=True).get()
        for name, tensor in made[kind].items():
            columns.setdefault(name, _Column(ids.size)).append(start, [piece.numpy() for piece in pieces_of(tensor)])
    features.pool.trim()
    named = {f"{name}.{i}": array for name, column in columns.items() for i, array in enumerate(column.joined())}
    return {"bits": bits, "ranks": ranks, **named}


class _Column:
    """The rows of one tensor, as they arrive.

    Args:
        rows: how many there are to be.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._dense: Array | None = None
        self._sparse: list[list[Array]] = []

    def append(self, start: int, pieces: list[Array]) -> None:
        """Take the pieces of the rows from ``start`` on, which are copied or stay the caller's."""
        if len(pieces) > 1:
            self._sparse.append([piece.copy() for piece in pieces])
            return
        if self._dense is None:
            self._dense = np.empty((self._rows, *pieces[0].shape[1:]), pieces[0].dtype)
        self._dense[start : start + len(pieces[0])] = pieces[0]

    def joined(self) -> list[Array]:
        """The pieces of all rows."""
        if self._dense is not None:
            return [self._dense]
        lengths = np.concatenate([np.diff(pieces[0]) for pieces in self._sparse])
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(self._sparse[0][0].dtype)
        return [indptr, *(np.concatenate([pieces[i] for pieces in self._sparse]) for i in (1, 2))]


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
