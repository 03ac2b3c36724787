"""A server's side of a session: the status of each request of a client, and the replay buffer of its replies.

The session recognises retries of a request, and repeats the reply instead of executing it again. It also applies
backpressure: while the replay buffer of a client is full, its further requests are parked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from gtrain.errors import GtrainError
from gtrain.wire.errors import FrameError
from gtrain.wire.header import EMPTY_BODY, MAX_ACKNOWLEDGED, Header, MessageType, pack_body
from gtrain.wire.limits import Limits
from gtrain.wire.message import Message, to_frames

_MAX_TEXT = 16 << 10  # characters of an error's message that are sent


@dataclass(slots=True)
class Reply:
    """A reply, kept until the client acknowledges it.

    Args:
        type: REPLY or ERROR.
        body: packed fields and specs.
        frames: memory of the tensors.
    """

    type: MessageType
    body: bytes
    frames: list[memoryview] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Size of body and tensors in bytes."""
        return len(self.body) + sum(frame.nbytes for frame in self.frames)


def result_reply(method: str, result: Message | None, limits: Limits) -> Reply:
    """Return the reply that carries a handler's result.

    Raises:
        TypeError: the result is not a message.
        FrameError: the result cannot be sent, or the client would not accept it.
    """
    if result is None:
        return Reply(MessageType.REPLY, EMPTY_BODY)
    if not isinstance(result, Message):
        raise TypeError(f"the handler of {method!r} returned a {type(result).__name__}, not a Message")
    specs, frames = to_frames(result.tensors, limits)
    reply = Reply(MessageType.REPLY, pack_body(method, result.fields, specs, limits), frames)
    if reply.nbytes > limits.max_message_bytes:
        raise FrameError(
            f"a reply of {reply.nbytes:,} bytes; the limit is {limits.max_message_bytes:,}",
            hint="request less at a time, or raise max_message_bytes in the Limits of both sides",
        )
    return reply


def error_reply(method: str, error: BaseException, limits: Limits) -> Reply:
    """Return the reply that raises at the client, with the name, message and hint of an exception."""
    message, hint = (error.message, error.hint) if isinstance(error, GtrainError) else (str(error), None)
    texts = {"kind": type(error).__name__, "message": message, "hint": hint}
    # "replace": UTF-8 cannot carry lone surrogates
    fields = {key: text and text[:_MAX_TEXT].encode(errors="replace").decode() for key, text in texts.items()}
    return Reply(MessageType.ERROR, pack_body(method, fields, (), limits))


@dataclass(frozen=True, slots=True)
class Caller:
    """The origin of a request.

    Args:
        client: the client's name.
        incarnation: the client's incarnation; a larger number is a later one.
        sequence: number of the request within the incarnation. (client, incarnation, sequence) is executed at most
            once.
    """

    client: str
    incarnation: int
    sequence: int


class RequestStatus(Enum):
    """The state of a request at the server, and the reaction to its (repeated) arrival."""

    NEW = 0
    """It has not arrived before: execute it."""
    IN_PROGRESS = 1
    """It is being executed, or waits: drop the repetition."""
    ANSWERED = 2
    """It was executed: send the reply again."""
    FINISHED = 3
    """The client has acknowledged its reply, or no longer waits for it: drop it."""
    OUT_OF_RANGE = 4
    """Its number is too far above the low-water mark; gtrain's clients never send such a request."""


@dataclass
class ServerSession:
    """The session of one incarnation of a client.

    Args:
        client: the client's name.
        incarnation: the client's incarnation.
        routing: id of the connection that replies go to; changes with a reconnect.
        limits: the smaller of both sides' limits.
        low: low-water mark: all requests below it are finished.
        finished: finished requests above the mark.
        replies: the replay buffer: replies that the client has not acknowledged, by request.
        running: sizes in bytes of the requests whose handlers returned a future, by request.
        parked: requests that wait until the client has acknowledged replies, with their sizes.
        unacknowledged_bytes: size of ``replies``.
        waiting_bytes: size of the requests running and parked.
    """

    client: str
    incarnation: int
    routing: bytes
    limits: Limits
    low: int = 1
    finished: set[int] = field(default_factory=set)
    replies: dict[int, Reply] = field(default_factory=dict)
    running: dict[int, int] = field(default_factory=dict)
    parked: deque[tuple[Header, Message, int]] = field(default_factory=deque)
    unacknowledged_bytes: int = 0
    waiting_bytes: int = 0

    def status(self, sequence: int) -> RequestStatus:
        """Return the status of the request with this number."""
        if sequence < self.low or sequence in self.finished:
            return RequestStatus.FINISHED
        if sequence in self.replies:
            return RequestStatus.ANSWERED
        if sequence in self.running or any(header.sequence == sequence for header, _, _ in self.parked):
            return RequestStatus.IN_PROGRESS
        # The bound keeps `finished` finite: a client acknowledges at most MAX_ACKNOWLEDGED numbers above the mark at
        # once.
        return RequestStatus.NEW if sequence <= self.low + 2 * MAX_ACKNOWLEDGED else RequestStatus.OUT_OF_RANGE

    @property
    def full(self) -> bool:
        """Whether the client must acknowledge replies before the server executes more for it."""
        return self.unacknowledged_bytes >= self.limits.max_bytes_in_flight

    @property
    def idle(self) -> bool:
        """Whether no request is in progress, so that the session can be forgotten."""
        return not self.running and not self.parked

    def overflows(self, nbytes: int) -> bool:
        """Whether a request of this size exceeds what a client may have waiting."""
        limit = self.limits.max_bytes_in_flight
        # The client counts no headers, and sends requests of any size beside those that it has sent ahead.
        too_large = self.waiting_bytes + nbytes > limit and self.waiting_bytes > 2 * self.limits.max_bytes_ahead
        too_many = len(self.running) + len(self.parked) >= self.limits.max_requests_in_flight
        return bool(self.waiting_bytes) and (too_large or too_many)

    def park(self, header: Header, message: Message, nbytes: int) -> None:
        """Keep a request until the client has acknowledged replies."""
        self.parked.append((header, message, nbytes))
        self.waiting_bytes += nbytes

    def unpark(self) -> tuple[Header, Message, int]:
        """Return the first parked request."""
        header, message, nbytes = self.parked.popleft()
        self.waiting_bytes -= nbytes
        return header, message, nbytes

    def start(self, sequence: int, nbytes: int) -> None:
        """Record that a request's handler returned a future."""
        self.running[sequence] = nbytes
        self.waiting_bytes += nbytes

    def keep(self, sequence: int, reply: Reply) -> bool:
        """Keep a reply until it is acknowledged; return False if the client no longer waits for it."""
        self.waiting_bytes -= self.running.pop(sequence, 0)
        if sequence < self.low or sequence in self.finished:
            return False
        self.replies[sequence] = reply
        self.unacknowledged_bytes += reply.nbytes
        return True

    def acknowledge(self, low: int, finished: Iterable[int]) -> None:
        """Drop the replies of requests that the client has finished; these are not executed any more either."""
        for sequence in finished:
            if low < sequence <= low + 2 * MAX_ACKNOWLEDGED:
                self.finished.add(sequence)
                self._drop(sequence)
        if low <= self.low:
            return
        for sequence in [sequence for sequence in self.replies if sequence < low]:
            self._drop(sequence)
        self.finished = {sequence for sequence in self.finished if sequence > low}
        self.low = low

    def _drop(self, sequence: int) -> None:
        reply = self.replies.pop(sequence, None)
        if reply is not None:
            self.unacknowledged_bytes -= reply.nbytes
