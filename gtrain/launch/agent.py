"""The agent: starts every process of a job once, watches them, and names the first cause of a failure.

The agent owns no rank and touches no tensor. It forks, so that all processes share the imports of one. One launch
covers the whole task (fit, validate, test). However the agent ends, no child outlives it: the kernel kills a child
whose parent dies.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gtrain.errors import GtrainError, RankFailedError, SilentRankError
from gtrain.launch import cuda, links
from gtrain.launch.children import PRELOAD, Child, Post
from gtrain.launch.job import Job, posts_of, start
from gtrain.launch.logs import log_path
from gtrain.launch.slot import WORKER
from gtrain.launch.sockets import listen_here

LEFT_SECONDS = 10.0  # how long after the others a worker may end that may be lost
ECHO_SECONDS = 0.5  # how long after the first failure others may still report an earlier cause


def start_and_watch(
    task: str | Callable[..., Any], args: Sequence[Any], settings: Mapping[str, Any], result: int
) -> None:
    """Fork the processes of a job of this machine alone and wait for them.

    Args:
        task: of the ranks.
        args: its arguments.
        settings: of :class:`Job`.
        result: a file for what rank 0 returns.
    """
    store = listen_here()
    try:
        job = Job(**settings, store=(store,), store_address=store.address, result=result)
        run(job, lambda: posts_of(job, task, args))
    finally:
        store.close()


def run(job: Job, make_posts: Callable[[], Sequence[Post]]) -> None:
    """Run a job, or one machine's share of it, to its end.

    Args:
        job: its shape; without processes yet.
        make_posts: makes the posts to fill, and binds their sockets as ``job.listeners``.

    Raises:
        GtrainError, RankFailedError: see :func:`gtrain.run_local`.
    """
    preload()
    job.log_dir.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with terminate_on_signals():
        try:
            posts = make_posts()
            sys.modules[PRELOAD].place_kernels(None)
            if len(posts) > 1:
                sys.modules[PRELOAD].share_compiler()
            for post in posts:
                job.children.append(start(job, post, 0))
            failed = _watch(job)
        finally:
            _end(job)
            for listener in job.listeners:
                listener.close()
            for memory in job.memories:
                os.close(memory)
            if job.line is not None:
                job.line.close()
    if failed and (child := first_cause(job.children)) is not None:
        raise error_of(child, job.size(child.slot.role), job.log_dir)


def preload() -> None:
    """Import once what every rank starts with, unless it has been.

    A tenth of the time would go into looking for garbage among what stays, and more of it at the end of the process:
    modules are out of the collector's sight from here on.
    """
    if PRELOAD in sys.modules:
        return
    collects = gc.isenabled()
    gc.disable()
    try:
        cuda.import_torch_geometric()
        importlib.import_module(PRELOAD)
    finally:
        gc.freeze()
        if collects:
            gc.enable()


# ---------------------------------------------------------------------------------------------------- watching


def _watch(job: Job) -> bool:
    """Return False when every worker came to its end, True :data:`ECHO_SECONDS` after a first failure."""
    deadline: float | None = None
    with selectors.DefaultSelector() as selector:
        for child in job.children:
            _register(selector, child)
        if job.leash is not None:
            selector.register(job.leash, selectors.EVENT_READ)
        while not _over(job, failing=deadline is not None):
            for key, _ in selector.select(0.05 if deadline else 1.0):
                if key.data is None:
                    return False  # the job, or the rank that this agent's servers belong to, has ended
                _heed(job, selector, key.data, key.fd)
            if deadline is None:
                _refill(job, selector)
                _go_on_without(job, selector)
                if _left_behind(job):
                    break
                if any(child.failed for child in job.children):
                    deadline = time.monotonic() + ECHO_SECONDS
            elif time.monotonic() >= deadline:
                break
    for child in job.children:  # what was written just before the end
        child.read_reports()
    return deadline is not None


def _left_behind(job: Job) -> bool:
    """Whether only workers are left without which the job went on, long after the others came to their ends."""
    others = [child for child in job.lasting if not child.may_be_lost]
    if not others or any(child.status is None for child in others):
        return False
    return time.monotonic_ns() - max(child.ended_ns for child in others) > LEFT_SECONDS * 1e9


def _over(job: Job, *, failing: bool) -> bool:
    """Whether there is nothing left to wait for: no worker, or, after a failure, no process at all."""
    waited_for = job.children if failing or job.leash is not None else job.lasting
    return all(child.status is not None for child in waited_for)


def _register(selector: selectors.BaseSelector, child: Child) -> None:
    selector.register(child.pidfd, selectors.EVENT_READ, child)
    selector.register(child.reports, selectors.EVENT_READ, child)


def _heed(job: Job, selector: selectors.BaseSelector, child: Child, descriptor: int) -> None:
    """Take in a child's report, or its end."""
    if descriptor == child.reports:
        if not child.read_reports():
            selector.unregister(descriptor)
        while child.complaints:
            label, seconds, silent = child.complaints.pop(0)
            for other in job.children:
                if other.slot.label == label:
                    other.hear(seconds, silent)
    elif child.reap():
        selector.unregister(descriptor)
        child.read_reports()


def _refill(job: Job, selector: selectors.BaseSelector) -> None:
    """Fill the posts of those who died and may be restarted; an error of a process's own would repeat itself."""
    for index, child in enumerate(job.children):
        if child.joined or child.restarts >= child.post.restarts or not died_without_a_cause(child) or _gave_up(child):
            continue
        with contextlib.suppress(KeyError):
            selector.unregister(child.reports)
        child.close()
        number, limit = child.restarts + 1, child.post.restarts
        said = ending(child, job.size(child.slot.role))
        print(f"gtrain: {said}; restarting it ({number}/{limit})", file=sys.stderr, flush=True)
        job.children[index] = start(job, child.post, number, selector.fileno())  # type: ignore[attr-defined]
        _register(selector, job.children[index])


def _go_on_without(job: Job, selector: selectors.BaseSelector) -> None:
    """Let go of machines without which the job goes on, where a worker died; their servers stay."""
    for child in job.children:
        if not (child.may_be_lost and died_without_a_cause(child)):
            continue
        if job.machine is not None and job.leash is None:  # no worker is left here, by which to know the job's end
            try:
                job.line = links.connect(job.store_address, job.key_file, LEFT_SECONDS, listens=True)
            except (GtrainError, OSError):
                return  # the job has ended too
            job.leash = job.line.fileno()
            selector.register(job.leash, selectors.EVENT_READ)
        node = child.slot.node
        said = ending(child, job.size(child.slot.role))
        print(f"gtrain: {said}; the job goes on without machine {node}", file=sys.stderr, flush=True)
        for worker in job.lasting:
            if worker.slot.node == node:
                worker.lost = True
                worker.signal(signal.SIGKILL)  # it has lost what it shares with the one that died


# ---------------------------------------------------------------------------------------------------- ending


def _end(job: Job) -> None:
    """Leave no process behind: SIGTERM, then SIGKILL to each child's whole process group."""
    began = time.monotonic()
    for child in job.children:
        child.signal(signal.SIGTERM)
    for child in sorted(job.children, key=lambda child: child.post.stop_seconds):
        _await_end(child, began + child.post.stop_seconds)
    for child in job.children:
        child.signal(signal.SIGKILL)
        child.reap(wait=True)
        child.close()


def _await_end(child: Child, deadline: float) -> None:
    while child.status is None and (left := deadline - time.monotonic()) > 0:
        with selectors.DefaultSelector() as selector:
            selector.register(child.pidfd, selectors.EVENT_READ)
            selector.select(left)
        child.reap()
    if child.status is None and not child.post.has_end:
        print(f"gtrain: {child.slot.label} did not end in {child.post.stop_seconds:g} s and is killed", file=sys.stderr)


@contextlib.contextmanager
def terminate_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that the ranks are ended on the way out (Ctrl-C is one already)."""

    received: list[int] = []

    def stop(number: int, _: Any) -> None:
        received.append(number)
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
        if received:  # said last: until here ranks may have spoken
            print(f"gtrain: ended by {signal.Signals(received[0]).name}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------- the cause


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


def _gave_up(child: Child) -> bool:
    """Whether a process ended because another one was silent: its own next life would wait for that one too."""
    return child.failure is not None and child.failure["type"] == SilentRankError.__name__


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
    killed = child.status == -signal.SIGKILL and child.silent_seconds is None
    advice = "the kernel kills with SIGKILL when memory runs out; " if killed else ""
    return RankFailedError(f"{ending(child, of)}.", hint=f"{advice}the {_kind(child)}'s log is {log}")


def ending(child: Child, of: int) -> str:
    """How a process ended, in one clause: ``rank 2 of 4 (machine 1) was killed by SIGKILL``."""
    where = f"{child.slot.label} of {of} (machine {child.slot.node})"
    if child.failure is not None:
        return f"{where} failed with {child.failure['type']}: {child.failure['message'] or 'no message'}"
    status = child.status or 0
    if child.silent_seconds is not None:
        return f"{where} gave no sign of life for {child.silent_seconds:g} s and was killed"
    if status < 0:
        return f"{where} was killed by {signal.Signals(-status).name}"
    task = "its task was done" if child.slot.role == WORKER else "the job was over"
    return f"{where} ended with exit code {status} before {task}"


def _kind(child: Child) -> str:
    return "rank" if child.slot.role == WORKER else child.slot.role
