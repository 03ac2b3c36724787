"""Attention's backward pass at the owners of the sources: one set of messages where fetching again would take two.

The gradient of a source row needs the row, which its owner has, and of each target that reads it the gradient and three
numbers a head. So the targets' side travels: rows once, and back a number a head for the target's logit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from gtrain_sar.edges import Compressed, EdgeBlocks, compress, numbered
from gtrain_sar.halo import HaloExchange, add_rows, gather
from gtrain_sar.kernels import Dropout, attention_backward
from gtrain_sar.messages import InFlight, Packet, peers, send_backward, send_forward

if TYPE_CHECKING:
    from gtrain_sar.attention.fused import AttentionBackward

_SPREAD = 60.0  # exp(2 * _SPREAD) would overflow float32
_MOST_ROWS = 1 << 14  # of a message: it is held twice, as it leaves and as it arrives


@dataclass
class ReadBy:
    """Edges of one message, as the owner of their sources needs them.

    Attributes:
        round: of the exchange.
        piece: number of the message in its round; each has a tag of its own.
        targets: own distinct targets of the round's block, int64 [T], ascending: the rows that this rank sends to the
            owner.
        edges: the reader's edges by own source; columns are positions among the rows that it sends.
        num_targets: rows that the reader sends.
    """

    round: int
    piece: int
    targets: Tensor
    edges: Compressed
    num_targets: int


@dataclass
class Reverse:
    """All messages in their order, and how many bytes they take.

    Attributes:
        messages: those of this rank; a round's are cut so that none has more than ``_MOST_ROWS`` rows.
        pieces: the most messages that a round has on any rank.
        over_halo: rows sent over all ranks, for each row of their halo.
    """

    messages: list[ReadBy]
    pieces: int
    over_halo: float

    def pays(self, mode: int) -> bool:
        """Whether it sends no more than fetching rows again (mode 1 would) and sending their gradients."""
        return self.over_halo <= (2 if mode == 1 else 1)


def reverse(blocks: EdgeBlocks) -> Reverse:
    """Tell the owners of the sources which edges read them; once for each set of edges, and not counted as traffic."""
    if "reverse" not in blocks.extra:
        counters = blocks.exchange.group.counters
        recording, counters.recording = counters.recording, False
        try:
            blocks.extra["reverse"] = _ask(blocks)
        finally:
            counters.recording = recording
    found: Reverse = blocks.extra["reverse"]
    return found


def _ask(blocks: EdgeBlocks) -> Reverse:
    exchange, each = blocks.exchange, numbered(blocks)
    group, tag = exchange.group, exchange.group.next_tag()
    targets = [block.by_target.rows for block in each]
    sizes = [[len(b), len(t)] for b, t in zip(each, targets, strict=True)]
    of_all = group.all_gather(torch.tensor(sizes, dtype=torch.int64))
    messages: list[ReadBy] = []
    for r in range(1, exchange.rounds):
        reader, _ = peers(group, r)
        num_edges, num_targets = of_all[reader][r].tolist()
        incoming = targets[r].new_empty((3, num_edges), dtype=torch.int32)
        send_backward(group, r, _described(each[r].by_source, targets[r]), incoming, tag).wait()
        source, target, edge = incoming.long()
        messages += _cut(r, targets[r], num_targets, (exchange.send_rows[r][source], target, edge), exchange)
    sent = sum(int(sizes[1:, 1].sum()) for sizes in of_all)
    halo = torch.tensor([sum(exchange.reads)], dtype=torch.int64)
    most = max((int(sizes[1:, 1].max()) for sizes in of_all if len(sizes) > 1), default=0)
    return Reverse(messages, _pieces(most), sent / max(int(group.all_reduce(halo)), 1))


def _cut(
    r: int, targets: Tensor, num_targets: int, edges: tuple[Tensor, Tensor, Tensor], exchange: HaloExchange
) -> Iterator[ReadBy]:
    """One round's messages; edges are own source, position of the reader's target, and number."""
    source, target, number = edges
    out, into = _bounds(len(targets)), _bounds(num_targets)
    for piece in range(max(len(out), len(into)) - 1):
        (low, high), (first, last) = _span(out, piece), _span(into, piece)
        here = (target >= first) & (target < last)
        chosen = compress(source[here], target[here] - first, number[here], exchange.shard.num_local)
        yield ReadBy(r, piece, targets[low:high], chosen, last - first)


def _pieces(rows: int) -> int:
    return max(1, -(-rows // _MOST_ROWS))


def _bounds(rows: int) -> list[int]:
    count = _pieces(rows)
    return [rows * k // count for k in range(count + 1)]


def _span(bounds: list[int], piece: int) -> tuple[int, int]:
    return (bounds[piece], bounds[piece + 1]) if piece + 1 < len(bounds) else (bounds[-1], bounds[-1])


def _described(edges: Compressed, targets: Tensor) -> Tensor:
    """Row in the block, position of the target and number of each edge, int32 [3, E_b]."""
    source = torch.repeat_interleave(edges.rows, edges.ptr.diff())
    target = torch.searchsorted(targets, edges.columns.long())
    return torch.stack([source.int(), target.int(), edges.edges])


def send_targets(backward: AttentionBackward, extremes: list[Tensor], prefetch: int | None) -> None:
    """Add the gradients of all edges, remote ones at the owner of their source.

    Args:
        backward: the tensors.
        extremes: for each round from 1 on, the largest and smallest logit of the block's sources, [2, H].
        prefetch: messages in flight beside the one that is worked on; None: all of them.
    """
    group, known = backward.blocks.exchange.group, reverse(backward.blocks)
    tags = [(group.next_tag(), group.next_tag()) for _ in range(known.pieces)]
    arriving = _Arriving(
        known.messages,
        lambda message: _expect(backward, message, tags[message.piece][0]),
        lambda message, flight: _send(backward, message, extremes, flight),
    )
    ahead = len(known.messages) if prefetch is None else prefetch
    returning: list[tuple[Tensor, InFlight]] = []
    arriving.post(ahead)
    backward.local()
    for k, message in enumerate(known.messages):
        pieces = arriving.take(k)
        arriving.post(k + 1 + ahead)  # after what was sent is let go of
        answer = _answer(backward, message, pieces)
        del pieces
        incoming = answer.new_empty((len(message.targets), answer.size(1)))
        flight = send_forward(group, message.round, answer, incoming, tags[message.piece][1])
        returning.append((message.targets, flight))
    for targets, flight in returning:  # small ones, which come behind all that the peers had posted before
        add_rows(backward.dtarget, targets, flight.wait()[0])


class _Arriving:
    """Messages posted in order and taken in order: receives by ``expect``, then sends by ``send``."""

    def __init__(
        self,
        messages: Sequence[ReadBy],
        expect: Callable[[ReadBy], InFlight],
        send: Callable[[ReadBy, InFlight], object],
    ) -> None:
        self._messages, self._expect, self._send, self._posted = messages, expect, send, 0
        self._flying: deque[InFlight] = deque()

    def post(self, until: int) -> None:
        """Post the first ``until`` messages, if that was not done already."""
        messages = self._messages[self._posted : until]
        flights = [self._expect(message) for message in messages]
        for message, flight in zip(messages, flights, strict=True):
            self._send(message, flight)
        self._flying.extend(flights)
        self._posted += len(messages)

    def take(self, k: int) -> list[Tensor]:
        """What message k brought, the next one."""
        self.post(k + 1)
        return self._flying.popleft().wait()


def _expect(backward: AttentionBackward, message: ReadBy, tag: int) -> InFlight:
    """Post the receive of the reader's targets of a block."""
    exchange, r = backward.blocks.exchange, message.round
    incoming = _packet(backward, exchange, message.num_targets, folded=_folds(_sent_extremes(backward, r)))
    return InFlight(exchange.group, incoming, peers(exchange.group, r)[0], tag)


def _send(backward: AttentionBackward, message: ReadBy, extremes: list[Tensor], flight: InFlight) -> None:
    """Post this rank's targets of a block to the owner of the sources."""
    exchange, r, targets = backward.blocks.exchange, message.round, message.targets
    target = backward.target[targets]
    lse, delta = backward.lse[targets], backward.delta[targets]
    outgoing = _packet(backward, exchange, len(targets), folded=_folds(extremes[r - 1]))
    rows, logit, *rest, seed = outgoing.pieces
    gather(backward.grad, targets, rows)
    if len(rest) == 1:  # exp(-lse) goes into the rows, relative to the block's largest logit
        scale = (_leaky(extremes[r - 1][0] + target, backward.slope) - lse).exp()
        rows.mul_(scale.unsqueeze(-1))
        delta = delta * scale
    else:
        rest[1].copy_(lse)
    logit.copy_(target)
    rest[0].copy_(delta)
    seed.fill_(backward.keep.seed)
    flight.send(outgoing.buffer, peers(exchange.group, r)[1])


def _packet(backward: AttentionBackward, exchange: HaloExchange, count: int, *, folded: bool) -> Packet:
    grad = backward.grad
    heads = ((count, grad.size(1)), grad.dtype)
    rows = ((count, *grad.shape[1:]), exchange.on_wire(grad.dtype))
    scalars = [heads] * (2 if folded else 3)
    return Packet([rows, *scalars, ((1 if count else 0,), torch.int64)], grad.device)


def _folds(extremes: Tensor) -> bool:
    """Whether logits of a block lie so close together that exp(-lse) may be a factor of the rows; both ends see it."""
    return bool((extremes[0] - extremes[1] < _SPREAD).all())


def extremes_of(source: Tensor) -> Tensor:
    """Largest and smallest logit of a block's sources [n, H], as [2, H]; 0 where it has none."""
    return torch.stack([source.amax(0), source.amin(0)]) if len(source) else source.new_zeros((2, source.size(1)))


def _sent_extremes(backward: AttentionBackward, r: int) -> Tensor:
    """The largest and smallest logit of the sources that the reader of round r has, [2, H]; as it computed them."""
    exchange = backward.blocks.exchange
    rows = backward.source[exchange.send_rows[r]]
    return extremes_of(rows.to(exchange.on_wire(rows.dtype)).to(rows.dtype))


def _answer(backward: AttentionBackward, message: ReadBy, pieces: list[Tensor]) -> Tensor:
    """Add the gradients of own sources that the reader's targets ask for; returns those of its logits [T, H]."""
    rows, target, delta, *rest, seed = pieces
    lse = rest[0] if rest else _leaky(_sent_extremes(backward, message.round)[0] + target, backward.slope)
    keep = Dropout(backward.keep.p, int(seed) if len(seed) else 0)
    of_target = torch.zeros_like(target)
    attention_backward(
        message.edges, backward.x, backward.source, target, lse, delta, rows.to(backward.grad.dtype), backward.slope,
        of_round(keep, message.round), backward.dx, backward.dsource, of_target,
    )  # fmt: skip
    return of_target


def of_round(keep: Dropout, r: int) -> Dropout:
    """The dropout of one block, whose edges are numbered within it."""
    return Dropout(keep.p, keep.seed ^ (r * 0x9E3779B97F4A7C15 & (1 << 62) - 1)) if keep.p > 0 else keep


def _leaky(logit: Tensor, slope: float) -> Tensor:
    return F.leaky_relu(logit, slope)
