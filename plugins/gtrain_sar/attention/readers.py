"""Which edges read this rank's rows, as the owner of the sources needs them for attention's backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gtrain_sar.edges import Compressed, EdgeBlocks, compress, hashed
from gtrain_sar.halo import HaloExchange
from gtrain_sar.point_to_point import peers, send_backward

MOST_ROWS = 1 << 12  # of a message: it is held twice, as it leaves and as it arrives
LEAST_ROWS = 1 << 9  # the last messages are small, so that little is left to do once they are here


@dataclass
class ReaderEdges:
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
class ReaderPlan:
    """All messages in their order, and how many bytes they take.

    Attributes:
        messages: those of this rank; a round's are cut as :func:`sizes` says.
        pieces: the most messages that a round has on any rank.
        over_halo: rows sent over all ranks, for each row of their halo.
        num_local: own rows.
    """

    messages: list[ReaderEdges]
    pieces: int
    over_halo: float
    num_local: int
    _finished: dict[int, list[Tensor]] = field(default_factory=dict)

    def pays(self, mode: int) -> bool:
        """Whether it sends no more than fetching rows again (mode 1 would) and sending their gradients."""
        return self.over_halo <= (2 if mode == 1 else 1)

    def finished(self, lag: int) -> list[Tensor]:
        """Own rows, int64, by when their gradients are complete: before message 0 is worked off, after each, at last.

        Args:
            lag: the answer to message k is here once message k + lag was worked off, or at last.
        """
        if lag not in self._finished:
            count = len(self.messages)
            complete = torch.zeros(self.num_local, dtype=torch.int64)
            answered = torch.zeros_like(complete)
            for k, message in enumerate(self.messages):
                complete[message.edges.rows.cpu()] = k + 1
                answered[message.targets.cpu()] = min(k + lag, count) + 1
            steps = torch.maximum(complete, answered)
            device = self.messages[0].targets.device if count else steps.device
            order, each = steps.argsort(stable=True).to(device), torch.bincount(steps, minlength=count + 2)
            self._finished[lag] = list(order.split(each.tolist()))
        return self._finished[lag]


def reader_plan(blocks: EdgeBlocks) -> ReaderPlan:
    """Tell the owners of the sources which edges read them; once for each set of edges, and not counted as traffic."""
    if "reader_plan" not in blocks.extra:
        counters = blocks.exchange.group.counters
        recording, counters.recording = counters.recording, False
        try:
            blocks.extra["reader_plan"] = _ask(blocks)
        finally:
            counters.recording = recording
    plan: ReaderPlan = blocks.extra["reader_plan"]
    return plan


def sizes(rows: int) -> list[int]:
    """How many of a round's rows each of its messages has: as many as may be, but fewer and fewer towards the end."""
    counts = []
    while rows > 0:
        counts.append(min(rows, MOST_ROWS, max(LEAST_ROWS, rows // 4)))
        rows -= counts[-1]
    return counts


def _ask(blocks: EdgeBlocks) -> ReaderPlan:
    exchange, each = blocks.exchange, hashed(blocks)
    group, tag = exchange.group, exchange.group.next_tag()
    targets = [block.by_target.rows for block in each]
    lengths = [[len(b), len(t)] for b, t in zip(each, targets, strict=True)]
    of_all = group.all_gather(torch.tensor(lengths, dtype=torch.int64))
    messages: list[ReaderEdges] = []
    for r in range(1, exchange.rounds):
        reader, _ = peers(group, r)
        num_edges, num_targets = of_all[reader][r].tolist()
        incoming = targets[r].new_empty((3, num_edges), dtype=torch.int32)
        send_backward(group, r, _described(each[r].by_source, targets[r]), incoming, tag).wait()
        source, target, edge = incoming.long()
        messages += _cut(r, targets[r], num_targets, (exchange.send_rows[r][source], target, edge), exchange)
    sent = sum(int(lengths[1:, 1].sum()) for lengths in of_all)
    halo = torch.tensor([sum(exchange.reads)], dtype=torch.int64)
    pieces = max((len(sizes(int(rows))) for lengths in of_all for rows in lengths[1:, 1]), default=0)
    over_halo = sent / max(int(group.all_reduce(halo)), 1)
    return ReaderPlan(messages, pieces, over_halo, exchange.shard.num_local)


def _cut(
    r: int, targets: Tensor, num_targets: int, edges: tuple[Tensor, Tensor, Tensor], exchange: HaloExchange
) -> Iterator[ReaderEdges]:
    """One round's messages; edges are own source, position of the reader's target, and number."""
    source, target, number = edges
    out, into = sizes(len(targets)), sizes(num_targets)
    count, low, first = max(len(out), len(into)), 0, 0
    for piece, (sent, read) in enumerate(zip(_padded(out, count), _padded(into, count), strict=True)):
        here = (target >= first) & (target < first + read)
        chosen = compress(source[here], target[here] - first, number[here], exchange.shard.num_local)
        yield ReaderEdges(r, piece, targets[low : low + sent], chosen, read)
        low, first = low + sent, first + read


def _padded(numbers: list[int], count: int) -> list[int]:
    return numbers + [0] * (count - len(numbers))


def _described(edges: Compressed, targets: Tensor) -> Tensor:
    """Row in the block, position of the target and id of each edge, int32 [3, E_b]."""
    source = torch.repeat_interleave(edges.rows, edges.ptr.diff())
    target = torch.searchsorted(targets, edges.columns.long())
    return torch.stack([source.int(), target.int(), edges.edges])
