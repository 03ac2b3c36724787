"""What a worker of several machines has beside its own: the lock server, the group, the depot, common parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gtrain.errors import ConfigError, PeerLostError
from gtrain.strategy.counters import Counters
from gtrain.strategy.servers import Servers
from gtrain.wire import Client
from gtrain_pbg.config import PBGConfig
from gtrain_pbg.machines.depot import Depot, FolderDepot, ServedDepot
from gtrain_pbg.machines.group import MachinesGroup
from gtrain_pbg.machines.lock_client import LockClient
from gtrain_pbg.machines.parameters import SharedParameters
from gtrain_pbg.typed import TypeCut

SILENT_SECONDS = 60.0
"""A parameter server may take so long to answer, at least; the lock server says earlier if it is gone."""
LARGE_BYTES = 64 << 20
"""A table that is not cut from here on takes parameter servers a good part of their time."""
log = logging.getLogger("gtrain")


def check_spread(cuts: Sequence[TypeCut], dtype: torch.dtype, warns: bool) -> None:
    """Check what several machines have to share.

    Args:
        cuts: how each entity type is cut.
        dtype: of the tables.
        warns: whether this process is the one that says so if it may be slow.

    Raises:
        ConfigError: no type is cut.
    """
    if not any(cut.is_cut for cut in cuts):
        raise ConfigError(
            "several machines were to train, and no entity type is cut into partitions.",
            hint="leave data.entities.<type>.num_partitions=1 out for one of them, or set trainer.num_nodes=1.",
        )
    for cut in cuts:
        nbytes = cut.spec.rows * cut.spec.dim * dtype.itemsize
        if warns and not cut.is_cut and nbytes > LARGE_BYTES:
            log.warning("the table of %s is not cut, and all of its %d MB go through parameter servers",
                        cut.spec.name, nbytes >> 20)  # fmt: skip


class Machines:
    """Several machines, as one of their workers has to do with them.

    Args:
        settings: of the strategy.
        servers: of the job.
        rank: this worker; size: number of workers.
        counters: where traffic is counted.
        store: address of the job's key-value store; None on the machine that has it.
        tell, timeout_seconds: see :class:`~gtrain_pbg.machines.lock_client.LockClient`.

    Raises:
        ConfigError: the job has no lock server.
    """

    def __init__(
        self,
        settings: PBGConfig,
        servers: Servers,
        rank: int,
        size: int,
        counters: Counters,
        store: str | None,
        tell: Callable[[str], None] | None = None,
        timeout_seconds: float = 0.0,
    ) -> None:
        if not servers.count("lock"):
            raise ConfigError(
                "strategy=pbg was to train on several machines, and the job has no lock server.",
                hint="start it with the gtrain command, or set num_nodes=1.",
            )
        self._settings, self._servers = settings, servers
        self._silent_seconds = max(SILENT_SECONDS, 2 * settings.lease_seconds, timeout_seconds)
        self.lock = LockClient(
            servers.client("lock", 0), settings.lease_seconds, store, self._miss, tell, timeout_seconds
        )
        self.group = MachinesGroup(rank, size, self.lock, counters)

    def depot(self, run_dir: Path) -> Depot:
        """Where partitions are while no machine trains them."""
        clients = self._clients("partition")
        if clients:
            return ServedDepot(clients)
        return FolderDepot(Path(self._settings.partition_path or run_dir / "partitions").absolute())

    def parameters(self, tensors: Mapping[str, Tensor]) -> SharedParameters:
        """This machine's copy of what all machines have."""
        clients = self._clients("parameter")
        return SharedParameters(tensors, clients, self._settings.sync_interval, self._silent_seconds)

    def _miss(self, name: str) -> None:
        role, _, number = name.partition(" ")
        self._servers.miss(role, int(number))

    def _clients(self, role: str) -> list[Client]:
        """Clients of the servers of a role, which nobody waits for in vain once it is known that they are gone."""
        clients = self._servers.clients(role)

        def close(error: PeerLostError) -> None:
            for client in clients:
                client.close(error)

        self.lock.on_loss(close)
        return clients

    def next_lease(self) -> int:
        """A number larger than that of any lease so far."""
        return int(self.lock.ask("number", {}).fields["number"])
