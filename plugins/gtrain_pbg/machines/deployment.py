"""The deployment on several machines: buckets are leased by the lock server, and partitions are in a shared store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtrain.errors import ConfigError, PeerLostError
from gtrain.graph.store import Store
from gtrain.strategy.counters import Counters
from gtrain.strategy.group import Group
from gtrain.strategy.servers import Servers
from gtrain.wire import Client
from gtrain_pbg.buckets import ScheduledBucket
from gtrain_pbg.checkpoints import EpochProgress
from gtrain_pbg.config import PBGConfig
from gtrain_pbg.deployment import Deployment
from gtrain_pbg.machines.folder import PartitionFolder
from gtrain_pbg.machines.lock_client import LockClient, MachinesGroup
from gtrain_pbg.machines.parameter_server import SharedParameters
from gtrain_pbg.machines.partition_server import PartitionClient
from gtrain_pbg.machines.scheduler import Grant
from gtrain_pbg.partition_store import PartitionStore, partition_key
from gtrain_pbg.typed import TypedTables
from gtrain_pbg.worker import BucketBatches, BucketSource, timed_wait

SILENT_SECONDS = 60.0
"""Least time-out of requests to parameter servers; the lock server reports a lost one earlier."""
LARGE_BYTES = 64 << 20
"""Size from which a table that is not partitioned slows parameter servers down."""
log = logging.getLogger("gtrain")


def check_tables(tables: TypedTables, warns: bool) -> None:
    """Check that a type is partitioned, and warn of large types that are not.

    Args:
        tables: of all entity types.
        warns: whether this process logs the warning.

    Raises:
        ConfigError: no type is partitioned.
    """
    if not any(entity.is_partitioned for entity in tables.types):
        raise ConfigError(
            "several machines were to train, and no entity type is partitioned.",
            hint="remove data.entities.<type>.num_partitions=1 of one type, or set trainer.num_nodes=1.",
        )
    for entity in tables.types:
        nbytes = entity.spec.rows * entity.spec.dim * tables.dtype.itemsize
        if warns and not entity.is_partitioned and nbytes > LARGE_BYTES:
            log.warning("the table of %s is not partitioned; all of its %d MB go through parameter servers",
                        entity.spec.name, nbytes >> 20)  # fmt: skip


class MultiMachineDeployment(Deployment):
    """Several machines share partitions, and the lock server grants buckets.

    Args:
        settings: of the strategy.
        servers: of the job.
        rank: of this worker.
        size: number of workers.
        counters: of traffic.
        store: address of the job's key-value store; None on the machine that has it.
        tell, timeout_seconds: see :class:`~gtrain_pbg.machines.lock_client.LockClient`.

    Attributes:
        group: all workers of all machines.
        machine: the workers of this machine; set once that group is formed.
        lock: client of the lock server.

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
                "strategy=pbg on several machines needs a lock server, and this job has none.",
                hint="start it with the gtrain command, or set num_nodes=1.",
            )
        self._servers = servers
        self._silent_seconds = max(SILENT_SECONDS, 2 * settings.lease_seconds, timeout_seconds)
        self.lock = LockClient(
            servers.client("lock", 0), settings.lease_seconds, store, self._mark_lost, tell, timeout_seconds
        )
        self._everyone = MachinesGroup(rank, size, self.lock, counters)
        super().__init__(settings, self._everyone)
        self.slots = settings.buffer_partitions or 3
        self.exchanging = threading.Lock()

    def evaluation_share(self) -> tuple[int, int]:
        return self._everyone.share

    def connect(self, tables: TypedTables, run_dir: Path, publishes: bool) -> None:
        check_tables(tables, publishes)
        clients, folder = self._clients("partition"), Path(self._settings.partition_path or run_dir / "partitions")
        store: PartitionStore = PartitionClient(clients) if clients else PartitionFolder(folder.absolute())
        tables.connect(store, publishes, self._next_lease)

    def source(
        self,
        tables: TypedTables,
        shared: Mapping[str, Tensor],
        store: Store,
        start: Callable[[int], EpochProgress],
        limit: int | None,
    ) -> BucketSource:
        settings, clients = self._settings, self._clients("parameter")
        parameters = SharedParameters(
            tables.in_common(shared), clients, settings.sync_interval, self._silent_seconds, self.exchanging
        )
        as_tree = settings.distributed_tree_init_order and settings.warm_start is None
        groups = self.machine, self._everyone
        return LeasedBuckets(tables, self.lock, *groups, parameters, start, as_tree, settings.checkpoint_chunks)

    def _mark_lost(self, name: str) -> None:
        role, _, number = name.partition(" ")
        self._servers.mark_lost(role, int(number))

    def _clients(self, role: str) -> list[Client]:
        """Return the clients of the servers of a role; a loss that ends this process aborts their pending requests."""
        clients = self._servers.clients(role)

        def close(error: PeerLostError) -> None:
            for client in clients:
                client.close(error)

        self.lock.on_loss(close)
        return clients

    def _next_lease(self) -> int:
        """Return a number larger than that of any lease so far."""
        return int(self.lock.request("number", {}).fields["number"])


class LeasedPartitions:
    """The partitions that a machine holds leases of, moved by its leader; a lease covers all partitioned tables.

    Args:
        tables: of all entity types.
        release: called with the keys of leases whose partitions have been saved.
    """

    def __init__(self, tables: TypedTables, release: Callable[[list[str]], None]) -> None:
        self._tables, self._release = tables, release
        self._leases: dict[int, int] = {}
        self._pending: Future[None] | None = None

    def load(self, grant: Grant) -> ScheduledBucket:
        """Load the partitions of a bucket; while it is trained, evict others and prefetch one."""
        self.settle()
        buffer, bucket = self._tables.buffer, grant.bucket
        needed = {*bucket, *(() if grant.ahead is None else (grant.ahead,))}
        # Old leases too: evicted partitions are written back under them.
        leases = self._leases | {p: grant.leases[self._key(p)] for p in needed - buffer.slot_of.keys()}
        self._leases = {p: leases[p] for p in needed}
        before, during = buffer.exchange(bucket, grant.ahead)
        if during:
            self._pending = self._tables.begin_swaps(during, leases, self._released)
        self._tables.swap(before, leases, self._released)
        slots = buffer.slot_of[bucket[0]], buffer.slot_of[bucket[1]]
        ahead = () if grant.ahead is None else (grant.ahead,)
        return ScheduledBucket(bucket, grant.chunk, slots, before, during, ahead=ahead)

    def give_back(self) -> None:
        """Save all partitions and release their leases."""
        self.settle()
        leases, self._leases = self._leases, {}
        self._tables.begin_swaps(self._tables.buffer.evict_all(), leases, self._released).result()

    def settle(self) -> None:
        """Wait for swaps in the background.

        Raises:
            DataError, RemoteError: a partition could not be saved or loaded.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _released(self, partition: int) -> None:
        self._release([self._key(partition)])

    def _key(self, partition: int) -> str:
        return partition_key(self._tables.bundle, partition)


class LeasedBuckets:
    """A :class:`~gtrain_pbg.worker.BucketSource`: the machine's leader requests buckets and moves partitions.

    Args:
        tables: of all entity types.
        lock: client of the lock server.
        machine: the workers of this machine; the leader is the first.
        everyone: all workers of all machines.
        parameters: that all machines share.
        start: returns where an epoch starts: with a chunk above 0 when it resumes from a checkpoint.
        as_tree: whether the first epoch grows as a tree, because the tables start from random vectors.
        pauses: whether all machines wait for each other after each edge chunk, where a checkpoint is written.
    """

    def __init__(
        self,
        tables: TypedTables,
        lock: LockClient,
        machine: Group,
        everyone: MachinesGroup,
        parameters: SharedParameters,
        start: Callable[[int], EpochProgress],
        as_tree: bool,
        pauses: bool,
    ) -> None:
        self._tables, self._lock, self._machine, self._everyone = tables, lock, machine, everyone
        self._parameters, self._start, self._as_tree, self._pauses = parameters, start, as_tree, pauses
        self._leads, self._rounds, self._requests = machine.rank == 0, 0, 0
        self._partitions = LeasedPartitions(tables, self._release)
        self._edges: int | None = None  # edges of the machine's last bucket
        self._round_counts: dict[str, float] = {}  # of the lock server
        self._counts: dict[str, float] = {}
        self.done = self.skipped = self.offset = 0

    def begin(self, batches: BucketBatches, epoch: int) -> None:
        self._batches, self._epoch = batches, epoch

    def buckets(self) -> Iterator[ScheduledBucket | None]:
        passes, first = self._batches.edges.passes, self._start(self._epoch).chunk
        self._counts = {}
        for chunk in range(first, passes) if self._pauses else [first]:
            self._begin_round(chunk, chunk + 1 if self._pauses else passes)
            self._edges = None
            while (scheduled := self._next()) is not None:
                yield scheduled
            self._end_round()
            if self._pauses and chunk + 1 < passes:
                self.done = chunk + 1
                yield None

    def following(self) -> None:
        """Return None: the lock server grants the next bucket once this one is trained."""

    def trained(self, scheduled: ScheduledBucket, edges: int) -> None:
        self._edges = edges

    def counts(self) -> dict[str, float]:
        return self._counts

    def _begin_round(self, first: int, last: int) -> None:
        """Start all machines with the parameters of rank 0, on the edge chunks ``first`` to ``last - 1``."""
        if self._everyone.rank == 0:
            self._parameters.put()  # it may have read a checkpoint
        self._get_parameters()
        self._rounds += 1
        if self._leads:
            edges, epoch = self._batches.edges, self._epoch
            fields: dict[str, Any] = {"round": self._rounds, "epoch": epoch, "seed": edges.seed, "first": first}
            fields |= {"as_tree": self._as_tree and epoch == first == 0, "table": self._tables.bundle, "chunks": last}
            self._lock.request("begin", fields | {"holding": self._parameters.holding}, [edges.filled()])
            self._parameters.start()

    def _end_round(self) -> None:
        """Leave all machines with the same parameters and the counts of the round."""
        if self._leads:
            self._parameters.stop()
        self._get_parameters()
        counts: dict[str, float] = self._everyone.broadcast_object(self._round_counts)
        self._counts = {name: value + self._counts.get(name, 0.0) for name, value in counts.items()}

    def _get_parameters(self) -> None:
        """Get the servers' parameters once all machines have sent theirs."""
        self._everyone.barrier()
        if self._leads:
            self._parameters.get()
        self._machine.barrier()
        self._tables.refresh_common()

    def _next(self) -> ScheduledBucket | None:
        """Return the machine's next bucket, with its partitions in memory; None: the round is over."""
        # -1 stands for "the round is over"; a tensor, because a broadcast has a fixed size.
        sent = torch.full((5,), -1)
        ahead: tuple[int, ...] = ()
        if self._leads:
            # The other workers of the machine wait for this worker's broadcast below.
            with timed_wait(self._everyone.counters, "bucket"), self._lock.explaining():
                self._parameters.check()
                grant = self._acquire()
                if grant is not None:
                    scheduled = self._partitions.load(grant)
                    ahead = scheduled.ahead
                    self._parameters.exchange()
                    sent = torch.tensor([*scheduled.bucket, *scheduled.slots, scheduled.chunk])
        head, tail, first, second, chunk = self._machine.broadcast(sent).tolist()
        # The leader's buffer is up to date; the others need only this bucket's slots.
        if not self._leads or head < 0:
            self._tables.buffer.slot_of = {} if head < 0 else {head: first, tail: second}
        return None if head < 0 else ScheduledBucket((head, tail), chunk, (first, second), (), (), ahead=ahead)

    def _release(self, keys: list[str]) -> None:
        self._lock.request("release", {"keys": keys})

    def _acquire(self) -> Grant | None:
        # Saved partitions may be granted again, under another lease.
        self._partitions.settle()
        edges = self._edges
        while True:
            self._requests += 1
            reply = self._lock.request("acquire", {"edges": edges, "turn": self._requests}).fields
            if "over" in reply:
                self._round_counts = {"edges": float(reply["edges"]), "buckets_again": float(reply["again"])}
                return None
            if "bucket" in reply:
                head, tail = reply["bucket"]
                return Grant((head, tail), reply["chunk"], reply["leases"], reply["ahead"])
            # No bucket is free: others may need the partitions that this machine holds.
            self._partitions.give_back()
            edges = None
