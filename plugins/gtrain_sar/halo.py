"""Exchange of halo rows between ranks: values towards the readers, gradients back to the owners."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gtrain.graph.shard import GraphShard
from gtrain.strategy.group import Group, Transfer


class InFlight:
    """The rows of one block on their way: what this rank sends in the round and what it receives."""

    def __init__(self, send: Transfer | None, receive: Transfer | None, block: Tensor) -> None:
        self._send, self._receive, self._block = send, receive, block

    def wait(self) -> Tensor:
        """The received rows, once both directions are complete."""
        for transfer in (self._receive, self._send):
            if transfer is not None:
                transfer.wait()
        self._send = self._receive = None
        return self._block


class HaloExchange:
    """Who needs which rows of whom, for one shard on every rank.

    In round r (1 .. P-1) rank p reads block r from rank p-r and is read by rank p+r, so every rank sends and receives
    once a round. All ranks must call the same methods in the same order.

    Args:
        group: the ranks.
        shard: this rank's part.
    """

    def __init__(self, group: Group, shard: GraphShard) -> None:
        self.group, self.shard = group, shard
        self.rounds = group.size
        self.reads = [len(halo) for halo in shard.halo]
        self.send_rows = self._ask()

    def _ask(self) -> list[Tensor]:
        """Tell each owner which of its rows this rank reads; returns, per round, the own rows that are read here."""
        counts = self.group.all_gather(torch.tensor(self.reads, dtype=torch.int64))
        first, tag = int(self.shard.offsets[self.shard.part]), self.group.next_tag()
        rows = [torch.empty(0, dtype=torch.int64)]
        for r in range(1, self.rounds):
            reader, owner = self._peers(r)
            wanted = torch.empty(int(counts[reader][r]), dtype=torch.int64)
            InFlight(
                self.group.send(self.shard.halo[r].contiguous(), owner, tag) if self.reads[r] else None,
                self.group.receive(wanted, reader, tag) if len(wanted) else None,
                wanted,
            ).wait()
            rows.append(wanted - first)
        return rows

    def _peers(self, r: int) -> tuple[int, int]:
        """The rank that reads this one in round r, and the one that this rank reads."""
        rank, size = self.group.rank, self.group.size
        return (rank + r) % size, (rank - r) % size

    def to(self, device: torch.device) -> None:
        """Keep the row numbers where the activations are."""
        self.send_rows = [rows.to(device) for rows in self.send_rows]

    # ------------------------------------------------------------------------------------------ values

    def fetch(self, rows: Tensor, r: int, tag: int) -> InFlight:
        """Post round r's exchange of ``rows`` [num_local, ...]; the result is [reads[r], ...]."""
        reader, owner = self._peers(r)
        outgoing = rows.detach().index_select(0, self.send_rows[r])
        block = rows.new_empty((self.reads[r], *rows.shape[1:]))
        return InFlight(
            self.group.send(outgoing, reader, tag) if outgoing.numel() else None,
            self.group.receive(block, owner, tag) if block.numel() else None,
            block,
        )

    def stream(self, tensors: Sequence[Tensor], prefetch: int) -> Iterator[tuple[int, list[Tensor]]]:
        """Blocks of several row tensors in round order, ``(0, the tensors themselves)`` first.

        Args:
            tensors: [num_local, ...] each.
            prefetch: blocks that may be on their way beside the one that was yielded.
        """
        tags = [self.group.next_tag() for _ in tensors]
        flying: deque[list[InFlight]] = deque()
        posted = 0
        for r in range(self.rounds):
            while posted < min(r + prefetch, self.rounds - 1):
                posted += 1
                flying.append([self.fetch(t, posted, tag) for t, tag in zip(tensors, tags, strict=True)])
            if r == 0:
                yield 0, list(tensors)
                continue
            yield r, [transfer.wait() for transfer in flying.popleft()]

    # ------------------------------------------------------------------------------------------ gradients

    def push(self, gradient: Tensor, r: int, tag: int) -> InFlight:
        """Post round r's way back: the gradient of block r [reads[r], ...] to its owner, the reader's to here."""
        reader, owner = self._peers(r)
        gradient = gradient.contiguous()
        arriving = gradient.new_empty((len(self.send_rows[r]), *gradient.shape[1:]))
        return InFlight(
            self.group.send(gradient, owner, tag) if gradient.numel() else None,
            self.group.receive(arriving, reader, tag) if arriving.numel() else None,
            arriving,
        )

    def add(self, arrived: Tensor, r: int, to: Tensor) -> None:
        """Add the gradient that round r brought to the rows it belongs to."""
        add_rows(to, self.send_rows[r], arrived)


def add_rows(to: Tensor, rows: Tensor, values: Tensor) -> None:
    """``to[rows] += values`` in place, with repeated rows added up. Row-wise ``scatter_add_`` has a fast path."""
    to.scatter_add_(0, rows.view(-1, *[1] * (values.dim() - 1)).expand_as(values), values)


class HaloRows(torch.autograd.Function):
    """[num_local, ...] -> [num_local + num_halo, ...]: the own rows and the whole halo after one exchange."""

    @staticmethod
    def forward(ctx, exchange: HaloExchange, rows: Tensor) -> Tensor:  # type: ignore[no-untyped-def,override]
        ctx.exchange, ctx.tag = exchange, exchange.group.next_tag()
        tag = exchange.group.next_tag()
        flying = [exchange.fetch(rows, r, tag) for r in range(1, exchange.rounds)]
        return torch.cat([rows, *(transfer.wait() for transfer in flying)])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[no-untyped-def,override]
        exchange, ptr = ctx.exchange, ctx.exchange.shard.block_ptr.tolist()
        flying = [exchange.push(gradient[ptr[r] : ptr[r + 1]], r, ctx.tag) for r in range(1, exchange.rounds)]
        own = gradient[: ptr[1]].clone()
        for r, transfer in enumerate(flying, start=1):
            exchange.add(transfer.wait(), r, own)
        return None, own


class FetchedBlock(torch.autograd.Function):
    """One block of ``rows`` as a step of the graph: its gradient goes back to the owner."""

    @staticmethod
    def forward(ctx, exchange: HaloExchange, r: int, tag: int, rows: Tensor, block: Tensor) -> Tensor:  # type: ignore[no-untyped-def,override]
        ctx.exchange, ctx.r, ctx.tag, ctx.shape = exchange, r, tag, rows.shape
        return block.view_as(block)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, None, None, Tensor, None]:  # type: ignore[no-untyped-def,override]
        own = gradient.new_zeros(ctx.shape)
        ctx.exchange.add(ctx.exchange.push(gradient, ctx.r, ctx.tag).wait(), ctx.r, own)
        return None, None, None, own, None
