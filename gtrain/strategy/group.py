"""The ranks of a job as one group, built directly on gloo and never as torch's default group.

Lightning broadcasts on the default group after every training batch, and torchmetrics and Lightning's loggers use it
unasked. Without one, all traffic of a job goes through here, is counted here, and a group can be formed anew.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from gtrain.errors import PeerLostError
from gtrain.strategy.counters import Counters

if TYPE_CHECKING:
    from gtrain.strategy.forming import Forming

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_SMALL = 1024


class Transfer:
    """A message on its way. Keeps its tensor alive until :meth:`wait` returns."""

    def __init__(self, group: Group, name: str, work: Any, tensor: Tensor, target: Tensor | None = None) -> None:
        self._group, self._name, self._work, self._tensor, self._target = group, name, work, tensor, target
        self._posted = time.perf_counter()

    def wait(self) -> Tensor:
        """Block until the message has left (a send) or arrived (a receive) and return its tensor.

        Raises:
            PeerLostError: the other rank is gone or did not answer in time.
        """
        began = time.perf_counter()
        with self._group.counters.span(self._name):
            self._group.guard(self._work.wait)
        self._group.counters.waited(self._posted, began)
        if self._target is not None:  # staged through the host's memory
            return self._target.copy_(self._tensor)
        return self._tensor


@dataclass(frozen=True)
class Membership:
    """A process's place in one incarnation of a group that is formed again and again.

    Attributes:
        incarnation: its number; a later group has a larger one.
        members: the job's ranks that belong to it, ascending.
        backend: gloo's group, or None for a group of one.
    """

    incarnation: int
    members: tuple[int, ...]
    backend: Any


class Group:
    """All workers of a job; a group of one does nothing.

    Args:
        rank: this process.
        size: number of ranks.
        backend: gloo's group, or None for a group of one.
        counters: where traffic is counted; None: a count of the group's own.
        forming: how the group is formed anew; None: it cannot be.
        incarnation: how often members came and went before; -1 outside of the group.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        backend: Any = None,
        counters: Counters | None = None,
        forming: Forming | None = None,
        incarnation: int = 0,
    ) -> None:
        self.rank, self.size = rank, size
        self.counters = counters or Counters()
        self.incarnation = incarnation
        self._backend, self._forming = backend, forming
        self._tag = 0

    # ------------------------------------------------------------------------------------------ coming and going

    def reform(self) -> None:
        """Form the group anew, after a communication failed because a member died or left.

        Every member that is left calls it; so does a rank that was started again, which comes in by it. It waits until
        all are here. What was under way in the group before is lost: whether one rank had finished a communication that
        failed for another is for the caller to settle, by sending again what all agree on.

        Raises:
            PeerLostError: nobody came back in time.
        """
        if self._forming is None:
            raise PeerLostError("this group cannot be formed anew")
        self.close()
        if self.incarnation < 0:
            self._forming.come_back()
        self.take(self._forming.meet(self.incarnation))

    def leave(self) -> None:
        """Be no member any more; the others form the group anew without this rank, which is alone from now on."""
        self.close()
        if self._forming is not None:
            self._forming.leave()
        self.rank, self.size, self._forming = 0, 1, None

    def take(self, place: Membership) -> None:
        """Be a member of this incarnation."""
        assert self._forming is not None
        self.incarnation, self._backend = place.incarnation, place.backend
        self.rank, self.size = place.members.index(self._forming.rank), len(place.members)
        self._tag = 0

    def passed(self, count: int = 1) -> bool:
        """Whether the next ``count`` collectives were completed by a former life of this process.

        What it did before the last of them is done then, and seen by others; it must not be done again.
        """
        return False

    # ------------------------------------------------------------------------------------------ point to point

    def next_tag(self) -> int:
        """A number for the next exchange; equal on all ranks as long as they run the same program."""
        self._tag = (self._tag + 1) % (1 << 30)
        return self._tag

    def send(self, tensor: Tensor, to: int, tag: int) -> Transfer:
        """Post a send of a contiguous tensor; it must not change before the transfer is waited for."""
        self.counters.sent(tensor.nbytes)
        staged = tensor.cpu()
        return Transfer(self, f"wait: send to rank {to}", self.guard(self._pg.send, [staged], to, tag), staged)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Transfer:
        """Post a receive into a contiguous tensor."""
        self.counters.received(tensor.nbytes)
        name = f"wait: receive from rank {source}"
        if tensor.device.type == "cpu":
            return Transfer(self, name, self.guard(self._pg.recv, [tensor], source, tag), tensor)
        staged = torch.empty_like(tensor, device="cpu")
        return Transfer(self, name, self.guard(self._pg.recv, [staged], source, tag), staged, tensor)

    # ------------------------------------------------------------------------------------------ collectives

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce ``tensor`` over the ranks in place and return it. ``op``: sum, mean, max or min."""
        if self.size == 1:
            return tensor
        self.counters.sent(tensor.nbytes)
        self.counters.received(tensor.nbytes)
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]  # type: ignore[assignment]
        host = tensor.detach().cpu().contiguous()
        self._together("all-reduce", lambda: self._pg.allreduce([host], options))
        if host.data_ptr() != tensor.data_ptr():
            tensor.copy_(host)
        return tensor.div_(self.size) if op in ("mean", "avg") else tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order. Shapes may differ in any dimension; dtype and rank of the shape may not.

        Shape and content travel in one message where they fit into :data:`_SMALL` bytes on every rank (metrics do).
        """
        if self.size == 1:
            return [tensor]
        host = tensor.detach().cpu().contiguous()
        content = host.view(-1).view(torch.uint8) if host.numel() else torch.empty(0, dtype=torch.uint8)
        header = torch.tensor(host.shape, dtype=torch.int64).view(torch.uint8)
        first = torch.zeros(len(header) + _SMALL, dtype=torch.uint8)
        first[: len(header)] = header
        first[len(header) : len(header) + len(content)] = content[:_SMALL]
        rows = self._gather_equal(first)
        shapes = [torch.Size(row[: len(header)].clone().view(torch.int64).tolist()) for row in rows]
        sizes = [shape.numel() * host.element_size() for shape in shapes]
        rows = [row[len(header) :] for row in rows]
        if max(sizes) > _SMALL:
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: len(content)] = content
            rows = self._gather_equal(padded)
        return [
            row[:size].clone().view(host.dtype).view(shape).to(tensor.device)
            for row, size, shape in zip(rows, sizes, shapes, strict=True)
        ]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's Python object, in rank order."""
        if self.size == 1:
            return [value]
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        return [pickle.loads(row.numpy().tobytes()) for row in self.all_gather(payload)]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The object of rank ``source``, on every rank."""
        if self.size == 1:
            return value
        payload = torch.frombuffer(bytearray(pickle.dumps(value if self.rank == source else None)), dtype=torch.uint8)
        length = self._broadcast(torch.tensor([payload.numel()]), source)
        received = payload if self.rank == source else torch.empty(int(length), dtype=torch.uint8)
        return pickle.loads(self._broadcast(received, source).numpy().tobytes())

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite ``tensor`` by that of rank ``source``."""
        if self.size == 1:
            return tensor
        host = self._broadcast(tensor.detach().cpu().contiguous(), source)
        return tensor.copy_(host) if host.data_ptr() != tensor.data_ptr() else tensor

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            self._together("barrier", lambda: self._pg.barrier())

    def close(self) -> None:
        """Let go of the connections; the backend's threads end here."""
        self._backend = None

    # ------------------------------------------------------------------------------------------ inside

    @property
    def _pg(self) -> Any:
        if self._backend is None:
            raise PeerLostError("the process group is closed")
        return self._backend

    def _gather_equal(self, tensor: Tensor) -> list[Tensor]:
        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        if tensor.numel():
            self.counters.sent(tensor.nbytes * (self.size - 1))
            self.counters.received(tensor.nbytes * (self.size - 1))
            self._together("all-gather", lambda: self._pg.allgather([rows], [tensor]))
        return rows

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = source
        if tensor.numel():
            self.counters.sent(tensor.nbytes * (self.size - 1) if self.rank == source else 0)
            self.counters.received(tensor.nbytes if self.rank != source else 0)
            self._together("broadcast", lambda: self._pg.broadcast([tensor], options))
        return tensor

    def _together(self, name: str, start: Callable[[], Any]) -> None:
        """Run a collective to its end; all of its time counts as waiting."""
        began = time.perf_counter()
        with self.counters.span(f"wait: {name}"):
            self.guard(lambda: start().wait())
        self.counters.waited(began, began)

    @staticmethod
    def guard(call: Any, *args: Any) -> Any:
        """Make a call of gloo's; its RuntimeError means that a peer is gone."""
        try:
            return call(*args)
        except RuntimeError as error:
            raise PeerLostError(f"a peer is gone or silent: {error}") from error


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """One flat copy of several tensors of one dtype, for one message instead of many."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten_into(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the pieces of ``flat`` back into the tensors that :func:`flatten` joined."""
    for piece, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True):
        tensor.copy_(piece.view_as(tensor))
