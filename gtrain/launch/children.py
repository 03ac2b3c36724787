"""Fork the processes of a job, run their tasks, and track them. Light."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gtrain.backends import load
from gtrain.launch import slot as slots
from gtrain.launch.logs import STACKS_SIGNAL, capture, log_path, watch_stacks_signal
from gtrain.launch.shipping import write_result
from gtrain.launch.slot import JobContext, Slot
from gtrain.launch.sockets import Listener
from gtrain.launch.templates import keep_templates_in_memory
from gtrain.memory.limits import oom_kills

REPEAT_SECONDS = 9.0  # below the 10 s after which a wait is reported, so that a later wait is reported again
GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
PRELOAD = "gtrain.launch.preload"
"""The module that the agent imports before it forks."""
_STACKS_SECONDS = 30.0  # the agent first asks a process for its stacks after peers have waited this long for it
_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the agent, and the job with it."""


@dataclass(frozen=True)
class ProcessSpec:
    """How to run the process of a slot; a restarted process has the same specification.

    Attributes:
        slot: the process's place in the job.
        task: a function, or ``package.module:function``.
        args: its arguments.
        restarts: how many times the process may be restarted.
        stop_signal: the signal that ends the process; with another one than SIGTERM the process ignores SIGTERM.
        stop_seconds: time between this signal and SIGKILL.
        listener: the socket of a server.
        lasting_file: an anonymous file (``memfd``) that the agent keeps open for the state that a restarted server
            continues from; None for a process that is not restarted.
        serves_store: whether the process serves the job's key-value store.
        terminates: whether the task ends by itself, and the agent waits for it; a server runs until it is stopped.
        terminal: whether the process also writes to the terminal.
        result: descriptor of the file for the task's return value, or None.
    """

    slot: Slot
    task: str | Callable[..., Any]
    args: Sequence[Any] = ()
    restarts: int = 0
    stop_signal: signal.Signals = signal.SIGTERM
    stop_seconds: float = GRACE_SECONDS
    listener: Listener | None = None
    lasting_file: int | None = None
    serves_store: bool = False
    terminates: bool = False
    terminal: bool = False
    result: int | None = None


@dataclass
class Child:
    """The agent's record of a forked process."""

    spec: ProcessSpec
    pid: int
    pidfd: int
    reports: int  # read end of its pipe
    restarts: int = 0  # how many processes of this slot came before
    pending: bytes = b""
    status: int | None = None  # exit code, or minus the signal; None while alive
    ended_ns: int = 0
    done: bool = False
    failure: dict[str, Any] | None = None
    stopping: bool = False  # the agent has sent it a signal to end
    joined: bool = False  # it takes part in the job; no restarted process could take its place
    saves_on_request: bool = False  # it reported that after SIGTERM it saves a checkpoint and ends
    may_be_lost: bool = False  # it reported that the job can continue without its machine
    lost: bool = False  # a worker of its machine died, and the job continues without the machine
    silent_seconds: float | None = None  # how long it was silent when the agent killed it
    started_at: float = field(default_factory=time.monotonic)
    next_stacks_seconds: float = _STACKS_SECONDS  # the next wait after which it is asked for its stacks
    oom_kills: int = field(default_factory=oom_kills)  # of the machine, before it started
    holds: str = ""  # sizes of its parameters and of its first batch, which it reported
    peak_bytes: int = 0  # peak resident memory, known when it has ended
    out_of_memory: bool = False  # the kernel killed it, or another one meanwhile, because memory ran out
    complaints: list[tuple[str, float, bool]] = field(default_factory=list)  # process, seconds, whether it is silent
    closed: bool = field(default=False, repr=False)

    @property
    def slot(self) -> Slot:
        """The process's place in the job."""
        return self.spec.slot

    @property
    def failed(self) -> bool:
        """Whether the process ended before its task was done, without being told to."""
        completed = self.spec.terminates and self.status == 0 and self.done
        return self.status is not None and not (self.stopping or self.lost or completed)

    def read_reports(self) -> bool:
        """Handle the reports that the process wrote; return False at the end of its pipe."""
        while True:
            try:
                data = os.read(self.reports, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            *lines, self.pending = (self.pending + data).split(b"\n")
            for line in lines:
                self._handle_report(json.loads(line))

    def _handle_report(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "done":
                self.done = True
            case "may be lost":
                self.may_be_lost = message["value"]
            case "saves on request":
                self.saves_on_request = message["value"]
            case "holds":
                self.holds = message["text"]
            case "joined":
                self.joined = True
            case "say":
                print(f"gtrain: {message['text']}", file=sys.stderr, flush=True)
            case "waiting":
                _print_waiting(message["process"], message["seconds"], message["note"])
                self.complaints.append((message["process"], message["seconds"], False))
            case "silent":
                self.complaints.append((message["label"], message["seconds"], True))
            case _:
                self.failure = self.failure or message

    def reap(self, wait: bool = False) -> bool:
        """Collect the exit status if the process has ended, and kill what is left of its process group.

        Until the status is collected no other process can get the same number, so the signal reaches the process's own
        group or nothing.
        """
        if self.status is not None:
            return True
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG))
        if ended is None:
            return False
        self.ended_ns = time.monotonic_ns()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        self.status, self.peak_bytes = os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024
        self.out_of_memory = self.status == -signal.SIGKILL and oom_kills() > self.oom_kills
        return True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process group, and note that the process was told to end."""
        if self.status is not None:
            return
        self.stopping = True
        self.deliver(number)

    def deliver(self, number: int, *, group: bool = True) -> None:
        """Send a signal to the process group, or to the process alone."""
        for kill in (os.killpg, os.kill) if group else (os.kill,):  # the group exists once the child has made it
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, number)
                return  # once: a second SIGTERM ends a server at once

    def handle_complaint(self, seconds: float, silent: bool) -> None:
        """Handle a peer's report that it waits for this process: ask for its stacks, or kill it if it is silent.

        Several peers report the same silence, some of them perhaps after the process was restarted.
        """
        if self.status is not None or self.silent_seconds is not None or time.monotonic() - self.started_at <= seconds:
            return
        if silent:
            self.silent_seconds = seconds
            self.deliver(signal.SIGKILL)
        elif seconds >= self.next_stacks_seconds:
            self.next_stacks_seconds *= 10
            self.deliver(STACKS_SIGNAL, group=False)

    def close(self) -> None:
        """Close the descriptors."""
        if not self.closed:
            os.close(self.reports)
            os.close(self.pidfd)
            self.closed = True


_waiting_printed: dict[str, float] = {}


def _print_waiting(process: str, seconds: float, note: str) -> None:
    """Print which process is waited for, once for all processes that wait for it."""
    now = time.monotonic()
    if now - _waiting_printed.get(process, -REPEAT_SECONDS) >= REPEAT_SECONDS:
        _waiting_printed[process] = now
        print(f"gtrain: waiting for {process}, {seconds:.0f} s{note}", file=sys.stderr, flush=True)


def fork(spec: ProcessSpec, context: Callable[[int], JobContext], to_close: Iterable[int], restarts: int) -> Child:
    """Fork a process.

    Args:
        spec: what the process runs.
        context: makes the process's context from the write end of its pipe to the agent; called in the process.
        to_close: descriptors of the agent that the process must not keep.
        restarts: how many processes of this slot came before.
    """
    pid, read_end = fork_with_pipe(partial(_run_child, spec, context, to_close, os.getpid()))
    os.set_blocking(read_end, False)
    return Child(spec, pid, os.pidfd_open(pid), read_end, restarts)


def silence() -> None:
    """Discard what this process prints."""
    discarded = os.open(os.devnull, os.O_WRONLY)
    os.dup2(discarded, 1)
    os.dup2(discarded, 2)


def fork_with_pipe(run: Callable[[int], object]) -> tuple[int, int]:
    """Fork a process that calls ``run`` with the write end of a pipe; ``run`` ends the process.

    Returns:
        The process's id, and the read end of the pipe.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    read_end, write_end = os.pipe()
    # Python ignores exceptions of functions that it calls after a fork, and so those of a signal that arrives then.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        pid = os.fork()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    if pid == 0:
        os.close(read_end)
        run(write_end)
    os.close(write_end)
    return pid, read_end


def _run_child(
    spec: ProcessSpec, make_context: Callable[[int], JobContext], to_close: Iterable[int], agent: int, write_end: int
) -> None:
    """Run the task in the forked process. Ends with ``os._exit``, which skips the exit handlers of the agent."""
    code, context = 1, None
    try:
        for descriptor in to_close:
            os.close(descriptor)
        gc.freeze()  # traversing what the agent imported takes a third of a second per collection
        die_with_parent(agent)
        os.setpgid(0, 0)  # Ctrl-C reaches only the agent, which ends the processes in order
        for number in ENDING_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        if spec.stop_signal != signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # A process outside the terminal's foreground group is stopped when it reads from the terminal.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        context = make_context(write_end)
        capture(
            log_path(context.log_dir, spec.slot.label),
            terminal=spec.terminal,
            append=context.restarts + context.attempt > 0,
        )
        slots.enter(context)
        keep_templates_in_memory()
        value = resolve(spec.task)(*spec.args)
        if spec.result is not None and value is not None:
            write_result(spec.result, value)
        slots.report("done")
        code = 0
    except SystemExit as exit_request:
        code = exit_request.code if isinstance(exit_request.code, int) else 1
        if code:
            slots.report_failure(exit_request)
    except BaseException as exception:  # noqa: BLE001 - reported, whatever it is; then the process ends
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
    if os.getppid() != parent:  # the parent died between the fork and the line above
        os._exit(1)


def stop_event() -> threading.Event:
    """Return an event that the first SIGTERM or SIGINT sets; a second one ends the process. Ignored signals stay so.

    Call it before any thread is started. The signals are blocked and a thread waits for them: a handler could run while
    the main thread holds the event's lock, and setting the event would deadlock.
    """
    event = threading.Event()
    numbers = [number for number in _STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # threads that start later inherit it
    watch_stacks_signal()

    def wait() -> None:
        signal.sigwait(numbers)
        event.set()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # this thread receives the second signal
        signal.pause()

    threading.Thread(target=wait, name="gtrain-stop", daemon=True).start()
    return event


def _log_failure(context: JobContext, exception: BaseException) -> None:
    """Write the traceback to the log file only; the terminal gets the agent's message."""
    with open(log_path(context.log_dir, context.slot.label), "a") as log:
        log.write("".join(traceback.format_exception(exception)))


def resolve(task: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, imported if it is given as ``package.module:function``."""
    return task if callable(task) else load(task)
