"""The asking side: one packed request to each owner, and what it answers as segments of rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.wire import Message, WireError
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.ranks.parts import Kind
from gtrain_pyg.rows.server import wire_name
from gtrain_pyg.rows.tables import Table, convert

Array = NDArray[Any]

CHUNK_BYTES = 1 << 20
"""About so many bytes of rows travel in one frame of a message."""
MAX_REQUEST_CHUNKS, MAX_REQUEST_TENSORS = 32, 512
"""What is more goes in further requests: an owner answers one after the other, and holds the answers."""


class Asker(Protocol):
    """What requests need of :class:`gtrain_pyg.ranks.service.Peers`."""

    def ask(
        self, part: int, method: str, fields: Mapping[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> Future[Message]:
        """Ask the owner of a part."""

    def wait(self, answer: Future[Message]) -> Message:
        """Wait for what it answers."""


@dataclass
class Missing:
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
class Requests:
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
    missing: dict[Kind, Missing]
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
