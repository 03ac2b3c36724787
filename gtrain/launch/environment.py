"""Which job this process is part of: one the agent started, one that another launcher started, or none."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from gtrain.launch import cluster
from gtrain.launch import slot as slots
from gtrain.launch.slot import JobContext


class AgentEnvironment(ClusterEnvironment):
    """A process that the agent forked on this machine."""

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
        """The agent fixed it."""

    def global_rank(self) -> int:
        return self._context.slot.rank

    def set_global_rank(self, rank: int) -> None:
        """The agent fixed it."""

    def local_rank(self) -> int:
        return self._context.slot.local

    def node_rank(self) -> int:
        return self._context.slot.node

    @property
    def context(self) -> JobContext:
        """The place in the agent's job."""
        return self._context


def agent_environment() -> AgentEnvironment | None:
    """The environment of a rank that the agent forked, or None."""
    context = slots.current()
    return AgentEnvironment(context) if context is not None else None


def find_environment() -> ClusterEnvironment:
    """The environment of this process: the agent's, torchrun's, SLURM's, or that of a process on its own."""
    kind = cluster.detect()
    found = agent_environment()
    if found is not None:
        return found
    if kind == "torchrun":
        return TorchElasticEnvironment()
    if kind == "slurm":
        return SLURMEnvironment(auto_requeue=False)
    return LightningEnvironment()


def ranks_on_this_machine() -> int:
    """How many ranks share this machine's cores; simulated machines share them too."""
    context = slots.current()
    if context is not None:
        return context.world_size if context.simulated else context.devices
    kind = cluster.detect()
    if kind == "torchrun":
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(os.environ.get("SLURM_NTASKS_PER_NODE", "1")) if kind == "slurm" else 1
