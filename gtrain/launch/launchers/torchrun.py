"""``cluster=torchrun``: ranks started by ``torchrun`` or another launcher that sets torch.distributed's variables."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtrain.errors import PeerLostError
from gtrain.launch import links, slot
from gtrain.launch.children import die_with_parent
from gtrain.launch.launchers.external import ExternalLauncher, RankVariables
from gtrain.launch.request import JobRequest
from gtrain.launch.sockets import Listener, listen_here, listen_tcp

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import ClusterEnvironment

_STORE_SECONDS = 1800.0
_KEY = "gtrain/store"


class Torchrun(ExternalLauncher):
    """torchrun, or another launcher that sets the variables of torch.distributed, started the ranks."""

    name = "torchrun"
    restart_hint = "leave out cluster.max_restarts: torchrun --max-restarts=N restarts the ranks."
    even_hint = "give torchrun the same --nproc-per-node on every machine."
    variables = RankVariables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    attempt_variable = "TORCHELASTIC_RESTART_COUNT"
    job_variables = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT", "GROUP_RANK")

    def detect(self, environ: Mapping[str, str] = os.environ) -> bool:
        by_hand = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys()
        return "TORCHELASTIC_RUN_ID" in environ or by_hand

    def job_id(self, environ: Mapping[str, str] = os.environ) -> str:
        run_id = environ.get("TORCHELASTIC_RUN_ID", "none")
        if run_id != "none":  # torchrun's default, the same for all jobs
            return f"{self.name} {run_id}"
        return f"{self.name} {socket.gethostname()} {os.getppid()}"

    def agent_id(self) -> str:
        """The torchrun process of this machine: its id, and its start time in ticks, because ids are reused."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return ""
        agent = os.getppid()
        started = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{self.name} agent {socket.gethostname()} {agent} {started}"

    def environment(self) -> ClusterEnvironment:
        from lightning.fabric.plugins.environments import TorchElasticEnvironment

        return TorchElasticEnvironment()

    def launch(self, request: JobRequest) -> Any:
        if "TORCHELASTIC_RUN_ID" in os.environ:  # a killed torchrun would leave its ranks running
            die_with_parent(os.getppid())
        return super().launch(request)

    def store_address(
        self,
        environment: ClusterEnvironment,
        own_address: str | None,
        serve: Callable[[Sequence[Listener]], str],
    ) -> str:
        """If torchrun serves its own store at the main port, rank 0 publishes the address of the job's store there.

        Nothing else goes through torchrun's store, because it is not authenticated. torchrun keeps its store when it
        restarts the ranks, which may then read the address of the earlier attempt; nothing answers there.
        """
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return super().store_address(environment, own_address, serve)
        from torch.distributed import TCPStore

        host, port = environment.main_address, environment.main_port
        try:
            store = TCPStore(host, port, None, False, timedelta(seconds=_STORE_SECONDS), wait_for_workers=False)
            if environment.global_rank() > 0:
                return _find_address(lambda: store.get(_KEY).decode())
            address = serve([listen_here() if own_address is None else listen_tcp(own_address)])
            store.set(_KEY, address)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise PeerLostError(f"torchrun's store at {host}:{port} does not answer: {reason}") from error
        return address


def _find_address(read: Callable[[], str]) -> str:
    """Return the address at which rank 0 of this attempt answers.

    The address of an earlier attempt does not answer: torchrun ends the ranks of all nodes before it starts new ones.

    Args:
        read: returns the address that was published last; waits for the first one.
    """
    deadline = time.monotonic() + _STORE_SECONDS
    while True:
        address = read()
        try:
            links.connect(address, slot.roster().key_file, 0.0, listens=True).close()
            return address
        except PeerLostError:
            if time.monotonic() > deadline:
                raise
            time.sleep(links.RETRY_SECONDS)
