"""Collectives of the ranks of several machines, through the lock server; the group survives the loss of machines."""

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
    """Collectives of all ranks that are not lost, for small values: metrics, paths, the model's small parameters.

    The contribution of a rank that was lost afterwards counts. Values are plain data, as a message's fields; objects
    are not pickled.

    Args:
        rank: this process.
        size: number of ranks.
        lock: client of the lock server.
        counters: of traffic.

    Attributes:
        members: the ranks that contributed to the last collective, ascending.
    """

    def __init__(self, rank: int, size: int, lock: LockClient, counters: Counters) -> None:
        super().__init__(rank, size, counters=counters)
        self._lock, self._collectives = lock, 0
        self.members = list(range(size))

    @property
    def share(self) -> tuple[int, int]:
        """This rank's number among the members, and the number of members."""
        return self.members.index(self.rank), len(self.members)

    def reform(self) -> None:
        raise PeerLostError("this group is never formed again: it survives losses")

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        reduced = reduce(_OPS[op], self.all_gather(tensor))
        tensor.copy_(reduced)
        return tensor.div_(self.size) if op in ("mean", "avg") else tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [
            gathered.to(tensor.device)
            for gathered in self._contribute(None, [tensor.detach().cpu().contiguous()]).tensors
        ]

    def all_gather_object(self, value: Any) -> list[Any]:
        return list(self._contribute(_plain(value)).fields["values"])

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        reply = self._contribute(_plain(value) if self.rank == source else None)
        return reply.fields["values"][self._position(reply, source)]

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        contribution = [tensor.detach().cpu().contiguous()] if self.rank == source else []
        reply = self._contribute(None, contribution)
        self._position(reply, source)
        return tensor if self.rank == source else tensor.copy_(reply.tensors[0])

    def barrier(self) -> None:
        self._contribute(None)

    def close(self) -> None:
        self._lock.close()

    def _position(self, reply: Message, source: int) -> int:
        ranks: list[int] = reply.fields["ranks"]
        if source not in ranks:
            raise PeerLostError(f"rank {source}, the source of a broadcast, is lost")
        return ranks.index(source)

    def _contribute(self, value: Any, tensors: list[Tensor] | None = None) -> Message:
        self._collectives += 1
        with self.counters.span("wait: meeting"):
            reply = self._lock.request("meet", {"number": self._collectives, "value": value}, tensors or [])
        self.members = reply.fields["ranks"]
        self.size = len(self.members)
        return reply


def _plain(value: Any) -> Any:
    """Return paths as text, and other values unchanged."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value
