"""The agent: starts every process of a job once, watches them, and names the first cause of a failure.

The agent owns no rank and touches no tensor. It forks, so that all ranks share the imports of one process. One launch
covers the whole task (fit, validate, test). However the agent ends, no child outlives it: the kernel kills a child
whose parent dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gtrain.errors import ConfigError, GtrainError, RankFailedError
from gtrain.launch import slot as slots
from gtrain.launch.logs import capture, log_path
from gtrain.launch.slot import JobContext, Slot

PRELOAD = "gtrain.launch.preload"
ECHO_SECONDS = 0.5  # how long after the first failure others may still report an earlier cause
GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
_PR_SET_PDEATHSIG = 1


@dataclass
class Child:
    """A forked process as the agent sees it."""

    slot: Slot
    pid: int
    pidfd: int
    reports: int  # read end of its pipe
    pending: bytes = b""
    status: int | None = None  # exit code, or minus the signal; None while alive
    ended_ns: int = 0
    done: bool = False
    result: Any = None
    failure: dict[str, Any] | None = None
    killed_by_agent: bool = False

    @property
    def failed(self) -> bool:
        """Ended, and not by coming to the end of its task."""
        return self.status is not None and not (self.status == 0 and self.done)


@dataclass
class Job:
    """The processes of one launch."""

    num_nodes: int
    devices: int
    log_dir: Path
    children: list[Child] = field(default_factory=list)


def run_local(
    task: str | Callable[..., Any],
    *args: Any,
    num_nodes: int = 1,
    devices: int = 1,
    log_dir: str | os.PathLike[str] = "logs",
) -> Any:
    """Run ``task(*args)`` in ``num_nodes * devices`` processes of this machine and wait for all of them.

    Args:
        task: a function, or ``package.module:function``.
        args: passed to every rank as they are (the ranks are forks: nothing is pickled).
        num_nodes: machines to simulate.
        devices: ranks on each of them.
        log_dir: each rank writes ``rank-<r>.log`` there; rank 0 writes to the terminal too.

    Returns:
        What rank 0 returned, where JSON can hold it.

    Raises:
        GtrainError: as a rank raised it, when the first failure is a user's mistake.
        RankFailedError: names the rank that failed first, how, and where its log is.
    """
    if num_nodes < 1 or devices < 1:
        raise ConfigError(
            f"num_nodes={num_nodes} and devices={devices} were set; both must be at least 1.",
            hint="ranks = num_nodes * devices.",
        )
    importlib.import_module(PRELOAD)
    job = Job(num_nodes, devices, Path(log_dir).absolute())
    job.log_dir.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with _terminate_on_signals():
        try:
            _start(job, task, args)
            _watch(job)
        finally:
            _end(job)
    _raise_first_cause(job)
    return next(child.result for child in job.children if child.slot.rank == 0)


# ---------------------------------------------------------------------------------------------------- starting


def _start(job: Job, task: str | Callable[..., Any], args: Sequence[Any]) -> None:
    """Fork one child for each slot. The job's key-value store gets a socket bound here, so no port can be lost."""
    with socket.socket() as store:
        store.bind(("127.0.0.1", 0))
        store.listen(1024)
        for node in range(job.num_nodes):
            for local in range(job.devices):
                _fork(job, Slot("worker", node * job.devices + local, node, local), store, task, args)


def _fork(job: Job, slot: Slot, store: socket.socket, task: str | Callable[..., Any], args: Sequence[Any]) -> None:
    read_end, write_end = os.pipe()
    agent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        for sibling in job.children:
            os.close(sibling.reports)
            os.close(sibling.pidfd)
        port = store.getsockname()[1]
        store_fd = store.detach() if slot.rank == 0 else None
        store.close()  # a detached socket has nothing left to close
        _child(JobContext(slot, job.num_nodes, job.devices, port, store_fd, write_end, job.log_dir), agent, task, args)
    os.close(write_end)
    job.children.append(Child(slot, pid, os.pidfd_open(pid), read_end))


def _child(context: JobContext, agent: int, task: str | Callable[..., Any], args: Sequence[Any]) -> None:
    """The life of a rank. Never returns: it leaves by ``os._exit``, past the agent's own exit handlers."""
    code, slot = 1, context.slot
    try:
        _die_with(agent)
        os.setpgid(0, 0)  # Ctrl-C reaches the agent alone, which ends the ranks in order
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        capture(log_path(context.log_dir, slot.label), terminal=slot.role == "worker" and slot.rank == 0)
        slots.enter(context)
        result = _resolve(task)(*args)
        slots.report("done", result=result if _is_json(result) else None)
        code = 0
    except SystemExit as exit_request:
        code = exit_request.code if isinstance(exit_request.code, int) else 1
        if code:
            slots.report_failure(exit_request)
    except BaseException as exception:  # noqa: BLE001 - whatever ends a rank is reported, then the process ends
        slots.report_failure(exception)
        _log_failure(context, exception)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _die_with(agent: int) -> None:
    """Have the kernel kill this process when the agent dies, however it dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:  # it died between the fork and the line above
        os._exit(1)


def _log_failure(context: JobContext, exception: BaseException) -> None:
    """Keep the traceback in the log file alone: the terminal gets the agent's one message."""
    with open(log_path(context.log_dir, context.slot.label), "a") as log:
        log.write("".join(traceback.format_exception(exception)))


def _resolve(task: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(task):
        return task
    module, _, name = task.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


# ---------------------------------------------------------------------------------------------------- watching


def _watch(job: Job) -> None:
    """Return when every child ended, or :data:`ECHO_SECONDS` after the first of them failed."""
    deadline: float | None = None
    with selectors.DefaultSelector() as selector:
        for child in job.children:
            selector.register(child.pidfd, selectors.EVENT_READ, child)
            selector.register(child.reports, selectors.EVENT_READ, child)
        while any(child.status is None for child in job.children):
            for key, _ in selector.select(0.05 if deadline else 1.0):
                child = key.data
                if key.fd == child.reports:
                    if not _read_reports(child):
                        selector.unregister(child.reports)
                elif _reap(child):
                    selector.unregister(child.pidfd)
            if deadline is None and any(child.failed for child in job.children):
                deadline = time.monotonic() + ECHO_SECONDS
            if deadline is not None and time.monotonic() >= deadline:
                break
    for child in job.children:  # what was written just before the end
        while _read_reports(child, wait=False):
            pass


def _read_reports(child: Child, wait: bool = True) -> bool:
    """Take in what the child wrote; False at the end of its pipe."""
    if not wait:
        os.set_blocking(child.reports, False)
    try:
        data = os.read(child.reports, 65536)
    except BlockingIOError:
        return False
    *lines, child.pending = (child.pending + data).split(b"\n")
    for line in lines:
        message = json.loads(line)
        if message["kind"] == "done":
            child.done, child.result = True, message["result"]
        else:
            child.failure = child.failure or message
    return bool(data)


def _reap(child: Child) -> bool:
    """Collect the exit status if the child has ended."""
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    if pid == 0:
        return False
    child.status, child.ended_ns = os.waitstatus_to_exitcode(status), time.monotonic_ns()
    return True


# ---------------------------------------------------------------------------------------------------- ending


def _end(job: Job) -> None:
    """Leave no process behind: SIGTERM, then SIGKILL to each child's whole process group."""
    _signal_all(job, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(child.status is None for child in job.children) and time.monotonic() < deadline:
        for child in job.children:
            if child.status is None and not _reap(child):
                time.sleep(0.01)
    _signal_all(job, signal.SIGKILL)
    for child in job.children:
        if child.status is None:
            child.status, child.ended_ns = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]), time.monotonic_ns()
        os.close(child.reports)
        os.close(child.pidfd)


def _signal_all(job: Job, number: signal.Signals) -> None:
    for child in job.children:
        if child.status is not None:
            continue
        child.killed_by_agent = True
        for kill in (os.killpg, os.kill):  # the group does not exist before the child has made it
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(child.pid, number)


@contextlib.contextmanager
def _terminate_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that the ranks are ended on the way out (Ctrl-C is one already)."""

    def stop(number: int, _: Any) -> None:
        print(f"gtrain: ended by {signal.Signals(number).name}", file=sys.stderr)
        raise SystemExit(128 + number)

    try:
        before = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGHUP)}
    except ValueError:  # not in the main thread, where nobody may set a handler
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise_first_cause(job: Job) -> None:
    """Name the child that failed first, if any did."""
    causes = [_cause(child) for child in job.children if child.failed and not child.killed_by_agent or child.failure]
    if not causes:
        return
    _, _, child = min(causes, key=lambda cause: cause[:2])
    log = log_path(job.log_dir, child.slot.label)
    failure = child.failure
    if failure is not None and failure["user"] and not failure["echo"]:
        raise GtrainError(failure["message"], hint=failure["hint"])
    where = f"{child.slot.label} of {len(job.children)} (machine {child.slot.node})"
    if failure is not None:
        text = failure["message"] or "no message"
        raise RankFailedError(f"{where} failed with {failure['type']}: {text}", hint=f"the full traceback is in {log}")
    message, hint = _describe_death(where, child.status or 0, log)
    raise RankFailedError(message, hint=hint)


def _cause(child: Child) -> tuple[bool, int, Child]:
    """Order of blame: what is no echo of another's end comes first, then what came first in time."""
    if child.failure is not None:
        return child.failure["echo"], child.failure["time_ns"], child
    return False, child.ended_ns, child


def _describe_death(where: str, status: int, log: Path) -> tuple[str, str]:
    """Message and hint for a process that ended without saying why; ``status`` is negative for a signal."""
    if status < 0:
        advice = "the kernel kills with SIGKILL when memory runs out; " if -status == signal.SIGKILL else ""
        name = signal.Signals(-status).name
        return f"{where} was killed by {name} (signal {-status}).", f"{advice}the rank's log is {log}"
    return f"{where} ended with exit code {status} before its task was done.", f"the rank's log is {log}"
