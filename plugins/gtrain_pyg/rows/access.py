"""Node and edge tensors of batches: hosted rows by memory map, remote rows from their owners, hot ones from a cache.

Batches come in a *stream*: a remote row that several successive ones need is asked for once, with one packed request
from each batch to each owner; while these are under way the hosted rows of a batch are copied. ::

    stream = rows.stream(4)
    begun = [stream.begin({"node": ids, EDGE_TYPE: positions}) for ids, positions in batches]
    tensors = begun[0].make()     # {"node": {"x": [n, F], "y": [n]}, EDGE_TYPE: {"edge_id": [e]}}

Nodes are named by global id, edges by global edge position (:class:`gtrain_pyg.ranks.parts.PartBook`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.errors import DataError
from gtrain.graph.store import Store
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.ranks.parts import Kind, PartBook
from gtrain_pyg.ranks.service import Peers
from gtrain_pyg.rows import kernels
from gtrain_pyg.rows.cache import HaloCache
from gtrain_pyg.rows.recent import Recent
from gtrain_pyg.rows.requests import Missing, Requests
from gtrain_pyg.rows.server import RowServer, fingerprint
from gtrain_pyg.rows.shelf import Extra, Shelf
from gtrain_pyg.rows.stream import Begun, Ids, Stream, Wanted
from gtrain_pyg.rows.tables import DenseTable, Table

Array = NDArray[Any]

EXACT = frozenset({"y"})
"""Node tensors that keep their dtype on the wire, as those with one number a node do."""


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
        if peers is None and len(self._shelf.hosted) < book.num_parts:
            raise DataError(
                f"of {book.num_parts} parts this rank hosts {self._shelf.hosted}, and it has no peers to ask",
                hint="give Rows the job's Peers, or host all parts",
            )
        if peers is not None:
            peers.handle(method, RowServer(self._shelf, store, pool))

    def fetch(self, batches: Sequence[Ids]) -> list[dict[Kind, dict[str, Tensor]]]:
        """The tensors of some batches, which ask for a remote row once; errors as :meth:`Stream.begin`'s."""
        stream = self.stream(max(1, len(batches)))
        return [begun.make() for begun in [stream.begin(batch) for batch in batches]]

    def begin(self, batch: Ids, *, names: Mapping[Kind, Sequence[str]] | None = None, as_stored: bool = False) -> Begun:
        """Ask for the remote rows of one batch; arguments and errors as :meth:`stream`'s and :meth:`Stream.begin`'s."""
        return self.stream(1, names=names, as_stored=as_stored).begin(batch)

    def stream(
        self, batches: int, *, names: Mapping[Kind, Sequence[str]] | None = None, as_stored: bool = False
    ) -> Stream:
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
            kind: Recent(
                tables,
                {name: self._on_wire(kind, name, table) for name, table in tables.items()},
                self._shelf.offsets(kind),
                self._shelf.segments,
                batches,
                self.pool,
            )
            for kind, tables in chosen.items()
            if tables
        }
        return Stream(self, chosen, recent, batches, None if as_stored else self.dtype)

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

    def find(self, kind: Kind, ids: Any) -> Wanted:
        """The places of one batch's rows.

        Raises:
            DataError: an id is out of range.
        """
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
        return Wanted(ids, place, missed)

    def request(self, missing: dict[Kind, Missing]) -> Requests:
        """Ask the owners for rows."""
        assert self._peers is not None  # or all parts were hosted
        for kind, wanted in missing.items():
            count = sum(rows.size for rows in wanted.rows.values())
            self.counts.fetched += count
            self.counts.fetched_nodes += count if isinstance(kind, str) else 0
        requests = Requests(self._peers, self._method, self._store, missing, self.pool)
        requests.send()
        return requests

    def _on_wire(self, kind: Kind, name: str, table: Table) -> torch.dtype:
        """The dtype in which a tensor's values travel."""
        one = isinstance(table, DenseTable) and not table.shape
        wire = self._wire_dtype
        if wire is None or not isinstance(kind, str) or name in EXACT or one or wire.itemsize >= table.dtype.itemsize:
            return table.dtype
        return table.goes_as(wire)


_NO_MARKS: tuple[Array, Array] = np.empty(0, np.uint64), np.empty(0, np.uint32)
for _mark in _NO_MARKS:
    _mark.flags.writeable = False
