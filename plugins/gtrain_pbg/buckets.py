"""The order in which an epoch trains the buckets, and which partitions are in memory when.

Orders: ``random``. ``affinity``: each bucket shares a partition with the last one if a remaining bucket does.
``inside_out``: buckets among the first partitions come before those with later ones, so that every bucket but the first
meets vectors that were trained already; ``outside_in`` is its reverse. ``beta``: for a buffer of c partitions, all
buckets among c - 1 of them and every other one are trained before these c - 1 are exchanged (Mohoney et al. 2021,
section 4). Which partition counts as first is drawn again in each epoch. ``sequential``: row by row, always the same.

On one machine the order is known when an epoch starts. The evicted partition is therefore the one that is needed last
(Belady 1966), and the next bucket's partitions are prefetched while a bucket is trained.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product

Bucket = tuple[int, int]
"""Partitions of the heads and of the tails."""
SOON = 4
"""A partition that is needed again within this number of buckets is not evicted to prefetch another."""


def bucket_order(order: str, partitions: int, buffer: int, seed: int) -> list[Bucket]:
    """Return each pair of partitions once.

    Args:
        order: one of ``gtrain_pbg.config.ORDERS``.
        partitions: P.
        buffer: partitions that fit into memory, for ``beta``.
        seed: of the random choices.
    """
    rng = random.Random(seed)
    names = list(range(partitions))
    buckets = list(product(names, names))
    if order == "random":
        rng.shuffle(buckets)
    if order in ("random", "sequential"):
        return buckets
    if order == "affinity":
        return _by_affinity(buckets, rng)
    rng.shuffle(names)
    ordered = _beta(partitions, max(2, min(buffer, partitions))) if order == "beta" else _layers(partitions)
    if order == "outside_in":
        ordered.reverse()
    return [(names[i], names[j]) for i, j in ordered]


def components(buckets: Iterable[Bucket]) -> dict[int, int]:
    """Return the connected component of each partition in a bucket, named by one of its partitions."""
    root: dict[int, int] = {}

    def find(partition: int) -> int:
        while root.setdefault(partition, partition) != partition:
            # Path halving: the chains stay short.
            root[partition] = partition = root[root[partition]]
        return partition

    for head, tail in buckets:
        root[find(head)] = find(tail)
    return {partition: find(partition) for partition in root}


def _by_affinity(buckets: list[Bucket], rng: random.Random) -> list[Bucket]:
    remaining: dict[int, set[Bucket]] = {}  # of each partition
    for bucket in buckets:
        for partition in bucket:
            remaining.setdefault(partition, set()).add(bucket)
    ordered = [rng.choice(buckets)]
    while True:
        last = ordered[-1]
        for partition in last:
            remaining[partition].discard(last)
        near = remaining[last[0]] | remaining[last[1]]
        # First both partitions, then one, then any. Sorted, because the order of a set depends on its history.
        choices = sorted(near & set(product(last, last)) or near or set().union(*remaining.values()))
        if not choices:
            return ordered
        ordered.append(rng.choice(choices))


def _layers(partitions: int) -> list[Bucket]:
    """Layer l has the buckets of partition l with itself and with those before it."""
    return [
        bucket
        for layer in range(partitions)
        for other in range(layer + 1)
        for bucket in dict.fromkeys([(other, layer), (layer, other)])
    ]


def _beta(partitions: int, capacity: int) -> list[Bucket]:
    """The buffer-aware order: c - 1 partitions stay while all others pass through the last slot."""
    ordered: dict[Bucket, None] = {}
    rest = list(range(partitions))
    while rest:
        stay, rest = rest[: capacity - 1], rest[capacity - 1 :]
        ordered |= dict.fromkeys(product(stay, stay))
        # Reversed: the partition that was loaded last is still in memory.
        for other in reversed(rest):
            members = [*stay, other]
            ordered |= dict.fromkeys(product(members, members))
        rest.reverse()
    return list(ordered)


@dataclass(frozen=True)
class Swap:
    """One slot gets another partition.

    Attributes:
        slot: the slot.
        out: the partition that is evicted; None: the slot was empty.
        into: the partition that is loaded; None: the slot stays empty.
    """

    slot: int
    out: int | None
    into: int | None


@dataclass(frozen=True)
class ScheduledBucket:
    """One bucket of an epoch and its swaps.

    Attributes:
        bucket: partitions of heads and of tails.
        chunk: number of the bucket's edge chunk.
        slots: of the two partitions.
        before: swaps that must be done before it is trained, and could not be done earlier.
        during: swaps for the next bucket that may be done while it is trained.
        after: slot of each partition that is in memory after these.
        soon: swaps before the next bucket, whose files may be read into the page cache meanwhile.
        ends_chunk: whether the plan has no later bucket of this chunk.
        last: whether the epoch ends with it, where that is known.
        ahead: partitions that the next bucket needs, as far as that is known.
    """

    bucket: Bucket
    chunk: int
    slots: tuple[int, int]
    before: tuple[Swap, ...]
    during: tuple[Swap, ...]
    after: Mapping[int, int] = field(default_factory=dict)
    soon: tuple[Swap, ...] = ()
    ends_chunk: bool = False
    last: bool = False
    ahead: tuple[int, ...] = ()


@dataclass
class PartitionBuffer:
    """Which partitions are in which slots of memory.

    Attributes:
        slots: number of slots.
        slot_of: slot of each partition that is in memory.
    """

    slots: int
    slot_of: dict[int, int] = field(default_factory=dict)

    def plan(self, buckets: list[tuple[Bucket, int]]) -> list[ScheduledBucket]:
        """Plan the swaps of an epoch, and leave the buffer as the epoch leaves it.

        Args:
            buckets: buckets and edge chunks in their order.
        """
        # An empty set at the end: after the last bucket nothing is needed.
        needed = [set(bucket) for bucket, _ in buckets] + [set()]
        plan, before = [], self._load(needed[0], set(), needed, 0)
        for number, (bucket, chunk) in enumerate(buckets):
            slots, last = (self.slot_of[bucket[0]], self.slot_of[bucket[1]]), number + 1 == len(buckets)
            during = self._load(needed[number + 1], needed[number], needed, number + 1)
            after = dict(self.slot_of)
            soon = self._load(needed[number + 1], set(), needed, number + 1)
            plan.append(
                ScheduledBucket(
                    *(bucket, chunk, slots, before, during, after, soon),
                    ends_chunk=last or buckets[number + 1][1] > chunk,
                    last=last,
                    ahead=tuple(sorted(needed[number + 1])),
                )
            )
            before = soon
        return plan

    def exchange(self, bucket: Bucket, ahead: int | None) -> tuple[tuple[Swap, ...], tuple[Swap, ...]]:
        """Plan for a bucket that was not known before: evict all partitions but its own and the next one's.

        Args:
            bucket: the bucket.
            ahead: a partition that the next bucket needs; None: unknown.

        Returns:
            The swaps that must be done before the bucket is trained, and those that may be done while it is.
        """
        needed = {*bucket, *(() if ahead is None else (ahead,))}
        leaving = {slot: partition for partition, slot in self.slot_of.items() if partition not in needed}
        self.slot_of = {partition: slot for partition, slot in self.slot_of.items() if partition in needed}
        free = sorted(set(range(self.slots)) - set(self.slot_of.values()) - leaving.keys())

        def load(partition: int) -> Swap:
            slot = self.slot_of[partition] = free.pop(0) if free else next(iter(leaving))
            return Swap(slot, leaving.pop(slot, None), partition)

        before = tuple(load(partition) for partition in sorted(set(bucket) - self.slot_of.keys()))
        during = (load(ahead),) if ahead is not None and ahead not in self.slot_of else ()
        return before, (*(Swap(slot, partition, None) for slot, partition in leaving.items()), *during)

    def evict_all(self) -> tuple[Swap, ...]:
        """Plan to empty all slots."""
        slot_of, self.slot_of = self.slot_of, {}
        return tuple(Swap(slot, partition, None) for partition, slot in slot_of.items())

    def _load(self, wanted: set[int], pinned: set[int], needed: list[set[int]], at: int) -> tuple[Swap, ...]:
        """Load partitions as far as slots allow without evicting any that are wanted or pinned."""
        swaps = []
        for partition in sorted(wanted - set(self.slot_of)):
            slot, out = self._take_slot(wanted | pinned, needed, at, early=bool(pinned))
            if slot is None:
                break
            if out is not None:
                del self.slot_of[out]
            self.slot_of[partition] = slot
            swaps.append(Swap(slot, out, partition))
        return tuple(swaps)

    def _take_slot(
        self, pinned: set[int], needed: list[set[int]], at: int, early: bool
    ) -> tuple[int | None, int | None]:
        """Return a slot and the partition to evict from it, if any; None: no slot."""
        free = sorted(set(range(self.slots)) - set(self.slot_of.values()))
        if free:
            return free[0], None
        others = [partition for partition in self.slot_of if partition not in pinned]
        if not others:
            return None, None

        def next_use(partition: int) -> int:
            return next((n for n in range(at, len(needed)) if partition in needed[n]), len(needed) - 1)

        # Belady's rule: the partition whose next use is furthest away.
        out = max(others, key=lambda partition: (next_use(partition), partition))
        # Prefetching must not evict a partition that is read again at once.
        if early and next_use(out) < at + SOON:
            return None, None
        return self.slot_of[out], out
