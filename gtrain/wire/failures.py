"""What a client's requests raise, in words that name the peer."""

from __future__ import annotations

from gtrain.wire.errors import DeadlineError, FrameError, PeerRestartedError, RefusedError, RemoteError
from gtrain.wire.header import FRONT_BYTES, Header
from gtrain.wire.limits import Limits
from gtrain.wire.outstanding import Pending


def refused(peer: str, address: str, reason: str) -> RefusedError:
    """The server does not let this process in."""
    return RefusedError(
        f"{peer} at {address} refuses this process: {reason}",
        hint="give all processes of a job the same key file; end processes of an earlier start of the job",
    )


def late(peer: str, address: str, pending: Pending) -> DeadlineError:
    """The deadline has passed, with the request sent or not."""
    seconds = pending.seconds
    if pending.sent:
        text = f"{peer} did not answer {pending.method!r} within {seconds:g} s"
        hint = f"look into the log of {peer}: it is busy, stopped or gone; or allow more time"
    else:
        text = f"{peer} at {address} was not reached within {seconds:g} s to ask for {pending.method!r}"
        hint = f"check that {peer} runs and that its address can be reached from here"
    return DeadlineError(text, hint=hint, peer=peer, method=pending.method, seconds=seconds)


def no_room(peer: str, pending: Pending) -> DeadlineError:
    """The deadline has passed before there was room beside earlier requests."""
    return DeadlineError(
        f"{peer} did not answer earlier requests within {pending.seconds:g} s; {pending.method!r} of "
        f"{pending.nbytes:,} bytes had to wait and was not sent",
        hint="ask for less at a time, or raise max_bytes_in_flight in the Limits of both sides",
        peer=peer,
        method=pending.method,
        seconds=pending.seconds,
    )


def restarted(peer: str, pending: Pending) -> PeerRestartedError:
    """Another life of the server, or one that has forgotten this client, answers."""
    return PeerRestartedError(
        f"{peer} was restarted, or has forgotten this client, while {pending.method!r} was under way; whether it was "
        "executed is unknown",
        hint=f"look into the log of {peer} for why it ended",
    )


def remote(peer: str, pending: Pending, header: Header) -> RemoteError:
    """The handler raised."""
    kind, text, hint = (header.fields.get(name) for name in ("kind", "message", "hint"))
    return RemoteError(
        peer=peer,
        method=pending.method,
        kind=str(kind),
        remote_message=str(text),
        hint=hint if isinstance(hint, str) else None,
    )


def excess(peer: str, pending: Pending, limits: Limits) -> FrameError | None:
    """The server would not take a request of that size; None if it would."""
    largest = max((frame.nbytes for frame in pending.frames), default=0)
    within = (
        pending.nbytes <= limits.max_message_bytes
        and largest <= limits.max_frame_bytes
        and len(pending.frames) <= limits.max_tensors
        and len(pending.body) <= limits.max_header_bytes - FRONT_BYTES
    )
    if within:
        return None
    return FrameError(
        f"{peer} does not take {pending.method!r} with {pending.nbytes:,} bytes in {len(pending.frames)} tensors; its "
        f"limits are {limits.max_message_bytes:,} bytes, {limits.max_frame_bytes:,} for one of {limits.max_tensors}",
        hint=f"send it in pieces, or raise the Limits of {peer}",
    )
