"""Requests for remote rows: one packed request per owner, the reply as segments, and the history of requested rows."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gtrain.wire import Message, WireError
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.features import kernels
from gtrain_pyg.features.tables import FeatureTable, addresses, convert, wire_name
from gtrain_pyg.peers import Array, NodeOrEdgeType, Peers

CHUNK_BYTES = 1 << 20
"""Approximate bytes of rows in one frame of a message."""
MAX_REQUEST_CHUNKS, MAX_REQUEST_TENSORS = 32, 512
"""Limits of one request; the rest goes into further ones. An owner replies one by one, and holds the replies."""
WIDE_BYTES = 32
"""Rows of fewer bytes are requested by each batch: looking them up in the history costs more than sending them."""
MAX_SEQUENCE = 1 << 22
"""The largest number of a batch: number and id share the 63 bits of a key in the hash map."""


@dataclass
class RowRequest:
    """The rows of one node type or edge type that one batch requests.

    Attributes:
        tables: the tensors, by name.
        dtypes: the dtype of each tensor's values on the wire.
        chunk: rows of a segment, a power of 2.
        first: the first segment of owner 0.
        per_owner: segments of each owner, not all of which are in use.
        rows: by owner, rows within its part, in the order of the owner's segments.
        bases: by name, the addresses of the arrays in these segments, ``[arrays, P * per_owner]``.
    """

    tables: Mapping[str, FeatureTable]
    dtypes: Mapping[str, torch.dtype]
    chunk: int
    first: int
    per_owner: int
    rows: Mapping[int, Array]
    bases: Mapping[str, Array]

    @property
    def arrays(self) -> int:
        """Return the number of arrays of a chunk."""
        return sum(len(base) for base in self.bases.values())

    @property
    def nbytes(self) -> float:
        """Return the bytes of the rows as stored."""
        row = sum(table.row_bytes for table in self.tables.values())
        return row * sum(rows.size for rows in self.rows.values())


@dataclass(frozen=True)
class _ChunkRange:
    """Consecutive chunks ``start .. stop-1`` of the rows of one type in one request."""

    graph_type: NodeOrEdgeType
    start: int
    stop: int


@dataclass
class PendingRequests:
    """The requests of one batch and their replies. Threads may share it after :meth:`send`.

    Args:
        peers: the other ranks.
        method: the name of their handlers.
        store: checksum of the store.
        missing: the rows to request, by type.
        pool: memory of rows that have another dtype on the wire.
    """

    peers: Peers
    method: str
    store: int
    missing: dict[NodeOrEdgeType, RowRequest]
    pool: BufferPool
    received: list[Tensor] = field(default_factory=list)  # the bases are addresses in these
    _sent: list[tuple[int, list[_ChunkRange], Future[Message]]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self) -> None:
        """Send all requests."""
        for owner in sorted({owner for missing in self.missing.values() for owner in missing.rows}):
            for ranges in self._packed(owner):
                wants = [self._entry(chunks.graph_type) for chunks in ranges]
                rows = [self._rows(owner, chunks) for chunks in ranges]
                fields = {"store": self.store, "part": owner, "wants": wants}
                self._sent.append((owner, ranges, self.peers.request(owner, self.method, fields, rows)))

    @property
    def arrived(self) -> bool:
        """Return whether :meth:`receive` would not wait."""
        return all(future.done() for _, _, future in tuple(self._sent))

    def receive(self) -> None:
        """Wait for all replies; the segments can be read afterwards.

        Raises:
            WireError: an owner failed, or its reply does not fit the request.
        """
        with self._lock:
            while self._sent:
                owner, ranges, future = self._sent[0]
                self._enter(owner, ranges, self.peers.wait(owner, future).tensors)
                self._sent.pop(0)

    def _packed(self, owner: int) -> Iterator[list[_ChunkRange]]:
        """Pack the rows requested of one owner into one request, or into several beyond the limits."""
        ranges: list[_ChunkRange] = []
        least = MAX_REQUEST_TENSORS // MAX_REQUEST_CHUNKS
        room = MAX_REQUEST_TENSORS
        for graph_type, missing in self.missing.items():
            start, stop = 0, -(-missing.rows[owner].size // missing.chunk) if owner in missing.rows else 0
            cost = max(least, missing.arrays)
            while start < stop:
                if ranges and room < cost:
                    yield ranges
                    ranges, room = [], MAX_REQUEST_TENSORS
                end = min(stop, start + max(1, room // cost))
                ranges.append(_ChunkRange(graph_type, start, end))
                room -= (end - start) * cost
                start = end
        if ranges:
            yield ranges

    def _entry(self, graph_type: NodeOrEdgeType) -> dict[str, Any]:
        missing = self.missing[graph_type]
        dtypes = [str(missing.dtypes[name]).removeprefix("torch.") for name in missing.tables]
        return {"kind": wire_name(graph_type), "names": list(missing.tables), "dtypes": dtypes, "chunk": missing.chunk}

    def _rows(self, owner: int, chunks: _ChunkRange) -> Tensor:
        missing = self.missing[chunks.graph_type]
        return torch.from_numpy(missing.rows[owner][chunks.start * missing.chunk : chunks.stop * missing.chunk])

    def _enter(self, owner: int, ranges: list[_ChunkRange], tensors: Sequence[Tensor]) -> None:
        """Enter the addresses of a reply's rows in the segments' bases."""
        expected = sum((chunks.stop - chunks.start) * self.missing[chunks.graph_type].arrays for chunks in ranges)
        if len(tensors) != expected:
            raise _unexpected(owner, f"{len(tensors)} tensors instead of {expected}")
        remaining = iter(tensors)
        for chunks in ranges:
            missing = self.missing[chunks.graph_type]
            for chunk in range(chunks.start, chunks.stop):
                rows = min(missing.chunk, missing.rows[owner].size - chunk * missing.chunk)
                for name, table in missing.tables.items():
                    arrays = [next(remaining) for _ in missing.bases[name]]
                    if error := table.check(arrays, rows, missing.dtypes[name]):
                        raise _unexpected(owner, f"{error}, as {name} of {chunks.graph_type}")
                    if table.last_is_values and arrays[-1].dtype != table.dtype:
                        arrays[-1] = convert(arrays[-1], self.pool.tensor(arrays[-1].shape, table.dtype))
                    self.received += arrays
                    missing.bases[name][:, owner * missing.per_owner + chunk] = addresses(arrays)


def _unexpected(owner: int, reply: str) -> WireError:
    return WireError(
        f"rank {owner} replied to a request for rows of its part with {reply}",
        hint="have all ranks run the same version of gtrain on the same store",
    )


def chunk_rows(tables: Mapping[str, FeatureTable]) -> int:
    """Return the rows of a chunk: a power of 2."""
    row_bytes = sum(table.row_bytes for table in tables.values())
    return 1 << max(0, min(20, int(CHUNK_BYTES / max(1.0, row_bytes)).bit_length() - 1))


class RequestHistory:
    """The remote rows of one node type or edge type that recent batches requested.

    The rows that a batch requests are in segments that are reserved for it until ``batches`` later batches have
    started. A hash map has the location of each row and the number of the batch that requested it (its *sequence*);
    locations of batches before the oldest one whose rows are held are stale.

    Args:
        tables: the tensors of a row.
        dtypes: the dtype of each tensor's values on the wire.
        offsets: int64 ``[P + 1]``; part p has the rows ``offsets[p] .. offsets[p+1]-1``.
        first: the first segment after the parts and the cache.
        batches: most successive batches that request a row once, together; 1: each requests all its rows.
        pool: memory of the requests.
    """

    def __init__(
        self,
        tables: Mapping[str, FeatureTable],
        dtypes: Mapping[str, torch.dtype],
        offsets: Array,
        first: int,
        batches: int,
        pool: BufferPool,
    ) -> None:
        self._tables, self._dtypes, self._offsets, self._pool = tables, dtypes, offsets, pool
        self._first, self._batches = first, batches
        self._parts = offsets.size - 1
        self._chunk = chunk_rows(tables)
        self._wide = sum(table.row_bytes for table in tables.values()) >= WIDE_BYTES
        self._per_owner = 1  # segments of each owner and batch
        self._sizes: deque[int] = deque(maxlen=batches)  # rows that the last batches requested
        self._used = 0  # slots of the map that are not empty
        self._map: Array = np.zeros((0, 2), np.int64)

    @property
    def segments(self) -> int:
        """Return the number of segments: of parts, cache, and all batches."""
        return self._first + self._batches * self._parts * self._per_owner

    def add(self, ids: Array, location: Array, missed: int, sequence: int, oldest: int) -> RowRequest:
        """Locate the rows that are missing here, and return those that no recent batch has requested.

        Args:
            ids: int64 ``[n]``.
            location: int64 ``[n]`` of :func:`gtrain_pyg.features.kernels.locate`; negative ones are replaced.
            missed: the number of negative ones.
            sequence: number of the batch, 1 to :data:`MAX_SEQUENCE`, ascending.
            oldest: the earliest batch whose rows can still be read; below 1: any.
        """
        oldest = max(1, oldest)
        self._reserve(missed, oldest)
        first = self._first + sequence % self._batches * self._parts * self._per_owner
        segments = kernels.SegmentRange(first, self._per_owner, self._chunk.bit_length() - 1)
        new, owners = self._pool.take(missed), self._pool.take(missed, np.int32)
        requests = kernels.RequestList(new, owners, np.zeros(self._parts + 1, np.int64))
        if self._wide:
            self._used += kernels.request_new(ids, location, self._map, sequence, oldest, requests, segments)
        else:
            kernels.request_all(ids, location, requests, segments)
        *counts, total = requests.counts.tolist()
        self._sizes.append(total)
        starts = np.cumsum([0, *counts])
        int32 = int(np.diff(self._offsets).max()) < 1 << 31
        rows = self._pool.take(total, np.int32 if int32 else np.int64)
        kernels.sort_by_owner(new[:total], owners[:total], self._offsets, starts[:-1].copy(), rows)
        by_owner = {part: rows[starts[part] : starts[part + 1]] for part in range(self._parts) if counts[part]}
        width = self._parts * self._per_owner
        bases = {name: np.zeros((len(table.bases), width), np.int64) for name, table in self._tables.items()}
        return RowRequest(self._tables, self._dtypes, self._chunk, first, self._per_owner, by_owner, bases)

    def clear(self) -> None:
        """Forget all rows; sequences may restart at 1."""
        self._map, self._used = self._map[:0], 0
        self._sizes.clear()

    def _reserve(self, missed: int, oldest: int) -> None:
        """Make room for more rows in the segments and in the map."""
        per_owner = max(1, -(-missed // self._chunk))
        if per_owner > self._per_owner:
            # A power of 2, so that the segments are renumbered seldom.
            self._per_owner = 1 << (per_owner - 1).bit_length()
            # The segments of earlier batches are numbered differently.
            self.clear()
        if self._wide and self._used + missed > self._map.shape[0] * 3 // 4:
            # Twice the rows of the last batches and of this one, rounded up: at most half full.
            larger = np.zeros((1 << (2 * (sum(self._sizes) + missed)).bit_length(), 2), np.int64)
            self._used = kernels.rehash(self._map, oldest, larger)
            self._map = larger
