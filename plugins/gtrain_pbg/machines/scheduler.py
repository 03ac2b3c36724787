"""The bucket scheduler of the lock server: leases of partitions to machines, which train buckets; no communication.

A machine holds leases of partitions. It trains a bucket whose two partitions it holds, and may keep one of them for the
next bucket. A bucket is done when both of its partitions have been written back after its training; if the machine is
lost before that, another machine trains the bucket again. So no edge is left out, whichever machine dies.

A machine may prefetch: with its bucket it gets a lease of a partition that its next bucket needs beside one that it
holds. The next bucket stays pending, so that it is not lost with the machine. It is the next one that this machine is
granted, and needs no other machine: a prefetch delays others by no more than the training of one bucket. It is granted
only while every other machine has a bucket that it could start without that partition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gtrain_pbg.buckets import Bucket, components
from gtrain_pbg.partition_store import partition_key

BucketTask = tuple[int, Bucket]
"""An edge chunk, and a bucket of it."""


@dataclass(frozen=True)
class Grant:
    """A bucket that a machine may train.

    Attributes:
        bucket: partitions of heads and of tails.
        chunk: which of the bucket's edge chunks.
        leases: number of the lease of each partition, by key; larger is later.
        ahead: a partition to prefetch for the next bucket; None: none.
    """

    bucket: Bucket
    chunk: int
    leases: dict[str, int]
    ahead: int | None = None


@dataclass(frozen=True)
class GrantRanking:
    """Ranks the buckets that a machine could be granted, by their effect on the other machines.

    Attributes:
        pending: buckets that are not granted yet.
        machines: number of machines.
        idle: whether another machine waits for a bucket.
        free: pending buckets that a waiting machine could start if this machine held no leases.
        unknown: partitions of which no bucket has been trained, in an epoch that grows as a tree.
    """

    pending: Sequence[Bucket]
    machines: int
    idle: bool = False
    free: Sequence[Bucket] = ()
    unknown: Collection[int] = ()

    def ranked(self, choices: Sequence[tuple[Bucket, int]]) -> list[int]:
        """Return the positions of the choices, the best first; ties keep their order.

        While other machines wait, prefer a bucket that leaves them one, then one that grows the tree, so that more of
        them can start soon. Then prefer buckets with more *tight* partitions: a partition is tight if its pending
        buckets, one after the other, take as long as all pending buckets take the machines together. Then prefer
        buckets for which fewer partitions must be fetched.

        Args:
            choices: buckets that the machine may start, and the number of partitions to fetch for each.
        """
        tight = {p for p, count in _load(self.pending).items() if count * self.machines >= len(self.pending)}
        spread, joint = _load(self.free), Counter(frozenset(bucket) for bucket in self.free)

        def cost(number: int) -> tuple[bool, int, int, int]:
            bucket, fetched = choices[number]
            pair = set(bucket)
            # Free buckets that share a partition with this one; those that share both were counted twice.
            blocked = sum(spread[p] for p in pair) - (joint[frozenset(pair)] if len(pair) == 2 else 0)
            starves = self.idle and blocked == len(self.free)
            grows = len(pair & set(self.unknown)) if self.idle else 0
            return starves, -grows, -len(pair & tight), fetched

        return sorted(range(len(choices)), key=cost)


def _load(buckets: Sequence[Bucket]) -> Counter[int]:
    """Count the buckets of each partition."""
    return Counter(partition for bucket in buckets for partition in set(bucket))


@dataclass
class _MachineState:
    leases: dict[str, int] = field(default_factory=dict)
    active: BucketTask | None = None
    ahead: int | None = None  # partition that it prefetches
    # Trained buckets, and their partitions not yet written back.
    unsaved: dict[BucketTask, set[str]] = field(default_factory=dict)

    @property
    def tasks(self) -> list[BucketTask]:
        """Buckets that are not done, in the order of their grants."""
        return [*self.unsaved, *([] if self.active is None else [self.active])]


class BucketScheduler:
    """The buckets of an epoch, and the machines that hold them.

    Args:
        table: name of the table.
        order: returns the order of the buckets of an edge chunk.
        chunks: edge chunks per epoch.
        as_tree: whether a bucket is granted only if one of its partitions has been trained, except the first bucket of
            each connected component: no two machines then start from unrelated vectors that meet later.
        first: the first edge chunk.
        ahead: whether machines have memory for a prefetched partition.

    Attributes:
        edges: trained edges of each bucket that is done.
        again: number of buckets that were granted again because a machine was lost.
    """

    def __init__(
        self,
        table: str,
        order: Callable[[int], list[Bucket]],
        chunks: int,
        as_tree: bool,
        first: int = 0,
        ahead: bool = False,
    ) -> None:
        self._table, self._order, self._chunks, self._as_tree = table, order, chunks, as_tree
        self._ahead = ahead and not as_tree
        self._machines: dict[int, _MachineState] = {}
        self._chunk, self._pending = first, [(first, bucket) for bucket in order(first)]
        self._component = components(bucket for _, bucket in self._pending)
        self._known: set[str] = set()
        self._rooted: set[int] = set()  # components with a bucket that is done
        self._trained_edges: dict[BucketTask, int] = {}
        self.edges: dict[BucketTask, int] = {}
        self.again = 0

    @property
    def over(self) -> bool:
        """Whether every bucket of every chunk is done."""
        return not self._pending and not self._busy and self._chunk + 1 >= self._chunks

    def acquire(self, machine: int, next_lease: Callable[[], int]) -> Grant | None:
        """Grant the best bucket (:class:`GrantRanking`) of which no other machine holds a partition; None: no bucket.

        The machine must write back the other partitions that it holds, which :meth:`released` then records.
        """
        self._advance_chunk()
        mine = self._of(machine)
        if mine.active is not None:
            raise ValueError(f"machine {machine} holds the bucket {mine.active} and requests another")
        taken = self._taken(machine)
        choices = [
            (task, len(keys - mine.leases.keys()))
            for task in self._pending
            if not (keys := self._keys(task[1])) & taken and self._allowed(task[1], keys, mine)
        ]
        # It has prefetched a partition for one of the buckets whose partitions it holds, so it trains that one.
        if mine.ahead is not None:
            choices = [choice for choice in choices if choice[1] == 0]
        if not choices:
            return None
        best = self._ranking(machine).ranked([(bucket, fetched) for (_, bucket), fetched in choices])[0]
        chunk, bucket = mine.active = choices[best][0]
        self._pending.remove(mine.active)
        # Sorted: a restarted lock server must number leases in the same way.
        for key in sorted(self._keys(bucket) - mine.leases.keys()):
            mine.leases[key] = next_lease()
        mine.ahead = ahead = self._reserve(machine, bucket, next_lease) if self._ahead else None
        needed = self._keys(bucket if ahead is None else (*bucket, ahead))
        return Grant(bucket, chunk, {key: mine.leases[key] for key in needed}, ahead)

    def holds(self, machine: int) -> bool:
        """Return whether a machine holds leases."""
        return bool(self._of(machine).leases)

    def trained(self, machine: int, edges: int) -> None:
        """Record that a machine has trained its bucket, whose partitions are not yet written back."""
        mine = self._of(machine)
        if mine.active is None:
            raise ValueError(f"machine {machine} has no bucket")
        mine.unsaved[mine.active] = self._keys(mine.active[1])
        self._trained_edges[mine.active] = edges
        mine.active = None

    def released(self, machine: int, keys: list[str]) -> None:
        """Record that a machine has written partitions back and released their leases."""
        mine = self._of(machine)
        for key in keys:
            if mine.leases.pop(key, None) is None:
                # A repeated request: the lock server was restarted before it replied.
                continue
            for task, missing in list(mine.unsaved.items()):
                if key in missing:
                    missing.discard(key)
                    self._known.add(key)
                    self._rooted.add(self._component[task[1][0]])
                # Only now is the bucket done: both partitions have the result of its training.
                if not missing:
                    del mine.unsaved[task]
                    self.edges[task] = self._trained_edges[task]

    def lose(self, machine: int) -> None:
        """Return the buckets of a lost machine that it had not written back to the pending ones."""
        mine = self._machines.pop(machine, _MachineState())
        # In front, in the order of their grants: other machines may have waited for these partitions.
        self._pending[:0] = mine.tasks
        self.again += len(mine.tasks)

    def state(self) -> dict[str, Any]:
        """Return the state that a restarted lock server needs, as plain data."""
        return {
            "chunk": self._chunk,
            "pending": self._pending,
            "machines": {
                number: (state.leases, state.active, state.ahead, [(t, sorted(k)) for t, k in state.unsaved.items()])
                for number, state in self._machines.items()
            },
            "known": sorted(self._known),
            "rooted": sorted(self._rooted),
            "trained": list(self._trained_edges.items()),
            "edges": list(self.edges.items()),
            "again": self.again,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state` returned, of a scheduler with the same arguments; lists may be tuples."""
        self._chunk, self.again = state["chunk"], state["again"]
        self._pending = list(state["pending"])
        self._known, self._rooted = set(state["known"]), set(state["rooted"])
        self._trained_edges, self.edges = dict(state["trained"]), dict(state["edges"])
        for number, (leases, active, ahead, unsaved) in state["machines"].items():
            self._machines[number] = _MachineState(leases, active, ahead, {task: set(keys) for task, keys in unsaved})

    @property
    def _busy(self) -> bool:
        return any(machine.tasks for machine in self._machines.values())

    def _of(self, machine: int) -> _MachineState:
        return self._machines.setdefault(machine, _MachineState())

    def _keys(self, partitions: Iterable[int]) -> set[str]:
        return {partition_key(self._table, partition) for partition in partitions}

    def _taken(self, machine: int) -> set[str]:
        """Return the partitions that other machines hold."""
        return {key for other, holder in self._machines.items() if other != machine for key in holder.leases}

    def _ranking(self, machine: int) -> GrantRanking:
        """Return the ranking of buckets for a machine."""
        pending = [bucket for _, bucket in self._pending]
        idle = any(other.active is None for number, other in self._machines.items() if number != machine)
        if not idle and (self._known or not self._as_tree):
            return GrantRanking(pending, len(self._machines))
        mine, taken = self._of(machine), self._taken(machine)
        known = self._known.union(*(self._keys(bucket) for _, bucket in mine.unsaved))
        free = [
            bucket
            for bucket in pending
            if not (keys := self._keys(bucket)) & taken and (not self._as_tree or keys & known)
        ]
        unknown = [p for p in self._component if partition_key(self._table, p) not in known] if self._as_tree else []
        return GrantRanking(pending, len(self._machines), True, free, unknown)

    def _reserve(self, machine: int, bucket: Bucket, next_lease: Callable[[], int]) -> int | None:
        """Lease the partition that the machine's next bucket needs beside one of this bucket, if it may prefetch it."""
        mine, held = self._of(machine), self._keys(bucket)
        if any(self._keys(other) <= held for _, other in self._pending):
            # The next bucket needs no other partition.
            return None
        taken = self._taken(machine) | mine.leases.keys() - held
        choices = []
        for task in self._pending:
            # One partition of this bucket and one other: exactly what a single prefetch can prepare.
            missing = set(task[1]) - set(bucket)
            if len(missing) == 1 and missing != set(task[1]) and not self._keys(missing) & taken:
                choices.append((task, missing))
        for number in self._ranking(machine).ranked([(task[1], 1) for task, _ in choices]):
            task, missing = choices[number]
            if self._others_can_start(machine, self._keys(missing), task):
                (partition,) = missing
                mine.leases[partition_key(self._table, partition)] = next_lease()
                return partition
        return None

    def _others_can_start(self, machine: int, reserved: set[str], task: BucketTask) -> bool:
        """Return whether each other machine has a bucket to start without the partitions reserved for this task."""
        return all(
            any(t != task and not self._keys(t[1]) & (self._taken(other) | reserved) for t in self._pending)
            for other in self._machines
            if other != machine
        )

    def _allowed(self, bucket: Bucket, keys: set[str], mine: _MachineState) -> bool:
        if not self._as_tree or keys & self._known or any(keys & self._keys(other) for _, other in mine.unsaved):
            return True
        # The first bucket of a component that nobody trains or has trained: it becomes the root of its tree.
        started = {self._component[other[0]] for machine in self._machines.values() for _, other in machine.tasks}
        return self._component[bucket[0]] not in started | self._rooted

    def _advance_chunk(self) -> None:
        """Start the next edge chunk once this one is done."""
        if not self._pending and not self._busy and self._chunk + 1 < self._chunks:
            self._chunk += 1
            self._pending = [(self._chunk, bucket) for bucket in self._order(self._chunk)]
