"""Feature store: node and edge tensors of batches, from mapped files of hosted parts, a cache, or the rows' owners.

Batches are *prefetched* in order: a remote row that several successive batches need is requested once, with one packed
request per batch and owner; while requests are in transit the hosted rows of a batch are copied. ::

    prefetcher = features.prefetcher(4)
    pending = [prefetcher.prefetch({"node": ids, EDGE_TYPE: positions}) for ids, positions in batches]
    tensors = pending[0].get()     # {"node": {"x": [n, F], "y": [n]}, EDGE_TYPE: {"edge_id": [e]}}

Nodes are identified by global id, edges by global edge position (:class:`gtrain_pyg.peers.PartBook`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gtrain.errors import DataError
from gtrain.graph.owners import owner_of
from gtrain.graph.sampling.scratch import read_only
from gtrain.graph.store import Store
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.features import kernels
from gtrain_pyg.features.requests import MAX_SEQUENCE, PendingRequests, RequestHistory, RowRequest
from gtrain_pyg.features.tables import (
    DenseFeatureTable,
    ExtraTensors,
    FeatureTable,
    HostedTensors,
    RowServer,
    fingerprint,
)
from gtrain_pyg.peers import Array, NodeOrEdgeType, PartBook, Peers

EXACT = frozenset({"y"})
"""Node tensors that keep their dtype on the wire, as those with one number per node do."""
_NO_CACHE: tuple[Array, Array] = read_only(np.empty(0, np.uint64)), read_only(np.empty(0, np.uint32))
Ids = Mapping[NodeOrEdgeType, Any]
Tables = Mapping[NodeOrEdgeType, Mapping[str, FeatureTable]]
HELD_BATCHES = 1
"""Received rows stay in memory for later batches, up to the bytes of all rows of this many (largest) batches."""


@dataclass
class RowCounts:
    """Rows of nodes and edges that batches needed so far.

    Attributes:
        hosted: read from this rank's memory maps.
        cached: remote, read from the cache.
        missed: remote, not in the cache.
        on_device: read from the cache of the rank's device, and not counted above.
        fetched: requested; fewer than missed if successive batches need the same rows.
        fetched_nodes: rows of nodes among those fetched.
    """

    hosted: int = 0
    cached: int = 0
    missed: int = 0
    on_device: int = 0
    fetched: int = 0
    fetched_nodes: int = 0


@dataclass
class FeatureCache:
    """Rows of remote nodes.

    Attributes:
        arrays: by node type: ``bits`` uint64 and ``ranks`` uint32, a bitmap of the ids, see :func:`.kernels.rank_bits`;
            and the arrays of each tensor, ``<name>.0`` and on, whose rows are in the order of the ids.
    """

    arrays: dict[str, dict[str, Array]] = field(default_factory=dict)

    def __contains__(self, node_type: object) -> bool:
        """Return whether nodes of a type are cached."""
        return node_type in self.arrays

    @property
    def nbytes(self) -> int:
        """Return the bytes of all arrays."""
        return sum(array.nbytes for arrays in self.arrays.values() for array in arrays.values())


class FeatureStore:
    """Serves the rows of one store, to this rank and to others. Threads may share it.

    Args:
        store: the graph.
        book: the parts' ranges.
        hosted: parts whose files this rank reads itself.
        peers: the other ranks; None if all parts are hosted.
        pool: memory of the batches.
        names: by node type and edge type, the tensors of batches.
        wire_dtype: dtype of floating node features on the wire; None or float32: as stored. Tensors with one number
            per node, and ``y``, are always sent as stored.
        dtype: dtype of all floating tensors in batches; None: as stored.
        extra: by type, name and hosted part, tensors that the store does not have, ``[n_p, ...]``.
        method: the name under which all ranks serve these rows.

    Attributes:
        names, dtype, pool: as passed.
        counts: the rows served to this rank.
        cache: rows of remote nodes; see :meth:`set_cache`.

    Raises:
        StoreError: the store does not have a tensor of ``names``.
        DataError: a tensor does not have one row per node or edge; or ``peers`` is None and some parts are not hosted.
    """

    def __init__(
        self,
        store: Store,
        book: PartBook,
        hosted: Sequence[int],
        peers: Peers | None,
        pool: BufferPool,
        names: Mapping[NodeOrEdgeType, Sequence[str]],
        *,
        wire_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        extra: ExtraTensors | None = None,
        method: str = "rows",
    ) -> None:
        self.names = {graph_type: tuple(tensors) for graph_type, tensors in names.items()}
        self.dtype, self.counts, self.pool = dtype, RowCounts(), pool
        self.cache: FeatureCache | None = None
        self._hosted = HostedTensors(store, book, hosted, extra or {})
        self._tables = {t: {name: self._hosted.table(t, name) for name in self.names[t]} for t in self.names}
        self._wire_dtype = None if wire_dtype == torch.float32 else wire_dtype
        self._method, self._store, self._peers = method, fingerprint(store), peers
        if peers is not None:
            peers.handle(method, RowServer(self._hosted, store, pool))
        elif len(self._hosted.hosted) < book.num_parts:
            raise DataError(
                f"this rank hosts {self._hosted.hosted} of {book.num_parts} parts, and has no peers",
                hint="give the FeatureStore the job's Peers, or host all parts",
            )

    def get(self, batches: Sequence[Ids]) -> list[dict[NodeOrEdgeType, dict[str, Tensor]]]:
        """Return the tensors of several batches; a remote row that they share is requested once.

        Raises:
            DataError: an id is out of range.
            WireError: an owner cannot be reached.
        """
        prefetcher = self.prefetcher(max(1, len(batches)))
        return [pending.get() for pending in [prefetcher.prefetch(batch) for batch in batches]]

    def prefetch(
        self, batch: Ids, *, names: Mapping[NodeOrEdgeType, Sequence[str]] | None = None, as_stored: bool = False
    ) -> PendingBatch:
        """Request the remote rows of one batch; arguments as for :meth:`prefetcher`.

        Raises:
            DataError: an id is out of range.
            WireError: an owner cannot be reached.
        """
        return self.prefetcher(1, names=names, as_stored=as_stored).prefetch(batch)

    def prefetcher(
        self, batches: int, *, names: Mapping[NodeOrEdgeType, Sequence[str]] | None = None, as_stored: bool = False
    ) -> Prefetcher:
        """Return a prefetcher of successive batches.

        Args:
            batches: the window: a remote row that several of this many successive batches need is requested once.
            names: a selection of the tensors; None: all.
            as_stored: keep the dtype of floats in the store.
        """
        tables = self._tables
        if names is not None:
            tables = {t: {name: self._tables[t][name] for name in tensors} for t, tensors in names.items()}
        histories = {
            graph_type: RequestHistory(
                selected,
                {name: self._dtype_on_wire(graph_type, name, table) for name, table in selected.items()},
                self._hosted.offsets(graph_type),
                self._hosted.segments,
                batches,
                self.pool,
            )
            for graph_type, selected in tables.items()
            if selected
        }
        return Prefetcher(self, tables, histories, batches, None if as_stored else self.dtype)

    def set_cache(self, cache: FeatureCache) -> None:
        """Read the rows that a cache holds from the cache from now on."""
        for node_type, arrays in cache.arrays.items():
            for name, table in self._tables[node_type].items():
                table.set_segment(self._hosted.parts, [arrays[f"{name}.{i}"] for i in range(len(table.bases))])
        self.cache = cache

    def is_remote(self, graph_type: NodeOrEdgeType, ids: Array) -> Array:
        """Return whether each row is in a part that this rank does not host, bool ``[n]``."""
        return ~self._hosted.is_hosted[owner_of(ids, self._hosted.offsets(graph_type))]

    def shape(self, graph_type: NodeOrEdgeType, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor over all parts.

        Raises:
            KeyError: the tensor is not in :attr:`names`.
        """
        return (self.count(graph_type), *self._tables[graph_type][name].shape)

    @property
    def hosts_all(self) -> bool:
        """Return whether this rank hosts all parts."""
        return bool(self._hosted.is_hosted.all())

    def count(self, graph_type: NodeOrEdgeType) -> int:
        """Return the nodes, or edges, of a type over all parts."""
        return int(self._hosted.offsets(graph_type)[-1])

    def is_dense(self, graph_type: NodeOrEdgeType, name: str) -> bool:
        """Return whether a tensor is dense in the store; otherwise it has CSR form."""
        return isinstance(self._tables[graph_type][name], DenseFeatureTable)

    def stored_dtype(self, graph_type: NodeOrEdgeType, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the store."""
        return self._tables[graph_type][name].dtype

    def output_dtype(self, graph_type: NodeOrEdgeType, name: str) -> torch.dtype:
        """Return the dtype of a tensor in batches."""
        return self._tables[graph_type][name].output_dtype(self.dtype)

    def output_dtypes(self) -> dict[NodeOrEdgeType, dict[str, torch.dtype]]:
        """Return the dtype of every tensor in batches."""
        return {t: {name: self.output_dtype(t, name) for name in names} for t, names in self.names.items()}

    def row_bytes(self, graph_type: NodeOrEdgeType) -> float:
        """Return the bytes of all tensors of one node or edge, as stored."""
        return sum(table.row_bytes for table in self._tables[graph_type].values())

    def locate(self, graph_type: NodeOrEdgeType, ids: Any) -> Lookup:
        """Return the locations of one batch's rows.

        Raises:
            DataError: an id is out of range.
        """
        # As the bitmap is: numba compiles per mutability.
        ids = read_only(np.ascontiguousarray(ids, np.int64))
        location = self.pool.take(ids.size)
        offsets = self._hosted.offsets(graph_type)
        bits, ranks = _NO_CACHE
        if self.cache is not None and isinstance(graph_type, str) and graph_type in self.cache:
            bits, ranks = (self.cache.arrays[graph_type][name] for name in ("bits", "ranks"))
        hosted, cached, invalid = kernels.locate(ids, offsets, self._hosted.is_hosted, bits, ranks, location)
        if invalid >= 0:
            raise DataError(
                f"a batch names row {int(ids[invalid])} of {graph_type}, which has {int(offsets[-1])} rows",
                hint="give seeds and edges by their numbers in the store, which start at 0",
            )
        missed = ids.size - hosted - cached
        self.counts.hosted += hosted
        self.counts.cached += cached
        self.counts.missed += missed
        return Lookup(ids, location, missed)

    def request(self, missing: dict[NodeOrEdgeType, RowRequest]) -> PendingRequests:
        """Send requests for rows to their owners."""
        assert self._peers is not None  # or all parts are hosted
        for graph_type, request in missing.items():
            count = sum(rows.size for rows in request.rows.values())
            self.counts.fetched += count
            self.counts.fetched_nodes += count if isinstance(graph_type, str) else 0
        requests = PendingRequests(self._peers, self._method, self._store, missing, self.pool)
        requests.send()
        return requests

    def _dtype_on_wire(self, graph_type: NodeOrEdgeType, name: str, table: FeatureTable) -> torch.dtype:
        wire = self._wire_dtype
        scalar = isinstance(table, DenseFeatureTable) and not table.shape
        if wire is None or not isinstance(graph_type, str) or name in EXACT or scalar:
            return table.dtype
        # A dtype that is not narrower would save nothing.
        return table.dtype if wire.itemsize >= table.dtype.itemsize else table.output_dtype(wire)


@dataclass
class Lookup:
    """The rows of one type that one batch needs.

    Attributes:
        ids: int64 ``[n]``, read-only.
        location: int64 ``[n]``, see :mod:`gtrain_pyg.features.kernels`.
        missed: rows that are neither hosted nor cached.
    """

    ids: Array
    location: Array
    missed: int


class Prefetcher:
    """Requests the remote rows of successive batches; made by :meth:`FeatureStore.prefetcher`. Used by one thread.

    Args:
        features: serves the rows.
        tables: the tensors, by type and name.
        histories: by type, the rows that recent batches requested.
        batches: the window of successive batches that request a shared row once.
        dtype: of floating tensors; None: as stored.
    """

    def __init__(
        self,
        features: FeatureStore,
        tables: Tables,
        histories: Mapping[NodeOrEdgeType, RequestHistory],
        batches: int,
        dtype: torch.dtype | None,
    ) -> None:
        self._features, self._tables, self._histories, self._dtype = features, tables, histories, dtype
        self._batches = batches
        # The requests of the batches whose rows are held.
        self._recent: deque[PendingRequests | None] = deque()
        self._held_bytes = self._largest_batch = 0.0
        self._row_bytes = {t: sum(table.row_bytes for table in tables[t].values()) for t in histories}
        self._sequence = 0

    def prefetch(self, batch: Ids) -> PendingBatch:
        """Request the remote rows of the next batch, except those that recent batches requested.

        Args:
            batch: int64 ids by type; types without tensors are ignored.

        Raises:
            DataError: an id is out of range.
            WireError: an owner cannot be reached.
        """
        lookups = {t: self._features.locate(t, batch[t]) for t in self._histories if t in batch}
        # The histories' hash maps have the batch's number in the bits above an id, which it must not exceed.
        if self._sequence == MAX_SEQUENCE:
            self._sequence = 0
            for history in self._histories.values():
                history.clear()
        self._sequence += 1
        nbytes = sum(self._row_bytes[graph_type] * lookup.ids.size for graph_type, lookup in lookups.items())
        self._largest_batch = max(self._largest_batch, nbytes)
        self._release()
        # Rows that batches from `oldest` on requested are still in memory, so this batch does not request them again.
        oldest = self._sequence - len(self._recent)
        missing: dict[NodeOrEdgeType, RowRequest] = {}
        segments: dict[NodeOrEdgeType, int] = {}
        for graph_type, lookup in lookups.items():
            if lookup.missed:
                history = self._histories[graph_type]
                missing[graph_type] = history.add(lookup.ids, lookup.location, lookup.missed, self._sequence, oldest)
                segments[graph_type] = history.segments
        self._recent.append(self._features.request(missing) if missing else None)
        self._held_bytes += sum(request.nbytes for request in missing.values())
        # Its rows may have been requested by any batch that is held.
        requests = tuple(recent for recent in self._recent if recent is not None) if missing else ()
        return PendingBatch(self._features, self._tables, lookups, requests, segments, self._dtype)

    def _release(self) -> None:
        """Release the rows of the earliest batches beyond the limits."""
        limit = HELD_BATCHES * self._largest_batch
        while self._recent and (len(self._recent) >= self._batches or self._held_bytes > limit):
            earliest = self._recent.popleft()
            if earliest is not None:
                self._held_bytes -= sum(request.nbytes for request in earliest.missing.values())


class PendingBatch:
    """A batch whose remote rows were requested; made by :meth:`Prefetcher.prefetch`. Holds the rows until :meth:`get`.

    Args:
        features: serves the rows.
        tables: the tensors, by type and name.
        lookups: the batch's rows, by type.
        requests: the requests that have its remote rows, also those of earlier batches; () without remote rows.
        segments: the number of segments of each type that has remote rows.
        dtype: of floating tensors; None: as stored.
    """

    def __init__(
        self,
        features: FeatureStore,
        tables: Tables,
        lookups: dict[NodeOrEdgeType, Lookup],
        requests: tuple[PendingRequests, ...],
        segments: Mapping[NodeOrEdgeType, int],
        dtype: torch.dtype | None,
    ) -> None:
        self._features, self._tables, self._segments, self._dtype = features, tables, segments, dtype
        self._lookups: dict[NodeOrEdgeType, Lookup] | None = lookups
        self._requests = requests

    def get(self) -> dict[NodeOrEdgeType, dict[str, Tensor]]:
        """Return the tensors, in the order of the batch's ids; can be called once.

        Raises:
            WireError: an owner failed.
            ValueError: called before.
        """
        if self._lookups is None:
            raise ValueError("get() was called before on this batch; it can be called once, because it frees the ids")
        lookups, self._lookups = self._lookups, None
        # While replies are in transit, hosted and cached rows are copied. If all have arrived, one pass copies all
        # rows.
        waits = not all(requests.arrived for requests in self._requests)
        started = {t: self._copy_local(t, lookup) if waits and lookup.missed else {} for t, lookup in lookups.items()}
        for requests in self._requests:
            requests.receive()
        tensors = {
            graph_type: self._copy(graph_type, lookups[graph_type], started[graph_type]) for graph_type in lookups
        }
        self._requests = ()
        return tensors

    def _copy_local(self, graph_type: NodeOrEdgeType, lookup: Lookup) -> dict[str, Tensor]:
        """Copy hosted and cached rows while replies are in transit: of dense tensors whose dtype does not change."""
        outs: dict[str, Tensor] = {}
        for name, table in self._tables[graph_type].items():
            if isinstance(table, DenseFeatureTable) and table.output_dtype(self._dtype) == table.dtype:
                outs[name] = table.empty(lookup.location.size, self._features.pool, table.dtype)
                table.fill(outs[name], lookup.location, table.bases, 0, table.bases.shape[1])
        return outs

    def _copy(self, graph_type: NodeOrEdgeType, lookup: Lookup, started: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the rows that :meth:`_copy_local` did not."""
        tensors: dict[str, Tensor] = {}
        for name, table in self._tables[graph_type].items():
            bases = self._bases(graph_type, name, table) if lookup.missed else table.bases
            if name in started:
                assert isinstance(table, DenseFeatureTable)
                tensors[name] = started[name]
                table.fill(tensors[name], lookup.location, bases, table.bases.shape[1], bases.shape[1])
            else:
                dtype = table.output_dtype(self._dtype)
                tensors[name] = table.tensor(table.gather(lookup.location, bases, self._features.pool, dtype), dtype)
        return tensors

    def _bases(self, graph_type: NodeOrEdgeType, name: str, table: FeatureTable) -> Array:
        """Return the addresses of all segments: of parts, cache and requests."""
        local = table.bases.shape[1]
        bases = np.zeros((len(table.bases), self._segments[graph_type]), np.int64)
        bases[:, :local] = table.bases
        for requests in self._requests:
            missing = requests.missing.get(graph_type)
            if missing is not None:  # later requests overwrite earlier ones whose segments were numbered differently
                bases[:, missing.first : missing.first + missing.bases[name].shape[1]] = missing.bases[name]
        return bases
