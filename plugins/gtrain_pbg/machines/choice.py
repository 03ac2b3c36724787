"""Which of the buckets that a machine may begin it should: one that leaves the others something to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gtrain_pbg.order import Bucket


@dataclass(frozen=True)
class Outlook:
    """What the other machines have before them while one machine's next bucket is chosen.

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
