"""Messages between two ranks: several tensors in one buffer, which travels in pieces.

A piece leaves as soon as its rows are computed, and rows are processed as their piece arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gtrain.strategy.group import Group, Transfer

PIECE_BYTES = 8 << 20
LEAST_BYTES = 1 << 19
"""Size of the first and last pieces: small, so that the transfer starts early and little work is left at its end."""
_ALIGNED = 64  # bytes
BufferWriter = Callable[[int], object]
"""Writes the bytes of a buffer before a position; those that an earlier call wrote are not written again."""


class Packet:
    """Several tensors in one contiguous buffer.

    Args:
        pieces: shape and dtype of each tensor.
        device: of the buffer.

    Attributes:
        buffer: uint8, the bytes that travel.
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
        """Return the number of rows of tensor k that start within the first ``size`` bytes."""
        tensor = self.pieces[k]
        row = tensor[:1].nbytes
        return min(max(-(-(size - self.starts[k]) // row), 0), len(tensor)) if row else len(tensor)


class PendingExchange:
    """The messages of one round that are in flight: one that this rank sends and one that it receives.

    The receive is posted first: the message that announces room for it would otherwise queue behind the sent rows.

    Args:
        group: the ranks.
        incoming: the received tensor or packet.
        source: the sending rank.
        tag: of the messages of both directions.
    """

    def __init__(self, group: Group, incoming: Tensor | Packet, source: int, tag: int) -> None:
        self._group, self._tag = group, tag
        buffer, pieces = (incoming.buffer, incoming.pieces) if isinstance(incoming, Packet) else (incoming, [incoming])
        self._pieces: list[Tensor] = pieces
        self._receives = deque((end, group.receive(piece, source, tag)) for end, piece in _split(buffer))
        self._sends: list[Transfer] = []
        self._dtypes: list[torch.dtype] | None = None

    def send(self, outgoing: Tensor, to: int, fill: BufferWriter | None = None) -> PendingExchange:
        """Post the outgoing message of the round, each piece once ``fill`` has written it."""
        for end, piece in _split(outgoing):
            if fill is not None:
                fill(end)
            self._sends.append(self._group.send(piece, to, self._tag))
        return self

    def wait(self) -> list[Tensor]:
        """Return the received tensors, once both directions are complete."""
        deque(self._arriving(), maxlen=0)
        if self._dtypes is not None:
            self._pieces = [p.to(d) for p, d in zip(self._pieces, self._dtypes, strict=True)]
            self._dtypes = None
        return self._pieces

    def rows(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows of the single received tensor as they arrive: the number of the first one, and the rows."""
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
        """Yield the number of bytes received, after each piece; then wait for the sends."""
        while self._receives:
            size, transfer = self._receives.popleft()
            transfer.wait()
            yield size
        while self._sends:
            self._sends.pop().wait()

    def as_types(self, dtypes: list[torch.dtype]) -> PendingExchange:
        """Convert the received tensors to these dtypes once they are complete."""
        self._dtypes = None if dtypes == [piece.dtype for piece in self._pieces] else dtypes
        return self


def peers(group: Group, r: int) -> tuple[int, int]:
    """Return the rank that reads from this one in round r, and the rank that this one reads from."""
    return (group.rank + r) % group.size, (group.rank - r) % group.size


def send_forward(
    group: Group, r: int, outgoing: Tensor, incoming: Tensor | Packet, tag: int, fill: BufferWriter | None = None
) -> PendingExchange:
    """Post round r towards the readers: send to the reader of this rank, receive from the owner it reads from."""
    reader, owner = peers(group, r)
    return PendingExchange(group, incoming, owner, tag).send(outgoing, reader, fill)


def send_backward(
    group: Group, r: int, outgoing: Tensor, incoming: Tensor | Packet, tag: int, fill: BufferWriter | None = None
) -> PendingExchange:
    """Post round r towards the owners: send to the owner that this rank reads from, receive from its reader."""
    return send_forward(group, -r, outgoing, incoming, tag, fill)


def _split(buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the end and the bytes of each piece of a message; sender and receiver split it alike."""
    flat = buffer.view(-1).view(torch.uint8)
    start, most = 0, LEAST_BYTES
    while start < len(flat):
        rest = len(flat) - start
        size = min(most, PIECE_BYTES, max(rest // 4, LEAST_BYTES))
        end = start + min(rest, -(-size // _ALIGNED) * _ALIGNED)
        yield end, flat[start:end]
        start, most = end, 2 * most
