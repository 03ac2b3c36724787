"""``cluster=mpi``: ranks that ``mpirun`` or ``mpiexec`` of Open MPI, MPICH or Intel MPI started.

The ranks call no MPI function. Of ``mpirun`` they use the numbers in their environment, and its daemon on each machine,
which is the parent of the machine's ranks: they end with it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from gtrain.errors import ConfigError
from gtrain.launch import rendezvous, slot
from gtrain.launch.children import die_with_parent
from gtrain.launch.launchers.base import RankInfo
from gtrain.launch.launchers.external import ExternalLauncher, RankVariables
from gtrain.launch.request import JobRequest
from gtrain.launch.slot import LOOPBACK
from gtrain.launch.sockets import Listener, abstract_address, listen_abstract, listen_here

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import ClusterEnvironment

# Open MPI's local ranks are not in the order of ranks, and its "node rank" is not the number of a machine.
OPEN_MPI = RankVariables("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "", "OMPI_COMM_WORLD_LOCAL_SIZE")
HYDRA = RankVariables("PMI_RANK", "PMI_SIZE", "", "MPI_LOCALNRANKS")
"""The process manager of MPICH and Intel MPI. ``srun --mpi=pmi2`` sets ``PMI_RANK`` too, but no ``MPI_LOCALNRANKS``."""
_OPEN_MPI_JOB = "PMIX_NAMESPACE"
_STORE_SECONDS = 1800.0


class Mpi(ExternalLauncher):
    """mpirun or mpiexec of Open MPI, MPICH or Intel MPI started the ranks."""

    name = "mpi"
    names_dead_ranks = False  # MPICH names a process that it has killed itself
    restart_hint = "leave out cluster.max_restarts: mpirun restarts nothing; run it again with ckpt_path=last."
    even_hint = "place them evenly: --map-by ppr:N:node of Open MPI, -ppn N of MPICH."

    def __init__(self) -> None:
        self._location: rendezvous.StoreLocation | None = None

    def names(self, environ: Mapping[str, str]) -> RankVariables:
        return OPEN_MPI if OPEN_MPI.rank in environ else HYDRA

    def detect(self, environ: Mapping[str, str] = os.environ) -> bool:
        names = self.names(environ)
        return {names.rank, names.size, names.local_size} <= environ.keys()

    def job_id(self, environ: Mapping[str, str] = os.environ) -> str:
        return f"{self.name} {socket.gethostname()} {self.attempt_id(environ)}"

    def attempt_id(self, environ: Mapping[str, str] = os.environ) -> str:
        job = environ.get(_OPEN_MPI_JOB) or _daemon(self.names(environ).rank)
        return f"{job}/{self.rank_info(environ).machine}"

    def check(self, cfg: DictConfig) -> None:
        """Accept ``cluster.rendezvous``, which several machines need."""
        self.check_restarts(cfg)
        if cfg.cluster.rank is not None:
            raise ConfigError(
                f"cluster.rank={cfg.cluster.rank} was set; mpirun numbers the ranks.", hint="leave out cluster.rank."
            )
        self.check_even()

    def launch(self, request: JobRequest) -> Any:
        die_with_parent(os.getppid())  # a killed mpirun would leave its ranks running
        rank_info, cluster = self.rank_info(), request.cfg.cluster
        if cluster.rendezvous is not None:
            secured = cluster.isolated or cluster.key_file is not None
            rendezvous.check_secure(rendezvous.parse(cluster.rendezvous), secured)
        elif rank_info.machines > 1:
            raise ConfigError(
                f"mpirun started ranks on {rank_info.machines} machines, and cluster.rendezvous is not set.",
                hint="set a file that does not exist, in a folder that all machines share: "
                "cluster.rendezvous=file:///path; or a free port on the machine of rank 0: tcp://host:port.",
            )
        return super().launch(request)

    @contextlib.contextmanager
    def meeting(self, cfg: DictConfig, rank_info: RankInfo) -> Iterator[None]:
        """Meet at ``cluster.rendezvous``; without it, the ranks of one machine know the name of rank 0's socket."""
        if cfg.cluster.rendezvous is None:
            yield
            return
        target, secured = rendezvous.parse(cfg.cluster.rendezvous), slot.roster().key_file is not None
        if rank_info.rank == 0:
            with rendezvous.hold(target, secured) as self._location:
                yield
        else:
            self._location = rendezvous.find(target, cfg.cluster.timeout_seconds, secured)
            yield

    def environment(self) -> ClusterEnvironment:
        from gtrain.launch.rank_environment import RankEnvironment

        location = self._location
        return RankEnvironment(
            self.rank_info(), location.route if location else LOOPBACK, location.port if location else 0
        )

    def store_address(
        self,
        environment: ClusterEnvironment,
        own_address: str | None,
        serve: Callable[[Sequence[Listener]], str],
    ) -> str:
        """Rank 0 serves the store at the rendezvous; without one, at a socket that is named after the job."""
        rank_info, location = self.rank_info(), self._location
        if location is None:
            name = f"gtrain-store/{os.getuid()}/{self.attempt_id()}"[:100]
            return serve([_listen(name)]) if rank_info.rank == 0 else abstract_address(name)
        if location.socket is None:
            address = location.address
        else:
            tcp = Listener(location.socket, location.address)
            address = serve([tcp] if own_address is not None else [listen_here(), tcp])
        _check_machines(address, rank_info)
        return address


def _listen(name: str) -> Listener:
    try:
        return listen_abstract(name)
    except OSError as error:
        raise ConfigError(
            f"another process has the name of this job's socket, {name}: {error.strerror}.",
            hint="set cluster.rendezvous=file:///path, a file that does not exist.",
        ) from error


def _daemon(variable: str) -> int:
    """Return mpirun's daemon on this machine: the nearest ancestor of this process that does not have the variable.

    Between it and a rank may be a shell.
    """
    pid = os.getppid()
    with contextlib.suppress(OSError):  # a process of another user
        while f"\0{variable}=".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def _check_machines(address: str, rank_info: RankInfo) -> None:
    """Refuse ranks that do not fill one machine after the other: the first of each machine tells the others its host.

    Raises:
        ConfigError: names both hosts.
    """
    from gtrain.launch.key_value import KeyValueStore

    store = KeyValueStore(address, slot.roster().key_file, _STORE_SECONDS).prefixed("gtrain-hosts")
    first, host = rank_info.rank - rank_info.local, socket.gethostname()
    if rank_info.local == 0:
        store.set(str(first), host)
    elif (other := store.get(str(first)).decode()) != host:
        raise ConfigError(
            f"mpirun started rank {first} on {other} and rank {rank_info.rank} on {host}; ranks {first} to "
            f"{first + rank_info.local_size - 1} must be on one machine.",
            hint="place ranks machine by machine: mpirun --map-by slot of Open MPI, which is its default.",
        )
