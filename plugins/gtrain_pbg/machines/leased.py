"""The buckets of one of several machines: the lock server grants them one by one, with leases of partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch

from gtrain.strategy.group import Group
from gtrain_pbg.files import partition_key
from gtrain_pbg.machines.group import MachinesGroup
from gtrain_pbg.machines.lock_client import LockClient
from gtrain_pbg.machines.parameter_server import SharedParameters
from gtrain_pbg.machines.scheduler import Grant
from gtrain_pbg.swaps import ScheduledBucket
from gtrain_pbg.typed import TypedTables
from gtrain_pbg.worker import BucketBatches, timed_wait


class LeasedPartitions:
    """The partitions that a machine holds, as its leader moves them. A lease is one of all tables that are cut.

    Args:
        tables: the tables.
        release: told the keys of leases whose partitions are saved.
    """

    def __init__(self, tables: TypedTables, release: Callable[[list[str]], None]) -> None:
        self._tables, self._release = tables, release
        self._leases: dict[int, int] = {}
        self._under_way: Future[None] | None = None

    def bring(self, grant: Grant) -> ScheduledBucket:
        """Bring the partitions of a bucket into slots; while it is trained, others are saved and one is read ahead."""
        self.settle()
        buffer, bucket = self._tables.buffer, grant.bucket
        granted = {*bucket, *(() if grant.ahead is None else (grant.ahead,))}
        leases = self._leases | {p: grant.leases[self._key(p)] for p in granted - buffer.slot_of.keys()}
        self._leases = {p: leases[p] for p in granted}
        before, during = buffer.exchange(bucket, grant.ahead)
        if during:
            self._under_way = self._tables.begin_swaps(during, leases, self._released)
        self._tables.swap(before, leases, self._released)
        slots = buffer.slot_of[bucket[0]], buffer.slot_of[bucket[1]]
        return ScheduledBucket(bucket, grant.chunk, slots, before, during)

    def give_back(self) -> None:
        """Save all partitions, and hold none any more."""
        self.settle()
        leases, self._leases = self._leases, {}
        self._tables.begin_swaps(self._tables.buffer.leave_all(), leases, self._released).result()

    def settle(self) -> None:
        """Wait for what is saved and read beside training.

        Raises:
            DataError, RemoteError: it could not be.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _released(self, partition: int) -> None:
        self._release([self._key(partition)])

    def _key(self, partition: int) -> str:
        return partition_key(self._tables.bundle, partition)


class LeasedBuckets:
    """A :class:`~gtrain_pbg.worker.BucketSource`: the machine's leader asks for buckets and moves partitions.

    Args:
        tables: the tables.
        lock: the lock server.
        machine: the workers of this machine; the leader is the first.
        everyone: all workers of all machines.
        parameters: those that all machines have.
        first: returns the chunk with which an epoch starts: above 0 when it resumes from a checkpoint.
        as_tree: whether the table begins with random vectors, and the first epoch therefore goes as a tree.
        pauses: whether all machines stop after each edge chunk, where a checkpoint is written.
    """

    def __init__(
        self,
        tables: TypedTables,
        lock: LockClient,
        machine: Group,
        everyone: MachinesGroup,
        parameters: SharedParameters,
        first: Callable[[int], int],
        as_tree: bool,
        pauses: bool,
    ) -> None:
        self._tables, self._lock, self._machine, self._everyone = tables, lock, machine, everyone
        self._parameters, self._first, self._as_tree, self._pauses = parameters, first, as_tree, pauses
        self._leads, self._rounds, self._turns = machine.rank == 0, 0, 0
        self._partitions = LeasedPartitions(tables, self._release)
        self._edges: int | None = None  # that the machine's last bucket was trained on
        self._granted: dict[str, float] = {}  # what the lock server says of a round
        self._counts: dict[str, float] = {}
        self.done = 0

    def begin(self, batches: BucketBatches, epoch: int) -> None:
        self._batches, self._epoch = batches, epoch

    def visits(self) -> Iterator[ScheduledBucket | None]:
        passes, first = self._batches.edges.passes, self._first(self._epoch)
        self._counts = {}
        for chunk in range(first, passes) if self._pauses else [first]:
            self._begin_round(chunk, chunk + 1 if self._pauses else passes)
            self._edges = None
            while (visit := self._next()) is not None:
                yield visit
            self._end_round()
            if self._pauses and chunk + 1 < passes:
                self.done = chunk + 1
                yield None

    def trained(self, visit: ScheduledBucket, edges: int) -> None:
        self._edges = edges

    def counts(self) -> dict[str, float]:
        return self._counts

    def _begin_round(self, first: int, last: int) -> None:
        """All begin with the same parameters, those of rank 0, on the edge chunks from ``first`` to before ``last``."""
        if self._everyone.rank == 0:
            self._parameters.put()  # it may have read a checkpoint
        self._get_parameters()
        self._rounds += 1
        if self._leads:
            edges, epoch = self._batches.edges, self._epoch
            as_tree = self._as_tree and epoch == first == 0
            fields: dict[str, Any] = {"round": self._rounds, "epoch": epoch, "seed": edges.seed}
            fields |= {"first": first, "as_tree": as_tree, "table": self._tables.bundle, "chunks": last}
            fields["holding"] = self._parameters.holding
            self._lock.ask("begin", fields, [edges.filled()])
            self._parameters.start()

    def _end_round(self) -> None:
        """All machines have the same parameters, and all know what the round came to."""
        if self._leads:
            self._parameters.stop()
        self._get_parameters()
        counts: dict[str, float] = self._everyone.broadcast_object(self._granted if self._everyone.rank == 0 else None)
        self._counts = {name: value + self._counts.get(name, 0.0) for name, value in counts.items()}

    def _get_parameters(self) -> None:
        """Take the servers' parameters once all machines have sent theirs."""
        self._everyone.barrier()
        if self._leads:
            self._parameters.get()
        self._machine.barrier()

    def _next(self) -> ScheduledBucket | None:
        """The machine's next bucket, with its partitions in memory; None: the round is over."""
        sent = torch.full((6,), -1)
        if self._leads:  # the machine's other workers stand still
            with timed_wait(self._everyone.counters, "bucket"), self._lock.explaining():
                self._parameters.check()
                grant = self._acquire()
                if grant is not None:
                    visit = self._partitions.bring(grant)
                    self._parameters.exchange()
                    sent = torch.tensor([*visit.bucket, *visit.slots, visit.chunk, 0])
        head, tail, first, second, chunk, _ = self._machine.broadcast(sent).tolist()
        if not self._leads or head < 0:
            self._tables.buffer.slot_of = {} if head < 0 else {head: first, tail: second}
        return None if head < 0 else ScheduledBucket((head, tail), chunk, (first, second), (), ())

    def _release(self, keys: list[str]) -> None:
        self._lock.ask("release", {"keys": keys})

    def _acquire(self) -> Grant | None:
        self._partitions.settle()  # what is saved may be granted again, under another lease
        edges = self._edges
        while True:
            self._turns += 1
            reply = self._lock.ask("acquire", {"edges": edges, "turn": self._turns}).fields
            if "over" in reply:
                self._granted = {"edges": float(reply["edges"]), "buckets_again": float(reply["again"])}
                return None
            if "bucket" in reply:
                head, tail = reply["bucket"]
                return Grant((head, tail), reply["chunk"], reply["leases"], reply["ahead"])
            self._partitions.give_back()
            edges = None
