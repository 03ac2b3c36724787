"""A client's unanswered requests: their numbers, sizes, deadlines and errors, and the acknowledgements of replies."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from gtrain.wire.errors import DeadlineError, FrameError, PeerRestartedError, RemoteError
from gtrain.wire.header import FRONT_BYTES, MAX_ACKNOWLEDGED
from gtrain.wire.limits import Limits
from gtrain.wire.message import Message


@dataclass(slots=True)
class PendingRequest:
    """A request until it is answered, and the errors that it can raise.

    Args:
        method: the request's method.
        body: packed fields and specs.
        frames: memory of the tensors, kept alive for a repetition.
        nbytes: size of body and frames.
        deadline: monotonic time at which the request raises.
        seconds: time from the request to its deadline.
        attended: whether a thread will call :meth:`gtrain.wire.Client.result` for it.
        sequence: number of the request.
        sent: server incarnation that it was sent to; 0 before.
        resent: whether it was sent more than once.
        future: receives the reply.
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

    def deadline_error(self, peer: str, address: str) -> DeadlineError:
        """Return the error of a request without a reply at its deadline."""
        if self.sent:
            text = f"{peer} did not answer {self.method!r} within {self.seconds:g} s"
            hint = f"see the log of {peer}: it is busy, stopped or gone; or allow more time"
        else:
            text = f"{peer} at {address} was not reached within {self.seconds:g} s for the request {self.method!r}"
            hint = f"check that {peer} runs and that its address can be reached from this machine"
        return DeadlineError(text, hint=hint, peer=peer, method=self.method, seconds=self.seconds)

    def backpressure_error(self, peer: str) -> DeadlineError:
        """Return the error of a request that had to wait for earlier ones until its deadline."""
        return DeadlineError(
            f"{peer} did not answer earlier requests within {self.seconds:g} s; {self.method!r} of "
            f"{self.nbytes:,} bytes had to wait and was not sent",
            hint="send smaller requests, or raise max_bytes_in_flight in the Limits of both sides",
            peer=peer,
            method=self.method,
            seconds=self.seconds,
        )

    def restart_error(self, peer: str) -> PeerRestartedError:
        """Return the error of a request whose server was restarted, or has forgotten this client."""
        return PeerRestartedError(
            f"{peer} was restarted, or has forgotten this client, during the request {self.method!r}; whether it was "
            "executed is unknown",
            hint=f"see the log of {peer} for why it ended",
        )

    def remote_error(self, peer: str, fields: Mapping[str, Any]) -> RemoteError:
        """Return the error of a request whose handler raised."""
        kind, text, hint = (fields.get(name) for name in ("kind", "message", "hint"))
        return RemoteError(
            peer=peer,
            method=self.method,
            kind=str(kind),
            remote_message=str(text),
            hint=hint if isinstance(hint, str) else None,
        )

    def size_error(self, peer: str, limits: Limits) -> FrameError | None:
        """Return the error of a request beyond the server's limits; None if the server accepts it."""
        within = (
            self.nbytes <= limits.max_message_bytes
            and max((frame.nbytes for frame in self.frames), default=0) <= limits.max_frame_bytes
            and len(self.frames) <= limits.max_tensors
            and len(self.body) <= limits.max_header_bytes - FRONT_BYTES
        )
        if within:
            return None
        return FrameError(
            f"{peer} does not accept {self.method!r} with {self.nbytes:,} bytes in {len(self.frames)} tensors; its "
            f"limits are {limits.max_message_bytes:,} bytes, {limits.max_frame_bytes:,} for one of "
            f"{limits.max_tensors} tensors",
            hint=f"send it in pieces, or raise the Limits of {peer}",
        )


class PendingRequests:
    """A client's unanswered requests by number. Not thread-safe."""

    def __init__(self) -> None:
        self.requests: dict[int, PendingRequest] = {}
        self.nbytes = 0
        self.unattended = 0
        self._next = 1
        self._finished: set[int] = set()  # at or above the low-water mark
        self._unacknowledged: list[int] = []  # finished since the last acknowledgement
        self._deadlines: list[tuple[float, int]] = []  # heap; entries of finished requests are dropped lazily

    @property
    def low(self) -> int:
        """The low-water mark: all requests below this number are finished."""
        return next(iter(self.requests), self._next)

    def has_room(self, nbytes: int, limits: Limits) -> bool:
        """Whether a further request of this size may be sent; always true if none is pending.

        Beside requests that were sent ahead (:meth:`has_room_ahead`), a request of any size may be.
        """
        if not self.requests:
            return True
        return (
            len(self.requests) < limits.max_requests_in_flight
            and (self.nbytes + nbytes <= limits.max_bytes_in_flight or self.nbytes <= limits.max_bytes_ahead)
            # A header can acknowledge this many numbers above the mark, so no more may be open.
            and self._next - self.low < MAX_ACKNOWLEDGED
        )

    def has_room_ahead(self, nbytes: int, limits: Limits) -> bool:
        """Whether a request may be sent that the server answers only after later ones, which must find room too."""
        return (
            len(self.requests) < limits.max_requests_in_flight // 2 and self.nbytes + nbytes <= limits.max_bytes_ahead
        )

    def add(self, request: PendingRequest) -> None:
        """Number a request and add it."""
        request.sequence = self._next
        self._next += 1
        self.requests[request.sequence] = request
        self.nbytes += request.nbytes
        self.unattended += not request.attended
        heapq.heappush(self._deadlines, (request.deadline, request.sequence))

    def finish(self, request: PendingRequest) -> None:
        """Remove a request; the next message acknowledges its reply."""
        del self.requests[request.sequence]
        self.nbytes -= request.nbytes
        self.unattended -= not request.attended
        self._finished.add(request.sequence)
        self._unacknowledged.append(request.sequence)
        # Numbers below the low-water mark are dropped now and then, not one by one.
        if len(self._finished) > 2 * MAX_ACKNOWLEDGED:
            self._finished = {sequence for sequence in self._finished if sequence > self.low}
        if len(self._deadlines) > 2 * MAX_ACKNOWLEDGED:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self.requests]
            heapq.heapify(self._deadlines)

    def new_acknowledgements(self) -> tuple[int, list[int]]:
        """Return the low-water mark and the requests above it that finished since the last acknowledgement."""
        low = self.low
        finished = [sequence for sequence in self._unacknowledged if sequence > low]
        self._unacknowledged = []
        return low, finished

    def all_acknowledgements(self) -> tuple[int, list[int]]:
        """Return the low-water mark and all finished requests above it, for a new connection."""
        low = self.low
        self._finished = {sequence for sequence in self._finished if sequence > low}
        self._unacknowledged = []
        return low, sorted(self._finished)

    @property
    def first_deadline(self) -> float:
        """The earliest deadline; infinity without pending requests."""
        while self._deadlines and self._deadlines[0][1] not in self.requests:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def pop_expired(self, now: float) -> list[PendingRequest]:
        """Return the requests whose deadline has passed, once each; they stay pending."""
        expired = []
        while self.first_deadline <= now:
            expired.append(self.requests[heapq.heappop(self._deadlines)[1]])
        return expired
