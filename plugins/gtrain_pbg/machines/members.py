"""Membership of ranks, and collectives of a job whose machines may be lost.

Collectives are numbered 1, 2, 3, ..., and each rank contributes a value. A collective completes when every rank that is
not lost has contributed. Its result includes the contributions of ranks that were lost since, is decided once, and is
the same for all: a loss never leaves two ranks with different results. A result is stored until every rank has
contributed to a later collective, for ranks that repeat a request because the lock server was restarted.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gtrain.errors import PeerLostError
from gtrain.wire import Limits, Message
from gtrain.wire.message import from_frames, to_frames

Reply = Future[Message | None]
DeferredReplies = list[Callable[[], None]]
"""Functions that send replies; called once the state that the replies depend on is saved."""


class JobEndedError(PeerLostError):
    """Raised when the whole job cannot go on, not only this machine."""


@dataclass
class _PendingCollective:
    contributions: dict[int, Message] = field(default_factory=dict)
    waiting: dict[int, Reply] = field(default_factory=dict)


class Membership:
    """The ranks of a job.

    Args:
        machines: number of machines.
        devices: ranks on each.
        deferred: receives decided replies.

    Attributes:
        lost: reasons by number of the lost machine.
    """

    def __init__(self, machines: int, devices: int, deferred: DeferredReplies) -> None:
        self._devices, self._deferred = devices, deferred
        self._alive = set(range(machines * devices))
        self._pending: dict[int, _PendingCollective] = {}
        self._results: dict[int, Message] = {}
        self._last: dict[int, int] = {}  # the last collective of each rank
        self.lost: dict[int, str] = {}

    def machine_of(self, rank: int) -> int:
        """Return the machine of a rank."""
        return rank // self._devices

    def ranks_of(self, machine: int) -> range:
        """Return the ranks of a machine."""
        return range(machine * self._devices, (machine + 1) * self._devices)

    def awaited(self) -> set[int]:
        """Return the ranks that the others wait for in a collective."""
        return {rank for collective in self._pending.values() for rank in self._alive - collective.waiting.keys()}

    def check(self, rank: int) -> None:
        """Refuse a rank that was declared lost: other machines do its work by now.

        Raises:
            PeerLostError: its machine is lost.
        """
        reason = self.lost.get(self.machine_of(rank))
        if reason is not None:
            raise PeerLostError(
                f"machine {self.machine_of(rank)} was declared lost: {reason}",
                hint="other machines train its buckets; raise strategy.lease_seconds if it was only slow or stopped.",
            )

    def contribute(self, rank: int, number: int, contribution: Message) -> Reply:
        """Contribute to a collective; the reply has the contributions of all, in the order of ranks."""
        reply, self._last[rank] = Reply(), number
        # A repeated contribution: the decision stands, also if ranks were lost since.
        if number in self._results:
            self._deferred.append(partial(reply.set_result, self._results[number]))
            return reply
        collective = self._pending.setdefault(number, _PendingCollective())
        collective.contributions[rank], collective.waiting[rank] = contribution, reply
        self._complete()
        return reply

    def lose(self, machine: int, reason: str) -> None:
        """Go on without a machine's ranks."""
        self.lost[machine] = reason
        ranks = set(self.ranks_of(machine))
        self._alive -= ranks
        for collective in self._pending.values():
            for rank in ranks & collective.waiting.keys():
                error = PeerLostError(f"machine {machine} was declared lost")
                self._deferred.append(partial(collective.waiting.pop(rank).set_exception, error))
        self._complete()

    def end(self, reason: str) -> None:
        """Fail all pending collectives: the job cannot go on."""
        for collective in self._pending.values():
            for reply in collective.waiting.values():
                self._deferred.append(partial(reply.set_exception, JobEndedError(reason)))
            collective.waiting.clear()

    def state(self) -> dict[str, Any]:
        """Return the state that a restarted lock server needs; ranks repeat undecided contributions."""
        results = {}
        for number, result in self._results.items():
            specs, frames = to_frames(result.tensors, Limits())
            results[number] = [result.fields, specs, [bytes(frame) for frame in frames]]
        return {"lost": self.lost, "came": self._last, "results": results}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state` returned."""
        self.lost, self._last = state["lost"], state["came"]
        self._alive -= {rank for machine in self.lost for rank in self.ranks_of(machine)}
        for number, (fields, specs, frames) in state["results"].items():
            shapes = [(dtype, tuple(shape)) for dtype, shape in specs]
            memory = [memoryview(bytearray(frame)) for frame in frames]
            self._results[number] = Message(fields, from_frames(shapes, memory, Limits()))

    def _complete(self) -> None:
        """Decide the collectives that all ranks have contributed to."""
        for number, collective in list(self._pending.items()):
            if self._alive <= collective.waiting.keys():
                del self._pending[number]
                ranks, messages = zip(*sorted(collective.contributions.items()), strict=True)
                fields = {"ranks": list(ranks), "values": [message.fields["value"] for message in messages]}
                result = Message(fields, [tensor for message in messages for tensor in message.tensors])
                self._results[number] = result
                for reply in collective.waiting.values():
                    self._deferred.append(partial(reply.set_result, result))
        # A rank that contributes to a later collective has received all earlier results.
        last = min((self._last.get(rank, 0) for rank in self._alive), default=0)
        self._results = {number: result for number, result in self._results.items() if number >= last}
