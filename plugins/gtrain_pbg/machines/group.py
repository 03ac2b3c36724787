"""The ranks of several machines as a group that outlives each of them: they meet at the lock server."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from gtrain.errors import PeerLostError
from gtrain.strategy.counters import Counters
from gtrain.strategy.group import Group
from gtrain.wire import Message
from gtrain_pbg.machines.lock_client import LockClient

_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class MachinesGroup(Group):
    """Collectives of all ranks that are not lost. They are for little: metrics, paths, the model's small parameters.

    What a rank brought before it was lost counts. Values are what a message's fields may be; no object is pickled.

    Args:
        rank: this process.
        size: number of ranks.
        lock: where they meet.
        counters: where traffic is counted.

    Attributes:
        members: the ranks that came to the last meeting, ascending.
    """

    def __init__(self, rank: int, size: int, lock: LockClient, counters: Counters) -> None:
        super().__init__(rank, size, counters=counters)
        self._lock, self._meetings = lock, 0
        self.members = list(range(size))

    @property
    def share(self) -> tuple[int, int]:
        """This rank's number among the members, and how many there are: who is lost has no share of what is dealt."""
        return self.members.index(self.rank), len(self.members)

    def reform(self) -> None:
        raise PeerLostError("this group needs no forming anew")

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        reduced = reduce(_OPS[op], self.all_gather(tensor))
        tensor.copy_(reduced)
        return tensor.div_(self.size) if op in ("mean", "avg") else tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [
            gathered.to(tensor.device) for gathered in self._meet(None, [tensor.detach().cpu().contiguous()]).tensors
        ]

    def all_gather_object(self, value: Any) -> list[Any]:
        return list(self._meet(_plain(value)).fields["values"])

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        answer = self._meet(_plain(value) if self.rank == source else None)
        return answer.fields["values"][self._of(answer, source)]

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        brought = [tensor.detach().cpu().contiguous()] if self.rank == source else []
        answer = self._meet(None, brought)
        self._of(answer, source)
        return tensor if self.rank == source else tensor.copy_(answer.tensors[0])

    def barrier(self) -> None:
        self._meet(None)

    def close(self) -> None:
        self._lock.close()

    def _of(self, answer: Message, source: int) -> int:
        ranks: list[int] = answer.fields["ranks"]
        if source not in ranks:
            raise PeerLostError(f"rank {source}, which had something to tell, is lost")
        return ranks.index(source)

    def _meet(self, value: Any, tensors: list[Tensor] | None = None) -> Message:
        self._meetings += 1
        with self.counters.span("wait: meeting"):
            answer = self._lock.request("meet", {"number": self._meetings, "value": value}, tensors or [])
        self.members = answer.fields["ranks"]
        self.size = len(self.members)
        return answer


def _plain(value: Any) -> Any:
    """Paths as text: a message has no such type."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value
