"""Who is there, and what they meet for: collectives of a job whose machines may be lost.

Each rank comes to meeting 1, 2, 3, ... with a value. A meeting is over when every rank has come that is not lost; what
was brought, also by ranks that were lost since, is decided once and answered to all alike. So a loss never leaves two
ranks with different results, and nothing has to be done anew. A result is kept until every rank has come to a later
meeting, for those that ask again because the lock server was restarted before they had it.
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
"""Sets the results of replies; called once the state from which they follow is saved."""


class JobEndedError(PeerLostError):
    """The job cannot go on: not only this machine's part of it."""


@dataclass
class _PendingCollective:
    brought: dict[int, Message] = field(default_factory=dict)
    waiting: dict[int, Reply] = field(default_factory=dict)


class Membership:
    """The ranks of a job.

    Args:
        machines: how many there are.
        devices: ranks on each.
        settled: takes the replies that are decided.

    Attributes:
        lost: why a machine is taken for lost, by its number.
    """

    def __init__(self, machines: int, devices: int, settled: DeferredReplies) -> None:
        self._devices, self._settled = devices, settled
        self._there = set(range(machines * devices))
        self._meetings: dict[int, _PendingCollective] = {}
        self._results: dict[int, Message] = {}
        self._came: dict[int, int] = {}  # the last meeting to which each rank came
        self.lost: dict[int, str] = {}

    def machine_of(self, rank: int) -> int:
        """The machine of a rank."""
        return rank // self._devices

    def ranks_of(self, machine: int) -> range:
        """The ranks of a machine."""
        return range(machine * self._devices, (machine + 1) * self._devices)

    def check(self, rank: int) -> None:
        """Refuse a rank that was taken for lost: others do its work by now.

        Raises:
            PeerLostError: it was.
        """
        reason = self.lost.get(self.machine_of(rank))
        if reason is not None:
            raise PeerLostError(
                f"machine {self.machine_of(rank)} was taken for lost: {reason}",
                hint="other machines train its buckets; raise strategy.lease_seconds if it was only slow or stopped.",
            )

    def meet(self, rank: int, number: int, brought: Message) -> Reply:
        """Come to a meeting; the answer has what all brought, in the order of ranks."""
        reply, self._came[rank] = Reply(), number
        if number in self._results:
            self._settled.append(partial(reply.set_result, self._results[number]))
            return reply
        meeting = self._meetings.setdefault(number, _PendingCollective())
        meeting.brought[rank] = brought
        meeting.waiting[rank] = reply
        self._hold()
        return reply

    def lose(self, machine: int, reason: str) -> None:
        """Go on without a machine's ranks."""
        self.lost[machine] = reason
        gone = {rank for rank in self._there if self.machine_of(rank) == machine}
        self._there -= gone
        for meeting in self._meetings.values():
            for rank in gone & meeting.waiting.keys():
                error = PeerLostError(f"machine {machine} was taken for lost")
                self._settled.append(partial(meeting.waiting.pop(rank).set_exception, error))
        self._hold()

    def end(self, reason: str) -> None:
        """Let all who wait know that the job cannot go on."""
        for meeting in self._meetings.values():
            for reply in meeting.waiting.values():
                self._settled.append(partial(reply.set_exception, JobEndedError(reason)))
            meeting.waiting.clear()

    def state(self) -> dict[str, Any]:
        """What a later life of the lock server needs; ranks bring again what is not decided."""
        results = {}
        for number, result in self._results.items():
            specs, frames = to_frames(result.tensors, Limits())
            results[number] = [result.fields, specs, [bytes(frame) for frame in frames]]
        return {"lost": self.lost, "came": self._came, "results": results}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` returned."""
        self.lost, self._came = state["lost"], state["came"]
        self._there -= {rank for machine in self.lost for rank in self.ranks_of(machine)}
        for number, (fields, specs, frames) in state["results"].items():
            known = [(name, tuple(shape)) for name, shape in specs]
            memory = [memoryview(bytearray(frame)) for frame in frames]
            self._results[number] = Message(fields, from_frames(known, memory, Limits()))

    def _hold(self) -> None:
        """Hold the meetings to which all have come."""
        for number, meeting in list(self._meetings.items()):
            if self._there <= meeting.waiting.keys():
                del self._meetings[number]
                ranks = sorted(meeting.brought)
                fields = {"ranks": ranks, "values": [meeting.brought[rank].fields["value"] for rank in ranks]}
                tensors = [tensor for rank in ranks for tensor in meeting.brought[rank].tensors]
                result = self._results[number] = Message(fields, tensors)
                for reply in meeting.waiting.values():
                    self._settled.append(partial(reply.set_result, result))
        last = min((self._came.get(rank, 0) for rank in self._there), default=0)
        self._results = {number: result for number, result in self._results.items() if number >= last}
