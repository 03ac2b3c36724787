"""Lightning's cluster environment of this process: the agent's, or that of another launcher."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment

from gtrain.launch import launchers
from gtrain.launch import slot as slots
from gtrain.launch.slot import JobContext

SAY_SECONDS = 10.0
"""How long a process waits for another before it reports which one it waits for."""
REPORT_SECONDS = 30.0
"""How often it reports a longer wait."""


class AgentEnvironment(ClusterEnvironment):
    """The environment of a rank that the agent forked."""

    def __init__(self, context: JobContext) -> None:
        self.context = context

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.context.host

    @property
    def main_port(self) -> int:
        return self.context.port

    @staticmethod
    def detect() -> bool:
        return slots.current() is not None

    def world_size(self) -> int:
        return self.context.world_size

    def set_world_size(self, size: int) -> None:
        """Ignored: the agent sets it."""

    def global_rank(self) -> int:
        return self.context.slot.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignored: the agent sets it."""

    def local_rank(self) -> int:
        return self.context.slot.local

    def node_rank(self) -> int:
        return self.context.slot.node


def agent_environment() -> AgentEnvironment | None:
    """Return the environment of a rank that the agent forked, or None."""
    context = slots.current()
    return AgentEnvironment(context) if context is not None else None


def find_environment() -> ClusterEnvironment:
    """Return the environment of this process: the agent's, or that of the launcher that started it."""
    return agent_environment() or launchers.detect().environment()


def ranks_on_this_machine() -> int:
    """Return the number of ranks that share this machine's cores, those of simulated machines included."""
    context = slots.current()
    if context is not None:
        return context.world_size if context.simulated else context.devices
    rank_info = launchers.detect().rank_info()
    return 1 if rank_info is None else rank_info.local_size


def divide_cores(processes: int) -> None:
    """Give torch this process's share of the machine's cores, unless ``OMP_NUM_THREADS`` is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))


def say_waiting(process: str, seconds: float, note: str = "") -> None:
    """Report which process this one waits for, and since when: the agent prints it, or rank 0 under another launcher.

    Args:
        process: its name, ``rank 2 (machine 1)``, or what it has not done, ``rank 2 (machine 1) to join``.
        seconds: how long this process has waited.
        note: the end of the sentence.
    """
    if slots.current() is not None:
        slots.report("waiting", process=process, seconds=seconds, note=note)
    elif launchers.is_first() or process.startswith("rank 0 "):
        os.write(2, f"gtrain: waiting for {process}, {seconds:.0f} s{note}\n".encode())


def say_gone(process: str) -> None:
    """Report that a process has died, if neither the agent nor the launcher does.

    Args:
        process: its name, ``rank 2 (machine 1)``.
    """
    if slots.current() is None and not launchers.detect().names_dead_ranks:
        os.write(2, f"gtrain: {process} has died\n".encode())


class WaitReport:
    """Reports a wait after :data:`SAY_SECONDS`, and then every :data:`REPORT_SECONDS`.

    Args:
        process: the process that is waited for; see :func:`say_waiting`.
        say: prints the report.
    """

    def __init__(self, process: str, say: Callable[[str, float], None] = say_waiting) -> None:
        self._process, self._say = process, say
        self._start, self._next = time.monotonic(), SAY_SECONDS

    def __call__(self) -> float:
        """Report the wait if a report is due; called repeatedly while it lasts. Returns its seconds."""
        waited = time.monotonic() - self._start
        if waited >= self._next:
            self._next = REPORT_SECONDS * (waited // REPORT_SECONDS + 1)
            self._say(self._process, waited)
        return waited
