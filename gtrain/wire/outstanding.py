"""A client's unanswered requests: their numbers, bytes, deadlines, and what the server may forget."""

from __future__ import annotations

import heapq
from concurrent.futures import Future
from dataclasses import dataclass, field

from gtrain.wire.header import MAX_DONE
from gtrain.wire.limits import Limits
from gtrain.wire.message import Message


@dataclass(slots=True)
class Pending:
    """One request until it is answered.

    Args:
        method: what is asked for.
        body: packed fields and specs.
        frames: memory of the tensors, which it keeps alive for sending again.
        nbytes: of body and frames.
        deadline: monotonic time at which it raises.
        seconds: how long that was from the start, for messages.
        attended: whether a thread comes for the answer by itself.
        sequence: its number.
        sent: server incarnation that it was sent to; 0 if it was not.
        resent: whether it was sent more than once.
        future: where the answer goes.
    """

    method: str
    body: bytes
    frames: list[memoryview]
    nbytes: int
    deadline: float
    seconds: float
    attended: bool = False
    sequence: int = 0
    sent: int = 0
    resent: bool = False
    future: Future[Message] = field(default_factory=Future)


class Outstanding:
    """The table of unanswered requests; not thread-safe by itself."""

    def __init__(self) -> None:
        self.pending: dict[int, Pending] = {}
        self.nbytes = 0
        self.unattended = 0
        self._next = 1
        self._finished: set[int] = set()  # at or above low
        self._news: list[int] = []  # finished and not yet told to the server
        self._deadlines: list[tuple[float, int]] = []

    @property
    def low(self) -> int:
        """All requests below this number are finished."""
        return next(iter(self.pending), self._next)

    def has_room(self, nbytes: int, limits: Limits) -> bool:
        """Whether one more request of so many bytes may start; one always may when no other is under way."""
        if not self.pending:
            return True
        return (
            len(self.pending) < limits.max_requests_in_flight
            and self.nbytes + nbytes <= limits.max_bytes_in_flight
            and self._next - self.low < MAX_DONE
        )

    def add(self, pending: Pending) -> None:
        """Number a request and keep it."""
        pending.sequence = self._next
        self._next += 1
        self.pending[pending.sequence] = pending
        self.nbytes += pending.nbytes
        self.unattended += not pending.attended
        heapq.heappush(self._deadlines, (pending.deadline, pending.sequence))

    def finish(self, pending: Pending) -> None:
        """Forget a request; the server is told with the next message."""
        del self.pending[pending.sequence]
        self.nbytes -= pending.nbytes
        self.unattended -= not pending.attended
        self._finished.add(pending.sequence)
        self._news.append(pending.sequence)
        if len(self._finished) > 2 * MAX_DONE:
            self._finished = {sequence for sequence in self._finished if sequence > self.low}
        if len(self._deadlines) > 2 * MAX_DONE:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self.pending]
            heapq.heapify(self._deadlines)

    def news(self) -> tuple[int, list[int]]:
        """``low`` and the requests above it that finished since the last call."""
        low = self.low
        news = [sequence for sequence in self._news if sequence > low]
        self._news = []
        return low, news

    def finished(self) -> tuple[int, list[int]]:
        """``low`` and all finished requests above it."""
        low = self.low
        self._finished = {sequence for sequence in self._finished if sequence > low}
        self._news = []
        return low, sorted(self._finished)

    @property
    def soonest(self) -> float:
        """The earliest deadline; infinity if there is none."""
        while self._deadlines and self._deadlines[0][1] not in self.pending:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def expired(self, now: float) -> list[Pending]:
        """Requests whose deadline has passed, still in the table."""
        found = []
        while self.soonest <= now:
            found.append(self.pending[heapq.heappop(self._deadlines)[1]])
        return found
