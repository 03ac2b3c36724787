"""Rows of nodes that other ranks own: values towards whoever asked for them, gradients back to the owners."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gtrain.graph.owners import count_by_owner
from gtrain.strategy.group import Group


class RowExchange:
    """Who asked for which rows of whom, of the nodes of one type. All ranks make it, and call it, together.

    Args:
        group: the ranks; rank p owns part p.
        offsets: int64 ``[P + 1]``, global ids; rank p owns ``offsets[p] .. offsets[p+1]-1``.
        ids: global ids that this rank reads, of any shape; its own and repeated ones cost nothing.

    Attributes:
        wanted: int64 ``[h]``, the remote ones among the ids, each once, ascending.
    """

    def __init__(self, group: Group, offsets: Tensor, ids: Tensor) -> None:
        self.group = group
        self._first, end = int(offsets[group.rank]), int(offsets[group.rank + 1])
        self.num_own = end - self._first
        self.wanted = ids[(ids < self._first) | (ids >= end)].unique()
        self._reads = count_by_owner(self.wanted, offsets)
        self._serves = self._ask()

    def local(self, ids: Tensor) -> Tensor:
        """Return the rows of global ids, of any shape, in what :meth:`rows` returns."""
        own = ids - self._first
        remote = torch.searchsorted(self.wanted, ids.contiguous()) + self.num_own
        return torch.where((own >= 0) & (own < self.num_own), own, remote)

    def rows(self, own: Tensor) -> Tensor:
        """Return the own rows with those asked for after them; gradients of these are added to their owners' rows.

        Args:
            own: ``[num_own, ...]``.

        Returns:
            ``[num_own + h, ...]``, the remote rows in the order of :attr:`wanted`.
        """
        if self.group.size == 1:
            return own
        found: Tensor = _Rows.apply(self, own)
        return found

    @property
    def num_served(self) -> int:
        """Rows that this rank sends, all ranks that asked for some added up."""
        return sum(rows.numel() for rows in self._serves)

    def _ask(self) -> list[Tensor]:
        """Tell each owner what is read here; returns, for each rank, the own rows that it reads."""
        counts = self.group.all_gather(torch.tensor(self._reads, dtype=torch.int64))
        asked = [torch.empty(int(reads[self.group.rank]), dtype=torch.int64) for reads in counts]
        self._swap(list(self.wanted.split(self._reads)), asked)
        return [rows - self._first for rows in asked]

    def _swap(self, outgoing: list[Tensor], incoming: list[Tensor]) -> None:
        """Send each other rank a tensor and fill another from it; empty ones do not travel."""
        group, tag = self.group, self.group.next_tag()
        flying = []
        for r in range(1, group.size):
            to, source = (group.rank + r) % group.size, (group.rank - r) % group.size
            if outgoing[to].numel():
                flying.append(group.send(outgoing[to].contiguous(), to, tag))
            if incoming[source].numel():
                flying.append(group.receive(incoming[source], source, tag))
        for transfer in flying:
            transfer.wait()

    def fetch(self, own: Tensor) -> Tensor:
        """The remote rows, ``[h, ...]``."""
        remote = own.new_empty(self.wanted.numel(), *own.shape[1:])
        self._swap([own[rows.to(own.device)] for rows in self._serves], list(remote.split(self._reads)))
        return remote

    def give_back(self, gradient: Tensor) -> Tensor:
        """The gradient of the own rows, from that of :meth:`rows`."""
        total, remote = gradient[: self.num_own].clone(), gradient[self.num_own :].contiguous()
        arrived = [gradient.new_empty(rows.numel(), *gradient.shape[1:]) for rows in self._serves]
        self._swap(list(remote.split(self._reads)), arrived)
        for rows, values in zip(self._serves, arrived, strict=True):
            total.index_add_(0, rows.to(total.device), values)
        return total


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: RowExchange, own: Tensor) -> Tensor:  # type: ignore[override]
        ctx.exchange = exchange
        return torch.cat([own, exchange.fetch(own.detach())])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, ctx.exchange.give_back(gradient)
