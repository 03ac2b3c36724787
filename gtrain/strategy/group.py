"""The process group of a job's ranks: collectives and point-to-point messages over gtrain's own connections.

gtrain never creates torch's default group: Lightning broadcasts on it after every training batch, and torchmetrics and
Lightning's loggers use it implicitly. Without it all traffic of a job passes through this module and is counted here,
and a group can be formed again after a rank died.

The connections (:mod:`gtrain.strategy.mesh`) are authenticated and between machines encrypted, and nothing received is
unpickled. Sums are taken in rank order, so all ranks and all runs get bit-identical results.
"""

from __future__ import annotations

import atexit
import functools
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
from gtrain.strategy.device_group import DeviceGroup
from gtrain.strategy.membership import GroupFormation
from gtrain.strategy.mesh import Mesh, PendingMessage

_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda total, part: total.add_(part),
    "mean": lambda total, part: total.add_(part),
    "avg": lambda total, part: total.add_(part),
    "max": lambda total, part: torch.maximum(total, part, out=total),
    "min": lambda total, part: torch.minimum(total, part, out=total),
}
_SMALL = 1024
"""Up to this many bytes of content travel in the same message as the shape, see :meth:`Group.all_gather`."""
_SMALL_SUM = 32 << 10
"""Up to this many bytes ranks exchange whole tensors to sum them; above, each rank sums a part and sends it around."""
_COLLECTIVE = 1 << 62
"""Added to the number of a collective, so that its tag differs from those of point-to-point messages."""
_OUTSIDE = -1
"""The incarnation of a group that this rank has not joined yet."""
_groups_formed = 0


class Transfer:
    """A point-to-point message in transfer. Keeps its tensor alive until :meth:`wait` returns."""

    def __init__(
        self, group: Group, name: str, work: PendingMessage, tensor: Tensor, target: Tensor | None = None
    ) -> None:
        self._group, self._name, self._work, self._tensor, self._target = group, name, work, tensor, target
        self._posted = time.perf_counter()

    def wait(self) -> Tensor:
        """Block until the message was sent or received, and return its tensor.

        Raises:
            PeerLostError: the other rank is gone or did not answer in time.
        """
        wait_start = time.perf_counter()
        with self._group.counters.span(self._name):
            self._group.mesh.wait(self._work)
        self._group.counters.waited(self._posted, wait_start)
        if self._target is not None:  # staged through the host's memory
            return self._target.copy_(self._tensor)
        return self._tensor


class Group:
    """All workers of a job; a group of one does nothing.

    Args:
        rank: this process.
        size: number of ranks.
        mesh: the connections to the other ranks; None for a group of one.
        counters: counts the traffic; None creates new counters.
        formation: forms the group again after a rank died; None if that is not possible.
        incarnation: number of changes of membership before; -1 outside of the group.
    """

    takes_devices = True
    """Whether its ranks' GPUs may be connected. Otherwise a rank can be restarted alone and repeats collectives."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        mesh: Mesh | None = None,
        counters: Counters | None = None,
        formation: GroupFormation | None = None,
        incarnation: int = 0,
    ) -> None:
        self.rank, self.size = rank, size
        self.counters = counters or Counters()
        self.incarnation = incarnation
        self._mesh, self._formation = mesh, formation
        self._tag = self._collectives = 0
        self.devices: DeviceGroup | None = None  # connections between GPUs, where there are any

    # ------------------------------------------------------------------------------------------ membership

    def reform(self) -> None:
        """Form the group again after a communication failed because a member died or left.

        All remaining members call it, and so does a restarted rank, which joins the group by it. It waits until all are
        present. Messages in transfer are lost: one rank may have completed a communication that failed for another, so
        callers must agree on what to repeat.

        Raises:
            PeerLostError: a rank did not return in time.
        """
        if self._formation is None:
            raise PeerLostError("this group cannot be formed again")
        self.close()
        if self.incarnation < 0:
            self._formation.announce("back")
        self.join(*self._formation.meet(self.incarnation))

    def leave(self) -> None:
        """Leave the group, which the others form again without this rank; this rank is alone from then on."""
        self.close()
        if self._formation is not None:
            self._formation.announce("left")
        self.rank, self.size, self._formation = 0, 1, None

    def join(self, incarnation: int, members: tuple[int, ...], mesh: Mesh | None) -> None:
        """Become a member of an incarnation of the group."""
        assert self._formation is not None
        self.incarnation, self._mesh, self.devices = incarnation, mesh, None
        self.rank, self.size = members.index(self._formation.rank), len(members)
        self._tag = self._collectives = 0

    def passed(self, count: int = 1) -> bool:
        """Whether this process completed the next ``count`` collectives before it was restarted.

        Then others have seen the effects of everything before the last of them, which must not be repeated.
        """
        return False

    # ------------------------------------------------------------------------------------------ point to point

    def next_tag(self) -> int:
        """Return the tag of the next exchange; equal on all ranks that make the same calls."""
        self._tag = (self._tag + 1) % (1 << 30)
        return self._tag

    def send(self, tensor: Tensor, to: int, tag: int) -> Transfer:
        """Post a send of a contiguous tensor, which must not change before :meth:`Transfer.wait` returns."""
        self.counters.sent(tensor.nbytes)
        # On the CPU this is the same memory; on a GPU it is a copy, which the transfer keeps alive.
        staged = _on_host(tensor.detach())
        start = time.perf_counter()
        work = self.mesh.send(_bytes(staged), to, tag)
        self.counters.handed_over(start)
        return Transfer(self, f"wait: send to rank {to}", work, staged)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Transfer:
        """Post a receive into a contiguous tensor."""
        self.counters.received(tensor.nbytes)
        name = f"wait: receive from rank {source}"
        if tensor.device.type == "cpu":
            return Transfer(self, name, self.mesh.receive(_bytes(tensor), source, tag), tensor)
        staged = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return Transfer(self, name, self.mesh.receive(_bytes(staged), source, tag), staged, tensor)

    def watch(self, rank: int, done_within: Callable[[float], bool]) -> None:
        """Wait for something that another rank does by other connections than the group's.

        The terminal names the rank that is waited for, as in a wait for a message of the group.

        Args:
            rank: the rank.
            done_within: waits for at most the given seconds; returns whether it is done.

        Raises:
            SilentRankError: the rank has sent no heartbeat for the group's time limit.
            PeerLostError: it is gone.
        """
        self.mesh.watch(rank, done_within)

    # ------------------------------------------------------------------------------------------ collectives

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce ``tensor`` over the ranks in place and return it. ``op``: sum, mean, max or min."""
        if self.size == 1:
            return tensor
        self.counters.sent(tensor.nbytes)
        self.counters.received(tensor.nbytes)
        if self.devices is not None and self.devices.takes(tensor) and tensor.is_contiguous():
            with self._collective("all-reduce"):
                return self.devices.all_reduce(tensor.detach(), op)
        host = _on_host(tensor.detach()).contiguous()
        with self._collective("all-reduce"):
            self._reduce(host.view(-1), _OPS[op])
        # On the CPU a contiguous tensor was reduced in place.
        if host.data_ptr() != tensor.data_ptr():
            tensor.copy_(host, non_blocking=True)
        return tensor.div_(self.size) if op in ("mean", "avg") else tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor in rank order. Sizes may differ; dtype and number of dimensions may not.

        Shape and content travel in one message if they take up to :data:`_SMALL` bytes on every rank, as metrics do.
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
        # clone(): the header's bytes may not be aligned for int64.
        shapes = [torch.Size(row[: len(header)].clone().view(torch.int64).tolist()) for row in rows]
        sizes = [shape.numel() * host.element_size() for shape in shapes]
        rows = [row[len(header) :] for row in rows]
        # All ranks know all sizes, so they agree whether a second message follows.
        if max(sizes) > _SMALL:
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: len(content)] = content
            rows = self._gather_equal(padded)
        return [
            row[:size].clone().view(host.dtype).view(shape).to(tensor.device)
            for row, size, shape in zip(rows, sizes, shapes, strict=True)
        ]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value in rank order; plain data only, see :mod:`gtrain.strategy.plain_data`.

        Raises:
            ConfigError: the value is not plain data.
        """
        if self.size == 1:
            return [value]
        payload = torch.frombuffer(bytearray(plain_data.pack(value)), dtype=torch.uint8)
        return [plain_data.unpack(row.numpy().tobytes()) for row in self.all_gather(payload)]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return the value of rank ``source`` on every rank; plain data only, see :mod:`gtrain.strategy.plain_data`.

        Raises:
            ConfigError: the value is not plain data.
        """
        if self.size == 1:
            return value
        content = plain_data.pack(value) if self.rank == source else b""
        # Only the length matters on other ranks; an empty buffer is refused.
        payload = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
        length = self._broadcast(torch.tensor([payload.numel()]), source)
        received = payload if self.rank == source else torch.empty(int(length), dtype=torch.uint8)
        content = self._broadcast(received, source).numpy().tobytes()
        return value if self.rank == source else plain_data.unpack(content)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite ``tensor`` with that of rank ``source``, and return it."""
        if self.size == 1:
            return tensor
        host = self._broadcast(tensor.detach().cpu().contiguous(), source)
        return tensor.copy_(host) if host.data_ptr() != tensor.data_ptr() else tensor

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        if self.size > 1:
            with self._collective("barrier"):
                self._exchange(torch.zeros(1, dtype=torch.uint8))

    def close(self) -> None:
        """Close the connections."""
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.close()

    # ------------------------------------------------------------------------------------------ algorithms

    @property
    def mesh(self) -> Mesh:
        """The connections to the other ranks.

        Raises:
            PeerLostError: the group is closed, or has a single member.
        """
        if self._mesh is None:
            raise PeerLostError("the process group is closed")
        return self._mesh

    def _gather_equal(self, tensor: Tensor) -> list[Tensor]:
        if not tensor.numel():
            return [tensor] * self.size
        self.counters.sent(tensor.nbytes * (self.size - 1))
        self.counters.received(tensor.nbytes * (self.size - 1))
        with self._collective("all-gather"):
            return self._exchange(tensor)

    def _exchange(self, own: Tensor) -> list[Tensor]:
        """Return the contiguous host tensors of all ranks, which have one shape; ``own`` is this rank's."""
        rows = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
        self._swap([own] * self.size, rows)
        return rows

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send each other rank its contiguous host tensor, and receive its tensor; this rank's entries are ignored."""
        self._collectives += 1
        # Each rank starts with its successor, so that not all ranks send to rank 0 first.
        tag, others = _COLLECTIVE + self._collectives, [(self.rank + step) % self.size for step in range(1, self.size)]
        # Receives first: a large message is sent only after its receiver has posted a buffer.
        works = [self.mesh.receive(_bytes(incoming[rank]), rank, tag) for rank in others]
        works += [self.mesh.send(_bytes(outgoing[rank]), rank, tag) for rank in others]
        for work in works:
            self.mesh.wait(work)

    def _reduce(self, flat: Tensor, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Reduce a flat host tensor in place, in rank order."""
        if flat.nbytes <= _SMALL_SUM:
            flat.copy_(functools.reduce(add, self._exchange(flat)))
            return
        # Reduce-scatter and all-gather: each rank sends and receives 2 (size - 1) / size of the tensor, the least
        # possible.
        parts = flat.tensor_split(self.size)
        mine = parts[self.rank]
        rows = [mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.size)]
        self._swap(parts, rows)
        total = functools.reduce(add, rows)
        # The parts of other ranks were sent above, so that they can receive those ranks' sums.
        self._swap([total] * self.size, parts)
        mine.copy_(total)

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Broadcast along a binomial tree: in each round, every rank with the tensor sends it to one without."""
        if not tensor.numel():
            return tensor
        self.counters.sent(tensor.nbytes * (self.size - 1) if self.rank == source else 0)
        self.counters.received(tensor.nbytes if self.rank != source else 0)
        with self._collective("broadcast"):
            self._collectives += 1
            tag, view, position = _COLLECTIVE + self._collectives, _bytes(tensor), (self.rank - source) % self.size
            # Ranks are numbered from the source. In round k the ranks below 2**k have the tensor and send it 2**k
            # further.
            works, reach = [], 1 << position.bit_length()
            if position:
                parent = (position - reach // 2 + source) % self.size
                self.mesh.wait(self.mesh.receive(view, parent, tag))
            while position + reach < self.size:
                works.append(self.mesh.send(view, (position + reach + source) % self.size, tag))
                reach *= 2
            for work in works:
                self.mesh.wait(work)
        return tensor

    @contextmanager
    def _collective(self, name: str) -> Iterator[None]:
        """Measure a collective; all of its time counts as waiting."""
        start = time.perf_counter()
        with self.counters.span(f"wait: {name}"):
            yield
        self.counters.waited(start, start)


def _on_host(tensor: Tensor) -> Tensor:
    """Return a tensor of the CPU as it is, and a copy of a GPU's in pinned memory, to which it copies fastest."""
    if not tensor.is_cuda:
        return tensor.cpu()
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    flat = tensor.detach().view(-1)  # raises if it is not contiguous
    if not flat.numel():
        return memoryview(bytearray())
    # A buffer, although its type does not say so.
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of one dtype into a flat copy, to send one message instead of many."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten_into(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the pieces of ``flat`` back into the tensors that :func:`flatten` concatenated."""
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
    """Form a group of a job's workers; all ranks make the same calls in the same order.

    Args:
        environment: Lightning's cluster environment of this process.
        rank: this worker's index in the group.
        size: number of workers in the group.
        timeout_seconds: how long a communication may take, and how long a dead rank may stay away.
        counters: counts the traffic.
        again: whether :meth:`Group.reform` can form the group again after a rank died. This needs gtrain's agent,
            because other launchers do not restart single ranks. A restarted rank is alone until it calls ``reform``.
        name: name of the group, for groups of some workers only, such as those of a machine; empty for all workers.
        first: the job's rank of the group's first worker.
    """
    global _groups_formed
    if size == 1:
        return Group(counters=counters)
    _groups_formed += 1
    formation = GroupFormation(environment, f"{_groups_formed}{name}", rank, size, timeout_seconds, first)
    if not again or not isinstance(environment, AgentEnvironment):
        group = Group(rank, size, formation.connect(0, tuple(range(size))), counters)
    # The others are in the middle of a run: this rank joins when it calls reform().
    elif slots.restarts():
        group = Group(counters=counters, formation=formation, incarnation=_OUTSIDE)
    else:
        group = Group(rank, size, counters=counters, formation=formation, incarnation=_OUTSIDE)
        group.join(*formation.meet(_OUTSIDE))
    # Sends what is queued before the process ends.
    atexit.register(group.close)
    return group
