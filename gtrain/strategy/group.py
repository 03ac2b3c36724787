"""The ranks of a job as one group, over connections of its own and never as torch's default group.

Lightning broadcasts on the default group after every training batch, and torchmetrics and Lightning's loggers use it
unasked. Without one, all traffic of a job goes through here, is counted here, and a group can be formed anew.

The connections (:mod:`gtrain.strategy.mesh`) are authenticated, between machines encrypted, and nothing that comes from
them is unpickled. Sums are taken in the order of the ranks, so every rank has the same result to the last digit, and so
has every run.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gtrain.errors import PeerLostError
from gtrain.launch import slot as slots
from gtrain.launch.environment import AgentEnvironment
from gtrain.strategy import plain_data
from gtrain.strategy.counters import Counters
from gtrain.strategy.membership import Forming, Membership
from gtrain.strategy.mesh import Mesh, Work

_OPS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda total, part: total.add_(part),
    "mean": lambda total, part: total.add_(part),
    "avg": lambda total, part: total.add_(part),
    "max": lambda total, part: torch.maximum(total, part, out=total),
    "min": lambda total, part: torch.minimum(total, part, out=total),
}
_SMALL = 1024
_SMALL_SUM = 32 << 10
"""Bytes up to which a sum goes to all ranks at once; above, each rank sums a part and sends that to the others."""
_COLLECTIVE = 1 << 62
"""What is added to the number of a collective, to tell it from the tags of messages between two ranks."""
_OUTSIDE = -1
_groups_formed = 0


class Transfer:
    """A message on its way. Keeps its tensor alive until :meth:`wait` returns."""

    def __init__(self, group: Group, name: str, work: Work, tensor: Tensor, target: Tensor | None = None) -> None:
        self._group, self._name, self._work, self._tensor, self._target = group, name, work, tensor, target
        self._posted = time.perf_counter()

    def wait(self) -> Tensor:
        """Block until the message has left (a send) or arrived (a receive) and return its tensor.

        Raises:
            PeerLostError: the other rank is gone or did not answer in time.
        """
        began = time.perf_counter()
        with self._group.counters.span(self._name):
            self._group.mesh.wait(self._work)
        self._group.counters.waited(self._posted, began)
        if self._target is not None:  # staged through the host's memory
            return self._target.copy_(self._tensor)
        return self._tensor


class Group:
    """All workers of a job; a group of one does nothing.

    Args:
        rank: this process.
        size: number of ranks.
        mesh: the connections with the others, or None for a group of one.
        counters: where traffic is counted; None: a count of the group's own.
        forming: how the group is formed anew; None: it cannot be.
        incarnation: how often members came and went before; -1 outside of the group.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        mesh: Mesh | None = None,
        counters: Counters | None = None,
        forming: Forming | None = None,
        incarnation: int = 0,
    ) -> None:
        self.rank, self.size = rank, size
        self.counters = counters or Counters()
        self.incarnation = incarnation
        self._mesh, self._forming = mesh, forming
        self._tag = self._collectives = 0

    # ------------------------------------------------------------------------------------------ coming and going

    def reform(self) -> None:
        """Form the group anew, after a communication failed because a member died or left.

        Every member that is left calls it; so does a rank that was restarted, which comes in by it. It waits until
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
        self.incarnation, self._mesh = place.incarnation, place.mesh
        self.rank, self.size = place.members.index(self._forming.rank), len(place.members)
        self._tag = self._collectives = 0

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
        staged = tensor.detach().cpu()
        return Transfer(self, f"wait: send to rank {to}", self.mesh.send(_bytes(staged), to, tag), staged)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Transfer:
        """Post a receive into a contiguous tensor."""
        self.counters.received(tensor.nbytes)
        name = f"wait: receive from rank {source}"
        if tensor.device.type == "cpu":
            return Transfer(self, name, self.mesh.receive(_bytes(tensor), source, tag), tensor)
        staged = torch.empty_like(tensor, device="cpu")
        return Transfer(self, name, self.mesh.receive(_bytes(staged), source, tag), staged, tensor)

    # ------------------------------------------------------------------------------------------ collectives

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce ``tensor`` over the ranks in place and return it. ``op``: sum, mean, max or min."""
        if self.size == 1:
            return tensor
        self.counters.sent(tensor.nbytes)
        self.counters.received(tensor.nbytes)
        host = tensor.detach().cpu().contiguous()
        with self._together("all-reduce"):
            self._reduce(host.view(-1), _OPS[op])
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
        """Every rank's value, in rank order: plain data, see :mod:`gtrain.strategy.plain_data`.

        Raises:
            ConfigError: it is something else.
        """
        if self.size == 1:
            return [value]
        payload = torch.frombuffer(bytearray(plain_data.pack(value)), dtype=torch.uint8)
        return [plain_data.unpack(row.numpy().tobytes()) for row in self.all_gather(payload)]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The value of rank ``source``, on every rank: plain data, see :mod:`gtrain.strategy.plain_data`.

        Raises:
            ConfigError: it is something else.
        """
        if self.size == 1:
            return value
        content = plain_data.pack(value) if self.rank == source else b""
        payload = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
        length = self._broadcast(torch.tensor([payload.numel()]), source)
        received = payload if self.rank == source else torch.empty(int(length), dtype=torch.uint8)
        content = self._broadcast(received, source).numpy().tobytes()
        return value if self.rank == source else plain_data.unpack(content)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite ``tensor`` by that of rank ``source``."""
        if self.size == 1:
            return tensor
        host = self._broadcast(tensor.detach().cpu().contiguous(), source)
        return tensor.copy_(host) if host.data_ptr() != tensor.data_ptr() else tensor

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            with self._together("barrier"):
                self._exchange([torch.zeros(1, dtype=torch.uint8) for _ in range(self.size)])

    def close(self) -> None:
        """Let go of the connections."""
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.close()

    # ------------------------------------------------------------------------------------------ inside

    @property
    def mesh(self) -> Mesh:
        """The connections with the other ranks.

        Raises:
            PeerLostError: the group is closed, or has one member.
        """
        if self._mesh is None:
            raise PeerLostError("the process group is closed")
        return self._mesh

    def _gather_equal(self, tensor: Tensor) -> list[Tensor]:
        rows = [tensor if rank == self.rank else torch.empty_like(tensor) for rank in range(self.size)]
        if tensor.numel():
            self.counters.sent(tensor.nbytes * (self.size - 1))
            self.counters.received(tensor.nbytes * (self.size - 1))
            with self._together("all-gather"):
                self._exchange(rows)
        return rows

    def _exchange(self, rows: Sequence[Tensor]) -> None:
        """Send this rank's row to all others and receive theirs into theirs; rows are contiguous bytes of the host."""
        tag, own = self._number(), _bytes(rows[self.rank])
        works = [self.mesh.receive(_bytes(rows[rank]), rank, tag) for rank in self._others()]
        works += [self.mesh.send(own, rank, tag) for rank in self._others()]
        for work in works:
            self.mesh.wait(work)

    def _reduce(self, flat: Tensor, add: Callable[[Tensor, Tensor], object]) -> None:
        """Reduce a flat tensor of the host in place, in the order of the ranks."""
        if flat.nbytes <= _SMALL_SUM:
            rows = [flat.clone() if rank == self.rank else torch.empty_like(flat) for rank in range(self.size)]
            self._exchange(rows)
            flat.copy_(_total(rows, add))
            return
        parts, tag, every = flat.tensor_split(self.size), self._number(), self._others()
        mine = parts[self.rank]
        rows = [mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.size)]
        works = [self.mesh.receive(_bytes(rows[rank]), rank, tag) for rank in every]
        works += [self.mesh.send(_bytes(parts[rank]), rank, tag) for rank in every]
        for work in works:
            self.mesh.wait(work)
        total = _total(rows, add)  # the other parts have left, and may be overwritten
        tag = self._number()
        works = [self.mesh.receive(_bytes(parts[rank]), rank, tag) for rank in every]
        works += [self.mesh.send(_bytes(total), rank, tag) for rank in every]
        for work in works:
            self.mesh.wait(work)
        mine.copy_(total)

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Send down a binomial tree: each rank that has the tensor passes it on to one that has not, in each round."""
        if not tensor.numel():
            return tensor
        self.counters.sent(tensor.nbytes * (self.size - 1) if self.rank == source else 0)
        self.counters.received(tensor.nbytes if self.rank != source else 0)
        with self._together("broadcast"):
            tag, view, place = self._number(), _bytes(tensor), (self.rank - source) % self.size
            works, reach = [], 1
            while reach <= place:
                reach *= 2
            if place:
                parent = (place - reach // 2 + source) % self.size
                self.mesh.wait(self.mesh.receive(view, parent, tag))
            while place + reach < self.size:
                works.append(self.mesh.send(view, (place + reach + source) % self.size, tag))
                reach *= 2
            for work in works:
                self.mesh.wait(work)
        return tensor

    def _others(self) -> list[int]:
        """The other ranks, each rank beginning with the one after it."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _number(self) -> int:
        """The tag of the next collective; equal on all ranks."""
        self._collectives += 1
        return _COLLECTIVE + self._collectives

    @contextmanager
    def _together(self, name: str) -> Iterator[None]:
        """Run a collective to its end; all of its time counts as waiting."""
        began = time.perf_counter()
        with self.counters.span(f"wait: {name}"):
            yield
        self.counters.waited(began, began)


def _bytes(tensor: Tensor) -> memoryview:
    """A contiguous tensor's memory."""
    flat = tensor.detach().view(-1)  # which refuses what is not contiguous
    if not flat.numel():
        return memoryview(bytearray())
    array: Any = flat.view(torch.uint8).numpy()  # which is a buffer, for the interpreter if not for the type checker
    return memoryview(array)


def _total(rows: Sequence[Tensor], add: Callable[[Tensor, Tensor], object]) -> Tensor:
    """The reduction of rows, from the first to the last; may overwrite the first."""
    total = rows[0]
    for row in rows[1:]:
        add(total, row)
    return total


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """One flat copy of several tensors of one dtype, for one message instead of many."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten_into(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the pieces of ``flat`` back into the tensors that :func:`flatten` joined."""
    for piece, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True):
        tensor.copy_(piece.view_as(tensor))


def form_group(
    environment: Any,
    rank: int,
    size: int,
    timeout_seconds: float,
    counters: Counters,
    *,
    again: bool = False,
    name: str = "",
    first: int = 0,
) -> Group:
    """Form a group of a job's workers; every rank calls it the same number of times, in the same order.

    Args:
        environment: Lightning's cluster environment of this process.
        rank: this worker's number among them.
        size: number of workers.
        timeout_seconds: how long any one communication may take, and a rank that died may stay away.
        counters: where its traffic is counted.
        again: whether the group can be formed anew by :meth:`Group.reform`, where our agent started the ranks: no other
            launcher starts one of them again. A rank that was is then alone in its group until it calls that.
        name: tells groups of different workers apart, such as those of each machine; empty: of all workers.
        first: which of the job's workers is number 0 of these.
    """
    global _groups_formed
    if size == 1:
        return Group(counters=counters)
    _groups_formed += 1
    forming = Forming(environment, f"{_groups_formed}{name}", rank, size, timeout_seconds, first)
    if not again or not isinstance(environment, AgentEnvironment):
        group = Group(rank, size, forming.connect(0, tuple(range(size))), counters)
    elif slots.restarts():
        group = Group(counters=counters, forming=forming, incarnation=_OUTSIDE)
    else:
        group = Group(rank, size, counters=counters, forming=forming, incarnation=_OUTSIDE)
        group.take(forming.meet(_OUTSIDE))
    # what is under way leaves before the process does
    atexit.register(group.close)
    return group
