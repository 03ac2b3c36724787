"""The backward pass of attention at the owner of the sources, for the edges by which other ranks read its rows.

Instead of fetching the sources' rows again, the rank that owns the targets (the *reader*) sends rows of its targets,
such as their gradients, to the owner of the sources. The owner computes the gradients of its sources, whose rows it
has, and replies with those of the targets. It knows the reader's edges, which are exchanged once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from gtrain_sar.edges import CompressedEdges, EdgeBlocks, compress
from gtrain_sar.halo import HaloExchange, uncounted
from gtrain_sar.point_to_point import peers, send_backward

MOST_ROWS = 1 << 12  # of a message, which is in memory twice: as it is sent and as it is received
LEAST_ROWS = 1 << 9  # the last messages are small, so that little work remains after their arrival


@dataclass
class ReaderEdges:
    """One message in each direction: the rows that this rank sends as a reader, and the edges it serves as an owner.

    Attributes:
        round: number of the exchange's round, which determines both peers.
        piece: number of the message within its round; each number has a tag of its own.
        targets: int64 [T], ascending, distinct local targets: the rows that this rank sends to the owner of its
            sources.
        edges: the reader's edges, by this rank's local sources; columns are positions among the rows that it sends.
        num_targets: rows that the reader sends.
    """

    round: int
    piece: int
    targets: Tensor
    edges: CompressedEdges
    num_targets: int


@dataclass
class ReaderPlan:
    """All messages of a backward pass in order, and the traffic that they cause.

    Attributes:
        messages: this rank's messages; :func:`piece_sizes` divides the rows of a round.
        pieces: the largest number of messages of a round, over all ranks.
        over_halo: rows that all ranks send, divided by the rows of all halos.
        num_local: rows that this rank owns.
    """

    messages: list[ReaderEdges]
    pieces: int
    over_halo: float
    num_local: int
    _finished: dict[int, list[Tensor]] = field(default_factory=dict)

    def saves_traffic(self, mode: int) -> bool:
        """Whether this plan sends no more rows than the ordinary backward pass."""
        # The ordinary pass sends each halo row's gradient to its owner, and in mode 1 fetches the halo rows again.
        return self.over_halo <= (2 if mode == 1 else 1)

    def rows_by_completion(self, lag: int) -> list[Tensor]:
        """Group the local rows by the step after which their gradients are complete.

        Args:
            lag: the reply to message k has arrived once message k + lag is processed, or at the end.

        Returns:
            Local rows, int64: those complete before message 0 is processed, then after each message, then at the end.
        """
        if lag not in self._finished:
            count = len(self.messages)
            complete = torch.zeros(self.num_local, dtype=torch.int64)
            answered = torch.zeros_like(complete)
            # A row gets gradients as a source (when the last message with its edges is processed) and as a target (when
            # the reply to the last message with its row has arrived): the later of the two.
            for k, message in enumerate(self.messages):
                complete[message.edges.rows.cpu()] = k + 1
                answered[message.targets.cpu()] = min(k + lag, count) + 1
            steps = torch.maximum(complete, answered)
            device = self.messages[0].targets.device if count else steps.device
            order, each = steps.argsort(stable=True).to(device), torch.bincount(steps, minlength=count + 2)
            self._finished[lag] = list(order.split(each.tolist()))
        return self._finished[lag]


def reader_plan(blocks: EdgeBlocks) -> ReaderPlan:
    """Return the plan for a set of edges; the first call exchanges the edges, uncounted."""
    return blocks.derived("reader_plan", lambda: _exchange_edges(blocks))


def piece_sizes(rows: int) -> list[int]:
    """Divide a round's rows into messages: as large as allowed, and smaller and smaller towards the end."""
    counts = []
    while rows > 0:
        counts.append(min(rows, MOST_ROWS, max(LEAST_ROWS, rows // 4)))
        rows -= counts[-1]
    return counts


def _exchange_edges(blocks: EdgeBlocks) -> ReaderPlan:
    """Send each owner the edges that read its rows, and receive the edges that read this rank's rows."""
    exchange, hashed = blocks.exchange, blocks.hashed
    group, tag = exchange.group, exchange.group.next_tag()
    targets = [block.by_target.rows for block in hashed]
    messages: list[ReaderEdges] = []
    with uncounted(group):
        lengths = torch.tensor([[len(b), len(t)] for b, t in zip(hashed, targets, strict=True)], dtype=torch.int64)
        all_lengths = group.all_gather(lengths)  # of each rank [rounds, 2]: edges, targets
        for r in range(1, exchange.rounds):
            num_edges, num_targets = all_lengths[peers(group, r)[0]][r].tolist()
            incoming = targets[r].new_empty((3, num_edges), dtype=torch.int32)
            send_backward(group, r, _description(hashed[r].by_source, targets[r]), incoming, tag).wait()
            source, target, edge = incoming.long()
            reader_edges = exchange.send_rows[r][source], target, edge
            messages += _split(r, targets[r], num_targets, reader_edges, exchange)
        halo = int(group.all_reduce(torch.tensor([sum(exchange.reads)], dtype=torch.int64)))
    sent = torch.stack(all_lengths)[:, 1:, 1]
    pieces = max((len(piece_sizes(rows)) for rows in sent.flatten().tolist()), default=0)
    return ReaderPlan(messages, pieces, int(sent.sum()) / max(halo, 1), exchange.shard.num_local)


def _split(
    r: int, targets: Tensor, num_targets: int, edges: tuple[Tensor, Tensor, Tensor], exchange: HaloExchange
) -> Iterator[ReaderEdges]:
    """Yield one round's messages; ``edges`` are local source, position of the reader's target, and id."""
    source, target, edge_id = edges
    low = first = 0
    sizes = zip_longest(piece_sizes(len(targets)), piece_sizes(num_targets), fillvalue=0)
    for piece, (sent, received) in enumerate(sizes):
        inside = (target >= first) & (target < first + received)
        selected = compress(source[inside], target[inside] - first, edge_id[inside], exchange.shard.num_local)
        yield ReaderEdges(r, piece, targets[low : low + sent], selected, received)
        low, first = low + sent, first + received


def _description(edges: CompressedEdges, targets: Tensor) -> Tensor:
    """Return the row in the block, the position of the target and the id of each edge, int32 [3, E_b]."""
    source = torch.repeat_interleave(edges.rows, edges.ptr.diff())
    target = torch.searchsorted(targets, edges.columns.long())
    return torch.stack([source.int(), target.int(), edges.edges])
