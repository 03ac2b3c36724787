"""Making a store in a process of its own: what reading and cutting a whole graph takes is never memory of a rank."""

from __future__ import annotations

import builtins
import contextlib
import json
import logging
import os
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from gtrain import errors
from gtrain.data.module import GraphDataModule
from gtrain.launch import interpreter
from gtrain.launch.children import GRACE_SECONDS, die_with_parent
from gtrain.launch.launchers.local import run_local
from gtrain.strategy.counters import PeakMemory

log = logging.getLogger("gtrain")


def prepare(data: GraphDataModule) -> None:
    """Have the store of a DataModule made where there is none, in a process of its own that ends with it.

    Raises:
        GtrainError: as :meth:`~gtrain.data.module.GraphDataModule.prepare_data` raises it.
    """
    data.run_in_child = partial(call_apart, what=f"the process that prepares the store of {data.origin}")
    data.prepare_data()


def call_apart(function: Callable[[], Any], what: str) -> dict[str, int]:
    """Call a function in a process of its own, and wait for it: a fork, or a clean interpreter where this process has
    threads or uses CUDA. As :func:`call_in_fork`; what cannot be copied to a clean interpreter is called here."""
    reason = interpreter.fork_obstacle()
    return call_in_fork(function, what) if reason is None else call_in_interpreter(function, what, reason)


def call_in_interpreter(function: Callable[[], Any], what: str, reason: str) -> dict[str, int]:
    """Call a function in a clean interpreter; as :func:`call_in_fork`, ``reason`` being why it is not a fork."""
    with tempfile.TemporaryDirectory(prefix="gtrain-") as logs:
        try:
            message = run_local(_measured, function, log_dir=logs)
        except errors.RankFailedError as error:
            raise _killed(what, error.message.partition(";")[0]) from error
        except errors.GtrainError as error:  # the function itself raises none here
            memory = PeakMemory()
            log.info("%s is this one: %s, and it cannot be copied: %s", what, reason, error.message)
            function()
            return memory.figures()
    return _taken(message)


def call_in_fork(function: Callable[[], Any], what: str) -> dict[str, int]:
    """Call a function in a fork of this process, and wait for it.

    Args:
        function: what it returns is lost.
        what: the process's name, for messages.

    Returns:
        Peaks of that process's memory, see :meth:`~gtrain.strategy.counters.PeakMemory.figures`.

    Raises:
        Exception: as the function raised it, with its traceback as a note; of other classes than gtrain's and Python's,
            a ``RuntimeError``.
        DataError: the process was killed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    read_end, write_end = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _live(function, write_end, parent)
    os.close(write_end)
    status = None
    try:
        with open(read_end, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(pid, 0)
    finally:
        if status is None:
            _end(pid)
    if not said:
        code = os.waitstatus_to_exitcode(status)
        raise _killed(
            what, f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        )
    return _taken(json.loads(said))


def _killed(what: str, how: str) -> errors.DataError:
    return errors.DataError(
        f"{what} {how}.",
        hint="the kernel kills with SIGKILL when memory runs out: prepare the store by gtrain partition on a machine "
        "with more, or give the data in a smaller form.",
    )


def _taken(message: dict[str, Any]) -> dict[str, int]:
    """The memory that a process reports, unless it reports an error."""
    if message["error"] is not None:
        raise _error(message["error"])
    figures: dict[str, int] = message["memory"]
    return figures


def _measured(function: Callable[[], Any]) -> dict[str, Any]:
    """Call a function; what it raised, described, or None, and the memory of this process."""
    error, memory = None, PeakMemory()
    memory.start()
    try:
        function()
    except BaseException as exception:  # noqa: BLE001 - the parent raises it
        error = _described(exception)
    return {"error": error, "memory": memory.figures()}


def _live(function: Callable[[], Any], write_end: int, parent: int) -> NoReturn:
    """The life of the process: it leaves by ``os._exit``, past the exit handlers of the one that it was forked from."""
    message = None
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # files are removed on the way out
        message = _measured(function)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        with contextlib.suppress(BaseException), open(write_end, "w") as pipe:
            json.dump(message, pipe)
        os._exit(0)


def _end(pid: int) -> None:
    """Have the process remove what it has written, and end it."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGTERM)
            if not select.select([descriptor], [], [], GRACE_SECONDS)[0]:
                os.kill(pid, signal.SIGKILL)
        finally:
            os.close(descriptor)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _described(exception: BaseException) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": type(exception).__name__,
        "text": str(exception),
        "traceback": "".join(traceback.format_exception(exception)),
    }
    if isinstance(exception, errors.GtrainError):
        found |= {"text": exception.message, "hint": exception.hint}
    elif isinstance(exception, OSError):
        file = None if exception.filename is None else str(exception.filename)
        found["os"] = [exception.errno, exception.strerror, file]
    return found


def _error(found: dict[str, Any]) -> BaseException:
    """The exception that the process described."""
    kind = getattr(errors, found["type"], None) or getattr(builtins, found["type"], None)
    error: BaseException
    if "hint" in found:
        error = (kind or errors.GtrainError)(found["text"], hint=found["hint"])
    elif "os" in found:
        error = OSError(*found["os"]) if found["os"][0] is not None else OSError(found["text"])
    else:
        try:
            error = kind(found["text"])  # type: ignore[misc]
        except TypeError:  # a class of another package, or one that takes other arguments
            error = RuntimeError(f"{found['type']}: {found['text']}")
    error.add_note(f"In the process that prepares the store:\n{found['traceback']}")
    return error
