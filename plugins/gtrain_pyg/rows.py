"""Node and edge tensors of batches: hosted rows by memory map, remote rows from their owners, hot ones from a cache.

The batches of a *window* are served together. A remote row that several of them need is asked for once, with one packed
request to each owner; while these are under way the hosted rows of the first batch are copied. ::

    window = rows.begin([{"node": ids_0, EDGE_TYPE: positions_0}, {"node": ids_1, ...}])
    for i in range(2):
        tensors = window.batch(i)     # {"node": {"x": [n, F], "y": [n]}, EDGE_TYPE: {"edge_id": [e]}}

Nodes are named by global id, edges by global edge position (:class:`gtrain_pyg.parts.PartBook`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.errors import DataError
from gtrain.graph.store import Store
from gtrain_pyg import row_kernels as kernels
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.cache import HaloCache
from gtrain_pyg.parts import Kind, PartBook
from gtrain_pyg.row_requests import Missing, Numbers, Requests, chunk_rows
from gtrain_pyg.row_server import RowServer, fingerprint
from gtrain_pyg.row_shelf import Extra, Shelf
from gtrain_pyg.row_tables import DenseTable, Table
from gtrain_pyg.service import Peers

Array = NDArray[Any]
Ids = Mapping[Kind, Any]

EXACT = frozenset({"y"})
"""Node tensors that keep their dtype on the wire, as those with one number a node do."""


@dataclass
class Counts:
    """Rows of nodes and edges that batches needed so far.

    Attributes:
        hosted: read from this rank's memory maps.
        cached: remote, and found in the cache.
        missed: remote, and not in the cache.
        fetched: asked for; fewer than missed, where several batches of a window need the same.
    """

    hosted: int = 0
    cached: int = 0
    missed: int = 0
    fetched: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of remote rows that the cache had; 0 where there were none."""
        return self.cached / max(1, self.cached + self.missed)


class Rows:
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
        cache: rows of other parts kept here; see :meth:`keep`.

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
        self._shelf = Shelf(store, book, hosted, extra or {})
        self._tables = {
            kind: {name: self._shelf.table(kind, name) for name in tensors} for kind, tensors in self.names.items()
        }
        self._wire_dtype = None if wire_dtype == torch.float32 else wire_dtype
        self._method, self._store = method, fingerprint(store)
        self._peers = peers
        self._numbers, self._lock = Numbers(), threading.Lock()
        if peers is None and len(self._shelf.hosted) < book.num_parts:
            raise DataError(
                f"of {book.num_parts} parts this rank hosts {self._shelf.hosted}, and it has no peers to ask",
                hint="give Rows the job's Peers, or host all parts",
            )
        if peers is not None:
            peers.handle(method, RowServer(self._shelf, store, pool))

    def fetch(self, window: Sequence[Ids]) -> list[dict[Kind, dict[str, Tensor]]]:
        """The tensors of all batches of a window at once; arguments, results and errors as :meth:`begin`'s."""
        begun = self.begin(window)
        return [begun.batch(i) for i in range(len(window))]

    def begin(
        self, window: Sequence[Ids], *, names: Mapping[Kind, Sequence[str]] | None = None, as_stored: bool = False
    ) -> Window:
        """Ask for the remote rows of some batches.

        Args:
            window: of each batch, int64 ids by kind; kinds without names are passed over.
            names: the tensors wanted, some of those that the rows were made with; None: all.
            as_stored: leave the dtype of floats as it is in the store.

        Raises:
            DataError: an id is out of range.
            WireError: an owner cannot be asked.
        """
        wanted: list[dict[Kind, _Wanted]] = [{} for _ in window]
        missing: dict[Kind, Missing] = {}
        all_bases: dict[Kind, dict[str, Array]] = {}
        chosen = self._tables if names is None else self._choose(names)
        for kind, tables in chosen.items():
            found = [self._find(kind, batch[kind]) if kind in batch and tables else None for batch in window]
            for batch, here in zip(wanted, found, strict=True):
                if here is not None:
                    batch[kind] = here
            present = [here for here in found if here is not None]
            most = sum(here.missed for here in present)
            all_bases[kind] = {name: table.bases for name, table in tables.items()}
            if most:
                missing[kind] = self._number(kind, tables, present, most)
                all_bases[kind] = dict(missing[kind].bases)
        requests = None
        if missing:
            assert self._peers is not None  # or all parts were hosted
            requests = Requests(self._peers, self._method, self._store, missing, self.pool)
            requests.send()
        return Window(self, chosen, wanted, all_bases, requests, None if as_stored else self.dtype)

    def keep(self, cache: HaloCache | None) -> None:
        """Serve rows from a cache from now on."""
        for kind, tables in self._tables.items():
            if cache is not None and isinstance(kind, str) and kind in cache:
                for name, table in tables.items():
                    table.hold(self._shelf.parts, cache.pieces(kind, name, len(table.bases)))
        self.cache = cache

    def is_remote(self, kind: Kind, ids: Array) -> Array:
        """Whether each row is one that this rank does not host."""
        offsets = self._shelf.offsets(kind)
        return ~self._shelf.is_hosted[np.searchsorted(offsets, ids, side="right") - 1]

    def shape(self, kind: Kind, name: str) -> tuple[int, ...]:
        """The shape of a tensor over all parts.

        Raises:
            KeyError: these rows do not have it.
        """
        return (int(self._shelf.offsets(kind)[-1]), *self._tables[kind][name].shape)

    def row_bytes(self, kind: Kind) -> float:
        """Bytes of all tensors of one node or edge, as stored."""
        return sum(table.row_bytes for table in self._tables[kind].values())

    def _find(self, kind: Kind, ids: Any) -> _Wanted:
        """The places of one batch's rows."""
        ids = np.ascontiguousarray(ids, np.int64).view()
        ids.flags.writeable = False  # as marks are: numba compiles kernels for either kind of array
        place = self.pool.take(ids.size, np.int64)
        offsets = self._shelf.offsets(kind)
        bits, ranks = _NO_MARKS if self.cache is None else self.cache.marks(kind) or _NO_MARKS
        hosted, cached, wrong = kernels.find(ids, offsets, self._shelf.is_hosted, bits, ranks, place)
        if wrong >= 0:
            raise DataError(
                f"a batch names row {int(ids[wrong])} of {kind}, and there are {int(offsets[-1])}",
                hint="give seeds and edges by their numbers in the store, which begin at 0",
            )
        missed = ids.size - hosted - cached
        self.counts.hosted += hosted
        self.counts.cached += cached
        self.counts.missed += missed
        return _Wanted(ids, place, missed)

    def _choose(self, names: Mapping[Kind, Sequence[str]]) -> dict[Kind, dict[str, Table]]:
        """Some of the tables."""
        return {kind: {name: self._tables[kind][name] for name in tensors} for kind, tensors in names.items()}

    def _number(self, kind: Kind, tables: Mapping[str, Table], wanted: Sequence[_Wanted], most: int) -> Missing:
        """Give the rows that are to be asked for places in segments, those of each owner together."""
        offsets, parts = self._shelf.offsets(kind), self._shelf.parts
        chunk = chunk_rows(tables)
        first, each = self._shelf.segments, -(-most // chunk)
        segments = np.array([first, each, chunk.bit_length() - 1], np.int64)
        unique, owners = self.pool.take(most, np.int64), self.pool.take(most, np.int32)
        counts = np.zeros(parts + 1, np.int64)
        with self._lock:
            table, turn = self._numbers.begin(most)
            for batch in wanted:
                if batch.missed:
                    kernels.number(batch.ids, batch.place, table, turn, unique, owners, counts, segments)
        total = int(counts[-1])
        self.counts.fetched += total
        starts = np.cumsum(counts[:-1]) - counts[:-1]
        narrow = int(np.diff(offsets).max()) < 1 << 31
        dealt = self.pool.take(total, np.int32 if narrow else np.int64)
        kernels.deal(unique[:total], owners[:total], offsets, starts.copy(), dealt)
        rows = {p: dealt[starts[p] : starts[p] + counts[p]] for p in range(parts) if counts[p]}
        dtypes = {name: self._on_wire(kind, name, table) for name, table in tables.items()}
        bases = {name: _longer(table.bases, first + parts * each) for name, table in tables.items()}
        return Missing(tables, dtypes, chunk, first, each, rows, bases)

    def _on_wire(self, kind: Kind, name: str, table: Table) -> torch.dtype:
        """The dtype in which a tensor's values travel."""
        one = isinstance(table, DenseTable) and not table.shape
        wire = self._wire_dtype
        if wire is None or not isinstance(kind, str) or name in EXACT or one or wire.itemsize >= table.dtype.itemsize:
            return table.dtype
        return table.goes_as(wire)


@dataclass
class _Wanted:
    """What one batch needs of one kind: its ids, the places of their rows, and how many were to be asked for."""

    ids: Array
    place: Array
    missed: int


@dataclass
class Window:
    """Batches whose remote rows were asked for; made by :meth:`Rows.begin`."""

    _rows: Rows
    _tables: Mapping[Kind, Mapping[str, Table]]
    _wanted: list[dict[Kind, _Wanted]]
    _bases: Mapping[Kind, Mapping[str, Array]]
    _requests: Requests | None
    _dtype: torch.dtype | None
    _done: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        """Number of batches."""
        return len(self._wanted)

    def batch(self, i: int) -> dict[Kind, dict[str, Tensor]]:
        """Make the tensors of a batch, once; they are in the order of its ids.

        Remote rows are held until every batch was made.

        Raises:
            WireError: an owner failed to answer.
            ValueError: it was made before.
        """
        if i in self._done:
            raise ValueError(f"batch {i} of the window was made before, and its ids are forgotten")
        wanted, self._wanted[i] = self._wanted[i], {}
        self._done.add(i)
        waits = self._requests is not None and any(here.missed for here in wanted.values())
        begun = {kind: self._hosted(kind, here) if waits else {} for kind, here in wanted.items()}
        if waits and self._requests is not None:
            self._requests.receive()
        made = {kind: self._all(kind, here, begun[kind]) for kind, here in wanted.items()}
        if len(self._done) == len(self._wanted):
            self._requests = None
        return made

    def _hosted(self, kind: Kind, wanted: _Wanted) -> dict[str, Tensor]:
        """Copy what is here, while the rest is on its way: of dense tensors whose dtype does not change."""
        outs: dict[str, Tensor] = {}
        for name, table in self._tables[kind].items():
            if isinstance(table, DenseTable) and table.goes_as(self._dtype) == table.dtype:
                outs[name] = table.empty(wanted.place.size, self._rows.pool, table.dtype)
                table.fill(outs[name], wanted.place, table.bases, 0, table.bases.shape[1])
        return outs

    def _all(self, kind: Kind, wanted: _Wanted, begun: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy what was not copied yet."""
        made: dict[str, Tensor] = {}
        for name, table in self._tables[kind].items():
            bases = self._bases[kind][name]
            if name in begun:
                assert isinstance(table, DenseTable)
                made[name] = begun[name]
                if wanted.missed:
                    table.fill(made[name], wanted.place, bases, table.bases.shape[1], bases.shape[1])
            else:
                pieces = table.gather(wanted.place, bases, self._rows.pool, table.goes_as(self._dtype))
                made[name] = table.finish(pieces)
        return made


_NO_MARKS: tuple[Array, Array] = np.empty(0, np.uint64), np.empty(0, np.uint32)
for _mark in _NO_MARKS:
    _mark.flags.writeable = False


def _longer(bases: Array, segments: int) -> Array:
    longer = np.zeros((bases.shape[0], segments), np.int64)
    longer[:, : bases.shape[1]] = bases
    return longer
