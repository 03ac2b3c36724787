"""What a server remembers of a client so that each request is executed once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from gtrain.errors import GtrainError
from gtrain.wire.errors import FrameError
from gtrain.wire.header import EMPTY_BODY, MAX_DONE, Header, Kind, pack_body
from gtrain.wire.limits import Limits
from gtrain.wire.message import Message, to_frames

_MAX_TEXT = 16 << 10  # characters of an error's message that travel


@dataclass(slots=True)
class Answer:
    """An answer that is kept until the client has it.

    Args:
        kind: REPLY or ERROR.
        body: packed fields and specs.
        frames: memory of the tensors.
    """

    kind: Kind
    body: bytes
    frames: list[memoryview] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of body and tensors."""
        return len(self.body) + sum(frame.nbytes for frame in self.frames)


def success(method: str, result: Message | None, limits: Limits) -> Answer:
    """The answer that carries a handler's result.

    Raises:
        TypeError: it is no message.
        FrameError: it cannot be sent, or the client would not take it.
    """
    if result is None:
        return Answer(Kind.REPLY, EMPTY_BODY)
    if not isinstance(result, Message):
        raise TypeError(f"the handler of {method!r} returned a {type(result).__name__}, not a Message")
    specs, frames = to_frames(result.tensors, limits)
    answer = Answer(Kind.REPLY, pack_body(method, result.fields, specs, limits), frames)
    if answer.nbytes > limits.max_message_bytes:
        raise FrameError(
            f"an answer of {answer.nbytes:,} bytes; the limit is {limits.max_message_bytes:,}",
            hint="ask for less at a time, or raise max_message_bytes in the Limits of both sides",
        )
    return answer


def failure(method: str, error: BaseException, limits: Limits) -> Answer:
    """The answer that raises at the asker, with the name, message and hint of an exception."""
    message, hint = (error.message, error.hint) if isinstance(error, GtrainError) else (str(error), None)
    texts = {"kind": type(error).__name__, "message": message, "hint": hint}
    fields = {name: None if text is None else _encodable(text[:_MAX_TEXT]) for name, text in texts.items()}
    return Answer(Kind.ERROR, pack_body(method, fields, (), limits))


def _encodable(text: str) -> str:
    """A text without lone surrogates, which UTF-8 cannot carry."""
    return text.encode(errors="replace").decode()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks.

    Args:
        client: the client's name.
        incarnation: which life of it; a larger number is a later one.
        sequence: number of the request in that life. (client, incarnation, sequence) is executed once at most.
    """

    client: str
    incarnation: int
    sequence: int


class Status(Enum):
    """What is to be done with a request."""

    NEW = 0
    """Execute it."""
    UNDER_WAY = 1
    """It came before and is being executed, or waits: drop it."""
    ANSWERED = 2
    """It came before: send the answer again."""
    FINISHED = 3
    """The client has its answer, or does not want it any more: drop it."""
    BEYOND = 4
    """It is too far from the oldest unanswered one: no client of ours sends such."""


@dataclass
class Session:
    """One client's one life, as the server sees it.

    Args:
        client: its name.
        incarnation: its life.
        routing: where its answers go; another after a reconnect.
        limits: what both sides can take.
        low: requests below are finished.
        finished: requests above that are.
        answers: answers that the client has not acknowledged, by request.
        running: bytes of requests that are being executed by someone else, by request.
        parked: requests that wait until the client has acknowledged answers.
    """

    client: str
    incarnation: int
    routing: bytes
    limits: Limits
    low: int = 1
    finished: set[int] = field(default_factory=set)
    answers: dict[int, Answer] = field(default_factory=dict)
    running: dict[int, int] = field(default_factory=dict)
    parked: deque[tuple[Header, Message, int]] = field(default_factory=deque)
    unacknowledged_bytes: int = 0
    waiting_bytes: int = 0
    """Bytes of the requests running and parked."""

    def status(self, sequence: int) -> Status:
        """What is to be done with a request of this number."""
        if sequence < self.low or sequence in self.finished:
            return Status.FINISHED
        if sequence in self.answers:
            return Status.ANSWERED
        if sequence in self.running or any(header.sequence == sequence for header, _, _ in self.parked):
            return Status.UNDER_WAY
        return Status.NEW if sequence <= self.low + 2 * MAX_DONE else Status.BEYOND

    @property
    def full(self) -> bool:
        """Whether the client has to take answers before it gets more."""
        return self.unacknowledged_bytes >= self.limits.max_bytes_in_flight

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, so that it can be forgotten without harm."""
        return not self.running and not self.parked

    def overflows(self, nbytes: int) -> bool:
        """Whether a request of so many bytes is more than a client may have waiting here."""
        return bool(self.waiting_bytes) and (
            self.waiting_bytes + nbytes > self.limits.max_bytes_in_flight
            or len(self.running) + len(self.parked) >= self.limits.max_requests_in_flight
        )

    def park(self, header: Header, message: Message, nbytes: int) -> None:
        """Keep a request for later."""
        self.parked.append((header, message, nbytes))
        self.waiting_bytes += nbytes

    def unpark(self) -> tuple[Header, Message, int]:
        """The first request that was kept."""
        header, message, nbytes = self.parked.popleft()
        self.waiting_bytes -= nbytes
        return header, message, nbytes

    def start(self, sequence: int, nbytes: int) -> None:
        """A request is being executed by someone else."""
        self.running[sequence] = nbytes
        self.waiting_bytes += nbytes

    def keep(self, sequence: int, answer: Answer) -> bool:
        """A request is answered; returns False if the client does not want the answer any more."""
        self.waiting_bytes -= self.running.pop(sequence, 0)
        if sequence < self.low or sequence in self.finished:
            return False
        self.answers[sequence] = answer
        self.unacknowledged_bytes += answer.nbytes
        return True

    def acknowledge(self, low: int, done: Iterable[int]) -> None:
        """The client has finished with these requests: forget their answers, and do not execute them any more."""
        for sequence in done:
            if low < sequence <= low + 2 * MAX_DONE:
                self.finished.add(sequence)
                self._forget(sequence)
        if low <= self.low:
            return
        for sequence in [sequence for sequence in self.answers if sequence < low]:
            self._forget(sequence)
        self.finished = {sequence for sequence in self.finished if sequence > low}
        self.low = low

    def _forget(self, sequence: int) -> None:
        answer = self.answers.pop(sequence, None)
        if answer is not None:
            self.unacknowledged_bytes -= answer.nbytes
