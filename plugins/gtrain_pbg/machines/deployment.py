"""A worker of several machines: its lock server, its group, the store of partitions, common parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from gtrain.errors import ConfigError, PeerLostError
from gtrain.graph.store import Store
from gtrain.strategy.counters import Counters
from gtrain.strategy.group import Group
from gtrain.strategy.servers import Servers
from gtrain.wire import Client
from gtrain_pbg.config import PBGConfig
from gtrain_pbg.machines.folder import PartitionFolder
from gtrain_pbg.machines.group import MachinesGroup
from gtrain_pbg.machines.leased import LeasedBuckets
from gtrain_pbg.machines.lock_client import LockClient
from gtrain_pbg.machines.parameter_server import SharedParameters
from gtrain_pbg.machines.partition_server import PartitionClient
from gtrain_pbg.partition_store import PartitionStore
from gtrain_pbg.typed import TypedTables
from gtrain_pbg.worker import BucketSource

SILENT_SECONDS = 60.0
"""A parameter server may take so long to answer, at least; the lock server says earlier if it is gone."""
LARGE_BYTES = 64 << 20
"""A table that is not cut from here on takes parameter servers a good part of their time."""
log = logging.getLogger("gtrain")


def check_tables(tables: TypedTables, warns: bool) -> None:
    """Check what several machines have to share.

    Args:
        tables: of all entity types.
        warns: whether this process is the one that says so if it may be slow.

    Raises:
        ConfigError: no type is cut.
    """
    if not any(entity.is_partitioned for entity in tables.types):
        raise ConfigError(
            "several machines were to train, and no entity type is cut into partitions.",
            hint="leave data.entities.<type>.num_partitions=1 out for one of them, or set trainer.num_nodes=1.",
        )
    for entity in tables.types:
        nbytes = entity.spec.rows * entity.spec.dim * tables.dtype.itemsize
        if warns and not entity.is_partitioned and nbytes > LARGE_BYTES:
            log.warning("the table of %s is not cut, and all of its %d MB go through parameter servers",
                        entity.spec.name, nbytes >> 20)  # fmt: skip


class MultiMachineDeployment:
    """A :class:`~gtrain_pbg.deployment.Deployment`: machines share partitions, and the lock server grants buckets.

    Args:
        settings: of the strategy.
        servers: of the job.
        rank: this worker; size: number of workers.
        counters: where traffic is counted.
        store: address of the job's key-value store; None on the machine that has it.
        tell, timeout_seconds: see :class:`~gtrain_pbg.machines.lock_client.LockClient`.

    Attributes:
        group: all workers of all machines.
        machine: the workers of this machine; set once it is known.
        lock: the lock server.

    Raises:
        ConfigError: the job has no lock server.
    """

    folder = "initial-partitions"

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
        self.machine: Group = self.group
        self.slots = settings.buffer_partitions or 3

    def share(self) -> tuple[int, int]:
        return self.group.share

    def connect(self, tables: TypedTables, run_dir: Path, publishes: bool) -> None:
        check_tables(tables, publishes)
        clients = self._clients("partition")
        folder = Path(self._settings.partition_path or run_dir / "partitions").absolute()
        store: PartitionStore = PartitionClient(clients) if clients else PartitionFolder(folder)
        tables.connect(store, publishes, self._next_lease)

    def source(
        self,
        tables: TypedTables,
        shared: Mapping[str, Tensor],
        store: Store,
        first: Callable[[int], int],
        limit: int | None,
    ) -> BucketSource:
        settings, clients = self._settings, self._clients("parameter")
        parameters = SharedParameters(tables.in_common(shared), clients, settings.sync_interval, self._silent_seconds)
        as_tree = settings.distributed_tree_init_order and settings.warm_start is None
        pauses = settings.checkpoint_chunks
        return LeasedBuckets(tables, self.lock, self.machine, self.group, parameters, first, as_tree, pauses)

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

    def _next_lease(self) -> int:
        """A number larger than that of any lease so far."""
        return int(self.lock.ask("number", {}).fields["number"])
