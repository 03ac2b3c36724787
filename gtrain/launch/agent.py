"""The agent starts every process of a job, watches and restarts them, and reports the first cause of a failure.

The agent is not a rank and touches no tensors. It forks the processes, which therefore share the memory of its imports.
One launch covers the whole task (fit, validate, test). No child outlives the agent: the kernel kills a child whose
parent dies.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import DictConfig

from gtrain import backends
from gtrain.errors import GtrainError, InterruptedRunError, RankFailedError, SilentRankError
from gtrain.launch import cuda, links
from gtrain.launch.children import PRELOAD, Child, ProcessSpec
from gtrain.launch.job import Job, process_specs
from gtrain.launch.logs import log_path
from gtrain.launch.slot import WORKER
from gtrain.launch.sockets import listen_here
from gtrain.memory.limits import usable_memory
from gtrain.record import events

GRACE_AFTER_LOSS_SECONDS = 10.0  # how long workers of a lost machine may run on after all others have ended
_ENDS_JOB = (SilentRankError.__name__, InterruptedRunError.__name__)
"""Failures of which no single process recovers: it would wait for the silent peer too, or all others end as well."""
ECHO_SECONDS = 0.5  # after the first failure, how long to wait for reports of an earlier cause


def start_and_watch(
    task: str | Callable[..., Any], args: Sequence[Any], settings: Mapping[str, Any], result: int
) -> None:
    """Fork the processes of a single-machine job and wait for them.

    Args:
        task: the function that each rank runs, or ``package.module:function``.
        args: its arguments.
        settings: fields of :class:`Job`.
        result: descriptor of the file that rank 0 writes its return value to.
    """
    store = listen_here()
    try:
        job = Job(**settings, store=(store,), store_address=store.address, result=result)
        run(job, lambda: process_specs(job, task, args))
    finally:
        store.close()


def run(job: Job, make_specs: Callable[[], Sequence[ProcessSpec]]) -> None:
    """Run a job, or one machine's share of it, until it ends.

    Args:
        job: the job, before it has processes.
        make_specs: returns the processes to start, and binds their sockets as ``job.listeners``.

    Raises:
        GtrainError, RankFailedError: see :func:`gtrain.run_local`.
    """
    preload()

    def specs() -> Sequence[ProcessSpec]:
        made = make_specs()
        sys.modules[PRELOAD].place_kernels(None)
        if len(made) > 1:
            sys.modules[PRELOAD].share_compiler()
        return made

    supervise(job, specs)


def supervise(job: Job, make_specs: Callable[[], Sequence[ProcessSpec]]) -> None:
    """Start the processes of a job, watch them, and end them; see :func:`run`."""
    job.log_dir.mkdir(parents=True, exist_ok=True)
    with terminate_on_signals():
        try:
            for spec in make_specs():
                job.children.append(job.start(spec, 0))
            failed = _watch(job)
        except SystemExit:
            _let_ranks_save(job)
            raise
        finally:
            _end(job)
            for listener in job.listeners:
                listener.close()
            for memory in job.memories:
                os.close(memory)
            if job.line is not None:
                job.line.close()
    if failed and (child := first_cause(job.children)) is not None:
        _record(job, child, "failed")
        raise error_for(child, job.size(child.slot.role), job.log_dir, _less_memory(job, child))


def preload() -> None:
    """Import once what every rank starts with.

    The garbage collector is off during the import and ignores the imported objects afterwards: traversing them takes a
    tenth of the import's time, and again when a process ends.
    """
    if PRELOAD in sys.modules:
        return
    collects = gc.isenabled()
    gc.disable()
    try:
        _import_torchmetrics()
        cuda.import_torch_geometric()
        importlib.import_module(PRELOAD)
    finally:
        gc.freeze()
        if "triton" in sys.modules:
            # At exit it would list each object of its own that is left as leaked.
            atexit.register(gc.unfreeze)
        if collects:
            gc.enable()


def _import_torchmetrics() -> None:
    """Import torchmetrics without scipy.signal, which would take a sixth of the CPU time of a start.

    torchmetrics imports it only to give the scipy of one audio package a function back that scipy has removed.
    """
    if "scipy.signal" not in sys.modules and importlib.util.find_spec("scipy") is not None:
        signals: Any = ModuleType("scipy.signal")
        signals.hamming = None
        sys.modules["scipy.signal"] = signals
        try:
            importlib.import_module("torchmetrics")
        finally:
            del sys.modules["scipy.signal"]


# ---------------------------------------------------------------------------------------------------- watching


def _watch(job: Job) -> bool:
    """Wait until every worker has ended (False), or until :data:`ECHO_SECONDS` after the first failure (True)."""
    deadline: float | None = None
    with selectors.DefaultSelector() as selector:
        for child in job.children:
            _register(selector, child)
        if job.end_descriptor is not None:
            selector.register(job.end_descriptor, selectors.EVENT_READ)
        while not _is_finished(job, failing=deadline is not None):
            # The time-outs are for what sends no event: the deadline, and the grace period of lost machines.
            for key, _ in selector.select(0.05 if deadline else 1.0):
                if key.data is None:
                    return False  # the job has ended, or the rank that this agent's servers belong to
                _handle_event(job, selector, key.data, key.fd)
            if deadline is None:
                if job.is_over():
                    break
                _restart_dead(job, selector)
                _continue_without(job, selector)
                if _only_lost_remain(job):
                    break
                if any(child.failed for child in job.children):
                    deadline = time.monotonic() + ECHO_SECONDS
            elif time.monotonic() >= deadline:
                break
    for child in job.children:  # reports that were written just before the end
        child.read_reports()
    return deadline is not None


def _only_lost_remain(job: Job) -> bool:
    """Whether only workers of lost machines still run, well after all other workers have ended."""
    others = [child for child in job.lasting if not child.may_be_lost]
    if not others or any(child.status is None for child in others):
        return False
    return time.monotonic_ns() - max(child.ended_ns for child in others) > GRACE_AFTER_LOSS_SECONDS * 1e9


def _is_finished(job: Job, *, failing: bool) -> bool:
    """Whether nothing is left to wait for: no worker, or, after a failure, no process at all."""
    waited_for = job.children if failing or job.end_descriptor is not None else job.lasting
    return all(child.status is not None for child in waited_for)


def _register(selector: selectors.BaseSelector, child: Child) -> None:
    selector.register(child.pidfd, selectors.EVENT_READ, child)
    selector.register(child.reports, selectors.EVENT_READ, child)


def _handle_event(job: Job, selector: selectors.BaseSelector, child: Child, descriptor: int) -> None:
    """Read a child's reports, or collect its exit status."""
    if descriptor == child.reports:
        if not child.read_reports():
            selector.unregister(descriptor)
        while child.complaints:
            process, seconds, silent = child.complaints.pop(0)
            for other in job.children:
                if f"{process} ".startswith(f"{other.slot.label} "):  # the name may be longer: ``rank 2 (machine 1)``
                    other.handle_complaint(seconds, silent)
    elif child.reap():
        selector.unregister(descriptor)
        child.read_reports()


def _restart_dead(job: Job, selector: selectors.BaseSelector) -> None:
    """Restart processes that were killed, up to their limit; one that raised an error would raise it again."""
    for index, child in enumerate(job.children):
        if child.joined or child.restarts >= child.spec.restarts or not died_of_external_cause(child):
            continue
        if child.failure is not None and child.failure["type"] in _ENDS_JOB:
            continue
        with contextlib.suppress(KeyError):
            selector.unregister(child.reports)
        child.close()
        number, limit = child.restarts + 1, child.spec.restarts
        sentence = describe_end(child, job.size(child.slot.role))
        print(f"gtrain: {sentence}; restarting it ({number}/{limit})", file=sys.stderr, flush=True)
        _record(job, child, "restarted", number=number, limit=limit)
        job.children[index] = job.start(child.spec, number, selector.fileno())  # type: ignore[attr-defined]
        _register(selector, job.children[index])


def _continue_without(job: Job, selector: selectors.BaseSelector) -> None:
    """Drop machines that lost a worker, where the job can continue without them; their servers keep running."""
    for child in job.children:
        if not (child.may_be_lost and died_of_external_cause(child)):
            continue
        # Without workers, the key-value store tells when the job ends.
        if job.machine is not None and job.end_descriptor is None:
            try:
                job.line = links.connect(job.store_address, job.key_file, GRACE_AFTER_LOSS_SECONDS, listens=True)
            except (GtrainError, OSError):
                return  # the job has ended
            job.end_descriptor = job.line.fileno()
            selector.register(job.end_descriptor, selectors.EVENT_READ)
        node = child.slot.node
        sentence = describe_end(child, job.size(child.slot.role))
        print(f"gtrain: {sentence}; the job goes on without machine {node}", file=sys.stderr, flush=True)
        _record(job, child, "lost")
        for worker in job.lasting:
            if worker.slot.node == node:
                worker.lost = True
                worker.signal(signal.SIGKILL)  # the workers of a machine share state


# ---------------------------------------------------------------------------------------------------- ending


def _let_ranks_save(job: Job) -> None:
    """After SIGTERM or SIGHUP: wait until the ranks have saved a checkpoint and ended, ``job.grace_seconds`` at most.

    A server that was started by hand tells the ranks of the job to do so, and ends when the job does. A second signal
    ends the wait.
    """
    ranks = [child for child in job.lasting if child.slot.role == WORKER]
    for child in ranks:
        child.read_reports()
    if not job.lasting or not all(child.saves_on_request or child.status is not None for child in ranks):
        return
    for child in ranks:
        child.signal(signal.SIGTERM)
    what = "the ranks save a checkpoint after their step" if ranks else "the server waits for the end of the job"
    text = f"{what}, for up to {job.grace_seconds:g} s; a second signal ends the job at once"
    print(f"gtrain: {text}", file=sys.stderr, flush=True)
    if not ranks:
        job.tell_ranks_to_save()
    deadline = time.monotonic() + job.grace_seconds
    for child in job.lasting:
        _wait_for_end(child, deadline)


def _end(job: Job) -> None:
    """End all children by their signal, and by SIGKILL to each child's process group."""
    start_time = time.monotonic()
    for child in job.children:
        child.signal(child.spec.stop_signal)
    # Every limit counts from the start, so the shortest come first and no child waits for another's.
    for child in sorted(job.children, key=lambda child: child.spec.stop_seconds):
        _wait_for_end(child, start_time + child.spec.stop_seconds)
    for child in job.children:
        child.signal(signal.SIGKILL)
        child.reap(wait=True)
        child.close()


def _wait_for_end(child: Child, deadline: float) -> None:
    while child.status is None and (seconds := deadline - time.monotonic()) > 0:
        with selectors.DefaultSelector() as selector:
            selector.register(child.pidfd, selectors.EVENT_READ)
            selector.select(seconds)
        child.reap()
    if child.status is None and not child.spec.terminates:
        print(f"gtrain: {child.slot.label} did not end in {child.spec.stop_seconds:g} s and is killed", file=sys.stderr)


@contextlib.contextmanager
def terminate_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that the ranks are ended on the way out, as after Ctrl-C."""
    received: list[int] = []

    def stop(number: int, _: Any) -> None:
        received.append(number)
        raise SystemExit(128 + number)

    try:
        kept = signal.getsignal(signal.SIGTERM) == signal.SIG_IGN  # a keeper, whose rank ends it
        numbers = [signal.SIGHUP] if kept else [signal.SIGTERM, signal.SIGHUP]
        before = {number: signal.signal(number, stop) for number in numbers}
    except ValueError:  # only the main thread may set handlers
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:  # printed last, after the output of the ranks
            print(f"gtrain: ended by {signal.Signals(received[0]).name}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------- the cause


def first_cause(children: Iterable[Child]) -> Child | None:
    """Return the child that caused the failure, or None.

    A child that failed because it lost a peer only echoes the peer's failure; it is named only if no other child
    failed. Among the others the earliest failure counts; a process that was killed without a report is not an echo.
    """
    causes = [child for child in children if not child.lost and (child.failed or child.failure)]
    return min(
        causes,
        key=lambda child: (
            (child.failure["echo"], child.failure["time_ns"]) if child.failure else (False, child.ended_ns)
        ),
        default=None,
    )


def died_of_external_cause(child: Child) -> bool:
    """Whether a process was killed, or ended because a peer failed, and not by its own error."""
    return child.failed and (child.failure is None or child.failure["echo"])


def error_for(child: Child, of: int, log_dir: Path, less_memory: Sequence[str] = ()) -> GtrainError:
    """Return the exception that reports a failed child.

    Args:
        child: the first cause.
        of: number of processes of its role.
        log_dir: folder of the logs.
        less_memory: what reduces the memory of a rank, clauses in the imperative.
    """
    failure = child.failure
    if failure is not None and failure["user"] and not failure["echo"]:  # it tells the user what to do
        return GtrainError(failure["message"], hint=failure["hint"])
    log, external = log_path(log_dir, child.slot.label), died_of_external_cause(child)
    if failure is not None:
        interrupted = failure["type"] == InterruptedRunError.__name__
        hint = None if interrupted else f"the full traceback is in {log}"
        return RankFailedError(f"{describe_end(child, of)}", hint=hint, external=external)
    killed = child.status == -signal.SIGKILL and child.silent_seconds is None
    advice = "the kernel kills with SIGKILL when memory runs out; " if killed else ""
    if child.out_of_memory:
        advice = _memory_advice(child, less_memory)
    hint = f"{advice}the {_kind(child)}'s log is {log}"
    return RankFailedError(f"{describe_end(child, of)}.", hint=hint, external=external)


def _less_memory(job: Job, child: Child) -> Sequence[str]:
    """Return what reduces the memory of a rank of this job's strategy; empty for servers and jobs of programs."""
    config = job.config
    if child.slot.role != WORKER or not isinstance(config, DictConfig) or "strategy" not in config:
        return ()
    return backends.get(config["strategy"]["name"]).less_memory


def _memory_advice(child: Child, less_memory: Sequence[str]) -> str:
    """Return what a process held that was killed because memory ran out, and what reduces it."""
    gib = 2**30
    parts = f", of that {child.holds} in its first step" if child.holds else ""
    limit = f"all processes of this machine together may use {usable_memory() / gib:.1f} GiB"
    held = f"it held {child.peak_bytes / gib:.1f} GiB at its peak{parts}; {limit}; "
    return f"{held}{''.join(f'{each}; or ' for each in less_memory)}see with gtrain plan which strategy needs less; "


def describe_end(child: Child, of: int) -> str:
    """Describe how a process ended, as a clause: ``rank 2 of 4 (machine 1) was killed by SIGKILL``."""
    where = f"{child.slot.label} of {of} (machine {child.slot.node})"
    if child.failure is not None and child.failure["type"] == InterruptedRunError.__name__:
        return f"{where} {child.failure['message']}"
    if child.failure is not None:
        return f"{where} failed with {child.failure['type']}: {child.failure['message'] or 'no message'}"
    status = child.status or 0
    if child.silent_seconds is not None:
        return f"{where} sent no heartbeat for {child.silent_seconds:g} s and was killed"
    if status < 0:
        reason = ", because memory ran out" if child.out_of_memory else ""
        return f"{where} was killed by {signal.Signals(-status).name}{reason}"
    task = "its task was done" if child.slot.role == WORKER else "the job was over"
    return f"{where} ended with exit code {status} before {task}"


def _record(job: Job, child: Child, event: str, **fields: Any) -> None:
    """Append an event to the record of the run: how a process ended, and what the agent did about it."""
    slot = child.slot
    who = {"process": slot.label, "role": slot.role, "rank": slot.rank, "machine": slot.node}
    events.append(job.log_dir.parent, event, **who, message=describe_end(child, job.size(slot.role)), **fields)


def _kind(child: Child) -> str:
    return "rank" if child.slot.role == WORKER else child.slot.role
