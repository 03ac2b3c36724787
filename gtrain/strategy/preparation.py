"""Make a store in a separate process, so that reading and partitioning a whole graph takes no memory of a rank."""

from __future__ import annotations

import builtins
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from typing import IO, Any, NoReturn

from lightning.fabric.plugins.environments import ClusterEnvironment

from gtrain import errors
from gtrain.data.module import GraphDataModule
from gtrain.launch import interpreter, slot
from gtrain.launch.children import GRACE_SECONDS, die_with_parent, fork_with_pipe
from gtrain.launch.environment import WaitReport, find_environment
from gtrain.launch.job_store import POLL_SECONDS
from gtrain.launch.launchers.local import run_local
from gtrain.launch.sockets import wait_readable
from gtrain.strategy.counters import PeakMemory
from gtrain.strategy.store_sharing import prepare_shared

log = logging.getLogger("gtrain")


def prepare(data: GraphDataModule, environment: ClusterEnvironment | None = None) -> None:
    """Make the store of a data module in a separate process, unless it exists; all ranks call this.

    Args:
        data: the data module.
        environment: Lightning's cluster environment of this process; None: that of its launcher.

    Raises:
        GtrainError: see :func:`~gtrain.strategy.store_sharing.prepare_shared`.
    """
    data.run_in_child = partial(call_in_child, what=f"the process that prepares the store of {data.origin}")
    prepare_shared(data, environment or find_environment())


def call_in_child(function: Callable[[], Any], what: str) -> dict[str, int]:
    """Call a function in another process and wait for it; see :func:`call_in_fork`.

    The process is a fork, or a clean interpreter if this process has threads or uses CUDA. A function that cannot be
    copied to a clean interpreter is called in this process.
    """
    reason = interpreter.fork_obstacle()
    return call_in_fork(function, what) if reason is None else call_in_interpreter(function, what, reason)


def call_in_interpreter(function: Callable[[], Any], what: str, reason: str) -> dict[str, int]:
    """Call a function in a clean interpreter; see :func:`call_in_fork`. ``reason`` says why it is not a fork."""
    with tempfile.TemporaryDirectory(prefix="gtrain-") as logs:
        try:
            message = run_local(_call_measured, function, log_dir=logs)
        except errors.GtrainError as error:
            if isinstance(error, errors.RankFailedError) and error.external:
                # The message names a rank, in the form "rank 0 of 1 (machine 0) was killed by SIGKILL."
                raise _killed(what, error.message.partition(") ")[2].rstrip(".")) from error
            # The function's own errors arrive in the message.
            memory = PeakMemory()
            log.info(
                "preparing the store in this process, not in %s: a fork is unsafe (%s), and the data module cannot be "
                "copied to a new interpreter (%s)",
                what,
                reason,
                error.message,
            )
            function()
            return memory.figures()
    return _memory_of(message)


def call_in_fork(function: Callable[[], Any], what: str) -> dict[str, int]:
    """Call a function in a fork of this process, and wait for it.

    Args:
        function: the function; its return value is dropped.
        what: name of the process in messages.

    Returns:
        Peak memory of that process, see :meth:`~gtrain.strategy.counters.PeakMemory.figures`.

    Raises:
        Exception: the function's exception, with its traceback as a note; a ``RuntimeError`` in place of classes that
            are neither gtrain's nor Python's.
        DataError: the process was killed.
    """
    pid, read_end = fork_with_pipe(partial(_run_child, function, os.getpid()))
    status = None
    try:
        with open(read_end, "rb") as pipe:
            _report_stops(pipe, pid, what)
            content = pipe.read()
        _, status = os.waitpid(pid, 0)
    finally:
        if status is None:
            _end(pid)
    # The pipe closed without a message: the process did not reach its last lines.
    if not content:
        code = os.waitstatus_to_exitcode(status)
        raise _killed(
            what, f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        )
    return _memory_of(json.loads(content))


def _killed(what: str, how: str) -> errors.DataError:
    return errors.DataError(
        f"{what} {how}.",
        hint="the kernel kills with SIGKILL when memory runs out: prepare the store with gtrain partition on a machine "
        "with more memory, or reduce the data.",
    )


def _memory_of(message: dict[str, Any]) -> dict[str, int]:
    """Return the memory that a process reports; raise the error that it reports."""
    if message["error"] is not None:
        raise _error(message["error"])
    return message["memory"]


def _call_measured(function: Callable[[], Any]) -> dict[str, Any]:
    """Call a function; return a description of its exception, or None, and the memory of this process."""
    error, memory = None, PeakMemory()
    memory.start()
    try:
        function()
    except BaseException as exception:  # noqa: BLE001 - the parent raises it
        error = _describe(exception)
    return {"error": error, "memory": memory.figures()}


def _run_child(function: Callable[[], Any], parent: int, write_end: int) -> NoReturn:
    """Run the function in the forked process. Ends with ``os._exit``, which skips the exit handlers of the parent."""
    message = None
    try:
        die_with_parent(parent)
        # Ctrl-C also reaches the parent, which ends this process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that temporary files are removed
        message = _call_measured(function)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        with contextlib.suppress(BaseException), open(write_end, "w") as pipe:
            json.dump(message, pipe)
        os._exit(0)


def _report_stops(pipe: IO[bytes], pid: int, what: str) -> None:
    """Wait until the process writes its message or ends; report that it is stopped: preparing data may take hours."""
    report = None
    while not wait_readable([pipe.fileno()], POLL_SECONDS):
        is_stopped = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT | os.WNOHANG) is not None
        report = (report or WaitReport(what)) if is_stopped else None
        if report is not None:
            report()


def _end(pid: int) -> None:
    """End the process, after it has removed its temporary files."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGTERM)
            if not wait_readable([descriptor], GRACE_SECONDS):
                os.kill(pid, signal.SIGKILL)
        finally:
            os.close(descriptor)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _describe(exception: BaseException) -> dict[str, Any]:
    system_error = None
    if isinstance(exception, OSError):
        file = None if exception.filename is None else str(exception.filename)
        system_error = [exception.errno, exception.strerror, file]
    text = "".join(traceback.format_exception(exception))
    return {**slot.describe(exception), "text": str(exception), "os": system_error, "traceback": text}


def _error(description: dict[str, Any]) -> BaseException:
    """Return the exception that the process described."""
    error: BaseException
    if description["os"] is not None:
        error = OSError(*description["os"]) if description["os"][0] is not None else OSError(description["text"])
    elif description["user"]:
        error = errors.restored(description)
    else:
        try:
            error = getattr(builtins, description["type"])(description["text"])
        except (AttributeError, TypeError):
            # A class of another package, or one that takes other arguments.
            error = RuntimeError(f"{description['type']}: {description['text']}")
    error.add_note(f"In the process that prepares the store:\n{description['traceback']}")
    return error
