"""Messages between two ranks: several tensors in one buffer, which travels in pieces.

What is made row by row leaves piece by piece while the rest is made, and is worked on as it arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gtrain.strategy.group import Group, Transfer

PIECE_BYTES = 8 << 20
LEAST_BYTES = 1 << 19
"""Of the first and the last pieces: with them the wire begins, and the work on what it brought ends."""
_ALIGNED = 64  # bytes
Fill = Callable[[int], object]
"""Makes the first so many bytes of a buffer, those that are made already included."""


class Packet:
    """Several tensors in one contiguous buffer.

    Args:
        pieces: shape and type of each.
        device: where they are.

    Attributes:
        buffer: uint8, what travels.
        pieces: views of it, each starting at a multiple of 8 bytes.
        starts: these starts, in bytes.
    """

    def __init__(self, pieces: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device) -> None:
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in pieces]
        self.starts = [0]
        for size in sizes[:-1]:
            self.starts.append(self.starts[-1] + -(-size // 8) * 8)
        total = self.starts[-1] + sizes[-1] if sum(sizes) else 0
        self.buffer = torch.empty(total, dtype=torch.uint8, device=device)
        self.pieces = [
            self.buffer[a : a + n].view(dtype).view(tuple(shape))
            if n
            else torch.empty(shape, dtype=dtype, device=device)
            for a, n, (shape, dtype) in zip(self.starts, sizes, pieces, strict=True)
        ]

    def rows_within(self, k: int, size: int) -> int:
        """How many rows of tensor k lie within the first ``size`` bytes, if only in part."""
        tensor = self.pieces[k]
        row = tensor[:1].nbytes
        return min(max(-(-(size - self.starts[k]) // row), 0), len(tensor)) if row else len(tensor)


class PendingExchange:
    """One round's messages on their way: what this rank sends and what it receives.

    Its receives are posted first: the word that there is room would else wait behind the rows that go the same way.

    Args:
        group: the ranks.
        incoming: what is received.
        source: the rank that it comes from.
        tag: of the messages of both directions.
    """

    def __init__(self, group: Group, incoming: Tensor | Packet, source: int, tag: int) -> None:
        self._group, self._tag = group, tag
        buffer, pieces = (incoming.buffer, incoming.pieces) if isinstance(incoming, Packet) else (incoming, [incoming])
        self._pieces: list[Tensor] = pieces
        self._receives = deque((end, group.receive(piece, source, tag)) for end, piece in _cut(buffer))
        self._sends: list[Transfer] = []
        self._dtypes: list[torch.dtype] | None = None

    def send(self, outgoing: Tensor, to: int, fill: Fill | None = None) -> PendingExchange:
        """Post what leaves in the same round, each piece once ``fill`` has made it."""
        for end, piece in _cut(outgoing):
            if fill is not None:
                fill(end)
            self._sends.append(self._group.send(piece, to, self._tag))
        return self

    def wait(self) -> list[Tensor]:
        """The received tensors, once both directions are complete."""
        for _ in self._arriving():
            pass
        if self._dtypes is not None:
            self._pieces = [p.to(d) for p, d in zip(self._pieces, self._dtypes, strict=True)]
            self._dtypes = None
        return self._pieces

    def rows(self) -> Iterator[tuple[int, Tensor]]:
        """The one tensor that is received, as it arrives: where some rows start, and the rows."""
        (rows,) = self._pieces
        whole, row = self._dtypes is not None or not rows.numel(), rows[:1].nbytes
        first = 0
        for size in self._arriving():
            if not whole and (until := size // row) > first:
                yield first, rows[first:until]
                first = until
        if whole:
            yield 0, self.wait()[0]

    def _arriving(self) -> Iterator[int]:
        """Bytes that are here, with each piece; then everything has left too."""
        while self._receives:
            size, transfer = self._receives.popleft()
            transfer.wait()
            yield size
        while self._sends:
            self._sends.pop().wait()

    def as_types(self, dtypes: list[torch.dtype]) -> PendingExchange:
        """Give the received tensors these types once they are here."""
        self._dtypes = None if dtypes == [piece.dtype for piece in self._pieces] else dtypes
        return self


def peers(group: Group, r: int) -> tuple[int, int]:
    """The rank that reads this one in round r, and the one that this rank reads."""
    return (group.rank + r) % group.size, (group.rank - r) % group.size


def send_forward(
    group: Group, r: int, outgoing: Tensor, incoming: Tensor | Packet, tag: int, fill: Fill | None = None
) -> PendingExchange:
    """Post round r towards the readers: one tensor to the rank that reads this one, one from that which it reads."""
    reader, owner = peers(group, r)
    return PendingExchange(group, incoming, owner, tag).send(outgoing, reader, fill)


def send_backward(
    group: Group, r: int, outgoing: Tensor, incoming: Tensor | Packet, tag: int, fill: Fill | None = None
) -> PendingExchange:
    """Post round r towards the owners."""
    reader, owner = peers(group, r)
    return PendingExchange(group, incoming, reader, tag).send(outgoing, owner, fill)


def _cut(buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Pieces, and where each ends; both ends of a message cut it alike."""
    flat = buffer.view(-1).view(torch.uint8)
    start, most = 0, LEAST_BYTES
    while start < len(flat):
        left = len(flat) - start
        size = min(most, PIECE_BYTES, max(left // 4, LEAST_BYTES))
        end = start + min(left, -(-size // _ALIGNED) * _ALIGNED)
        yield end, flat[start:end]
        start, most = end, 2 * most
