"""The hottest rows of other ranks' parts, kept by this rank (or by the ranks of a machine together) and never changed.

Which nodes are hot is reckoned by :func:`gtrain_pyg.rows.hotness.expected_visits`. All tensors that batches get of a
cached node are here, so that it is not asked for at all. ::

    visits = expected_visits(store, {"node": train_ids}, batch_size, fan_out)
    fill_cache(rows, visits, cache_bytes)       # after every rank serves its rows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gtrain_pyg.ranks.parts import Kind
from gtrain_pyg.rows import kernels
from gtrain_pyg.rows.tables import pieces_of

if TYPE_CHECKING:
    from gtrain_pyg.rows.access import Rows

Array = NDArray[Any]
Share = Callable[[Callable[[], dict[str, Array]]], dict[str, Array]]

FILL_BYTES = 16 << 20
"""Rows that are asked for at a time to fill a cache."""
MARK_BYTES = 12 / 64
"""Bytes of the marks that tell which nodes are in a cache, for each node of the type."""


@dataclass
class HaloCache:
    """Rows of remote nodes.

    Attributes:
        arrays: by node type: ``bits`` uint64 and ``ranks`` uint32, marks by id, see
            :func:`gtrain_pyg.rows.kernels.rank_bits`; and the pieces of each tensor, ``<name>.0`` and on, whose rows
            are in the order of the ids.
    """

    arrays: dict[str, dict[str, Array]] = field(default_factory=dict)

    def __contains__(self, kind: object) -> bool:
        """Whether nodes of a type are cached."""
        return kind in self.arrays

    def marks(self, kind: Kind) -> tuple[Array, Array] | None:
        """``bits`` and ``ranks`` of a node type; None if nothing of it is here."""
        arrays = self.arrays.get(kind) if isinstance(kind, str) else None
        return None if arrays is None else (arrays["bits"], arrays["ranks"])

    def pieces(self, kind: str, name: str, count: int) -> list[Array]:
        """The pieces of one tensor."""
        return [self.arrays[kind][f"{name}.{i}"] for i in range(count)]

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(array.nbytes for arrays in self.arrays.values() for array in arrays.values())


def fill_cache(rows: Rows, visits: Mapping[str, Array], nbytes: int, share: Share | None = None) -> HaloCache:
    """Give rows a cache of the most visited remote nodes. Owners have to be serving; nobody else has to call this.

    Args:
        rows: to be served from the cache.
        visits: by node type, how often each node is visited, ``[N]``; only their order counts.
        nbytes: most bytes of the cache.
        share: takes a function that makes the arrays, and returns them as one rank of the machine has made them; None:
            this rank makes its own.

    Raises:
        WireError: an owner failed to answer.
    """

    def make() -> dict[str, Array]:
        chosen = choose(rows, visits, nbytes)
        made = {kind: _fetch(rows, kind, ids, len(visits[kind])) for kind, ids in chosen.items() if ids.size}
        return {f"{kind}/{name}": array for kind, arrays in made.items() for name, array in arrays.items()}

    cache = HaloCache()
    for key, array in (make() if share is None else share(make)).items():
        kind, _, name = key.rpartition("/")
        array.flags.writeable = False
        cache.arrays.setdefault(kind, {})[name] = array
    rows.keep(cache)
    return cache


def choose(rows: Rows, visits: Mapping[str, Array], nbytes: int) -> dict[str, Array]:
    """The remote nodes with most visits for a byte that fit, and that are visited at all: ascending ids by type."""
    kinds = [kind for kind in visits if rows.names.get(kind)]
    budget = nbytes - sum(MARK_BYTES * len(visits[kind]) for kind in kinds)
    ids, worth, cost = [], [], []
    for kind in kinds:
        remote = np.flatnonzero(visits[kind] > 0)
        remote = remote[rows.is_remote(kind, remote)]
        row_bytes = rows.row_bytes(kind)
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


def _fetch(rows: Rows, kind: str, ids: Array, count: int) -> dict[str, Array]:
    """Ask for the rows of ascending ids, and mark these."""
    bits, ranks = np.zeros(count // 64 + 1, np.uint64), np.zeros(count // 64 + 1, np.uint32)
    kernels.rank_bits(ids, bits, ranks)
    step = max(1, int(FILL_BYTES / max(1.0, rows.row_bytes(kind))))
    columns: dict[str, _Column] = {}
    for start in range(0, ids.size, step):
        made = rows.begin({kind: ids[start : start + step]}, as_stored=True).make()
        for name, tensor in made[kind].items():
            columns.setdefault(name, _Column(ids.size)).append(start, [piece.numpy() for piece in pieces_of(tensor)])
    rows.pool.trim()
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
