"""Errors of requests between two processes."""

from __future__ import annotations

from typing import Any

from gtrain.errors import GtrainError


class WireError(GtrainError):
    """A request to another process failed; base of all errors of the wire.

    Attributes:
        echo: whether another process's failure is the likely cause; the launcher then looks for that one.
    """

    echo = False


class FrameError(WireError):
    """A message is malformed, or larger than the limits allow.

    Attributes:
        header: the :class:`gtrain.wire.header.Header` of a malformed message if its sender could be read, else None.
            ``Any``, because the module of headers imports this one.
    """

    header: Any = None


class DeadlineError(WireError):
    """No reply arrived in time; the request may or may not have been executed.

    Args:
        peer: name of the server.
        method: the request's method.
        seconds: the deadline that passed.
    """

    # This error may only echo the failure of a peer; the launcher then names the peer's.
    echo = True

    def __init__(self, message: str, *, hint: str | None, peer: str, method: str, seconds: float) -> None:
        super().__init__(message, hint=hint)
        self.peer, self.method, self.seconds = peer, method, seconds


class PeerRestartedError(WireError):
    """The peer ended and another process took its place; whether the request was executed is unknown."""

    echo = True


class RefusedError(WireError):
    """The peer refuses this process: it has no key or another job's, or a newer incarnation took its place."""


class RemoteError(WireError):
    """The peer executed the request, and its handler raised.

    Args:
        peer: name of the server.
        method: the request's method.
        kind: class name of the handler's exception.
        remote_message: the exception's message.
        hint: the exception's hint, or None.
    """

    def __init__(self, *, peer: str, method: str, kind: str, remote_message: str, hint: str | None) -> None:
        super().__init__(f"{peer} failed to answer {method!r}: {kind}: {remote_message}", hint=hint)
        self.peer, self.method, self.kind, self.remote_message = peer, method, kind, remote_message
