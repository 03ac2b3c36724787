"""Rows of nodes that other ranks own: values from the owners to the readers, gradients back to the owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gtrain.graph.owners import count_by_owner
from gtrain.strategy.group import Group


class RowExchange:
    """The rows that each rank reads from each other rank, of the nodes of one type.

    All ranks create it, and call its methods, together.

    Args:
        group: the ranks; rank p owns part p.
        offsets: int64 ``[P + 1]``, global ids; rank p owns ``offsets[p] .. offsets[p+1]-1``.
        ids: global ids that this rank reads, of any shape; repeated ones, and those that it owns, are not sent.

    Attributes:
        remote_ids: int64 ``[h]``, the distinct ids that other ranks own, ascending.
    """

    def __init__(self, group: Group, offsets: Tensor, ids: Tensor) -> None:
        self.group = group
        self._first, end = int(offsets[group.rank]), int(offsets[group.rank + 1])
        self.num_own = end - self._first
        self.remote_ids = ids[(ids < self._first) | (ids >= end)].unique()
        self._reads = count_by_owner(self.remote_ids, offsets)
        self._served_rows = request_rows(group, self.remote_ids.split(self._reads), self._first)

    def local(self, ids: Tensor) -> Tensor:
        """Return the positions of global ids, of any shape, in the result of :meth:`rows`."""
        own = ids - self._first
        # remote_ids is sorted and contains all remote ids, so the position is exact; positions of own ids are not used.
        remote = torch.searchsorted(self.remote_ids, ids.contiguous()) + self.num_own
        return torch.where((own >= 0) & (own < self.num_own), own, remote)

    def rows(self, own: Tensor) -> Tensor:
        """Append the remote rows to the rank's own ones; their gradients are added at the owners.

        Args:
            own: ``[num_own, ...]``.

        Returns:
            ``[num_own + h, ...]``, the remote rows in the order of :attr:`remote_ids`.
        """
        return own if self.group.size == 1 else _Rows.apply(self, own)

    @property
    def num_served(self) -> int:
        """Rows that this rank sends, summed over the ranks that read them."""
        return sum(rows.numel() for rows in self._served_rows)

    def fetch(self, own: Tensor) -> Tensor:
        """Return the remote rows, ``[h, ...]``."""
        remote = own.new_empty(self.remote_ids.numel(), *own.shape[1:])
        _swap(self.group, [own[rows.to(own.device)] for rows in self._served_rows], remote.split(self._reads))
        return remote

    def return_gradients(self, gradient: Tensor) -> Tensor:
        """Send the gradients of remote rows to their owners and return the gradient of the rank's own rows.

        Args:
            gradient: ``[num_own + h, ...]``, of the result of :meth:`rows`.
        """
        total, remote = gradient[: self.num_own].clone(), gradient[self.num_own :].contiguous()
        arrived = [gradient.new_empty(rows.numel(), *gradient.shape[1:]) for rows in self._served_rows]
        _swap(self.group, remote.split(self._reads), arrived)
        for rows, values in zip(self._served_rows, arrived, strict=True):
            total.index_add_(0, rows.to(total.device), values)
        return total


def request_rows(group: Group, requests: Sequence[Tensor], first: int) -> list[Tensor]:
    """Tell each rank which of its rows this rank reads.

    Args:
        group: the ranks; all call this together.
        requests: for each rank, the global ids that this rank reads from it, int64; none from itself.
        first: the first global id that this rank owns.

    Returns:
        For each rank, the rows of this rank that it reads, int64.
    """
    counts = group.all_gather(torch.tensor([len(ids) for ids in requests], dtype=torch.int64))
    received = [torch.empty(int(of_rank[group.rank]), dtype=torch.int64) for of_rank in counts]
    _swap(group, requests, received)
    return [ids - first for ids in received]


def _swap(group: Group, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
    """Send a tensor to each other rank and receive one from it; empty ones are not sent."""
    tag, transfers = group.next_tag(), []
    for r in range(1, group.size):
        to, source = (group.rank + r) % group.size, (group.rank - r) % group.size
        if outgoing[to].numel():
            # Both sides know the sizes from request_rows, so neither sends an empty message.
            transfers.append(group.send(outgoing[to].contiguous(), to, tag))
        if incoming[source].numel():
            transfers.append(group.receive(incoming[source], source, tag))
    for transfer in transfers:
        transfer.wait()


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: RowExchange, own: Tensor) -> Tensor:  # type: ignore[override]
        ctx.exchange = exchange
        return torch.cat([own, exchange.fetch(own.detach())])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, ctx.exchange.return_gradients(gradient)
