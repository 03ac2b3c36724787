"""What one process of a job knows about its place in it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gtrain.backends import WORKER
from gtrain.errors import GtrainError, PeerLostError, disk_full

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Slot:
    """One process of the job.

    Attributes:
        role: ``worker``, or the name of a server role, such as ``parameter``.
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
        return f"rank {self.rank}" if self.role == WORKER else f"{self.role} {self.rank}"


@dataclass(frozen=True)
class Roster:
    """The servers of a job, as every process of it knows them.

    Attributes:
        counts: number of servers of each role, in the whole job.
        addresses: where they listen, in rank order, of those roles whose addresses were known when this process
            began; the others are in the job's key-value store.
        key_file: the keys with which this job's processes know each other; None where no address leaves the machine.
        standalone: roles whose servers are started by hand, on any machine.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    key_file: str | None = None
    standalone: frozenset[str] = frozenset()


@dataclass(frozen=True)
class JobContext:
    """A process that the agent forked: its slot, its job, and its lines to the agent.

    Attributes:
        slot: this process.
        num_nodes: machines of the job.
        devices: workers of each machine.
        port: port of the job's key-value store.
        store_fds: listening sockets of that store in the process that serves it, elsewhere none.
        report_fd: write end of the pipe to the agent; one JSON object a line.
        log_dir: folder of the logs.
        store_address: how this process reaches the store; see :func:`gtrain.launch.links.connect`.
        host: machine of the store.
        route: how other machines reach it; a loopback address where the whole job is on this machine.
        simulated: whether all machines of the job are simulated by processes of this one.
        restarts: how many times the slot was restarted before this process.
        descriptor: a server's listening socket, bound before the fork; None for a worker.
        address: what to connect to in order to reach that socket; None for a worker.
        lasting_file: an anonymous file that outlives this process, see :class:`gtrain.launch.children.Post`.
        roster: the servers of the job.
    """

    slot: Slot
    num_nodes: int
    devices: int
    port: int
    store_fds: tuple[int, ...]
    report_fd: int
    log_dir: Path
    store_address: str = ""
    host: str = LOOPBACK
    route: str = LOOPBACK
    simulated: bool = True
    restarts: int = 0
    descriptor: int | None = None
    address: str | None = None
    lasting_file: int | None = None
    roster: Roster = field(default_factory=Roster)

    @property
    def world_size(self) -> int:
        """Number of workers of the job."""
        return self.num_nodes * self.devices


_context: JobContext | None = None
_roster = Roster()
_failure_reported = False


def current() -> JobContext | None:
    """The place of this process in a job that the agent started, or None outside of one."""
    return _context


def enter(context: JobContext) -> None:
    """Take up a place in a job; called once, first thing after the fork."""
    global _context, _roster, _failure_reported
    _context, _roster, _failure_reported = context, context.roster, False


def roster() -> Roster:
    """The servers of this process's job; an empty roster where it has none."""
    return _roster


def set_roster(found: Roster) -> None:
    """Say which servers the job has: for a rank that another launcher started."""
    global _roster
    _roster = found


def restarts() -> int:
    """How many times the agent has started this process's slot again."""
    return 0 if _context is None else _context.restarts


def report(kind: str, **fields: Any) -> None:
    """Send one line to the agent; does nothing outside of an agent's job."""
    if _context is not None:
        os.write(_context.report_fd, (json.dumps({"kind": kind, **fields}) + "\n").encode())


def may_be_lost(may: bool = True) -> None:
    """Tell the agent whether the job goes on, should this process die, without its machine's workers."""
    report("may be lost", value=may)


def joined() -> None:
    """Tell the agent that this process has a part in the job by now: if it dies, no other takes its place."""
    report("joined")


def say(text: str) -> None:
    """Have the agent print a line to the terminal, which only rank 0 writes to itself."""
    report("say", text=text)


def report_failure(exception: BaseException) -> None:
    """Tell the agent why this process is about to end. Only the first call counts: the rest is a consequence."""
    global _failure_reported
    if _failure_reported:
        return
    _failure_reported = True
    report("failure", time_ns=time.monotonic_ns(), **describe(exception))


def describe(exception: BaseException) -> dict[str, Any]:
    """What the agent needs to name a failure: type, message, hint, and whether it is a user's mistake or an echo."""
    exception = disk_full(exception) or exception
    user = isinstance(exception, GtrainError)
    return {
        "type": type(exception).__name__,
        "message": exception.message if isinstance(exception, GtrainError) else str(exception),
        "hint": exception.hint if isinstance(exception, GtrainError) else None,
        "user": user,
        "echo": _is_echo(exception),
    }


def _is_echo(exception: BaseException | None) -> bool:
    """Whether a lost peer lies anywhere in the chain of causes. ``gtrain.wire`` marks such errors of its own."""
    seen: set[int] = set()
    while exception is not None and id(exception) not in seen:  # a chain may bite its own tail
        if isinstance(exception, PeerLostError) or getattr(exception, "echo", False):
            return True
        seen.add(id(exception))
        exception = exception.__cause__ or exception.__context__
    return False
