"""Requests for remote rows: one packed request to each owner, its answer as segments, and what was asked for lately."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.wire import Message, WireError
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.features import kernels
from gtrain_pyg.features.server import wire_name
from gtrain_pyg.features.tables import Table, convert
from gtrain_pyg.ranks.parts import Kind

Array = NDArray[Any]

CHUNK_BYTES = 1 << 20
"""About so many bytes of rows travel in one frame of a message."""
MAX_REQUEST_CHUNKS, MAX_REQUEST_TENSORS = 32, 512
"""What is more goes in further requests: an owner answers one after the other, and holds the answers."""
WIDE_BYTES = 32
"""Rows of fewer bytes are asked for by each batch: to look them up costs more than they do."""
LAST_TURN = 1 << 22
"""A turn and an id have to fit into 63 bits."""


class Asker(Protocol):
    """What requests need of :class:`gtrain_pyg.ranks.service.Peers`."""

    def ask(
        self, part: int, method: str, fields: Mapping[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> Future[Message]:
        """Ask the owner of a part."""

    def wait(self, answer: Future[Message]) -> Message:
        """Wait for what it answers."""


@dataclass
class RowRequest:
    """The rows of one kind that are to be asked for by one batch.

    Attributes:
        tables: the tensors wanted, by name.
        dtypes: in which dtype the values of each travel.
        chunk: rows of a segment, a power of 2.
        first: the first segment of owner 0.
        each: segments of each owner, of which not all need be in use.
        rows: of each owner, in the order of their segments; rows within its part.
        bases: by name, the addresses of the pieces in these segments, ``[pieces, P * each]``.
    """

    tables: Mapping[str, Table]
    dtypes: Mapping[str, torch.dtype]
    chunk: int
    first: int
    each: int
    rows: Mapping[int, Array]
    bases: Mapping[str, Array]

    @property
    def pieces(self) -> int:
        """Tensors of a chunk."""
        return sum(len(base) for base in self.bases.values())

    @property
    def nbytes(self) -> float:
        """Bytes of the rows as stored."""
        row = sum(table.row_bytes for table in self.tables.values())
        return row * sum(rows.size for rows in self.rows.values())


@dataclass(frozen=True)
class _Stretch:
    """Consecutive chunks of the rows of one kind that one request asks for."""

    kind: Kind
    start: int  # chunk
    stop: int


@dataclass
class PendingRequests:
    """What one batch asks for, and has got. Threads may share it once it was sent.

    Args:
        asker: the other ranks.
        method: the name of their handlers.
        store: checksum of the store.
        missing: by kind.
        pool: memory of rows whose dtype on the wire is another.
    """

    asker: Asker
    method: str
    store: int
    missing: dict[Kind, RowRequest]
    pool: BufferPool
    held: list[Tensor] = field(default_factory=list)  # the bases point into these
    _sent: list[tuple[int, list[_Stretch], Future[Message]]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self) -> None:
        """Send all requests."""
        for owner in sorted({owner for missing in self.missing.values() for owner in missing.rows}):
            for stretches in self._packed(owner):
                wants = [self._want(stretch.kind) for stretch in stretches]
                rows = [self._rows(owner, stretch) for stretch in stretches]
                fields = {"store": self.store, "part": owner, "wants": wants}
                self._sent.append((owner, stretches, self.asker.ask(owner, self.method, fields, rows)))

    @property
    def arrived(self) -> bool:
        """Whether :meth:`receive` would not have to wait."""
        return all(future.done() for _, _, future in tuple(self._sent))

    def receive(self) -> None:
        """Wait for all answers; the segments can be read then.

        Raises:
            WireError: an owner failed to answer, or not with what was asked for.
        """
        with self._lock:
            while self._sent:
                owner, stretches, future = self._sent[0]
                self._take(owner, stretches, self.asker.wait(future).tensors)
                self._sent.pop(0)

    def _packed(self, owner: int) -> Iterator[list[_Stretch]]:
        """All that one owner is asked for, in one request unless it is very much."""
        stretches: list[_Stretch] = []
        least = MAX_REQUEST_TENSORS // MAX_REQUEST_CHUNKS
        room = MAX_REQUEST_TENSORS
        for kind, missing in self.missing.items():
            start, stop = 0, -(-missing.rows[owner].size // missing.chunk) if owner in missing.rows else 0
            cost = max(least, missing.pieces)
            while start < stop:
                if stretches and room < cost:
                    yield stretches
                    stretches, room = [], MAX_REQUEST_TENSORS
                end = min(stop, start + max(1, room // cost))
                stretches.append(_Stretch(kind, start, end))
                room -= (end - start) * cost
                start = end
        if stretches:
            yield stretches

    def _want(self, kind: Kind) -> dict[str, Any]:
        missing = self.missing[kind]
        dtypes = [str(missing.dtypes[name]).removeprefix("torch.") for name in missing.tables]
        return {"kind": wire_name(kind), "names": list(missing.tables), "dtypes": dtypes, "chunk": missing.chunk}

    def _rows(self, owner: int, stretch: _Stretch) -> Tensor:
        missing = self.missing[stretch.kind]
        return torch.from_numpy(missing.rows[owner][stretch.start * missing.chunk : stretch.stop * missing.chunk])

    def _take(self, owner: int, stretches: list[_Stretch], tensors: Sequence[Tensor]) -> None:
        """Point the segments at an answer's rows."""
        expected = sum((each.stop - each.start) * self.missing[each.kind].pieces for each in stretches)
        if len(tensors) != expected:
            raise _strange(owner, f"{len(tensors)} tensors instead of {expected}")
        arrived = iter(tensors)
        for stretch in stretches:
            missing = self.missing[stretch.kind]
            for chunk in range(stretch.start, stretch.stop):
                rows = min(missing.chunk, missing.rows[owner].size - chunk * missing.chunk)
                segment = owner * missing.each + chunk
                for name, table in missing.tables.items():
                    pieces = [next(arrived) for _ in missing.bases[name]]
                    if wrong := table.check(pieces, rows, missing.dtypes[name]):
                        raise _strange(owner, f"{wrong}, as {name} of {stretch.kind}")
                    if pieces[-1].dtype != table.dtype:
                        pieces[-1] = convert(pieces[-1], self.pool.tensor(pieces[-1].shape, table.dtype))
                    self.held += pieces
                    table.point(missing.bases[name], segment, pieces)


def _strange(owner: int, what: str) -> WireError:
    return WireError(
        f"rank {owner} was asked for rows of its part, and answered with {what}",
        hint="have all ranks run the same version of gtrain on the same store",
    )


def chunk_rows(tables: Mapping[str, Table]) -> int:
    """Rows of a chunk: a power of 2."""
    row_bytes = sum(table.row_bytes for table in tables.values())
    return 1 << max(0, min(20, int(CHUNK_BYTES / max(1.0, row_bytes)).bit_length() - 1))


class RequestHistory:
    """The remote rows of one kind that successive batches ask for.

    Rows that a batch asks for lie in segments that are the batch's own until as many batches have begun as are at most
    looked back over. A hash map tells the place of each row and the batch, by its *turn*, that asked for it; places of
    earlier turns are as good as none.

    Args:
        tables: the tensors of a row.
        dtypes: in which dtype the values of each travel.
        offsets: int64 ``[P + 1]``; part p has the rows ``offsets[p] .. offsets[p+1]-1``.
        first: the first segment that is not a part or the cache.
        batches: how many ask for a row once, together, at most; 1: each asks for what it needs.
        pool: memory of requests.
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
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
        self._each = 1  # segments of each owner and batch
        self._sizes: deque[int] = deque(maxlen=batches)  # rows that the last batches asked for
        self._used = 0  # slots of the map that are not empty
        self._map: Array = np.zeros((0, 2), np.int64)

    @property
    def segments(self) -> int:
        """How many segments there are, with those of parts, cache, and all batches."""
        return self._first + self._batches * self._parts * self._each

    def ask(self, ids: Array, place: Array, missed: int, turn: int, floor: int) -> RowRequest:
        """Give the rows that are not here places, and list those that are to be asked for.

        Args:
            ids: int64 ``[n]``.
            place: int64 ``[n]`` of :func:`gtrain_pyg.features.kernels.find`; where below 0, replaced.
            missed: how many are below 0.
            turn: number of the batch, 1 to :data:`LAST_TURN`, ascending.
            floor: the earliest batch whose rows can still be read; below 1: any.
        """
        floor = max(1, floor)
        self._make_room(missed, floor)
        first = self._first + turn % self._batches * self._parts * self._each
        segments = np.array([first, self._each, self._chunk.bit_length() - 1], np.int64)
        unique, owners = self._pool.take(missed, np.int64), self._pool.take(missed, np.int32)
        counts = np.zeros(self._parts + 1, np.int64)
        if self._wide:
            self._used += kernels.number(ids, place, self._map, turn, floor, unique, owners, counts, segments)
        else:
            kernels.enlist(ids, place, unique, owners, counts, segments)
        total = int(counts[-1])
        self._sizes.append(total)
        return self._missing(unique[:total], owners[:total], counts[:-1], first)

    def forget(self) -> None:
        """Remember nothing; turns may begin anew."""
        self._map, self._used = self._map[:0], 0
        self._sizes.clear()

    def _make_room(self, missed: int, floor: int) -> None:
        """Have segments and slots of the map for so many rows more."""
        each = max(1, -(-missed // self._chunk))
        if each > self._each:
            self._each = 1 << (each - 1).bit_length()
            self.forget()  # the segments of earlier turns are numbered otherwise
        if not self._wide or self._used + missed <= self._map.shape[0] * 3 // 4:
            return
        larger = np.zeros((1 << (2 * (sum(self._sizes) + missed)).bit_length(), 2), np.int64)
        self._used = kernels.rehash(self._map, floor, larger)
        self._map = larger

    def _missing(self, unique: Array, owners: Array, counts: Array, first: int) -> RowRequest:
        starts = np.cumsum(counts) - counts
        narrow = int(np.diff(self._offsets).max()) < 1 << 31
        dealt = self._pool.take(unique.size, np.int32 if narrow else np.int64)
        kernels.deal(unique, owners, self._offsets, starts.copy(), dealt)
        rows = {p: dealt[starts[p] : starts[p] + counts[p]] for p in range(self._parts) if counts[p]}
        shape = self._parts * self._each
        bases = {name: np.zeros((table.bases.shape[0], shape), np.int64) for name, table in self._tables.items()}
        return RowRequest(self._tables, self._dtypes, self._chunk, first, self._each, rows, bases)
