"""Attention's backward pass at the owners of the sources: one set of messages where fetching again would take two.

The gradient of a source row needs the row, which its owner has, and of each target that reads it the gradient and three
numbers a head. So the targets' side travels: rows once, and back a number a head for the target's logit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from gtrain_sar.edges import Compressed, EdgeBlocks, compress
from gtrain_sar.halo import HaloExchange, InFlight, Packet, add_rows, gather, peers, send_backward, send_forward
from gtrain_sar.kernels import Dropout, attention_backward

if TYPE_CHECKING:
    from gtrain_sar.attention.fused import AttentionBackward

_SPREAD = 60.0  # exp(2 * _SPREAD) would overflow float32


@dataclass
class ReadBy:
    """One round's edges, as the owner of their sources needs them.

    Attributes:
        targets: own distinct targets of block r, int64 [T], ascending: the rows that this rank sends to the owner.
        edges: the reader's edges by own source; columns are positions among the rows that it sends.
        num_targets: rows that the reader sends.
    """

    targets: Tensor
    edges: Compressed
    num_targets: int


@dataclass
class Reverse:
    """All rounds, entry 0 unused, and whether sending the targets' side takes fewer bytes than fetching again."""

    rounds: list[ReadBy | None]
    pays: bool


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
    exchange, numbered = blocks.exchange, blocks.extra["numbered"]
    group, tag = exchange.group, exchange.group.next_tag()
    targets = [block.by_target.rows for block in numbered]
    sizes = [[len(b), len(t)] for b, t in zip(numbered, targets, strict=True)]
    of_all = group.all_gather(torch.tensor(sizes, dtype=torch.int64))
    rounds: list[ReadBy | None] = [None]
    for r in range(1, exchange.rounds):
        reader, _ = peers(group, r)
        num_edges, num_targets = of_all[reader][r].tolist()
        incoming = targets[r].new_empty((3, num_edges), dtype=torch.int32)
        send_backward(group, r, _described(numbered[r].by_source, targets[r]), incoming, tag).wait()
        source, target, edge = incoming.long()
        own = exchange.send_rows[r][source]
        rounds.append(ReadBy(targets[r], compress(own, target, edge, exchange.shard.num_local), num_targets))
    sent = sum(int(sizes[1:, 1].sum()) for sizes in of_all)
    halo = torch.tensor([sum(exchange.reads)], dtype=torch.int64)
    return Reverse(rounds, sent <= 2 * int(group.all_reduce(halo)))


def _described(edges: Compressed, targets: Tensor) -> Tensor:
    """Row in the block, position of the target and number of each edge, int32 [3, E_b]."""
    source = torch.repeat_interleave(edges.rows, edges.ptr.diff())
    target = torch.searchsorted(targets, edges.columns.long())
    return torch.stack([source.int(), target.int(), edges.edges])


def send_targets(backward: AttentionBackward, extremes: list[Tensor], prefetch: int) -> None:
    """Add the gradients of all edges, remote ones at the owner of their source.

    Args:
        backward: the tensors.
        extremes: for each round from 1 on, the largest and smallest logit of the block's sources, [2, H].
        prefetch: rounds in flight beside the one that is worked on.
    """
    exchange = backward.blocks.exchange
    ways, group = reverse(backward.blocks).rounds, exchange.group
    tags = group.next_tag(), group.next_tag()
    arriving: deque[InFlight] = deque()
    returning: deque[tuple[Tensor, InFlight]] = deque()
    posted = 0
    for r in range(exchange.rounds):
        while posted < min(r + prefetch, exchange.rounds - 1):
            posted += 1
            arriving.append(_send(backward, ways, posted, extremes, tags[0]))
        if r == 0:
            backward.local()
            continue
        way = ways[r]
        assert way is not None
        answer = _answer(backward, way, r, arriving.popleft().wait())
        incoming = answer.new_empty((len(way.targets), answer.size(1)))
        returning.append((way.targets, send_forward(group, r, answer, incoming, tags[1])))
        while len(returning) > 1:
            _take_back(backward, *returning.popleft())
    while returning:
        _take_back(backward, *returning.popleft())


def _take_back(backward: AttentionBackward, targets: Tensor, flight: InFlight) -> None:
    add_rows(backward.dtarget, targets, flight.wait()[0])


def _send(backward: AttentionBackward, ways: list[ReadBy | None], r: int, extremes: list[Tensor], tag: int) -> InFlight:
    """Post this rank's targets of block r to the owner of the sources, and receive those of the reader."""
    way, exchange = ways[r], backward.blocks.exchange
    assert way is not None
    target = backward.target[way.targets]
    lse, delta = backward.lse[way.targets], backward.delta[way.targets]
    outgoing = _packet(backward, exchange, len(way.targets), folded=_folds(extremes[r - 1]))
    rows, logit, *rest, seed = outgoing.pieces
    gather(backward.grad, way.targets, rows)
    if len(rest) == 1:  # exp(-lse) goes into the rows, relative to the block's largest logit
        scale = (_leaky(extremes[r - 1][0] + target, backward.slope) - lse).exp()
        rows.mul_(scale.unsqueeze(-1))
        delta = delta * scale
    else:
        rest[1].copy_(lse)
    logit.copy_(target)
    rest[0].copy_(delta)
    seed.fill_(backward.keep.seed)
    incoming = _packet(backward, exchange, way.num_targets, folded=_folds(_sent_extremes(backward, r)))
    return send_backward(exchange.group, r, outgoing.buffer, incoming, tag)


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


def _answer(backward: AttentionBackward, way: ReadBy, r: int, pieces: list[Tensor]) -> Tensor:
    """Add the gradients of own sources that the reader's targets ask for; returns those of its logits [T, H]."""
    rows, target, delta, *rest, seed = pieces
    lse = rest[0] if rest else _leaky(_sent_extremes(backward, r)[0] + target, backward.slope)
    keep = Dropout(backward.keep.p, int(seed) if len(seed) else 0)
    of_target = torch.zeros_like(target)
    attention_backward(
        way.edges, backward.x, backward.source, target, lse, delta, rows.to(backward.grad.dtype), backward.slope,
        of_round(keep, r), backward.dx, backward.dsource, of_target,
    )  # fmt: skip
    return of_target


def of_round(keep: Dropout, r: int) -> Dropout:
    """The dropout of one block, whose edges are numbered within it."""
    return Dropout(keep.p, keep.seed ^ (r * 0x9E3779B97F4A7C15 & (1 << 62) - 1)) if keep.p > 0 else keep


def _leaky(logit: Tensor, slope: float) -> Tensor:
    return F.leaky_relu(logit, slope)
