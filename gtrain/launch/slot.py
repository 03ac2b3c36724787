"""The slot of a process in its job (role, rank, machine), and the reports that it sends to the agent."""

from __future__ import annotations

import json
import os
import threading
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
    """The role, rank and machine of one process of the job; a restarted process has the slot of the one before.

    Attributes:
        role: ``worker``, or the name of a server role, such as ``parameter``.
        rank: index within the role, from 0.
        node: index of its machine (real or simulated), from 0.
        local: index among the processes of the role on its machine, from 0.
    """

    role: str
    rank: int
    node: int
    local: int

    @property
    def label(self) -> str:
        """The name in messages and log files: ``rank 2`` for a worker, ``<role> 0`` for a server."""
        return f"rank {self.rank}" if self.role == WORKER else f"{self.role} {self.rank}"


@dataclass(frozen=True)
class ServerRoster:
    """The servers of a job.

    Attributes:
        counts: number of servers of each role in the whole job.
        addresses: addresses in rank order, of the roles whose addresses were known when this process started; the
            others are in the job's key-value store.
        key_file: path of the key file that authenticates the job's processes; None for a job on one machine.
        standalone: roles whose servers are started by hand, on any machine.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    key_file: str | None = None
    standalone: frozenset[str] = frozenset()


@dataclass
class JobBase:
    """The data that the agent and every process have of their job.

    Attributes:
        num_nodes: machines of the job.
        devices: workers per machine.
        log_dir: folder of the logs.
        host: host name of the machine of the job's key-value store.
        port: port of the store.
        route: how other machines reach the store; a loopback address if the whole job is on this machine.
        store_address: how this machine's processes reach the store; see :func:`gtrain.launch.links.connect`.
        attempt: how many times the whole job was started before; see :func:`attempt`.
        roster: the servers of the job.
    """

    num_nodes: int
    devices: int
    log_dir: Path
    host: str = LOOPBACK
    port: int = 0
    route: str = LOOPBACK
    store_address: str = ""
    attempt: int = 0
    roster: ServerRoster = field(default_factory=ServerRoster)

    @property
    def world_size(self) -> int:
        """Number of workers of the job."""
        return self.num_nodes * self.devices


@dataclass(kw_only=True)
class JobContext(JobBase):
    """The data that a forked process has of its slot and its agent, in addition to :class:`JobBase`.

    Attributes:
        slot: this process.
        store_fds: listening sockets of the store in the process that serves it, empty elsewhere.
        report_fd: write end of the pipe to the agent; one JSON object per line.
        store_server: label of the process that serves the store.
        simulated: whether this machine simulates all machines of the job.
        restarts: how many times the agent has restarted this slot.
        descriptor: the listening socket of a server, bound before the fork; None for a worker.
        address: the address of that socket; None for a worker.
        lasting_file: a file that outlives this process, see :class:`gtrain.launch.children.ProcessSpec`.
    """

    slot: Slot
    store_fds: tuple[int, ...]
    report_fd: int
    store_server: str = "rank 0"
    simulated: bool = True
    restarts: int = 0
    descriptor: int | None = None
    address: str | None = None
    lasting_file: int | None = None


_context: JobContext | None = None
_roster = ServerRoster()
_attempt = 0
_job_number = 0
_failure_reported = False
_reporting = threading.Lock()  # threads report too, and a long report is written in pieces


def current() -> JobContext | None:
    """Return the context of this process, or None if no agent started it."""
    return _context


def enter(context: JobContext) -> None:
    """Set the context of this process; called once, right after the fork."""
    global _context, _roster, _attempt, _failure_reported
    _context, _roster, _attempt, _failure_reported = context, context.roster, context.attempt, False


def roster() -> ServerRoster:
    """Return the servers of this process's job; an empty roster if it has none."""
    return _roster


def set_roster(servers: ServerRoster, attempt: int = 0) -> None:
    """Set the servers of the job and its attempt, in a rank that another launcher started."""
    global _roster, _attempt
    _roster, _attempt = servers, attempt


def count_job() -> None:
    """Count a job of this process, which another launcher started; all ranks count the same jobs, as of a sweep."""
    global _job_number
    _job_number += 1


def job_number() -> int:
    """Return the number of the job among those of this process, from 1; 0 in the processes of gtrain's agent."""
    return _job_number


def restarts() -> int:
    """Return how often the agent has restarted this process's slot."""
    return 0 if _context is None else _context.restarts


def attempt() -> int:
    """Return how many times the whole job was started before; it then resumes from its last checkpoint."""
    return _attempt


def report(kind: str, **fields: Any) -> None:
    """Send a report to the agent; does nothing if no agent started this process."""
    if _context is None:
        return
    content = memoryview((json.dumps({"kind": kind, **fields}) + "\n").encode())
    with _reporting:
        while content:
            content = content[os.write(_context.report_fd, content) :]


def print_line(text: str) -> None:
    """Have the agent print a line to the terminal; only rank 0 writes there itself."""
    report("say", text=text)


def report_failure(exception: BaseException) -> None:
    """Tell the agent why this process is about to end. Later calls are ignored: they report consequences."""
    global _failure_reported
    if _failure_reported:
        return
    _failure_reported = True
    report("failure", time_ns=time.monotonic_ns(), **describe(exception))


def describe(exception: BaseException) -> dict[str, Any]:
    """Return an exception's type, message and hint, and whether it is a user error or echoes another failure."""
    exception = disk_full(exception) or exception
    user = isinstance(exception, GtrainError)
    return {
        "type": type(exception).__name__,
        "message": exception.message if isinstance(exception, GtrainError) else str(exception),
        "hint": exception.hint if isinstance(exception, GtrainError) else None,
        "user": user,
        "echo": _is_echo(exception),
        "external": getattr(exception, "external", False),
    }


def _is_echo(exception: BaseException | None) -> bool:
    """Whether a lost peer is among the causes of an exception. ``gtrain.wire`` sets ``echo`` on such errors."""
    seen: set[int] = set()
    while exception is not None and id(exception) not in seen:  # a chain of causes may have a cycle
        if isinstance(exception, PeerLostError) or getattr(exception, "echo", False):
            return True
        seen.add(id(exception))
        exception = exception.__cause__ or exception.__context__
    return False
