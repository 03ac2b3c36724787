"""Forking the processes of a job, and the life of one of them. Imports the standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gtrain.launch import slot as slots
from gtrain.launch.logs import STACKS_SIGNAL, capture, log_path
from gtrain.launch.shipping import write_result
from gtrain.launch.slot import JobContext, Slot
from gtrain.launch.sockets import Listener

SAY_AGAIN_SECONDS = 9.0  # below the 10 s after which a wait is reported, so that the next wait is reported too
GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
PRELOAD = "gtrain.launch.preload"
"""What the agent imports before it forks."""
_STACKS_SECONDS = 30.0  # how long a process was waited for when the agent first asks for its stacks
_WAITING = re.compile(r"waiting for ([a-z]+ \d+)\b.*?, (\d+) s")
_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Post:
    """A slot, what runs in it, and the socket it listens at: the same for every process that fills it.

    Attributes:
        slot: the process's place in the job.
        task: a function, or ``package.module:function``.
        args: what it is called with.
        restarts: how many times it is restarted after it died.
        stop_seconds: between SIGTERM and SIGKILL.
        listener: a server's socket.
        lasting_file: an anonymous file (``memfd``) that the agent keeps open, for what a server's next life needs; None
            where it is not restarted.
        serves_store: whether the job's key-value store is in this process.
        has_end: whether its task comes to an end, for which the agent waits; a server's goes on until it is asked to.
        terminal: whether the process speaks to the terminal too.
        result: a file for what its task returns, or None.
    """

    slot: Slot
    task: str | Callable[..., Any]
    args: Sequence[Any] = ()
    restarts: int = 0
    stop_seconds: float = GRACE_SECONDS
    listener: Listener | None = None
    lasting_file: int | None = None
    serves_store: bool = False
    has_end: bool = False
    terminal: bool = False
    result: int | None = None


@dataclass
class Child:
    """A forked process as the agent sees it."""

    post: Post
    pid: int
    pidfd: int
    reports: int  # read end of its pipe
    restarts: int = 0  # how many times its post was filled before
    pending: bytes = b""
    status: int | None = None  # exit code, or minus the signal; None while alive
    ended_ns: int = 0
    done: bool = False
    failure: dict[str, Any] | None = None
    stopping: bool = False  # the agent has asked it to end
    joined: bool = False  # it has a part in the job that no other process could take
    may_be_lost: bool = False  # it has said that the job goes on without its machine
    lost: bool = False  # it died, or another worker of its machine did, and the job goes on without them
    silent_seconds: float | None = None  # how long it had given no sign of life when the agent killed it
    started_at: float = field(default_factory=time.monotonic)
    stacks_at: float = _STACKS_SECONDS  # how long it is to be waited for when it is next asked for its stacks
    complaints: list[tuple[str, float, bool]] = field(default_factory=list)  # label, seconds, whether it is silent
    closed: bool = field(default=False, repr=False)

    @property
    def slot(self) -> Slot:
        """Its place in the job."""
        return self.post.slot

    @property
    def failed(self) -> bool:
        """Ended without being asked to, and not by coming to the end of its task."""
        came_to_its_end = self.post.has_end and self.status == 0 and self.done
        return self.status is not None and not (self.stopping or self.lost or came_to_its_end)

    def read_reports(self) -> bool:
        """Take in what the process wrote; False at the end of its pipe."""
        while True:
            try:
                data = os.read(self.reports, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            *lines, self.pending = (self.pending + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        if message["kind"] == "done":
            self.done = True
        elif message["kind"] == "may be lost":
            self.may_be_lost = message["value"]
        elif message["kind"] == "joined":
            self.joined = True
        elif message["kind"] == "say":
            print(f"gtrain: {message['text']}", file=sys.stderr, flush=True)
        elif message["kind"] == "waiting":
            _say_waiting(message["sentence"])
            if waiting := _WAITING.match(message["sentence"]):
                self.complaints.append((waiting[1], float(waiting[2]), False))
        elif message["kind"] == "silent":
            self.complaints.append((message["label"], message["seconds"], True))
        else:
            self.failure = self.failure or message

    def reap(self, wait: bool = False) -> bool:
        """Collect the exit status if the process has ended, and end what it started and left behind.

        The process is looked at first and collected last: until then no other can get its number, so that the signal
        reaches its own group or nobody.
        """
        if self.status is not None:
            return True
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG))
        if ended is None:
            return False
        self.ended_ns = time.monotonic_ns()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and to all that it started, and note that it was asked to end."""
        if self.status is not None:
            return
        self.stopping = True
        for kill in (os.killpg, os.kill):  # the group does not exist before the child has made it
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, number)
                return  # once: the second SIGTERM means something else to a server

    def hear(self, seconds: float, silent: bool) -> None:
        """Take in that others have waited for this process: get its stacks, and kill it if it gives no sign of life.

        Several complain of one silence, the last of them perhaps when another life has begun.
        """
        if self.status is not None or self.silent_seconds is not None or time.monotonic() - self.started_at <= seconds:
            return
        if silent:
            self.silent_seconds = seconds
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        elif seconds >= self.stacks_at:
            self.stacks_at *= 10
            os.kill(self.pid, STACKS_SIGNAL)

    def close(self) -> None:
        """Let go of the descriptors."""
        if not self.closed:
            os.close(self.reports)
            os.close(self.pidfd)
            self.closed = True


_said_waiting: dict[str, float] = {}


def _say_waiting(sentence: str) -> None:
    """Print for whom processes wait: once, however many wait for the same."""
    whom, now = sentence.rpartition(",")[0], time.monotonic()
    if now - _said_waiting.get(whom, -SAY_AGAIN_SECONDS) >= SAY_AGAIN_SECONDS:
        _said_waiting[whom] = now
        print(f"gtrain: {sentence}", file=sys.stderr, flush=True)


def fork(post: Post, context: Callable[[int], JobContext], to_close: Iterable[int], restarts: int) -> Child:
    """Start a process for a post.

    Args:
        post: what it does.
        context: makes its place in the job from the write end of its pipe to the agent; called in the process.
        to_close: descriptors of the agent's that are not for this process.
        restarts: how many times the post was filled before.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    agent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        for descriptor in to_close:
            os.close(descriptor)
        _live(post, context, write_end, agent)
    os.close(write_end)
    return Child(post, pid, os.pidfd_open(pid), read_end, restarts)


def _live(post: Post, make_context: Callable[[int], JobContext], write_end: int, agent: int) -> None:
    """The life of a process. Never returns: it leaves by ``os._exit``, past the agent's own exit handlers."""
    code, context = 1, None
    try:
        gc.freeze()  # what was imported is no garbage, and to look through it takes a third of a second
        die_with_parent(agent)
        os.setpgid(0, 0)  # Ctrl-C reaches the agent alone, which ends the processes in order
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        context = make_context(write_end)
        capture(log_path(context.log_dir, post.slot.label), terminal=post.terminal, append=context.restarts > 0)
        slots.enter(context)
        sys.modules[PRELOAD].keep_templates_in_memory()
        value = resolve(post.task)(*post.args)
        if post.result is not None and value is not None:
            write_result(post.result, value)
        slots.report("done")
        code = 0
    except SystemExit as exit_request:
        code = exit_request.code if isinstance(exit_request.code, int) else 1
        if code:
            slots.report_failure(exit_request)
    except BaseException as exception:  # noqa: BLE001 - whatever ends a process is reported, then it ends
        slots.report_failure(exception)
        if context is not None:
            _log_failure(context, exception)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however it dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died between the fork and the line above
        os._exit(1)


def stop_event() -> threading.Event:
    """An event that the first SIGTERM or SIGINT sets; a second one ends the process. To be called before any thread is.

    The signals are blocked and a thread waits for them: a handler would run between any two instructions of the main
    thread, and to set an event whose lock that thread holds is a deadlock.
    """
    event = threading.Event()
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)  # threads that start later inherit it

    def wait() -> None:
        signal.sigwait(_STOP_SIGNALS)
        event.set()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)  # of this thread, which takes the second
        signal.pause()

    threading.Thread(target=wait, name="gtrain-stop", daemon=True).start()
    return event


def _log_failure(context: JobContext, exception: BaseException) -> None:
    """Keep the traceback in the log file alone: the terminal gets the agent's one message."""
    with open(log_path(context.log_dir, context.slot.label), "a") as log:
        log.write("".join(traceback.format_exception(exception)))


def resolve(task: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, or the one at ``package.module:function``."""
    if callable(task):
        return task
    module, _, name = task.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
