"""The interface of launchers. Light: only ranks import Lightning and the key-value store."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import DictConfig

from gtrain.errors import ConfigError
from gtrain.launch.request import JobRequest
from gtrain.launch.sockets import Listener, listen_here

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import ClusterEnvironment


@dataclass(frozen=True)
class RankInfo:
    """A rank as the launcher that started it numbers it.

    Attributes:
        rank: index among all ranks, from 0.
        size: number of ranks.
        local: index among the ranks of the machine, from 0.
        local_size: number of ranks of the machine.
        machine: index of the machine, from 0.
        machines: number of machines.
    """

    rank: int
    size: int
    local: int
    local_size: int
    machine: int
    machines: int


class Launcher(ABC):
    """Starts the ranks of a job, or recognises that they were started; ``cluster=NAME`` selects one by name.

    Attributes:
        name: the value of ``cluster.kind``.
        schema: the dataclass of its settings, an option of Hydra's group ``schema/cluster``.
        starts_ranks: whether gtrain's agent starts the ranks; otherwise this process is a rank already.
        restarts_job: whether it restarts the whole job, ``cluster.max_restarts`` times.
        restart_hint: how to have the job restarted with a launcher that does not.
        names_dead_ranks: whether the launcher, or the agent, names a rank that was killed.
        ranks_meet: whether this process has met the other ranks; from then on each rank prints its errors.
    """

    name: ClassVar[str]
    schema: ClassVar[str] = "cluster"
    starts_ranks: ClassVar[bool] = True
    restarts_job: ClassVar[bool] = False
    names_dead_ranks: ClassVar[bool] = True
    restart_hint: ClassVar[str] = "leave out cluster.max_restarts, or let gtrain start the ranks: cluster=local."
    ranks_meet: bool = False

    def detect(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether this launcher started this process as a rank."""
        return False

    @abstractmethod
    def launch(self, request: JobRequest) -> Any:
        """Run a job, or this process's share of it.

        Returns:
            What rank 0's task returned, if it ran here.
        """

    def check(self, cfg: DictConfig) -> None:
        """Refuse settings that only other launchers use.

        Raises:
            ConfigError: names the key.
        """
        self.check_restarts(cfg)
        for key in ("rank", "rendezvous"):
            if cfg.cluster[key] is not None:
                raise ConfigError(
                    f"cluster.{key}={cfg.cluster[key]} was set; it is for processes that are started by hand.",
                    hint=f"set cluster=manual too, or leave out cluster.{key}.",
                )

    def check_restarts(self, cfg: DictConfig) -> None:
        """Refuse ``cluster.max_restarts`` where gtrain does not restart the job.

        Raises:
            ConfigError: names what restarts it instead.
        """
        if cfg.cluster.max_restarts and not self.restarts_job:
            raise ConfigError(
                f"cluster.max_restarts={cfg.cluster.max_restarts} was set; with cluster={self.name} gtrain does not "
                "restart the job.",
                hint=self.restart_hint,
            )

    def rank_info(self, environ: Mapping[str, str] = os.environ) -> RankInfo | None:
        """Return this process's rank; None if this process is the command that starts the ranks."""
        return None

    def owns_run_folder(self, cluster: Any) -> bool:
        """Whether this command creates and locks the run's folder; ``cluster`` is that group of the configuration."""
        return True

    def environment(self) -> ClusterEnvironment:
        """Return Lightning's environment for a process that no agent started."""
        from lightning.fabric.plugins.environments import LightningEnvironment

        return LightningEnvironment()

    def store_address(
        self,
        environment: ClusterEnvironment,
        own_address: str | None,
        serve: Callable[[Sequence[Listener]], str],
    ) -> str:
        """Return the address of the job's key-value store, in a process that no agent started.

        Args:
            environment: see :meth:`environment`.
            own_address: this machine's address for other machines; None if the job is on this machine only.
            serve: serves the store at sockets and returns the address of the first.
        """
        return serve([listen_here()])

    @contextlib.contextmanager
    def printing_once(self) -> Iterator[bool]:
        """Elect one of this machine's ranks to print why the job is refused; all of them find the same mistake.

        Yields:
            Whether this process prints.
        """
        yield True
