"""Naming what ended a job: the first failure that is no echo of another. Imports the standard library only."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path

from gtrain.errors import GtrainError, RankFailedError
from gtrain.launch.children import Child
from gtrain.launch.logs import log_path
from gtrain.launch.slot import WORKER


def first_cause(children: Iterable[Child]) -> Child | None:
    """The child that failed first, if any did.

    What is no echo of another's end comes first, then what came first in time. A process that died without a word is
    no echo; one that lost its peer is, and is blamed only if nobody else can be.
    """
    causes = [child for child in children if not child.lost and (child.failed or child.failure)]
    return min(causes, key=_order, default=None)


def _order(child: Child) -> tuple[bool, int]:
    if child.failure is not None:
        return child.failure["echo"], child.failure["time_ns"]
    return False, child.ended_ns


def is_users_mistake(child: Child) -> bool:
    """Whether the process ended by an error that says what the user should do, and is no echo."""
    return child.failure is not None and child.failure["user"] and not child.failure["echo"]


def died_without_a_cause(child: Child) -> bool:
    """Whether a process was killed, or ended for another process's sake; not by an error of its own."""
    return child.failed and (child.failure is None or child.failure["echo"])


def error_of(child: Child, of: int, log_dir: Path) -> GtrainError:
    """The error that a failed child stands for.

    Args:
        child: the first cause.
        of: how many processes its role has.
        log_dir: folder of the logs.
    """
    failure = child.failure
    if failure is not None and is_users_mistake(child):
        return GtrainError(failure["message"], hint=failure["hint"])
    log = log_path(log_dir, child.slot.label)
    if failure is not None:
        return RankFailedError(f"{ending(child, of)}", hint=f"the full traceback is in {log}")
    advice = "the kernel kills with SIGKILL when memory runs out; " if child.status == -signal.SIGKILL else ""
    return RankFailedError(f"{ending(child, of)}.", hint=f"{advice}the {_kind(child)}'s log is {log}")


def ending(child: Child, of: int) -> str:
    """How a process ended, in one clause: ``rank 2 of 4 (machine 1) was killed by SIGKILL``."""
    where = f"{child.slot.label} of {of} (machine {child.slot.node})"
    if child.failure is not None:
        return f"{where} failed with {child.failure['type']}: {child.failure['message'] or 'no message'}"
    status = child.status or 0
    if status < 0:
        return f"{where} was killed by {signal.Signals(-status).name}"
    task = "its task was done" if child.slot.role == WORKER else "the job was over"
    return f"{where} ended with exit code {status} before {task}"


def _kind(child: Child) -> str:
    return "rank" if child.slot.role == WORKER else child.slot.role
