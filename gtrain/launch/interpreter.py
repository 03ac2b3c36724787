"""A clean interpreter that serves as the agent of a process that must not fork.

A fork copies only the calling thread. A child that inherits a thread pool (OpenMP's after torch's first large product,
numba's, a notebook's) waits for its threads forever, and a child of a process that uses CUDA cannot use it. Such a
process starts an interpreter with neither, which imports what ranks need, forks them and ends with them. The function
and its arguments are pickled (:mod:`gtrain.launch.shipping`). Imports the standard library only.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from gtrain.errors import GtrainError, RankFailedError, restored
from gtrain.launch import cuda, shipping, slot
from gtrain.launch.children import GRACE_SECONDS, die_with_parent

_START = """
import json, sys
parent = json.loads(sys.stdin.buffer.readline())
sys.path[:], sys.argv[:] = parent["path"], parent["argv"]
from gtrain.launch.interpreter import serve
serve(parent)
"""
_FORK_SAFE = "jemalloc_bg_thd"  # Arrow's allocator stops this thread before a fork and restarts it afterwards


# ---------------------------------------------------------------------------------------------------- deciding


def fork_obstacle() -> str | None:
    """Return why this process must not fork ranks, as a clause; None if it may."""
    if cuda.in_use():
        return "it uses CUDA"
    if threading.active_count() > 1:
        return f"it has {threading.active_count()} Python threads"
    pool = sys.modules.get("numba.np.ufunc.parallel")
    if pool is not None and getattr(pool, "_is_initialized", False):
        return "numba has started its threads"
    if _threads() > 1:
        _end_openblas()
    deadline = time.monotonic() + 0.1  # the kernel lists a joined thread for a moment
    while (count := _threads()) > 1 and time.monotonic() < deadline:
        time.sleep(0.002)
    return f"it has {count} threads" if count > 1 else None


def _threads() -> int:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            names.append((task / "comm").read_text().strip())
    return sum(name != _FORK_SAFE for name in names)


def _end_openblas() -> None:
    """End the threads that numpy's and scipy's OpenBLAS start when they are loaded, so that they are not counted.

    OpenBLAS itself does so before a fork and restarts them when it needs them. This is safe because no other Python
    thread runs, so none is inside OpenBLAS.
    """
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in maps if line.count("/") and "openblas" in line.rpartition("/")[2]}
    for path in paths:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW).blas_thread_shutdown_()


# ---------------------------------------------------------------------------------------------------- the parent


def run(
    task: str | Callable[..., Any],
    args: Sequence[Any],
    settings: dict[str, Any],
    result: int,
    stop_seconds: float,
    reason: str,
) -> None:
    """Run a job in a clean interpreter.

    Args:
        task: as for :func:`gtrain.run_local`.
        args: its arguments.
        settings: the other arguments of ``run_local``.
        result: descriptor of the file for rank 0's return value.
        stop_seconds: how long the slowest process may take to end.
        reason: why this process does not fork the ranks, as a clause.

    Raises:
        GtrainError: as for ``run_local``, or an object cannot be pickled.
    """
    files = [os.memfd_create("gtrain-task"), result, os.memfd_create("gtrain-end")]
    try:
        with _Interpreter(files, stop_seconds) as interpreter:
            shipping.send_task(files[0], settings, task, args, reason)
            interpreter.send({})  # the task is written
            status = interpreter.wait()
        with open(f"/proc/self/fd/{files[2]}") as end:
            text = end.read()
        _raise(text, status)
    finally:
        os.close(files[0])
        os.close(files[2])


def _raise(end: str, status: int) -> None:
    """Raise the error that ended the job, if there was one; ``end`` is its description as JSON."""
    if not end:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
        raise RankFailedError(
            f"the process that starts the ranks {how}.",
            hint="its output is above; the kernel kills with SIGKILL when memory runs out.",
        )
    if (description := json.loads(end)) is not None:
        raise restored(description)


class _Interpreter:
    """The parent's handle on the interpreter: its standard input, and its output unless it is inherited."""

    def __init__(self, files: Sequence[int], stop_seconds: float) -> None:
        self._stop_seconds = stop_seconds
        sys.stdout.flush()
        sys.stderr.flush()
        out, err = (_is_ours(stream, number) for stream, number in ((sys.stdout, 1), (sys.stderr, 2)))
        self._process = subprocess.Popen(
            [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", _START],  # type: ignore[attr-defined]
            stdin=subprocess.PIPE,
            stdout=None if out else subprocess.PIPE,
            stderr=None if err else subprocess.PIPE,
            pass_fds=files,
            process_group=0,  # Ctrl-C reaches only this process, which ends the others in order
        )
        inherited = [out, err]
        self.send(
            {"path": sys.path, "argv": sys.argv, "files": list(files), "pid": os.getpid(), "inherited": inherited}
        )
        self._selector = selectors.DefaultSelector()
        for pipe, name in ((self._process.stdout, "stdout"), (self._process.stderr, "stderr")):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
                self._selector.register(pipe, selectors.EVENT_READ, (name, decoder))
        self._pidfd = os.pidfd_open(self._process.pid)
        self._selector.register(self._pidfd, selectors.EVENT_READ)

    def __enter__(self) -> _Interpreter:
        return self

    def __exit__(self, *_: object) -> None:
        """End the interpreter and its ranks in order if they still run, and kill them in any case."""
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
                self.wait(self._stop_seconds + 2 * GRACE_SECONDS)
        finally:
            self._process.kill()  # the kernel kills its ranks with it
            self._process.wait()
            os.close(self._pidfd)
            self._selector.close()
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()

    def wait(self, seconds: float | None = None) -> int:
        """Print the output of the processes until the interpreter has ended, and return its exit status."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while self._process.poll() is None:
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                break
            self._print_output(remaining)
        self._print_output(0)
        return self._process.returncode or 0

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, the first of which describes this process; the second starts the job."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the interpreter has ended; wait() notices
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _print_output(self, seconds: float | None) -> None:
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                continue
            name, decoder = key.data
            while True:
                try:
                    data = os.read(key.fd, 1 << 16)
                except BlockingIOError:
                    break
                if not data:
                    self._selector.unregister(key.fileobj)
                    break
                getattr(sys, name).write(decoder.decode(data))
            getattr(sys, name).flush()


def _is_ours(stream: Any, number: int) -> bool:
    """Whether a stream writes to the inherited descriptor; those of a notebook and redirected ones do not."""
    try:
        return stream in (sys.__stdout__, sys.__stderr__) and stream.fileno() == number
    except (OSError, ValueError, AttributeError):
        return False


# ---------------------------------------------------------------------------------------------------- the interpreter


def serve(parent: dict[str, Any]) -> NoReturn:
    """Run as the agent of the parent's job; never returns."""
    die_with_parent(parent["pid"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, inherited in zip((sys.stdout, sys.stderr), parent["inherited"], strict=True):
        if not inherited:
            stream.reconfigure(encoding="utf-8", errors="replace", line_buffering=True)  # type: ignore[union-attr]
    code = 1
    try:
        _serve(parent["files"], sys.stdin.buffer)
        code = 0
    except (KeyboardInterrupt, SystemExit):
        code = 130
    except BaseException:  # noqa: BLE001 - a defect: print its traceback
        traceback.print_exc()
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """End a clean interpreter without finalising the imported modules."""
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()  # removes a temporary folder of kernels
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _serve(files: Sequence[int], commands: BinaryIO) -> None:
    from gtrain.kernel_cache import find_cache
    from gtrain.launch import agent

    agent.preload()  # in parallel with the parent's pickling
    find_cache()  # before any rank imports a kernel
    if not commands.readline():
        return
    task, result, end = files
    settings, offset = shipping.receive_settings(task)
    description = None
    try:
        agent.start_and_watch(run_sent, (task, offset), settings, result)
    except GtrainError as error:
        description = slot.describe(error)
    with open(f"/proc/self/fd/{end}", "w") as file_of_end:
        json.dump(description, file_of_end)


def run_sent(descriptor: int, offset: int) -> Any:
    """Run the task that the parent sent, in a rank."""
    from gtrain.launch.children import resolve

    task, args = shipping.receive_task(descriptor, offset)
    return resolve(task)(*args)
