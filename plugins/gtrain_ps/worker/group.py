"""The workers as a group that meets at a server, and that a member can come back into."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gtrain.strategy.counters import Counters
from gtrain.strategy.group import Group
from gtrain_ps.server.collectives import collective_id
from gtrain_ps.worker.servers import ParameterServers


class ServedGroup(Group):
    """Collectives of the workers through their first server, numbered by the step that they are in.

    A worker that was restarted goes through the collectives since the last step once more: what the others
    answered then is at the server, or they wait for it. Until it has found its step it is ``alone``: what Lightning
    asks while it sets up was settled in a former life.

    Args:
        rank: this worker.
        size: K.
        servers: the servers.
        counters: where waiting is counted.

    Attributes:
        alone: whether the others are not asked.
        again: whether this process is a later life of its worker, and may do again what a former one did.
    """

    def __init__(self, rank: int, size: int, servers: ParameterServers, counters: Counters) -> None:
        super().__init__(rank, size, counters=counters)
        self.alone = self.again = False
        self._servers = servers
        self._step, self._index = 0, 0

    @property
    def index(self) -> int:
        """Collectives since the last step."""
        return self._index if self._step == self._servers.step else 0

    def enter(self, index: int) -> None:
        """Be with the others again, at this collective of the servers' step."""
        self.alone = False
        self._step, self._index = self._servers.step, index

    def passed(self, count: int = 1) -> bool:
        if self.alone or not self.again:
            return False
        self.again = self._servers.passed() >= collective_id(self._servers.step, self.index) + count
        return self.again

    # ------------------------------------------------------------------------------------------ collectives

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        rows = self._gather(tensor)
        total = rows[0].clone()
        for row in rows[1:]:
            if op in ("max", "min"):
                total = torch.maximum(total, row) if op == "max" else torch.minimum(total, row)
            else:
                total += row
        tensor.copy_(total)
        return tensor.div_(self.size) if op in ("mean", "avg") else tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [row.clone() for row in self._gather(tensor)]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return value if self.alone else super().broadcast_object(value, source)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor if self.alone else tensor.copy_(self._broadcast(tensor, source))

    def barrier(self) -> None:
        self._gather(torch.empty(0))

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return self._gather(tensor if self.rank == source else tensor.new_empty(0))[source]

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """Every worker's tensor, in the order of ranks."""
        given = tensor.detach().clone().contiguous()
        if self.alone:
            return [given] * self.size
        where = collective_id(self._servers.step, self.index)
        self._step, self._index = self._servers.step, self.index + 1
        with self.counters.span("wait: the other workers"):
            return list(self._servers.gather(where, given))
