"""Who is there, and what they meet for: collectives of a job whose machines may be lost.

Each rank comes to meeting 1, 2, 3, ... with a value. A meeting is over when every rank has come that is not lost; what
was brought, also by ranks that were lost since, is decided once and answered to all alike. So a loss never leaves two
ranks with different results, and nothing has to be done anew.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from gtrain.errors import PeerLostError
from gtrain.wire import Message

Reply = Future[Message | None]


class JobEndedError(PeerLostError):
    """The job cannot go on: not only this machine's part of it."""


@dataclass
class _Meeting:
    brought: dict[int, Message] = field(default_factory=dict)
    waiting: dict[int, Reply] = field(default_factory=dict)


class Members:
    """The ranks of a job.

    Args:
        machines: how many there are.
        devices: ranks on each.

    Attributes:
        lost: why a machine is taken for lost, by its number.
    """

    def __init__(self, machines: int, devices: int) -> None:
        self._devices = devices
        self._there = set(range(machines * devices))
        self._meetings: dict[int, _Meeting] = {}
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
            raise PeerLostError(f"machine {self.machine_of(rank)} was taken for lost: {reason}")

    def meet(self, rank: int, number: int, brought: Message) -> Reply:
        """Come to a meeting; the answer has what all brought, in the order of ranks."""
        meeting = self._meetings.setdefault(number, _Meeting())
        meeting.brought[rank] = brought
        reply = meeting.waiting[rank] = Reply()
        self._hold()
        return reply

    def lose(self, machine: int, reason: str) -> None:
        """Go on without a machine's ranks."""
        self.lost[machine] = reason
        gone = {rank for rank in self._there if self.machine_of(rank) == machine}
        self._there -= gone
        for meeting in self._meetings.values():
            for rank in gone & meeting.waiting.keys():
                meeting.waiting.pop(rank).set_exception(PeerLostError(f"machine {machine} was taken for lost"))
        self._hold()

    def end(self, reason: str) -> None:
        """Let all who wait know that the job cannot go on."""
        for meeting in self._meetings.values():
            for reply in meeting.waiting.values():
                reply.set_exception(JobEndedError(reason))
            meeting.waiting.clear()

    def _hold(self) -> None:
        """Hold the meetings to which all have come."""
        for number, meeting in list(self._meetings.items()):
            if self._there <= meeting.waiting.keys():
                del self._meetings[number]
                ranks = sorted(meeting.brought)
                fields = {"ranks": ranks, "values": [meeting.brought[rank].fields["value"] for rank in ranks]}
                tensors = [tensor for rank in ranks for tensor in meeting.brought[rank].tensors]
                for reply in meeting.waiting.values():
                    reply.set_result(Message(fields, tensors))
