"""Launchers that started the ranks before gtrain: this process is one of the ranks."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from omegaconf import DictConfig, open_dict

from gtrain.config import key_of
from gtrain.errors import ConfigError
from gtrain.launch import keeper
from gtrain.launch.agent import preload
from gtrain.launch.children import resolve
from gtrain.launch.job import counts_of
from gtrain.launch.launchers.base import Launcher, RankInfo
from gtrain.launch.request import JobRequest
from gtrain.launch.slot import ServerRoster, count_job, set_roster
from gtrain.launch.sockets import Listener, listen_here, listen_tcp
from gtrain.launch.templates import keep_templates_in_memory

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import ClusterEnvironment

RUN_RANK = "gtrain.launch.joining:run_rank"
_REFUSAL_SECONDS = 10.0


class RankVariables(NamedTuple):
    """Names of the environment variables that a launcher sets for each rank; see :class:`RankInfo`.

    An empty name is a number that the launcher does not set; it follows from the others, because ranks fill one machine
    after the other.
    """

    rank: str
    size: str
    local: str
    local_size: str
    machine: str = ""
    machines: str = ""


class ExternalLauncher(Launcher):
    """A launcher that passes ranks their numbers in environment variables.

    Local rank 0 of each machine starts a keeper, which starts the machine's servers.

    Attributes:
        variables: names of the environment variables.
        job_variables: variables whose values together identify an attempt of a job among those of one machine.
        attempt_variable: variable with the number of earlier attempts; empty if the launcher restarts nothing.
        even_hint: how to have the launcher start the same number of ranks on each machine.
    """

    starts_ranks = False
    variables: ClassVar[RankVariables]
    job_variables: ClassVar[tuple[str, ...]] = ()
    attempt_variable: ClassVar[str] = ""
    even_hint: ClassVar[str]

    @abstractmethod
    def detect(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether this launcher started this process as a rank."""

    def rank_info(self, environ: Mapping[str, str] = os.environ) -> RankInfo:
        """Return this process's rank; a job without variables for machines is assumed to be on one.

        Raises:
            KeyError, ValueError: rank or size are absent, or are not numbers.
        """
        names = self.names(environ)
        rank, size = int(environ[names.rank]), int(environ[names.size])
        machines = int(environ.get(names.machines) or 0)
        local_size = int(environ.get(names.local_size) or max(1, size // (machines or 1)))
        machines = machines or -(-size // local_size)
        local = int(environ.get(names.local) or rank % local_size)
        return RankInfo(rank, size, local, local_size, int(environ.get(names.machine) or rank // local_size), machines)

    def names(self, environ: Mapping[str, str]) -> RankVariables:
        """Return the names of the variables that this process has."""
        return self.variables

    def check(self, cfg: DictConfig) -> None:
        """Refuse an uneven placement too."""
        super().check(cfg)
        self.check_even()

    def check_even(self) -> None:
        """Refuse ranks that do not fill one machine after the other with the same number of ranks on each.

        Raises:
            ConfigError: names the rank and its place.
        """
        rank_info = self.rank_info()
        machine, local_size = rank_info.machine, rank_info.local_size
        even = rank_info.machines * local_size == rank_info.size
        if rank_info.machines == 1 or (even and rank_info.rank == machine * local_size + rank_info.local):
            return
        raise ConfigError(
            f"{self.name} started {rank_info.size} ranks on {rank_info.machines} machines, and rank {rank_info.rank} "
            f"is local rank {rank_info.local} of machine {machine}; every machine must have the same number of ranks, "
            "in order.",
            hint=self.even_hint,
        )

    def launch(self, request: JobRequest) -> Any:
        """Run the task of this rank."""
        count_job()  # before the fork of the keeper, whose servers use the store too
        cfg, rank_info = request.cfg, self.rank_info()
        self._adopt_world_size(cfg, rank_info, request.overrides)
        request.resolved()  # refuse mistakes before a fork; the run's folder is not known yet
        plans = request.plans()
        if any(plan.by_hand for plan in plans):
            raise ConfigError(
                f"cluster.standalone={list(cfg.cluster.standalone)} was set; under {self.name} servers have no "
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
        set_roster(ServerRoster(counts_of(plans), {}, key_file), self.attempt())
        with keeper.keeper_for(rank_info, plans, cfg) as servers:
            preload()
            keep_templates_in_memory()
            request.preflight(request.resolved())
            self.ranks_meet = True
            with self.meeting(request.cfg, rank_info):
                return resolve(RUN_RANK)(request, rank_info, servers, self.job_id(), self.agent_id())

    def meeting(self, cfg: DictConfig, rank_info: RankInfo) -> contextlib.AbstractContextManager[None]:
        """Find the machine of rank 0 and, on that machine, be found by the others within the context."""
        return contextlib.nullcontext()

    def attempt(self, environ: Mapping[str, str] = os.environ) -> int:
        """Return how many times the launcher started this job before."""
        return int(environ.get(self.attempt_variable) or 0)

    @abstractmethod
    def job_id(self, environ: Mapping[str, str] = os.environ) -> str:
        """Return the launcher's name of this job, which is the same in all attempts."""

    def agent_id(self) -> str:
        """Return a name of the process that starts this machine's ranks in all attempts; empty if there is none."""
        return ""

    def attempt_id(self, environ: Mapping[str, str] = os.environ) -> str:
        """Return a name of this attempt of the job that no other attempt or job on this machine has."""
        return "/".join(environ.get(name, "") for name in self.job_variables)

    def _adopt_world_size(self, cfg: DictConfig, rank_info: RankInfo, overrides: Sequence[str]) -> None:
        """Set the number of ranks to that of the launcher, unless the command sets another.

        Raises:
            ConfigError: the command and the launcher contradict each other.
        """
        nodes, devices = cfg.trainer.num_nodes, cfg.trainer.devices
        if nodes * devices == rank_info.size:
            return
        if any(key_of(override) in ("trainer.num_nodes", "trainer.devices") for override in overrides):
            raise ConfigError(
                f"trainer.num_nodes {nodes} * trainer.devices {devices} = {nodes * devices} ranks were set, "
                f"but {self.name} started {rank_info.size}.",
                hint=f"set numbers whose product is {rank_info.size}, or neither.",
            )
        with open_dict(cfg):
            cfg.trainer.num_nodes = rank_info.machines
            cfg.trainer.devices = rank_info.size // rank_info.machines

    def store_address(
        self,
        environment: ClusterEnvironment,
        own_address: str | None,
        serve: Callable[[Sequence[Listener]], str],
    ) -> str:
        """Rank 0 serves the store at the launcher's main address, and for a job on one machine at a Unix socket too."""
        if environment.global_rank() > 0:
            return f"tcp://{environment.main_address}:{environment.main_port}"
        tcp = listen_tcp(environment.main_address, environment.main_port)
        return serve([tcp] if own_address is not None else [listen_here(), tcp])

    @contextlib.contextmanager
    def printing_once(self) -> Iterator[bool]:
        """Elect one of this machine's ranks to print why the job is refused; all of them find the same mistake.

        The first rank binds a socket in the abstract namespace. The others connect to it and print nothing. The first
        one waits for all of them, so that none comes later, finds no socket and prints again.
        """
        try:
            others = 0 if self.ranks_meet else self.rank_info().local_size - 1
        except (KeyError, ValueError):
            others = 0
        if others < 1:
            yield True
            return
        address = f"\0gtrain-refusal/{os.getuid()}/{self.attempt_id()}"[:100]
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
