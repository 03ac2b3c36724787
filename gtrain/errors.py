"""Errors that a user can act on.

Every message says what was set and what was found, and ends with ``HINT:`` and what to do. The command line prints a
:class:`GtrainError` without a traceback; any other exception is a defect and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any


class GtrainError(Exception):
    """Base of all errors that gtrain raises on purpose.

    Args:
        message: one or two sentences that say what was set and what was found.
        hint: an imperative sentence that says what to do; printed after ``HINT:``.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message}\nHINT: {hint}" if hint else message)

    def add_hint(self, hint: str) -> None:
        """Append a line to the hint."""
        self.hint = f"{self.hint}\n{hint}" if self.hint else hint
        self.args = (f"{self.message}\nHINT: {self.hint}",)


class DiskFullError(GtrainError):
    """A file cannot be written because its disk, or this user's quota of it, is full."""


class DeviceMemoryError(GtrainError):
    """A rank has no memory left, on its device or on its machine; the message says what the memory held."""


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the path to an OSError without a file name, such as those of ``write`` and ``fsync``."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def disk_full(error: BaseException, advice: str = "") -> DiskFullError | None:
    """Return the error for an OSError of a full disk, with its file; None for any other exception.

    Args:
        error: the exception.
        advice: the hint; empty: where to free space, or how to choose another disk.
    """
    if not isinstance(error, OSError) or error.errno is None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return DiskFullError(
        f"{error.filename or 'a file of the run'} cannot be written: {os.strerror(error.errno).lower()}.",
        hint=advice
        or "free space on that disk, or choose another (hydra.run.dir, data.store, paths.stores, or the strategy's own "
        "folder).",
    )


class ConfigError(GtrainError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class DataError(GtrainError):
    """The input graph, its features or its labels cannot be used."""


@contextlib.contextmanager
def unreadable(problem: str, hint: str, *errors: type[Exception]) -> Iterator[None]:
    """Raise a DataError of the problem and the first line of an exception, in place of the exception.

    Args:
        problem: a clause such as ``FILE cannot be read``.
        hint: the hint.
        errors: the exceptions; none: all except gtrain's own, for readers in which a garbled file can raise anything.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, GtrainError) or (errors and not isinstance(error, errors)):
            raise
        reason = f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise DataError(f"{problem}: {reason.splitlines()[0]}", hint=hint) from error


def zero_weights(origin: str, demand: str) -> DataError:
    """Return the error that refuses a graph all of whose edge weights are 0.

    Args:
        origin: the files or the data set.
        demand: a clause that says what the model needs weights for; see :func:`gtrain.model.inputs.zero_demand`.
    """
    return DataError(
        f"{origin}: all edge weights are 0, and {demand}.",
        hint="correct the weights, or leave the column out (of data=edges: data.columns=[0,1]).",
    )


def negative_weight(weight: str, demand: str) -> DataError:
    """Return the error that refuses a negative edge weight.

    Args:
        weight: a clause with its position and value, such as ``edges.txt, line 7: the weight is -2``.
        demand: a clause that says why weights must be 0 or more; see :func:`gtrain.model.inputs.weight_demand`.
    """
    return DataError(
        f"{weight}, and {demand}.",
        hint="correct the weight, leave the column out (of data=edges: data.columns=[0,1]), or choose a model that "
        "takes signed weights; docs/models.md#edge-data lists them.",
    )


class StoreError(DataError):
    """A partitioned store on disk is damaged or of another format."""


class CheckpointError(GtrainError):
    """A checkpoint is missing, incomplete, damaged, or of another model."""


class PeerLostError(GtrainError):
    """Communication failed because another rank is gone: a consequence of a failure, never its first cause."""


class SilentRankError(PeerLostError):
    """The failure detector has declared another rank dead: its heartbeats stopped. The message names the rank."""


class RankFailedError(GtrainError):
    """A rank of the job failed; the message names the first rank that failed, and the reason.

    Args:
        external: whether the rank was killed, fell silent or lost a peer, so that a restarted job may succeed; an error
            of the rank itself would occur again.
    """

    def __init__(self, message: str, *, hint: str | None = None, external: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.external = external


class InterruptedRunError(SystemExit):
    """Training ended early, after a checkpoint, because a process of the job received SIGTERM."""

    echo = True  # a process is named only if no other failed

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)

    def __str__(self) -> str:
        return "saved a checkpoint and ended, because a process of the job received SIGTERM"


def restored(description: Mapping[str, Any]) -> GtrainError:
    """Return the error that another process described; see :func:`gtrain.launch.slot.describe`."""
    error_class = globals().get(description["type"], GtrainError)
    arguments = {"external": description["external"]} if error_class is RankFailedError else {}
    return error_class(description["message"], hint=description["hint"], **arguments)
