"""An epoch on one of several machines: buckets come from the lock server, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gtrain.strategy.group import Group
from gtrain_pbg.machines.board import Grant
from gtrain_pbg.machines.group import MachinesGroup
from gtrain_pbg.machines.lock_client import LockClient
from gtrain_pbg.machines.parameters import SharedParameters
from gtrain_pbg.machines.typed import SpreadTypes
from gtrain_pbg.spans import Cut, standing_still
from gtrain_pbg.training import BucketTraining, held_out

Trained = tuple[float, float, dict[str, float]]
"""Weighted sum of the losses, sum of the weights, and what is to be logged."""
NOTHING: Trained = (0.0, 0.0, {})


class MachineTrainee:
    """A worker's training. The machine's leader asks for buckets and moves partitions; its workers train together.

    Args:
        table: the tables.
        lock: the lock server.
        machine: the workers of this machine; the leader is the first.
        everyone: all workers of all machines.
        training: trains.
        parameters: those that all machines have.
        clock: says which epoch this is.
        first: says with which chunk an epoch begins: not with 0 where it was begun before.
        held_out: whether edges are held back.
        fresh: whether the table begins with random vectors, and the first epoch therefore goes as a tree.
        pauses: whether all machines stand still after each edge chunk, for a checkpoint.

    Attributes:
        over: whether the epoch is.
        done: how many edge chunks of the epoch are trained, where a checkpoint is due before its next one; 0: none is.
    """

    def __init__(
        self,
        table: SpreadTypes,
        lock: LockClient,
        machine: Group,
        everyone: MachinesGroup,
        training: BucketTraining,
        parameters: SharedParameters,
        clock: Callable[[], int],
        first: Callable[[int], int],
        held_out: bool,
        fresh: bool,
        pauses: bool,
    ) -> None:
        self._table, self._lock, self._machine, self._everyone = table, lock, machine, everyone
        self._training, self._parameters, self._clock = training, parameters, clock
        self._first, self._held_out, self._fresh, self._pauses = first, held_out, fresh, pauses
        self._leads, self._rounds, self._turns = machine.rank == 0, 0, 0
        self._work: Iterator[Trained] = iter(())
        self._counts: dict[str, float] = {}
        self.over, self.done = True, 0

    def begin(self, cut: Cut) -> None:
        """An epoch begins."""
        self._work, self.over = self._epoch(cut), False

    def train(self) -> Trained:
        """Train on about a span of edges."""
        self.done = 0
        return next(self._work, NOTHING)

    def _epoch(self, cut: Cut) -> Iterator[Trained]:
        epoch, passes = self._clock(), cut.edges.passes
        counts: dict[str, float] = {}
        first = self._first(epoch)
        for chunk in range(first, passes) if self._pauses else [first]:
            self._begin(cut, epoch, chunk, chunk + 1 if self._pauses else passes)
            yield from self._buckets(cut, epoch)
            counts = {name: value + counts.get(name, 0.0) for name, value in self._end().items()}
            if self._pauses and chunk + 1 < passes:
                self.done = chunk + 1
                yield NOTHING
        self.over = True
        yield 0.0, 0.0, {**counts, **self._held()}

    def _begin(self, cut: Cut, epoch: int, first: int, last: int) -> None:
        """All begin with the same parameters, on the edge chunks from ``first`` to before ``last``."""
        self._agree_on_parameters()
        self._rounds += 1
        if self._leads:
            as_tree = self._fresh and epoch == first == 0
            fields: dict[str, Any] = {"round": self._rounds, "epoch": epoch, "seed": cut.edges.seed}
            fields |= {"first": first, "as_tree": as_tree, "table": self._table.bundle, "chunks": last}
            fields["holding"] = self._parameters.holding
            self._lock.ask("begin", fields, [cut.edges.filled()])
            self._parameters.start()

    def _buckets(self, cut: Cut, epoch: int) -> Iterator[Trained]:
        """Train on buckets until all are done."""
        edges: int | None = None
        while (grant := self._next(edges)) is not None:
            edges = 0
            pieces, held = cut.pieces(grant.bucket, grant.chunk, epoch)
            visit = self._table.visit(grant)
            self._training.score_before(held, visit)
            self._machine.barrier()
            for piece in pieces:
                found = self._training.train(piece, visit)
                edges += sum(map(len, piece))
                yield *found, {}
            edges = int(self._machine.all_reduce(torch.tensor(edges)))  # all of the machine's workers are done
            self._training.score_after(held, visit)
            self._machine.barrier()

    def _next(self, edges: int | None) -> Grant | None:
        """The machine's next bucket, with its partitions in memory; None: the epoch is over."""
        told = torch.full((6,), -1)
        if self._leads:  # the machine's other workers stand still
            with standing_still(self._everyone.counters, "bucket"), self._lock.explaining():
                self._parameters.check()
                grant = self._acquire(edges)
                if grant is not None:
                    self._table.bring(grant, self._released)
                    self._parameters.exchange()
                    told = torch.tensor([*grant.bucket, *self._table.visit(grant).slots, grant.chunk, 0])
        head, tail, first, second, chunk, _ = self._machine.broadcast(told).tolist()
        if head < 0:
            self._table.forget()
            return None
        if not self._leads:
            self._table.place((head, tail), (first, second))
        return Grant((head, tail), chunk, {})

    def _acquire(self, edges: int | None) -> Grant | None:
        self._table.settle()  # what is written back may be granted again, under another lease
        while True:
            self._turns += 1
            found = self._lock.ask("acquire", {"edges": edges, "turn": self._turns}).fields
            if "over" in found:
                self._counts = {"edges": float(found["edges"]), "buckets_again": float(found["again"])}
                return None
            if "bucket" in found:
                head, tail = found["bucket"]
                return Grant((head, tail), found["chunk"], found["leases"], found["ahead"])
            self._table.give_back(self._released)
            edges = None

    def _released(self, keys: list[str]) -> None:
        self._lock.ask("release", {"keys": keys})

    def _agree_on_parameters(self) -> None:
        """All begin with the values of rank 0, which may have read a checkpoint."""
        if self._everyone.rank == 0:
            self._parameters.put()
        self._everyone.barrier()
        if self._leads:
            self._parameters.get()
        self._machine.barrier()

    def _end(self) -> dict[str, float]:
        """All machines have the same parameters, and all know what the epoch came to."""
        if self._leads:
            self._parameters.stop()
        self._everyone.barrier()
        if self._leads:
            self._parameters.get()
        self._machine.barrier()
        counts: dict[str, float] = self._everyone.broadcast_object(self._counts if self._everyone.rank == 0 else None)
        return counts

    def _held(self) -> dict[str, float]:
        """What is to be logged of edges that were held back, of all workers."""
        return held_out(self._everyone.all_reduce(self._training.take_held_out())) if self._held_out else {}


class Turn:
    """About a span of edges."""


class Turns:
    """An epoch of one worker, in turns: what is trained in each is not known before its time.

    Args:
        trainee: trains.
        cut: makes batches.
    """

    def __init__(self, trainee: MachineTrainee, cut: Cut) -> None:
        self._trainee, self._cut = trainee, cut

    def __iter__(self) -> Iterator[Turn]:
        self._trainee.begin(self._cut)
        while not self._trainee.over:  # Lightning asks for a turn before it takes the one before it
            yield Turn()
