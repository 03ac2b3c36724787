"""What every launcher answers. Light: Lightning and the key-value store are imported in ranks alone."""

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
    """The rank that another launcher gave this process, and the shape of its job.

    Attributes:
        rank: of all processes.
        size: number of all processes.
        local: number on its machine, from 0.
        local_size: processes of its machine.
        machine: number of its machine.
        machines: number of machines.
    """

    rank: int
    size: int
    local: int
    local_size: int
    machine: int
    machines: int


class Launcher(ABC):
    """Who starts the ranks of a job; ``cluster=NAME`` chooses one by :attr:`name`.

    Attributes:
        name: the value of ``cluster.kind``.
        starts_ranks: whether gtrain's own agent starts them; else this process is a rank already.
        ranks_meet: whether this process has met the other ranks: from then on each prints errors of its own.
    """

    name: ClassVar[str]
    starts_ranks: ClassVar[bool] = True
    ranks_meet: bool = False

    def detect(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether it has started this process as a rank."""
        return False

    @abstractmethod
    def launch(self, request: JobRequest) -> Any:
        """Run a job, or this process's share of it.

        Returns:
            What rank 0's task returned, if it ran here.
        """

    def check(self, cfg: DictConfig) -> None:
        """Refuse settings of other launchers.

        Raises:
            ConfigError: names the key.
        """
        for key in ("rank", "rendezvous"):
            if cfg.cluster[key] is not None:
                raise ConfigError(
                    f"cluster.{key}={cfg.cluster[key]} was set; it is for processes that are started by hand.",
                    hint=f"set cluster=manual too, or leave out cluster.{key}.",
                )

    def rank_info(self, environ: Mapping[str, str] = os.environ) -> RankInfo | None:
        """This process's rank; None where it is the command itself, which starts the ranks."""
        return None

    def owns_run_folder(self, cluster: Any) -> bool:
        """Whether this command makes the run's folder and locks it; ``cluster`` is that group of the configuration."""
        return True

    def environment(self) -> ClusterEnvironment:
        """Lightning's environment of this process, outside of an agent's job."""
        from lightning.fabric.plugins.environments import LightningEnvironment

        return LightningEnvironment()

    def store_address(
        self,
        environment: ClusterEnvironment,
        own_address: str | None,
        serve: Callable[[Sequence[Listener]], str],
    ) -> str:
        """Where the job's key-value store is, outside of an agent's job.

        Args:
            environment: see :meth:`environment`.
            own_address: this machine's address for the others; None where the job is on this machine alone.
            serve: serves the store at these sockets and returns the address of the first.
        """
        return serve([listen_here()])

    @contextlib.contextmanager
    def printing_once(self) -> Iterator[bool]:
        """Elect one of this machine's ranks to print why the job is refused; all of them find the same mistake.

        Yields:
            Whether this process prints.
        """
        yield True
