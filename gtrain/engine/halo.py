"""Exchange of halo rows between ranks: values from the owners to the readers, gradients back to the owners.

All tensors that go the same way in one round travel in one message: one buffer, sent in pieces. A piece leaves as soon
as its rows are computed, and rows are processed as their piece arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from gtrain.engine.constants import Constants
from gtrain.engine.precision import sum_dtype
from gtrain.graph.shard.nodes import ShardNodes
from gtrain.strategy.group import Group, Transfer
from gtrain.strategy.row_exchange import request_rows

PIECE_BYTES = 8 << 20
"""Largest size of a piece."""
LEAST_BYTES = 1 << 19
"""Size of the first and last pieces: small, so that the transfer starts early and little work is left at its end."""
_ALIGNED = 64  # bytes
BufferWriter = Callable[[int], object]
"""Writes the bytes of a buffer before a position; those that an earlier call wrote are not written again."""

RowProducer = Callable[[int], None]
"""Computes the rows before a number; those that were computed by an earlier call are not computed again."""


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
            # Multiples of 8: a tensor's view of the buffer needs the alignment of its dtype.
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
        row_bytes = tensor[:1].nbytes
        if not row_bytes:
            return len(tensor)
        return min(max(-(-(size - self.starts[k]) // row_bytes), 0), len(tensor))


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
        buffer, self._pieces = _buffer_and_pieces(incoming)
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
        # Rows that are converted to another dtype, or that are empty, come as a whole.
        whole, row_bytes = self._dtypes is not None or not rows.numel(), rows[:1].nbytes
        first = 0
        for size in self._arriving():
            if not whole and (until := size // row_bytes) > first:
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


class DeviceExchange(PendingExchange):
    """The messages of one round between GPUs, both directions at once and whole.

    Args:
        group: the ranks.
        outgoing: what this rank sends.
        to: the receiving rank.
        incoming: the received tensor or packet.
        source: the sending rank.
    """

    def __init__(self, group: Group, outgoing: Tensor, to: int, incoming: Tensor | Packet, source: int) -> None:
        assert group.devices is not None
        buffer, self._pieces = _buffer_and_pieces(incoming)
        self._dtypes: list[torch.dtype] | None = None
        self._sent = _as_bytes(outgoing)
        group.counters.sent(self._sent.nbytes)
        group.counters.received(buffer.nbytes)
        self._wait = group.devices.swap(self._sent, to, _as_bytes(buffer), source)

    def _arriving(self) -> Iterator[int]:
        self._wait()
        yield self._pieces[0].nbytes


def peers(group: Group, r: int) -> tuple[int, int]:
    """Return the rank that reads from this one in round r, and the rank that this one reads from."""
    return (group.rank + r) % group.size, (group.rank - r) % group.size


def send_forward(
    group: Group, r: int, outgoing: Tensor, incoming: Tensor | Packet, tag: int, fill: BufferWriter | None = None
) -> PendingExchange:
    """Post round r towards the readers: send to the reader of this rank, receive from the owner it reads from."""
    reader, owner = peers(group, r)
    if group.devices is not None and group.devices.takes(outgoing):
        if fill is not None:
            fill(outgoing.nbytes)
        return DeviceExchange(group, outgoing, reader, incoming, owner)
    return PendingExchange(group, incoming, owner, tag).send(outgoing, reader, fill)


def send_backward(
    group: Group, r: int, outgoing: Tensor, incoming: Tensor | Packet, tag: int, fill: BufferWriter | None = None
) -> PendingExchange:
    """Post round r towards the owners: send to the owner that this rank reads from, receive from its reader."""
    return send_forward(group, -r, outgoing, incoming, tag, fill)


def _buffer_and_pieces(incoming: Tensor | Packet) -> tuple[Tensor, list[Tensor]]:
    return (incoming.buffer, incoming.pieces) if isinstance(incoming, Packet) else (incoming, [incoming])


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _split(buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the end and the bytes of each piece of a message; sender and receiver split it alike."""
    flat = _as_bytes(buffer)
    start, most = 0, LEAST_BYTES
    while start < len(flat):
        rest = len(flat) - start
        size = min(most, PIECE_BYTES, max(rest // 4, LEAST_BYTES))
        end = start + min(rest, -(-size // _ALIGNED) * _ALIGNED)
        yield end, flat[start:end]
        # Pieces double up to the limit, and shrink again towards the end of the message.
        start, most = end, 2 * most


class HaloExchange:
    """The rows that each rank reads from each other rank, for the nodes of one shard.

    In round r (1 .. P-1) rank p reads block r from rank p-r and is read by rank p+r, so every rank sends and receives
    once per round. All ranks must call the same methods in the same order.

    Args:
        group: the ranks.
        shard: this rank's part.
        wire_dtype: floating type in which values travel; None: their own dtype.
        orig_id: int64 ``[num_local]``, original ids of the rank's nodes; None: the shard's.

    Attributes:
        reads: for each round, the number of rows that this rank reads.
        send_rows: for each round, int64, the local ids that the reader of this rank reads.
        constants: the cache of constant inputs, set by a :class:`~gtrain_sar.patching.Patcher`.
    """

    def __init__(
        self,
        group: Group,
        shard: ShardNodes,
        wire_dtype: torch.dtype | None = None,
        orig_id: Tensor | None = None,
    ) -> None:
        self._orig_id: Tensor | None = getattr(shard, "node_data", {}).get("orig_id") if orig_id is None else orig_id
        self.group, self.shard, self.wire_dtype = group, shard, wire_dtype
        self.constants: Constants | None = None
        self.rounds = group.size
        self.reads = [len(halo) for halo in shard.halo]
        self._first = int(shard.offsets[shard.part])
        if group.size == 1:
            # Nobody is asked: two of these are made for each layer of a batch that one process computes.
            self.send_rows = [shard.halo[0]]
            return
        requests = [shard.halo[(group.rank - owner) % group.size] for owner in range(group.size)]
        served = request_rows(group, requests, self._first)
        self.send_rows = [served[peers(group, r)[0]] for r in range(group.size)]

    @property
    def orig_id(self) -> Tensor:
        """Original ids of the rank's nodes, int64 [num_local]; global ids where the shard has none."""
        ids = self._orig_id
        return torch.arange(self._first, self._first + self.shard.num_local) if ids is None else ids

    @cached_property
    def all_ids(self) -> Tensor:
        """Original ids of local and halo nodes, int64 [num_local + num_halo]; the first access is an exchange."""
        with uncounted(self.group), torch.inference_mode(False):
            return halo_rows([(self, self.orig_id.to(self.send_rows[0].device))])[0]

    def to(self, device: torch.device) -> None:
        """Move the row numbers to the device of the activations."""
        self.send_rows = [rows.to(device) for rows in self.send_rows]

    def on_wire(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which values of ``dtype`` travel."""
        return self.wire_dtype if self.wire_dtype is not None and dtype.is_floating_point else dtype

    def add_gradients(self, r: int, total: Tensor, arrived: Tensor) -> None:
        """Add gradients that the reader of round r sent, ``[len(send_rows[r]), ...]``, to those of the rank's rows."""
        add_rows(total, self.send_rows[r], arrived)


OwnedRows = tuple[HaloExchange, Tensor]
"""An exchange and a tensor ``[num_local, ...]`` of the rank's rows, or a gradient of one block."""


@contextmanager
def uncounted(group: Group) -> Iterator[None]:
    """Leave messages out of the traffic counters: set-up happens once, whatever the number of epochs."""
    recording, group.counters.recording = group.counters.recording, False
    try:
        yield
    finally:
        group.counters.recording = recording


def incremental(compute: Callable[[int, int], None]) -> RowProducer:
    """Return a producer of rows in ascending order; ``compute(low, high)`` computes the rows ``low .. high-1``."""
    done = 0

    def until(count: int) -> None:
        nonlocal done
        if count > done:
            compute(done, count)
            done = count

    return until


def fetch(rows: Sequence[OwnedRows], r: int, tag: int, produce: RowProducer | None = None) -> PendingExchange:
    """Post round r's exchange; the results are ``[reads[r], ...]``, in the order of ``rows``.

    Args:
        rows: tensors whose rows are sent.
        r: the round.
        tag: of the messages.
        produce: computes the rows, which leave as they are computed; None: they are complete.
    """
    group, device = rows[0][0].group, rows[0][1].device
    outgoing = _packet(rows, [len(exchange.send_rows[r]) for exchange, _ in rows], device)
    filled = [0 for _ in rows]

    def fill(size: int) -> None:
        for k, (exchange, tensor) in enumerate(rows):
            until = outgoing.rows_within(k, size)
            selected = exchange.send_rows[r][filled[k] : until]
            if len(selected):
                if produce is not None:
                    # Rows are produced in ascending order, so the largest number that is sent decides how far to go.
                    produce(int(selected.max()) + 1)
                gather(tensor.detach(), selected, outgoing.pieces[k][filled[k] : until])
                filled[k] = until

    incoming = _packet(rows, [exchange.reads[r] for exchange, _ in rows], device)
    transfer = send_forward(group, r, outgoing.buffer, incoming, tag, fill)
    return transfer.as_types([tensor.dtype for _, tensor in rows])


def push(gradients: Sequence[OwnedRows], r: int, tag: int, produce: RowProducer | None = None) -> PendingExchange:
    """Post round r backwards: gradients of block r ``[reads[r], ...]`` to their owner, and the reader's to this rank.

    The results are ``[len(send_rows[r]), ...]``, in the order of ``gradients``. ``produce`` computes the gradients'
    rows; those of a single tensor leave as they are computed.
    """
    group, device = gradients[0][0].group, gradients[0][1].device
    fill = None
    if len(gradients) == 1 and gradients[0][0].on_wire(gradients[0][1].dtype) == gradients[0][1].dtype:
        rows = gradients[0][1].detach().contiguous()
        buffer = rows.view(-1).view(torch.uint8)
        if produce is not None:
            fill = partial(_produce_bytes, produce, rows[:1].nbytes)
    else:
        if produce is not None:
            produce(max(len(gradient) for _, gradient in gradients))
        outgoing = _packet(gradients, [len(gradient) for _, gradient in gradients], device)
        for (_, gradient), piece in zip(gradients, outgoing.pieces, strict=True):
            piece.copy_(gradient)
        buffer = outgoing.buffer
    incoming = _packet(gradients, [len(exchange.send_rows[r]) for exchange, _ in gradients], device)
    transfer = send_backward(group, r, buffer, incoming, tag, fill)
    return transfer.as_types([gradient.dtype for _, gradient in gradients])


def _produce_bytes(produce: RowProducer, row_bytes: int, size: int) -> None:
    """Compute the rows that start within the first ``size`` bytes: a piece may end inside a row."""
    produce(-(-size // row_bytes))


def _packet(rows: Sequence[OwnedRows], counts: Sequence[int], device: torch.device) -> Packet:
    shapes = [
        ((count, *tensor.shape[1:]), exchange.on_wire(tensor.dtype))
        for count, (exchange, tensor) in zip(counts, rows, strict=True)
    ]
    return Packet(shapes, device)


def gather(rows: Tensor, selected: Tensor, out: Tensor) -> None:
    """Copy selected rows to ``out``, in its dtype."""
    if rows.dtype == out.dtype:
        torch.index_select(rows, 0, selected, out=out)
    else:
        out.copy_(rows.index_select(0, selected))


def stream(
    rows: Sequence[OwnedRows], window: int | None, produce: RowProducer | None = None
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield ``(r, blocks of several row tensors)`` in round order, ``(0, the tensors themselves)`` first.

    Args:
        rows: tensors ``[num_local, ...]`` with their exchanges.
        window: blocks in flight beside the one that was yielded; None: all of them.
        produce: computes the tensors' rows, all of them before the first block is yielded; None: they are complete.
    """
    caches = [None if exchange.constants is None else exchange.constants.blocks(tensor) for exchange, tensor in rows]
    rounds = rows[0][0].rounds
    # Tensors whose blocks are not cached yet; the others need no message.
    uncached = [i for i, cache in enumerate(caches) if cache is None or len(cache) < rounds - 1]
    fetches = _Fetches([rows[i] for i in uncached], produce)
    ahead = rounds if window is None else window
    fetches.post(ahead)
    if produce is not None:
        # The local block comes next, and needs all rows.
        produce(len(rows[0][1]))
    yield 0, [tensor for _, tensor in rows]
    for r in range(1, rounds):
        fetches.post(r)
        fetched = dict(zip(uncached, fetches.take(), strict=True))
        # After the sent buffers of round r are freed.
        fetches.post(r + ahead)
        for i, block in fetched.items():
            if (cache := caches[i]) is not None:
                cache[r] = block
        yield r, [fetched[i] if i in fetched else caches[i][r] for i in range(len(rows))]  # type: ignore[index]


class _Fetches:
    """The rounds of one stream, posted in order and taken in order."""

    def __init__(self, rows: Sequence[OwnedRows], produce: RowProducer | None) -> None:
        self._rows, self._produce, self._posted = rows, produce, 0
        self._pending: deque[PendingExchange] = deque()
        self._tag = rows[0][0].group.next_tag() if rows else 0

    def post(self, until: int) -> None:
        """Post the rounds up to number ``until`` that are not posted yet."""
        while self._rows and self._posted < min(until, self._rows[0][0].rounds - 1):
            self._posted += 1
            self._pending.append(fetch(self._rows, self._posted, self._tag, self._produce))

    def take(self) -> list[Tensor]:
        """Return the next round's blocks."""
        return self._pending.popleft().wait() if self._rows else []


def count_needed(rows: Sequence[OwnedRows], passes: int = 1) -> None:
    """Count the fewest bytes that this rank must send so that its readers receive these rows ``passes`` times."""
    for exchange, tensor in rows:
        row_bytes = tensor.shape[1:].numel() * exchange.on_wire(tensor.dtype).itemsize
        exchange.group.counters.needed(passes * sum(map(len, exchange.send_rows)) * row_bytes)


def add_rows(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add in place ``total[rows] += values``; repeated rows add up. Row-wise ``scatter_add_`` has a fast path."""
    total.scatter_add_(0, rows.view(-1, *[1] * (values.dim() - 1)).expand_as(values), values.to(total.dtype))


def halo_rows(rows: Sequence[OwnedRows]) -> list[Tensor]:
    """Append the halo to the rank's rows, ``[num_local, ...] -> [num_local + num_halo, ...]``, by one exchange."""
    return list(_HaloRows.apply([exchange for exchange, _ in rows], *(tensor for _, tensor in rows)))


class _HaloRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchanges: list[HaloExchange], *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.exchanges = exchanges
        rows = list(zip(exchanges, tensors, strict=True))
        count_needed(rows)  # forward
        count_needed([pair for pair, need in zip(rows, ctx.needs_input_grad[1:], strict=True) if need])  # backward
        outs = concatenated_blocks(rows)
        ctx.mark_non_differentiable(*(out for out in outs if not out.is_floating_point()))
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        needed = [i for i, need in enumerate(ctx.needs_input_grad[1:]) if need]
        own = return_gradients([(ctx.exchanges[i], gradients[i]) for i in needed])
        by_position = dict(zip(needed, own, strict=True))
        return None, *(by_position.get(i) for i in range(len(gradients)))


def concatenated_blocks(rows: Sequence[OwnedRows]) -> list[Tensor]:
    """:func:`halo_rows` without autograd."""
    blocks = [block for _, block in stream(rows, None)]
    return [torch.cat(pieces) for pieces in zip(*blocks, strict=True)]


def return_gradients(gradients: Sequence[OwnedRows]) -> list[Tensor]:
    """Add gradients of halo rows at their owners, the transpose of :func:`halo_rows`, by one exchange.

    Args:
        gradients: ``[num_local + num_halo, ...]`` each, with their exchanges.

    Returns:
        ``[num_local, ...]`` each.
    """
    if not gradients:
        return []
    group, tag = gradients[0][0].group, gradients[0][0].group.next_tag()
    blocks = [tensor.split(exchange.shard.block_ptr.diff().tolist()) for exchange, tensor in gradients]
    exchanges = [exchange for exchange, _ in gradients]
    # All sends are posted before the first wait, so that they overlap.
    transfers = [
        push([(exchange, block[r]) for exchange, block in zip(exchanges, blocks, strict=True)], r, tag)
        for r in range(1, group.size)
    ]
    totals = [block[0].to(sum_dtype(block[0].dtype), copy=True) for block in blocks]
    for r, transfer in enumerate(transfers, start=1):
        for exchange, total, arrived in zip(exchanges, totals, transfer.wait(), strict=True):
            exchange.add_gradients(r, total, arrived)
    return [total.to(tensor.dtype) for total, (_, tensor) in zip(totals, gradients, strict=True)]
