"""Node and edge tensors of batches: hosted rows by memory map, remote rows from their owners, hot ones from a cache.

Batches are *prefetched* in their order: a remote row that several successive ones need is asked for once, with one
packed request from each batch to each owner; while these are under way the hosted rows of a batch are copied. ::

    prefetcher = features.prefetcher(4)
    pending = [prefetcher.prefetch({"node": ids, EDGE_TYPE: positions}) for ids, positions in batches]
    tensors = pending[0].get()     # {"node": {"x": [n, F], "y": [n]}, EDGE_TYPE: {"edge_id": [e]}}

Nodes are named by global id, edges by global edge position (:class:`gtrain_pyg.ranks.parts.PartBook`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.errors import DataError
from gtrain.graph.owners import owner_of
from gtrain.graph.store import Store
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.features import kernels
from gtrain_pyg.features.requests import LAST_TURN, PendingRequests, RequestHistory, RowRequest
from gtrain_pyg.features.server import RowServer, fingerprint
from gtrain_pyg.features.tables import DenseTable, Extra, HostedTensors, Table
from gtrain_pyg.ranks.parts import Kind, PartBook
from gtrain_pyg.ranks.service import Peers

Array = NDArray[Any]

EXACT = frozenset({"y"})
"""Node tensors that keep their dtype on the wire, as those with one number a node do."""
_NO_MARKS: tuple[Array, Array] = np.empty(0, np.uint64), np.empty(0, np.uint32)
Ids = Mapping[Kind, Any]
Tables = Mapping[Kind, Mapping[str, Table]]
KEPT_BATCHES = 1
"""What batches asked for is kept for later ones as long as it takes no more bytes than so many batches' rows."""


@dataclass
class Counts:
    """Rows of nodes and edges that batches needed so far.

    Attributes:
        hosted: read from this rank's memory maps.
        cached: remote, and found in the cache.
        missed: remote, and not in the cache.
        fetched: asked for; fewer than missed, where successive batches need the same.
        fetched_nodes: of these, rows of nodes.
    """

    hosted: int = 0
    cached: int = 0
    missed: int = 0
    fetched: int = 0
    fetched_nodes: int = 0


@dataclass
class HaloCache:
    """Rows of remote nodes.

    Attributes:
        arrays: by node type: ``bits`` uint64 and ``ranks`` uint32, marks by id, see
            :func:`.kernels.rank_bits`; and the pieces of each tensor, ``<name>.0`` and on, whose rows
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


class FeatureStore:
    """Serves the rows of one store, here and to other ranks. Threads may share it.

    Args:
        store: the graph.
        book: who owns what.
        hosted: parts whose files this rank reads itself.
        peers: the other ranks; None where all parts are hosted.
        pool: memory of the batches.
        names: by node type and edge type, the tensors that batches get.
        wire_dtype: dtype in which floating node features travel between ranks; None: as stored. Tensors with one
            number a node, and ``y``, travel as they are stored; and so does everything where it is float32.
        dtype: dtype of all floating tensors in batches; None: as stored.
        extra: by kind, name and hosted part, tensors that the store does not have, ``[n_p, ...]``.
        method: the name under which all ranks serve these rows.

    Attributes:
        names, dtype: as given.
        counts: what was served.
        cache: rows of other parts kept here; see :meth:`put`.

    Raises:
        StoreError: the store has no tensor of such a name.
        DataError: a name has no rows for nodes or edges, an extra tensor has too few or too many; or there are no
            peers and parts that are not hosted.
    """

    def __init__(
        self,
        store: Store,
        book: PartBook,
        hosted: Sequence[int],
        peers: Peers | None,
        pool: BufferPool,
        names: Mapping[Kind, Sequence[str]],
        *,
        wire_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        extra: Extra | None = None,
        method: str = "rows",
    ) -> None:
        self.names = {kind: tuple(tensors) for kind, tensors in names.items()}
        self.dtype, self.counts, self.pool = dtype, Counts(), pool
        self.cache: HaloCache | None = None
        self._hosted = HostedTensors(store, book, hosted, extra or {})
        self._tables = {
            kind: {name: self._hosted.table(kind, name) for name in tensors} for kind, tensors in self.names.items()
        }
        self._wire_dtype = None if wire_dtype == torch.float32 else wire_dtype
        self._method, self._store = method, fingerprint(store)
        self._peers = peers
        if peers is None and len(self._hosted.hosted) < book.num_parts:
            raise DataError(
                f"of {book.num_parts} parts this rank hosts {self._hosted.hosted}, and it has no peers to ask",
                hint="give the FeatureStore the job's Peers, or host all parts",
            )
        if peers is not None:
            peers.handle(method, RowServer(self._hosted, store, pool))

    def get(self, batches: Sequence[Ids]) -> list[dict[Kind, dict[str, Tensor]]]:
        """The tensors of some batches, which ask for a remote row once; errors as :meth:`Prefetcher.prefetch`'s."""
        prefetcher = self.prefetcher(max(1, len(batches)))
        return [pending.get() for pending in [prefetcher.prefetch(batch) for batch in batches]]

    def prefetch(
        self, batch: Ids, *, names: Mapping[Kind, Sequence[str]] | None = None, as_stored: bool = False
    ) -> PendingBatch:
        """Ask for the remote rows of one batch; arguments as :meth:`prefetcher`'s."""
        return self.prefetcher(1, names=names, as_stored=as_stored).prefetch(batch)

    def prefetcher(
        self, batches: int, *, names: Mapping[Kind, Sequence[str]] | None = None, as_stored: bool = False
    ) -> Prefetcher:
        """Serve successive batches.

        Args:
            batches: that ask for a remote row once, together: what a batch asked for is kept for those after it.
            names: the tensors wanted, some of those that the rows were made with; None: all.
            as_stored: leave the dtype of floats as it is in the store.
        """
        chosen = self._tables
        if names is not None:
            chosen = {kind: {name: self._tables[kind][name] for name in tensors} for kind, tensors in names.items()}
        recent = {
            kind: RequestHistory(
                tables,
                {name: self._on_wire(kind, name, table) for name, table in tables.items()},
                self._hosted.offsets(kind),
                self._hosted.segments,
                batches,
                self.pool,
            )
            for kind, tables in chosen.items()
            if tables
        }
        return Prefetcher(self, chosen, recent, batches, None if as_stored else self.dtype)

    def put(self, cache: HaloCache | None) -> None:
        """Serve the rows in a cache from it from now on."""
        for kind, tables in self._tables.items():
            if cache is not None and isinstance(kind, str) and kind in cache:
                for name, table in tables.items():
                    table.hold(self._hosted.parts, cache.pieces(kind, name, len(table.bases)))
        self.cache = cache

    def is_remote(self, kind: Kind, ids: Array) -> Array:
        """Whether each row is one that this rank does not host."""
        offsets = self._hosted.offsets(kind)
        return ~self._hosted.is_hosted[owner_of(ids, offsets)]

    def shape(self, kind: Kind, name: str) -> tuple[int, ...]:
        """The shape of a tensor over all parts.

        Raises:
            KeyError: these rows do not have it.
        """
        return (int(self._hosted.offsets(kind)[-1]), *self._tables[kind][name].shape)

    def row_bytes(self, kind: Kind) -> float:
        """Bytes of all tensors of one node or edge, as stored."""
        return sum(table.row_bytes for table in self._tables[kind].values())

    def look_up(self, kind: Kind, ids: Any) -> Lookup:
        """The places of one batch's rows.

        Raises:
            DataError: an id is out of range.
        """
        ids = np.ascontiguousarray(ids, np.int64).view()
        ids.flags.writeable = False  # as marks are: numba compiles kernels for either kind of array
        place = self.pool.take(ids.size, np.int64)
        offsets = self._hosted.offsets(kind)
        bits, ranks = _NO_MARKS if self.cache is None else self.cache.marks(kind) or _NO_MARKS
        hosted, cached, wrong = kernels.find(ids, offsets, self._hosted.is_hosted, bits, ranks, place)
        if wrong >= 0:
            raise DataError(
                f"a batch names row {int(ids[wrong])} of {kind}, and there are {int(offsets[-1])}",
                hint="give seeds and edges by their numbers in the store, which begin at 0",
            )
        missed = ids.size - hosted - cached
        self.counts.hosted += hosted
        self.counts.cached += cached
        self.counts.missed += missed
        return Lookup(ids, place, missed)

    def request(self, missing: dict[Kind, RowRequest]) -> PendingRequests:
        """Ask the owners for rows."""
        assert self._peers is not None  # or all parts were hosted
        for kind, wanted in missing.items():
            count = sum(rows.size for rows in wanted.rows.values())
            self.counts.fetched += count
            self.counts.fetched_nodes += count if isinstance(kind, str) else 0
        requests = PendingRequests(self._peers, self._method, self._store, missing, self.pool)
        requests.send()
        return requests

    def _on_wire(self, kind: Kind, name: str, table: Table) -> torch.dtype:
        """The dtype in which a tensor's values travel."""
        one = isinstance(table, DenseTable) and not table.shape
        wire = self._wire_dtype
        if wire is None or not isinstance(kind, str) or name in EXACT or one or wire.itemsize >= table.dtype.itemsize:
            return table.dtype
        return table.goes_as(wire)


for _mark in _NO_MARKS:
    _mark.flags.writeable = False


@dataclass
class Lookup:
    """What one batch needs of one kind: its ids, the places of their rows, and how many of these are not here."""

    ids: Array
    place: Array
    missed: int


class Prefetcher:
    """Batches in their order; made by :meth:`FeatureStore.prefetcher`. One thread asks for them.

    Args:
        features: that serve them.
        tables: the tensors wanted, by kind and name.
        recent: by kind, what was asked for lately.
        batches: that ask for a row once, together, at most.
        dtype: of floating tensors; None: as stored.
    """

    def __init__(
        self,
        features: FeatureStore,
        tables: Tables,
        recent: Mapping[Kind, RequestHistory],
        batches: int,
        dtype: torch.dtype | None,
    ) -> None:
        self._features, self._tables, self._recent, self._dtype = features, tables, recent, dtype
        self._batches = batches
        self._before: deque[PendingRequests | None] = deque()
        self._kept = self._largest = 0.0  # bytes: of the rows that those before asked for, and of the largest batch
        self._row_bytes = {kind: sum(table.row_bytes for table in tables[kind].values()) for kind in recent}
        self._turn = 0

    def prefetch(self, batch: Ids) -> PendingBatch:
        """Ask for the remote rows of the next batch, as far as those before it have not.

        Args:
            batch: int64 ids by kind; kinds without names are passed over.

        Raises:
            DataError: an id is out of range.
            WireError: an owner cannot be asked.
        """
        wanted = {kind: self._features.look_up(kind, batch[kind]) for kind in self._recent if kind in batch}
        self._take_turn()
        self._largest = max(self._largest, sum(self._row_bytes[kind] * here.ids.size for kind, here in wanted.items()))
        self._let_go()
        floor = self._turn - len(self._before)
        missing: dict[Kind, RowRequest] = {}
        segments: dict[Kind, int] = {}
        for kind, here in wanted.items():
            if here.missed:
                missing[kind] = self._recent[kind].ask(here.ids, here.place, here.missed, self._turn, floor)
                segments[kind] = self._recent[kind].segments
        self._before.append(self._features.request(missing) if missing else None)
        self._kept += sum(each.nbytes for each in missing.values())
        requests = tuple(before for before in self._before if before is not None) if missing else ()
        return PendingBatch(self._features, self._tables, wanted, requests, segments, self._dtype)

    def _let_go(self) -> None:
        """Forget what the earliest batches asked for, where that is too much."""
        while self._before and (len(self._before) >= self._batches or self._kept > KEPT_BATCHES * self._largest):
            earliest = self._before.popleft()
            if earliest is not None:
                self._kept -= sum(missing.nbytes for missing in earliest.missing.values())

    def _take_turn(self) -> None:
        if self._turn == LAST_TURN:
            self._turn = 0
            for recent in self._recent.values():
                recent.forget()
        self._turn += 1


class PendingBatch:
    """A batch whose remote rows were asked for; made by :meth:`Prefetcher.prefetch`. They are held until it is taken.

    Args:
        features: that serve it.
        tables: the tensors wanted, by kind and name.
        wanted: what of them.
        requests: what has its remote rows, the batches' before it too; () where it has none.
        segments: how many there are of each kind that has remote rows.
        dtype: of floating tensors; None: as stored.
    """

    def __init__(
        self,
        features: FeatureStore,
        tables: Tables,
        wanted: dict[Kind, Lookup],
        requests: tuple[PendingRequests, ...],
        segments: Mapping[Kind, int],
        dtype: torch.dtype | None,
    ) -> None:
        self._features, self._tables, self._segments, self._dtype = features, tables, segments, dtype
        self._wanted: dict[Kind, Lookup] | None = wanted
        self._requests = requests

    def get(self) -> dict[Kind, dict[str, Tensor]]:
        """Make the tensors, once, in the order of the batch's ids.

        Raises:
            WireError: an owner failed to answer.
            ValueError: it was made before.
        """
        if self._wanted is None:
            raise ValueError("the batch was made before, and its ids are forgotten")
        wanted, self._wanted = self._wanted, None
        waits = not all(requests.arrived for requests in self._requests)  # or all is copied in one go
        started = {kind: self._hosted(kind, here) if waits and here.missed else {} for kind, here in wanted.items()}
        for requests in self._requests:
            requests.receive()
        made = {kind: self._all(kind, here, started[kind]) for kind, here in wanted.items()}
        self._requests = ()
        return made

    def _hosted(self, kind: Kind, wanted: Lookup) -> dict[str, Tensor]:
        """Copy what is here, while the rest is on its way: of dense tensors whose dtype does not change."""
        outs: dict[str, Tensor] = {}
        for name, table in self._tables[kind].items():
            if isinstance(table, DenseTable) and table.goes_as(self._dtype) == table.dtype:
                outs[name] = table.empty(wanted.place.size, self._features.pool, table.dtype)
                table.fill(outs[name], wanted.place, table.bases, 0, table.bases.shape[1])
        return outs

    def _all(self, kind: Kind, wanted: Lookup, started: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy what was not copied yet."""
        made: dict[str, Tensor] = {}
        for name, table in self._tables[kind].items():
            bases = self._bases(kind, name, table) if wanted.missed else table.bases
            if name in started:
                assert isinstance(table, DenseTable)
                made[name] = started[name]
                table.fill(made[name], wanted.place, bases, table.bases.shape[1], bases.shape[1])
            else:
                pieces = table.gather(wanted.place, bases, self._features.pool, table.goes_as(self._dtype))
                made[name] = table.finish(pieces)
        return made

    def _bases(self, kind: Kind, name: str, table: Table) -> Array:
        """The addresses of all segments: parts and cache, and what the batches asked for."""
        bases = np.zeros((table.bases.shape[0], self._segments[kind]), np.int64)
        bases[:, : table.bases.shape[1]] = table.bases
        for requests in self._requests:
            missing = requests.missing.get(kind)
            if missing is not None:  # those of the latest come last, and prevail where segments were numbered anew
                bases[:, missing.first : missing.first + missing.bases[name].shape[1]] = missing.bases[name]
        return bases
