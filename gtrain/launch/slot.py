"""What one process of a job knows about its place in it. Imports the standard library only."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtrain.errors import GtrainError, PeerLostError


@dataclass(frozen=True)
class Slot:
    """One process of the job.

    Attributes:
        role: ``worker``, or the name of a server role.
        rank: number within the role, from 0.
        node: machine (real or simulated) that the process belongs to, from 0.
        local: number among the processes of that role on its machine, from 0.
    """

    role: str
    rank: int
    node: int
    local: int

    @property
    def label(self) -> str:
        """``rank 2`` for a worker, ``<role> 0`` for a server: how messages and log files name the process."""
        return f"rank {self.rank}" if self.role == "worker" else f"{self.role} {self.rank}"


@dataclass(frozen=True)
class JobContext:
    """A process that the agent forked: its slot, its job, and its lines to the agent.

    Attributes:
        slot: this process.
        num_nodes: machines of the job, here simulated by processes of one machine.
        devices: workers of each machine.
        port: loopback port of the job's key-value store.
        store_fd: listening socket of that store; only rank 0 has it and serves, elsewhere None.
        report_fd: write end of the pipe to the agent; one JSON object a line.
        log_dir: folder of the ranks' logs.
    """

    slot: Slot
    num_nodes: int
    devices: int
    port: int
    store_fd: int | None
    report_fd: int
    log_dir: Path

    @property
    def world_size(self) -> int:
        """Number of workers of the job."""
        return self.num_nodes * self.devices


_context: JobContext | None = None
_failure_reported = False


def current() -> JobContext | None:
    """The place of this process in a job that the agent started, or None outside of one."""
    return _context


def enter(context: JobContext) -> None:
    """Take up a place in a job; called once, first thing after the fork."""
    global _context, _failure_reported
    _context, _failure_reported = context, False


def report(kind: str, **fields: Any) -> None:
    """Send one line to the agent; does nothing outside of an agent's job."""
    if _context is not None:
        os.write(_context.report_fd, (json.dumps({"kind": kind, **fields}) + "\n").encode())


def report_failure(exception: BaseException) -> None:
    """Tell the agent why this process is about to end. Only the first call counts: the rest is a consequence."""
    global _failure_reported
    if _failure_reported:
        return
    _failure_reported = True
    report("failure", time_ns=time.monotonic_ns(), **describe(exception))


def describe(exception: BaseException) -> dict[str, Any]:
    """What the agent needs to name a failure: type, message, hint, and whether it is a user's mistake or an echo."""
    user = isinstance(exception, GtrainError)
    return {
        "type": type(exception).__name__,
        "message": exception.message if isinstance(exception, GtrainError) else str(exception),
        "hint": exception.hint if isinstance(exception, GtrainError) else None,
        "user": user,
        "echo": _is_echo(exception),
    }


def _is_echo(exception: BaseException | None) -> bool:
    """Whether a lost peer lies anywhere in the chain of causes."""
    seen: set[int] = set()
    while exception is not None and id(exception) not in seen:  # a chain may bite its own tail
        if isinstance(exception, PeerLostError):
            return True
        seen.add(id(exception))
        exception = exception.__cause__ or exception.__context__
    return False
