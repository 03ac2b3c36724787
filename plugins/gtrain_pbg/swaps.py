"""Which partitions are in memory when, and what is read and written meanwhile.

The order of the buckets is known at the beginning of an epoch, so the partition that makes room is always the one that
is needed last (Belady 1966), and the next bucket's partitions can be read while the last is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gtrain_pbg.order import Bucket

SOON = 4
"""A partition that is needed again within so many buckets does not make room for one that would only come early."""


@dataclass(frozen=True)
class Swap:
    """One slot gets another partition.

    Attributes:
        slot: the slot.
        out: the partition that leaves it; None: it was empty.
        into: the partition that comes; None: it stays empty.
    """

    slot: int
    out: int | None
    into: int | None


@dataclass(frozen=True)
class ScheduledBucket:
    """One bucket of an epoch.

    Attributes:
        bucket: partitions of heads and of tails.
        chunk: which of the bucket's edge chunks.
        slots: where the two partitions are.
        before: what must be done before it is trained, and could not be done earlier.
        during: what may be done while it is trained, for the next.
        after: slot of each partition that is in one after that.
        soon: what will be done before the next, whose files may be read into the kernel's memory meanwhile.
        ends_chunk: whether the plan has no other bucket of this chunk after it.
        last: whether the epoch ends with it, where that is known.
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


@dataclass
class PartitionBuffer:
    """The partitions in memory.

    Attributes:
        slots: number of slots.
        slot_of: slot of each partition that is in one.
    """

    slots: int
    slot_of: dict[int, int] = field(default_factory=dict)

    def plan(self, visits: list[tuple[Bucket, int]]) -> list[ScheduledBucket]:
        """Plan an epoch, and be as it leaves the buffer.

        Args:
            visits: buckets and edge chunks in their order.
        """
        needed = [set(bucket) for bucket, _ in visits]
        plan, now = [], self._bring(needed[0], set(), needed, 0) if visits else []
        for number, (bucket, chunk) in enumerate(visits):
            slots = self.slot_of[bucket[0]], self.slot_of[bucket[1]]
            during, later = [], []
            if number + 1 < len(visits):
                during = self._bring(needed[number + 1], needed[number], needed, number + 1)
            after = dict(self.slot_of)
            if number + 1 < len(visits):
                later = self._bring(needed[number + 1], set(), needed, number + 1)
            last = number + 1 == len(visits)
            ends_chunk = last or visits[number + 1][1] > chunk
            plan.append(
                ScheduledBucket(bucket, chunk, slots, tuple(now), tuple(during), after, tuple(later), ends_chunk, last)
            )
            now = later
        return plan

    def exchange(self, bucket: Bucket, ahead: int | None) -> tuple[tuple[Swap, ...], tuple[Swap, ...]]:
        """Plan for a bucket that was not known before: all partitions leave but its own and the next one's.

        Args:
            bucket: the bucket.
            ahead: a partition that the next bucket needs; None: it is not known.

        Returns:
            What must be done before the bucket is trained, and what may be done while it is.
        """
        kept = {*bucket, *(() if ahead is None else (ahead,))}
        leaving = {slot: partition for partition, slot in self.slot_of.items() if partition not in kept}
        self.slot_of = {partition: slot for partition, slot in self.slot_of.items() if partition in kept}
        free = sorted(set(range(self.slots)) - set(self.slot_of.values()) - leaving.keys())

        def bring(partition: int) -> Swap:
            slot = self.slot_of[partition] = free.pop(0) if free else next(iter(leaving))
            return Swap(slot, leaving.pop(slot, None), partition)

        before = tuple(bring(partition) for partition in sorted(set(bucket) - self.slot_of.keys()))
        during = (bring(ahead),) if ahead is not None and ahead not in self.slot_of else ()
        return before, (*(Swap(slot, partition, None) for slot, partition in leaving.items()), *during)

    def leave_all(self) -> tuple[Swap, ...]:
        """Plan that nothing is in a slot any more."""
        slot_of, self.slot_of = self.slot_of, {}
        return tuple(Swap(slot, partition, None) for partition, slot in slot_of.items())

    def _bring(self, wanted: set[int], kept: set[int], needed: list[set[int]], at: int) -> list[Swap]:
        """Bring partitions in, as far as there is room without those that are wanted or must be kept."""
        swaps = []
        for partition in sorted(wanted - set(self.slot_of)):
            slot, out = self._room(wanted | kept, needed, at, early=bool(kept))
            if slot is None:
                break
            if out is not None:
                del self.slot_of[out]
            self.slot_of[partition] = slot
            swaps.append(Swap(slot, out, partition))
        return swaps

    def _room(self, held: set[int], needed: list[set[int]], at: int, early: bool) -> tuple[int | None, int | None]:
        free = sorted(set(range(self.slots)) - set(self.slot_of.values()))
        if free:
            return free[0], None
        others = [partition for partition in self.slot_of if partition not in held]
        if not others:
            return None, None

        def next_use(partition: int) -> int:
            return next((n for n in range(at, len(needed)) if partition in needed[n]), len(needed))

        out = max(others, key=lambda partition: (next_use(partition), partition))
        if early and next_use(out) < at + SOON:
            return None, None
        return self.slot_of[out], out
