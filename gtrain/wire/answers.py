"""What a server answers with: a handler's result, or what it raised."""

from __future__ import annotations

from dataclasses import dataclass, field

from gtrain.errors import GtrainError
from gtrain.wire.errors import FrameError
from gtrain.wire.header import EMPTY_BODY, Kind, pack_body
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
