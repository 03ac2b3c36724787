"""The workers' collectives through a parameter server, which a restarted worker can repeat."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gtrain.strategy.counters import Counters
from gtrain.strategy.group import Group
from gtrain_ps.server.collectives import collective_id
from gtrain_ps.worker.servers import ParameterServers


class ServedGroup(Group):
    """Collectives of the workers through their first server, numbered by the step that they belong to.

    A restarted worker repeats the collectives since the last step: the server has the results of complete ones, and the
    others wait for it in the incomplete one. Until it has restored its step it is ``alone``: the collectives of
    Lightning's setup were completed by the process before it.

    Args:
        rank: this worker's.
        size: K.
        servers: the servers.
        counters: count the time of waiting.

    Attributes:
        alone: whether collectives take this worker's values only.
        repeating: whether this worker was restarted and may repeat collectives that were completed.
    """

    takes_devices = False

    def __init__(self, rank: int, size: int, servers: ParameterServers, counters: Counters) -> None:
        super().__init__(rank, size, counters=counters)
        self.alone = self.repeating = False
        self._servers = servers
        self._step, self._index = 0, 0

    @property
    def index(self) -> int:
        """Collectives since the last step."""
        return self._index if self._step == self._servers.step else 0

    def rejoin(self, index: int) -> None:
        """Take part in the collectives again, from this one of the current step."""
        self.alone = False
        self._step, self._index = self._servers.step, index

    def passed(self, count: int = 1) -> bool:
        if self.alone or not self.repeating:
            return False
        self.repeating = self._servers.passed() >= collective_id(self._servers.step, self.index) + count
        return self.repeating

    # ------------------------------------------------------------------------------------------ collectives

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        tensors = self._gather(tensor)
        total = tensors[0].clone()
        for other in tensors[1:]:
            if op in ("max", "min"):
                total = torch.maximum(total, other) if op == "max" else torch.minimum(total, other)
            else:
                total += other
        tensor.copy_(total)
        return tensor.div_(self.size) if op in ("mean", "avg") else tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [other.to(tensor.device, copy=True) for other in self._gather(tensor)]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return value if self.alone else super().broadcast_object(value, source)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor if self.alone else tensor.copy_(self._broadcast(tensor, source))

    def barrier(self) -> None:
        self._gather(torch.empty(0))

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return self._gather(tensor if self.rank == source else tensor.new_empty(0))[source]

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every worker's tensor, in rank order, on the host."""
        tensor = tensor.detach().to("cpu", copy=True).contiguous()
        if self.alone:
            return [tensor] * self.size
        collective = collective_id(self._servers.step, self.index)
        self._step, self._index = self._servers.step, self.index + 1
        with self.counters.span("wait: the other workers"):
            return list(self._servers.gather(collective, tensor))
