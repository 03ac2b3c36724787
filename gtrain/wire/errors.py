"""What can go wrong between two processes, each as an exception of its own."""

from __future__ import annotations

from typing import Any

from gtrain.errors import GtrainError


class WireError(GtrainError):
    """A request to another process failed; base of all errors of the wire.

    Attributes:
        echo: whether it most likely tells of another process's failure, which is then the one to name.
    """

    echo = False


class FrameError(WireError):
    """A message is malformed, or larger than the limits allow.

    Attributes:
        header: the :class:`gtrain.wire.header.Header` of a malformed message, as far as it could be read; None if not
            even the sender's name could be. ``Any``, since headers raise this error and their module imports this one.
    """

    header: Any = None


class DeadlineError(WireError):
    """No answer came in time; the request may or may not have been executed.

    Args:
        peer: name of the process that was asked.
        method: what it was asked for.
        seconds: how long was waited.
    """

    echo = True  # the peer may be gone: a launcher that looks for the first cause looks further

    def __init__(self, message: str, *, hint: str | None, peer: str, method: str, seconds: float) -> None:
        super().__init__(message, hint=hint)
        self.peer, self.method, self.seconds = peer, method, seconds


class PeerRestartedError(WireError):
    """The peer ended and another process answers in its place; whether it executed the request is unknown."""

    echo = True


class RefusedError(WireError):
    """The peer does not let this process in: no key, another job's key, or a newer incarnation took its place."""


class RemoteError(WireError):
    """The peer executed the request, and its handler raised.

    Args:
        peer: name of the process that was asked.
        method: what it was asked for.
        kind: name of the exception's class there.
        remote_message: the exception's message there.
        hint: what to do, where the exception there said so.
    """

    def __init__(self, *, peer: str, method: str, kind: str, remote_message: str, hint: str | None) -> None:
        super().__init__(f"{peer} failed to answer {method!r}: {kind}: {remote_message}", hint=hint)
        self.peer, self.method, self.kind, self.remote_message = peer, method, kind, remote_message
