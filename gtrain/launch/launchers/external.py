"""Launchers that have started the ranks before gtrain begins: this process is one of them."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from omegaconf import DictConfig, open_dict

from gtrain.errors import ConfigError
from gtrain.launch import keeper
from gtrain.launch.agent import preload
from gtrain.launch.children import PRELOAD, resolve
from gtrain.launch.launchers.base import Launcher, RankInfo
from gtrain.launch.request import JobRequest
from gtrain.launch.roles import counts_of
from gtrain.launch.slot import Roster, set_roster
from gtrain.launch.sockets import Listener, listen_here, listen_tcp

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import ClusterEnvironment

RUN_RANK = "gtrain.launch.joining:run_rank"
_REFUSAL_SECONDS = 10.0


class RankVariables(NamedTuple):
    """Names of the environment variables that a launcher sets for each rank; see :class:`RankInfo`."""

    rank: str
    size: str
    local: str
    local_size: str
    machine: str
    machines: str


class ExternalLauncher(Launcher):
    """A launcher whose ranks read their places from environment variables.

    Local rank 0 of each machine has its machine's servers started beside it.

    Attributes:
        variables: where a rank's place stands.
        job_variables: variables whose values together tell the jobs of one machine apart.
    """

    starts_ranks = False
    variables: ClassVar[RankVariables]
    job_variables: ClassVar[tuple[str, ...]]

    @abstractmethod
    def detect(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether it has started this process as a rank."""

    def rank_info(self, environ: Mapping[str, str] = os.environ) -> RankInfo:
        """This process's rank; without the variables of machines the job is taken to be on one.

        Raises:
            KeyError, ValueError: rank or size are absent, or are not numbers.
        """
        names = self.variables
        rank, size = int(environ[names.rank]), int(environ[names.size])
        machines = int(environ.get(names.machines) or 1)
        local_size = int(environ.get(names.local_size) or max(1, size // machines))
        local = int(environ.get(names.local) or (rank if machines == 1 else rank % local_size))
        return RankInfo(rank, size, local, local_size, int(environ.get(names.machine) or 0), machines)

    def launch(self, request: JobRequest) -> Any:
        """Be the rank that this process is."""
        cfg, rank_info = request.cfg, self.rank_info()
        self._take_world(cfg, rank_info, request.given)
        request.settled()  # all but the run's folder, which is not known yet, must be right before a fork
        plans = request.plans()
        if any(plan.by_hand for plan in plans):
            raise ConfigError(
                f"cluster.standalone={list(cfg.cluster.standalone)} was set; under {self.name} servers find no "
                "rendezvous.",
                hint="leave it empty: local rank 0 of each machine starts its machine's servers.",
            )
        key_file = request.key_file()
        if key_file is None and rank_info.machines > 1:
            raise ConfigError(
                f"{self.name} started ranks on {rank_info.machines} machines, and cluster.key_file is not set.",
                hint="make keys with gtrain key cluster.key_file=job.key in a folder that all machines share; or, "
                "where nobody else can reach the network, set cluster.isolated=true.",
            )
        set_roster(Roster(counts_of(plans), {}, key_file))
        with keeper.beside(rank_info, plans, cfg) as servers:
            preload()
            sys.modules[PRELOAD].keep_templates_in_memory()
            request.preflight(request.settled())
            self.ranks_meet = True
            return resolve(RUN_RANK)(request, rank_info, servers)

    def _take_world(self, cfg: DictConfig, rank_info: RankInfo, given: Sequence[str]) -> None:
        """Take the number of ranks from the launcher that started them, unless the command names another.

        Raises:
            ConfigError: the command and the launcher contradict each other.
        """
        nodes, devices = cfg.trainer.num_nodes, cfg.trainer.devices
        if nodes * devices == rank_info.size:
            return
        if any(override.startswith(("trainer.num_nodes=", "trainer.devices=")) for override in given):
            raise ConfigError(
                f"trainer.num_nodes {nodes} * trainer.devices {devices} = {nodes * devices} ranks were set, "
                f"but {self.name} started {rank_info.size}.",
                hint=f"set numbers whose product is {rank_info.size}, or neither.",
            )
        even = rank_info.machines * rank_info.local_size == rank_info.size
        with open_dict(cfg):
            cfg.trainer.num_nodes = rank_info.machines if even else rank_info.size
            cfg.trainer.devices = rank_info.local_size if even else 1

    def store_address(
        self,
        environment: ClusterEnvironment,
        own_address: str | None,
        serve: Callable[[Sequence[Listener]], str],
    ) -> str:
        """Rank 0 serves the store at the launcher's main address, and within one machine at a Unix socket too."""
        if environment.global_rank() > 0:
            return f"tcp://{environment.main_address}:{environment.main_port}"
        tcp = listen_tcp(environment.main_address, environment.main_port)
        return serve([tcp] if own_address is not None else [listen_here(), tcp])

    @contextlib.contextmanager
    def printing_once(self) -> Iterator[bool]:
        """Elect one of this machine's ranks to print why the job is refused; all of them find the same mistake.

        The first rank to come holds a socket without a file. The others connect to it and stay silent; it ends when all
        have, for then none comes later and prints again.
        """
        try:
            others = 0 if self.ranks_meet else self.rank_info().local_size - 1
        except (KeyError, ValueError):
            others = 0
        if others < 1:
            yield True
            return
        job = "/".join(os.environ.get(name, "") for name in self.job_variables)
        address = f"\0gtrain-refusal/{os.getuid()}/{job}"[:100]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            try:
                line.bind(address)
                line.listen(others)
            except OSError:
                with contextlib.suppress(OSError):
                    line.connect(address)
                yield False
                return
            yield True
            deadline = time.monotonic() + _REFUSAL_SECONDS
            with contextlib.suppress(TimeoutError):
                for _ in range(others):
                    line.settimeout(max(0.001, deadline - time.monotonic()))
                    line.accept()[0].close()
