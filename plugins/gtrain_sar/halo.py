"""Exchange of halo rows between ranks: values towards the readers, gradients back to the owners.

All tensors that go the same way in one round travel in one message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from gtrain.strategy.group import Group
from gtrain_sar.point_to_point import Packet, PendingExchange, peers, send_backward, send_forward

if TYPE_CHECKING:
    from gtrain_sar.constants import Constants
Make = Callable[[int], None]
"""Makes the first so many own rows, those that are made already included."""


class HaloNodes(Protocol):
    """What an exchange reads of a shard, or of one node type of a typed one; see ``GraphShard``."""

    @property
    def part(self) -> int: ...

    @property
    def offsets(self) -> Tensor: ...

    @property
    def block_ptr(self) -> Tensor: ...

    @property
    def halo(self) -> tuple[Tensor, ...]: ...

    @property
    def num_local(self) -> int: ...

    @property
    def num_halo(self) -> int: ...


class HaloExchange:
    """Who needs which rows of whom, for the nodes of one shard on every rank.

    In round r (1 .. P-1) rank p reads block r from rank p-r and is read by rank p+r, so every rank sends and receives
    once a round. All ranks must call the same methods in the same order.

    Args:
        group: the ranks.
        shard: this rank's part.
        wire_dtype: floating type that values travel in; None: their own.
        orig_id: int64 ``[num_local]``, the own nodes' ids in the source data; None: those that the shard has.
    """

    def __init__(
        self,
        group: Group,
        shard: HaloNodes,
        wire_dtype: torch.dtype | None = None,
        orig_id: Tensor | None = None,
    ) -> None:
        self._orig_id: Tensor | None = getattr(shard, "node_data", {}).get("orig_id") if orig_id is None else orig_id
        self.group, self.shard, self.wire_dtype = group, shard, wire_dtype
        self.constants: Constants | None = None
        self.rounds = group.size
        self.reads = [len(halo) for halo in shard.halo]
        self.send_rows = self._ask()
        self._all_ids: Tensor | None = None

    def _ask(self) -> list[Tensor]:
        """Tell each owner which of its rows this rank reads; returns, per round, the own rows that are read here."""
        counts = self.group.all_gather(torch.tensor(self.reads, dtype=torch.int64))
        first, tag = int(self.shard.offsets[self.shard.part]), self.group.next_tag()
        rows = [torch.empty(0, dtype=torch.int64)]
        for r in range(1, self.rounds):
            reader, _ = peers(self.group, r)
            wanted = torch.empty(int(counts[reader][r]), dtype=torch.int64)
            send_backward(self.group, r, self.shard.halo[r].contiguous(), wanted, tag).wait()
            rows.append(wanted - first)
        return rows

    @property
    def orig_id(self) -> Tensor:
        """Own nodes' ids in the source data, int64 [num_local]; global ids where the shard has none."""
        first = int(self.shard.offsets[self.shard.part])
        return torch.arange(first, first + self.shard.num_local) if self._orig_id is None else self._orig_id

    @property
    def all_ids(self) -> Tensor:
        """The same of own nodes and the halo, int64 [num_local + num_halo]; all ranks ask together the first time."""
        if self._all_ids is None:
            counters = self.group.counters
            recording, counters.recording = counters.recording, False
            try:
                with torch.inference_mode(False):
                    (self._all_ids,) = halo_rows([(self, self.orig_id.to(self.send_rows[0].device))])
            finally:
                counters.recording = recording
        return self._all_ids

    def to(self, device: torch.device) -> None:
        """Keep the row numbers where the activations are."""
        self.send_rows = [rows.to(device) for rows in self.send_rows]

    def on_wire(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which values of ``dtype`` travel."""
        return self.wire_dtype if self.wire_dtype is not None and dtype.is_floating_point else dtype

    def row_bytes(self, tensor: Tensor) -> int:
        """Bytes that one row of a tensor takes on the wire."""
        return int(tensor[:0].flatten(1).size(1) if tensor.dim() > 1 else 1) * self.on_wire(tensor.dtype).itemsize


Rows = tuple[HaloExchange, Tensor]
"""An exchange and a tensor ``[num_local, ...]`` of its own rows, or a gradient of one block."""


def in_order(make: Callable[[int, int], None]) -> Make:
    """Make rows from the first on; ``make`` makes those from a first one to before another."""
    made = 0

    def until(count: int) -> None:
        nonlocal made
        if count > made:
            make(made, count)
            made = count

    return until


def fetch(rows: Sequence[Rows], r: int, tag: int, make: Make | None = None) -> PendingExchange:
    """Post round r's exchange; the results are ``[reads[r], ...]``, in the order of ``rows``.

    Args:
        rows: what is sent.
        r: the round.
        tag: of the messages.
        make: makes the rows, which leave as they are made; None: they are there.
    """
    group, device = rows[0][0].group, rows[0][1].device
    outgoing = _packet(rows, [len(exchange.send_rows[r]) for exchange, _ in rows], device)
    filled = [0 for _ in rows]

    def fill(size: int) -> None:
        for k, (exchange, tensor) in enumerate(rows):
            until = outgoing.rows_within(k, size)
            chosen = exchange.send_rows[r][filled[k] : until]
            if len(chosen):
                if make is not None:
                    make(int(chosen.max()) + 1)
                gather(tensor.detach(), chosen, outgoing.pieces[k][filled[k] : until])
                filled[k] = until

    incoming = _packet(rows, [exchange.reads[r] for exchange, _ in rows], device)
    transfer = send_forward(group, r, outgoing.buffer, incoming, tag, fill)
    return transfer.as_types([tensor.dtype for _, tensor in rows])


def push(gradients: Sequence[Rows], r: int, tag: int, make: Make | None = None) -> PendingExchange:
    """Post round r's way back: gradients of block r ``[reads[r], ...]`` to their owners, the readers' to here.

    The results are ``[len(send_rows[r]), ...]``, in the order of ``gradients``. Where ``make`` is given, it makes the
    gradients' first rows, and those of a single tensor leave as they are made.
    """
    group, device = gradients[0][0].group, gradients[0][1].device
    most, fill = max(len(gradient) for _, gradient in gradients), None
    if len(gradients) == 1 and gradients[0][0].on_wire(gradients[0][1].dtype) == gradients[0][1].dtype:
        rows = gradients[0][1].detach().contiguous()
        buffer = rows.view(-1).view(torch.uint8)
        if make is not None:
            fill = partial(_make_bytes, make, rows)
    else:
        if make is not None:
            make(most)
        outgoing = _packet(gradients, [len(gradient) for _, gradient in gradients], device)
        for (_, gradient), piece in zip(gradients, outgoing.pieces, strict=True):
            piece.copy_(gradient)
        buffer = outgoing.buffer
    incoming = _packet(gradients, [len(exchange.send_rows[r]) for exchange, _ in gradients], device)
    transfer = send_backward(group, r, buffer, incoming, tag, fill)
    return transfer.as_types([gradient.dtype for _, gradient in gradients])


def _make_bytes(make: Make, rows: Tensor, size: int) -> None:
    """Have the rows made that the first ``size`` bytes hold, if only in part."""
    make(-(-size // rows[:1].nbytes))


def _packet(rows: Sequence[Rows], counts: Sequence[int], device: torch.device) -> Packet:
    shapes = [
        ((count, *tensor.shape[1:]), exchange.on_wire(tensor.dtype))
        for count, (exchange, tensor) in zip(counts, rows, strict=True)
    ]
    return Packet(shapes, device)


def gather(rows: Tensor, chosen: Tensor, into: Tensor) -> None:
    """Copy chosen rows, in the type of ``into``."""
    if rows.dtype == into.dtype:
        torch.index_select(rows, 0, chosen, out=into)
    else:
        into.copy_(rows.index_select(0, chosen))


def stream(rows: Sequence[Rows], window: int | None, make: Make | None = None) -> Iterator[tuple[int, list[Tensor]]]:
    """Blocks of several row tensors in round order, ``(0, the tensors themselves)`` first.

    Args:
        rows: tensors ``[num_local, ...]`` with their exchanges.
        window: blocks that may be on their way beside the one that was yielded; None: all of them.
        make: makes the tensors' rows, all of them before the first block is yielded; None: they are there.
    """
    kept = [None if exchange.constants is None else exchange.constants.blocks(tensor) for exchange, tensor in rows]
    rounds = rows[0][0].rounds
    live = [i for i, blocks in enumerate(kept) if blocks is None or len(blocks) < rounds - 1]
    fetches = _Fetches([rows[i] for i in live], make)
    ahead = rounds if window is None else window
    fetches.post(ahead)
    if make is not None:
        make(len(rows[0][1]))
    yield 0, [tensor for _, tensor in rows]
    for r in range(1, rounds):
        fetches.post(r)
        fetched = dict(zip(live, fetches.take(), strict=True))
        fetches.post(r + ahead)  # after what was sent is let go of
        for i, block in fetched.items():
            if (blocks := kept[i]) is not None:
                blocks[r] = block
        yield r, [fetched[i] if i in fetched else kept[i][r] for i in range(len(rows))]  # type: ignore[index]


class _Fetches:
    """The rounds of one stream, posted in order and taken in order."""

    def __init__(self, rows: Sequence[Rows], make: Make | None) -> None:
        self._rows, self._make, self._posted = rows, make, 0
        self._pending: deque[PendingExchange] = deque()
        self._tag = rows[0][0].group.next_tag() if rows else 0

    def post(self, until: int) -> None:
        """Post all rounds up to number ``until`` that are not yet posted."""
        while self._rows and self._posted < min(until, self._rows[0][0].rounds - 1):
            self._posted += 1
            self._pending.append(fetch(self._rows, self._posted, self._tag, self._make))

    def take(self) -> list[Tensor]:
        """The next round's blocks."""
        return self._pending.popleft().wait() if self._rows else []


def count_needed(rows: Sequence[Rows], passes: int = 1) -> None:
    """Count the fewest bytes that this rank must send so that its readers have these rows ``passes`` times."""
    for exchange, tensor in rows:
        sent = sum(map(len, exchange.send_rows))
        exchange.group.counters.needed(passes * sent * exchange.row_bytes(tensor))


def add_rows(to: Tensor, rows: Tensor, values: Tensor) -> None:
    """``to[rows] += values`` in place, with repeated rows added up. Row-wise ``scatter_add_`` has a fast path."""
    to.scatter_add_(0, rows.view(-1, *[1] * (values.dim() - 1)).expand_as(values), values)


def halo_rows(rows: Sequence[Rows]) -> list[Tensor]:
    """``[num_local, ...]`` each -> ``[num_local + num_halo, ...]``: own rows and the whole halo, by one exchange."""
    exchanges = [exchange for exchange, _ in rows]
    out: tuple[Tensor, ...] = _HaloRows.apply(exchanges, *(tensor for _, tensor in rows))
    return list(out)


class _HaloRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchanges: list[HaloExchange], *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.exchanges = exchanges
        rows = list(zip(exchanges, tensors, strict=True))
        wanted = [pair for pair, need in zip(rows, ctx.needs_input_grad[1:], strict=True) if need]
        count_needed(rows)
        count_needed(wanted)
        blocks = [block for _, block in stream(rows, None)]
        outs = tuple(torch.cat(pieces) for pieces in zip(*blocks, strict=True))
        ctx.mark_non_differentiable(*(out for out in outs if not out.is_floating_point()))
        return outs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        wanted = [i for i, need in enumerate(ctx.needs_input_grad[1:]) if need]
        if not wanted:
            return None, *(None for _ in gradients)
        group, tag = ctx.exchanges[0].group, ctx.exchanges[0].group.next_tag()
        starts = {i: ctx.exchanges[i].shard.block_ptr.tolist() for i in wanted}
        transfers = [
            push([(ctx.exchanges[i], gradients[i][starts[i][r] : starts[i][r + 1]]) for i in wanted], r, tag)
            for r in range(1, group.size)
        ]
        own = {i: gradients[i][: starts[i][1]].clone() for i in wanted}
        for r, transfer in enumerate(transfers, start=1):
            for i, arrived in zip(wanted, transfer.wait(), strict=True):
                add_rows(own[i], ctx.exchanges[i].send_rows[r], arrived)
        return None, *(own.get(i) for i in range(len(gradients)))
