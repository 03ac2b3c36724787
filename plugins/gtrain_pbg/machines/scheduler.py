"""The bucket scheduler of the lock server: which machine trains which bucket, without communication.

A machine *holds* partitions, each by a lease. It trains a bucket whose two partitions it holds, and may keep one for
the next bucket. A bucket is done when both of its partitions were written back after its training; if the machine is
lost before, the bucket is trained again by another. So no edge is left out, whoever dies when.

A machine may read ahead: with its bucket it gets a lease of a partition that the next one needs beside one of its own.
That bucket stays among those that are left, so that it is not lost with the machine. It is the next that the machine is
granted, which waits for nobody meanwhile: a lease ahead keeps others waiting no longer than the training of a bucket.
It is given only while every other machine has a bucket that it could begin without that partition.
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
    """What a machine may train.

    Attributes:
        bucket: partitions of heads and of tails.
        chunk: which of the bucket's edge chunks.
        leases: number of the lease of each of these partitions by its key; larger is later.
        ahead: a partition that the next bucket needs; None: none.
    """

    bucket: Bucket
    chunk: int
    leases: dict[str, int]
    ahead: int | None = None


@dataclass(frozen=True)
class GrantRanking:
    """What the other machines can do while one machine's next bucket is chosen.

    Attributes:
        pending: the buckets that are left.
        machines: how many train.
        idle: whether one of the others has no bucket, and waits.
        free: of those left, the ones that a machine which waits could begin if this one held nothing any more.
        unknown: partitions that no bucket has been trained of, in an epoch that grows as a tree.
    """

    pending: Sequence[Bucket]
    machines: int
    idle: bool = False
    free: Sequence[Bucket] = ()
    unknown: Collection[int] = ()

    def ranked(self, ways: Sequence[tuple[Bucket, int]]) -> list[int]:
        """The numbers of the ways, the best one first; equals keep their order.

        While others wait, a bucket is better that leaves them one, and then one that lets the tree grow, so that more
        of them can begin soon. Else a bucket is better of which more partitions are *tight*: they are in so many of
        the buckets left that these, one after the other, take as long as all that is left takes the machines together.
        Then the one counts for which fewer partitions must be fetched.

        Args:
            ways: buckets that the machine may begin, and how many partitions it must fetch for each.
        """
        load = _load(self.pending)
        tight = {p for p, count in load.items() if count * self.machines >= len(self.pending)}
        spread, joint = _load(self.free), Counter(frozenset(bucket) for bucket in self.free)

        def cost(number: int) -> tuple[bool, int, int, int]:
            bucket, fetched = ways[number]
            own = set(bucket)
            touching = sum(spread[p] for p in own) - (joint[frozenset(own)] if len(own) == 2 else 0)
            starves = self.idle and touching == len(self.free)
            grows = len(own & set(self.unknown)) if self.idle else 0
            return starves, -grows, -len(own & tight), fetched

        return sorted(range(len(ways)), key=cost)


def _load(buckets: Sequence[Bucket]) -> Counter[int]:
    """In how many buckets each partition is."""
    return Counter(partition for bucket in buckets for partition in set(bucket))


@dataclass
class _MachineState:
    leases: dict[str, int] = field(default_factory=dict)
    active: BucketTask | None = None
    ahead: int | None = None  # what it reads for its next bucket
    unsaved: dict[BucketTask, set[str]] = field(default_factory=dict)  # trained, and partitions not yet written back

    @property
    def works(self) -> list[BucketTask]:
        """What is not done, in the order of its grants."""
        return [*self.unsaved, *([] if self.active is None else [self.active])]


class BucketScheduler:
    """An epoch's buckets, and who has them.

    Args:
        table: name of the table.
        order: makes the order of the buckets of an edge chunk.
        chunks: edge chunks of an epoch.
        as_tree: whether a bucket is granted only if one of its partitions has been trained, but the first of those
            that are joined by others: no two machines then begin with vectors that will have to do with each other.
        first: the chunk with which it begins.
        ahead: whether machines have room for a partition that they read ahead.

    Attributes:
        edges: edges that were trained of each bucket that is done.
        again: how many buckets were granted again because a machine was lost.
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
        self._rooted: set[int] = set()  # components of which a bucket is done
        self._trained_edges: dict[BucketTask, int] = {}
        self.edges: dict[BucketTask, int] = {}
        self.again = 0

    @property
    def over(self) -> bool:
        """Whether every bucket of every chunk is done."""
        return not self._pending and not self._busy and self._chunk + 1 >= self._chunks

    def acquire(self, machine: int, next_lease: Callable[[], int]) -> Grant | None:
        """Grant a bucket of which no other machine holds any partition, or None; see :class:`GrantRanking` for which.

        The machine is to write back what else it holds, and then to say so by :meth:`released`.
        """
        self._go_on()
        mine = self._of(machine)
        if mine.active is not None:
            raise ValueError(f"machine {machine} has the bucket {mine.active} and asks for another")
        taken = self._taken(machine)
        ways = [
            (number, len(keys - mine.leases.keys()))
            for number, (_, bucket) in enumerate(self._pending)
            if not (keys := self._keys(bucket)) & taken and self._allowed(bucket, keys, mine)
        ]
        if mine.ahead is not None:
            ways = [way for way in ways if way[1] == 0]
        if not ways:
            return None
        best = self._outlook(machine).ranked([(self._pending[number][1], fetched) for number, fetched in ways])[0]
        chunk, bucket = mine.active = self._pending.pop(ways[best][0])
        for key in sorted(self._keys(bucket) - mine.leases.keys()):
            mine.leases[key] = next_lease()
        mine.ahead = ahead = self._reserve(machine, bucket, next_lease) if self._ahead else None
        wanted = self._keys(bucket if ahead is None else (*bucket, ahead))
        return Grant(bucket, chunk, {key: mine.leases[key] for key in wanted}, ahead)

    def holds(self, machine: int) -> bool:
        """Whether a machine holds partitions."""
        return bool(self._of(machine).leases)

    def trained(self, machine: int, edges: int) -> None:
        """A machine has trained its bucket, and its partitions are not yet written back."""
        mine = self._of(machine)
        if mine.active is None:
            raise ValueError(f"machine {machine} has no bucket")
        mine.unsaved[mine.active] = self._keys(mine.active[1])
        self._trained_edges[mine.active] = edges
        mine.active = None

    def released(self, machine: int, keys: list[str]) -> None:
        """A machine has written partitions back, and holds them no longer."""
        mine = self._of(machine)
        for key in keys:
            if mine.leases.pop(key, None) is None:
                continue  # told again, for the lock server was restarted before it answered
            for work, missing in list(mine.unsaved.items()):
                if key in missing:
                    missing.discard(key)
                    self._known.add(key)
                    self._rooted.add(self._component[work[1][0]])
                if not missing:
                    del mine.unsaved[work]
                    self.edges[work] = self._trained_edges[work]

    def lose(self, machine: int) -> None:
        """A machine is gone: what it had not written back is to be trained again."""
        mine = self._machines.pop(machine, _MachineState())
        self._pending[:0] = mine.works
        self.again += len(mine.works)

    def state(self) -> dict[str, Any]:
        """What a later life of the lock server needs: plain lists and dictionaries."""
        machines = {
            number: {
                "leases": dict(machine.leases),
                "active": machine.active,
                "ahead": machine.ahead,
                "unsaved": [(work, sorted(keys)) for work, keys in machine.unsaved.items()],
            }
            for number, machine in self._machines.items()
        }
        return {
            "chunk": self._chunk,
            "pending": self._pending,
            "machines": machines,
            "known": sorted(self._known),
            "rooted": sorted(self._rooted),
            "trained": list(self._trained_edges.items()),
            "edges": list(self.edges.items()),
            "again": self.again,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` returned, of a scheduler that was made with the same arguments."""
        self._chunk, self.again = state["chunk"], state["again"]
        self._pending = [_task(work) for work in state["pending"]]
        self._known, self._rooted = set(state["known"]), set(state["rooted"])
        self._trained_edges = {_task(work): edges for work, edges in state["trained"]}
        self.edges = {_task(work): edges for work, edges in state["edges"]}
        for number, saved in state["machines"].items():
            active = None if saved["active"] is None else _task(saved["active"])
            unsaved = {_task(work): set(keys) for work, keys in saved["unsaved"]}
            self._machines[number] = _MachineState(saved["leases"], active, saved["ahead"], unsaved)

    @property
    def _busy(self) -> bool:
        return any(machine.works for machine in self._machines.values())

    def _of(self, machine: int) -> _MachineState:
        return self._machines.setdefault(machine, _MachineState())

    def _keys(self, partitions: Iterable[int]) -> set[str]:
        return {partition_key(self._table, partition) for partition in partitions}

    def _taken(self, machine: int) -> set[str]:
        """Partitions that others hold."""
        return {key for other, holder in self._machines.items() if other != machine for key in holder.leases}

    def _outlook(self, machine: int) -> GrantRanking:
        """What others have before them, for the choice of a machine's bucket."""
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
        """Lease the partition that the machine's next bucket needs beside one of these, if it may be read ahead."""
        mine, here = self._of(machine), self._keys(bucket)
        if any(self._keys(other) <= here for _, other in self._pending):
            return None  # the next one needs no other
        taken = self._taken(machine) | mine.leases.keys() - here
        works = []
        for work in self._pending:
            missing = set(work[1]) - set(bucket)
            if len(missing) == 1 and missing != set(work[1]) and not self._keys(missing) & taken:
                works.append((work, missing))
        for number in self._outlook(machine).ranked([(work[1], 1) for work, _ in works]):
            work, missing = works[number]
            if self._others_get_on(machine, self._keys(missing), work):
                (partition,) = missing
                mine.leases[partition_key(self._table, partition)] = next_lease()
                return partition
        return None

    def _others_get_on(self, machine: int, reserved: set[str], work: BucketTask) -> bool:
        """Whether each other machine has a bucket that it could begin without what is reserved for this work."""
        return all(
            any(other != work and not self._keys(other[1]) & (self._taken(one) | reserved) for other in self._pending)
            for one in self._machines
            if one != machine
        )

    def _allowed(self, bucket: Bucket, keys: set[str], mine: _MachineState) -> bool:
        if not self._as_tree or keys & self._known or any(keys & self._keys(other) for _, other in mine.unsaved):
            return True
        begun = {self._component[other[0]] for machine in self._machines.values() for _, other in machine.works}
        return self._component[bucket[0]] not in begun | self._rooted

    def _go_on(self) -> None:
        """Go on to the next edge chunk once all of this one is done."""
        if not self._pending and not self._busy and self._chunk + 1 < self._chunks:
            self._chunk += 1
            self._pending = [(self._chunk, bucket) for bucket in self._order(self._chunk)]


def _task(packed: Any) -> BucketTask:
    """A work whose tuples were packed as lists."""
    chunk, (head, tail) = packed
    return chunk, (head, tail)
