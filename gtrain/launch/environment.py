"""Lightning's cluster environment of this process: the agent's, or that of another launcher."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import ClusterEnvironment

from gtrain.launch import launchers
from gtrain.launch import slot as slots
from gtrain.launch.slot import JobContext


class AgentEnvironment(ClusterEnvironment):
    """The environment of a rank that the agent forked."""

    def __init__(self, context: JobContext) -> None:
        self._context = context

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self._context.host

    @property
    def main_port(self) -> int:
        return self._context.port

    @staticmethod
    def detect() -> bool:
        return slots.current() is not None

    def world_size(self) -> int:
        return self._context.world_size

    def set_world_size(self, size: int) -> None:
        """Ignored: the agent sets it."""

    def global_rank(self) -> int:
        return self._context.slot.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignored: the agent sets it."""

    def local_rank(self) -> int:
        return self._context.slot.local

    def node_rank(self) -> int:
        return self._context.slot.node

    @property
    def context(self) -> JobContext:
        """The process's context in the agent's job."""
        return self._context


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


def say_waiting(sentence: str) -> None:
    """Report which process this one waits for: the agent prints it, or rank 0 under another launcher."""
    if slots.current() is not None:
        slots.report("waiting", sentence=sentence)
    elif launchers.is_first() or "rank 0 " in sentence:
        os.write(2, f"gtrain: {sentence}\n".encode())
