"""The driver's side of a Ray job: the command watches actors as the agent watches processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from gtrain.launch.children import Child, ProcessSpec
from gtrain.launch.job import Job
from gtrain.launch.slot import Slot
from gtrain.run import runs

_REPLY_SECONDS = 10.0
_KILL_SECONDS = 5.0
_POLL_SECONDS = 2.0
_LEAVE_SECONDS = 15.0  # the time before a node's end at which the job leaves it in any case


@dataclass
class ActorProcess(Child):
    """The driver's record of a process that a supervisor actor owns.

    A thread receives the actor's messages: it writes reports into the pipe that the agent's loop reads, and closes
    the pipe that takes the place of a pidfd when the process has ended.

    Attributes:
        supervisor: the actor.
        machine: the actor of its machine.
        result: the value of the process's task.
    """

    supervisor: Any = None
    machine: Any = None
    result: Any = None
    _abandoned: bool = False
    _started: bool = False
    _thread: threading.Thread | None = field(default=None, repr=False)
    _outcome: int | None = None
    _outcome_ns: int = 0

    def follow(self, address: str, report_end: int, end: int) -> None:
        """Start the process.

        Args:
            address: where the agent of its machine listens.
            report_end: write end of the pipe of reports.
            end: write end of the pipe that is closed at the end.
        """
        self._thread = threading.Thread(
            target=self._receive, args=(address, report_end, end), name=f"gtrain-{self.slot.label}", daemon=True
        )
        self._thread.start()

    def _receive(self, address: str, report_end: int, end: int) -> None:
        try:
            while not self._started:
                with contextlib.suppress(ActorUnavailableError):  # it is being restarted, or its process has ended
                    ray.get(self.supervisor.ready.remote())
                    self._run(address, report_end)
                    break
        except RayError:
            pass  # the actor died
        finally:
            if self._outcome is None:
                self.joined = self.joined or self._abandoned or not self._machine_lives()
                self._outcome = -signal.SIGKILL
            self._outcome_ns = time.monotonic_ns()
            os.close(report_end)
            os.close(end)

    def _run(self, address: str, report_end: int) -> None:
        """Have the supervisor start the process, and handle its messages until the process or the actor ends."""
        received = b""
        run = self.supervisor.run.options(num_returns="streaming", max_task_retries=0)
        for reference in run.remote(address, self.slot.label, self.restarts):
            *lines, received = (received + ray.get(reference)).split(b"\n")
            self._started = True
            for line in lines:
                self._handle(json.loads(line), report_end)

    def _handle(self, message: dict[str, Any], report_end: int) -> None:
        match message:
            case {"reports": text}:
                with contextlib.suppress(BrokenPipeError):  # nobody reads them any more
                    os.write(report_end, text.encode())
            case {"output": number, "text": text}:
                stream = sys.stdout if number == 1 else sys.stderr
                with contextlib.suppress(BrokenPipeError):
                    stream.write(text)
                    stream.flush()
            case {"ended": status}:
                self._outcome, self.result = status, message.get("result")

    def _machine_lives(self) -> bool:
        try:
            return bool(ray.get(self.machine.is_alive.remote(), timeout=_REPLY_SECONDS))
        except RayError:
            return False

    def _handle_report(self, message: dict[str, Any]) -> None:
        if message["kind"] == "failure":
            message["time_ns"] = time.monotonic_ns()  # the clocks of machines differ
        super()._handle_report(message)

    def abandon(self) -> None:
        """Take the process for killed: its cluster is lost."""
        self._abandoned = True
        self.status, self.ended_ns = -signal.SIGKILL, time.monotonic_ns()

    def deliver(self, number: int, *, group: bool = True) -> None:
        """Have the supervisor send a signal; the agent of the machine knows which signals the group receives."""
        with contextlib.suppress(RayError):
            self.supervisor.signal.remote(number, self.restarts)

    def reap(self, wait: bool = False) -> bool:
        """Collect the exit status if the process has ended; with ``wait``, kill the supervisor if it does not end."""
        if self.status is not None:
            return True
        assert self._thread is not None
        if wait:
            self._thread.join(_KILL_SECONDS)
            if self._thread.is_alive():
                ray.kill(self.supervisor, no_restart=True)
                self._thread.join(_KILL_SECONDS)
        elif self._outcome is not None:
            self._thread.join()
        if self._outcome is None and not wait:
            return False
        self.ended_ns = self._outcome_ns or time.monotonic_ns()
        self.status = -signal.SIGKILL if self._outcome is None else self._outcome
        return True


@dataclass(frozen=True)
class _Notice:
    """A notice that nodes of the job are about to leave the cluster.

    Attributes:
        machines: the machines on them, in words.
        checkpoint: the last checkpoint when the notice came.
    """

    machines: str
    checkpoint: runs.SavedCheckpoint | None


@dataclass
class RayJob(Job):
    """A job whose processes belong to actors.

    Attributes:
        machines: the machines' actors, in order.
        addresses: where their agents listen.
        supervisors: the actors of the processes, by label.
        nodes: ids of the cluster's nodes that the machines are on.
        draining: returns the nodes that are about to leave the cluster, and when, in milliseconds of Unix time.
        lost: returns how the cluster ended, a sentence, if it did.
        leaves: why the job ended although its processes ran, a sentence; None if it did not.
    """

    machines: Sequence[Any] = ()
    addresses: Sequence[str] = ()
    supervisors: Mapping[str, Any] = field(default_factory=dict)
    nodes: Sequence[str] = ()
    draining: Callable[[], Mapping[str, int]] = dict
    lost: Callable[[], str | None] = lambda: None
    leaves: str | None = None
    _next_poll: float = 0.0
    _notice: _Notice | None = None

    def is_over(self) -> bool:
        """Whether the cluster is lost, or a node of the job is about to leave it and a checkpoint was written since.

        Ranks that can save a checkpoint within an epoch get SIGTERM, and end after it.
        """
        if self.lost() is not None:
            for child in self.children:
                if isinstance(child, ActorProcess) and child.status is None:
                    child.abandon()
            return True
        ended = self._notice is not None and any(child.status is not None for child in self.lasting)
        if time.monotonic() < self._next_poll and not ended:
            return False
        self._next_poll = time.monotonic() + _POLL_SECONDS
        deadlines = self.draining()
        machines = [machine for machine, node in enumerate(self.nodes) if node in deadlines]
        checkpoint = runs.last_checkpoint(self.log_dir.parent)
        if machines and self._notice is None:
            saves = bool(self.lasting) and all(child.saves_on_request for child in self.lasting)
            self._notice = _Notice(" and ".join(f"machine {machine}" for machine in machines), checkpoint)
            what = "the job leaves it after the next checkpoint"
            if saves:
                what = "the ranks save a checkpoint after their step"
            text = f"gtrain: Ray drains the node of {self._notice.machines}; {what}"
            print(text, file=sys.stderr, flush=True)
            for child in self.lasting if saves else ():
                child.deliver(signal.SIGTERM)
        if self._notice is None:
            return False
        times = [deadlines[self.nodes[machine]] for machine in machines]
        due = any(0 < deadline < (time.time() + _LEAVE_SECONDS) * 1000 for deadline in times)
        if ended or due or checkpoint != self._notice.checkpoint:
            self.leaves = f"Ray drained the node of {self._notice.machines}"
        return self.leaves is not None

    def start(self, spec: ProcessSpec, restarts: int, *not_inherited: int) -> Child:
        """Have the supervisor of a slot start its process."""
        reports, report_end = os.pipe()
        end, end_writer = os.pipe()
        os.set_blocking(reports, False)
        node = spec.slot.node
        process = ActorProcess(
            spec, 0, end, reports, restarts, supervisor=self.supervisors[spec.slot.label], machine=self.machines[node]
        )
        process.follow(self.addresses[node], report_end, end_writer)
        return process

    @property
    def value(self) -> Any:
        """The value that rank 0's task returned."""
        results = [child.result for child in self.children if isinstance(child, ActorProcess) and child.spec.terminal]
        return results[0] if results else None


def specification(description: Mapping[str, Any]) -> ProcessSpec:
    """Return the specification of a process from the description of its machine's agent."""
    slot = Slot(**description["slot"])
    return ProcessSpec(
        slot,
        "",
        restarts=description["restarts"],
        stop_seconds=description["stop_seconds"],
        terminates=description["terminates"],
        terminal=slot.rank == 0 and description["terminates"],
    )
