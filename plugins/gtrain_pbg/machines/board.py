"""Which machine trains which bucket: the lock server's book, without any wire.

A machine *holds* partitions, each by a lease. It trains a bucket whose two partitions it holds, and may keep one for
the next bucket. A bucket is done when both of its partitions were written back after its training; if the machine is
lost before, the bucket is trained again by another. So no edge is left out, whoever dies when.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gtrain_pbg.order import Bucket, components

Work = tuple[int, Bucket]
"""An edge chunk, and a bucket of it."""


def partition_key(table: str, partition: int) -> str:
    """What a partition is called on the wire and on disk."""
    return f"{table}-{partition}"


@dataclass(frozen=True)
class Grant:
    """What a machine may train.

    Attributes:
        bucket: partitions of heads and of tails.
        chunk: which of the bucket's edge chunks.
        leases: number of the lease of each of the two partitions by its key; larger is later.
    """

    bucket: Bucket
    chunk: int
    leases: dict[str, int]


@dataclass
class _Machine:
    leases: dict[str, int] = field(default_factory=dict)
    active: Work | None = None
    unsaved: dict[Work, set[str]] = field(default_factory=dict)  # trained, and partitions not yet written back

    @property
    def works(self) -> list[Work]:
        """What is not done, in the order of its grants."""
        return [*self.unsaved, *([] if self.active is None else [self.active])]


class Board:
    """An epoch's buckets, and who has them.

    Args:
        table: name of the table.
        order: makes the order of the buckets of an edge chunk.
        chunks: edge chunks of an epoch.
        as_tree: whether a bucket is granted only if one of its partitions has been trained, but the first of those
            that are joined by others: no two machines then begin with vectors that will have to do with each other.
        first: the chunk with which it begins.

    Attributes:
        edges: edges that were trained of each bucket that is done.
        again: how many buckets were granted again because a machine was lost.
    """

    def __init__(
        self, table: str, order: Callable[[int], list[Bucket]], chunks: int, as_tree: bool, first: int = 0
    ) -> None:
        self._table, self._order, self._chunks, self._as_tree = table, order, chunks, as_tree
        self._machines: dict[int, _Machine] = {}
        self._chunk, self._pending = first, [(first, bucket) for bucket in order(first)]
        self._component = components(bucket for _, bucket in self._pending)
        self._known: set[str] = set()
        self._rooted: set[int] = set()  # components of which a bucket is done
        self._trained_edges: dict[Work, int] = {}
        self.edges: dict[Work, int] = {}
        self.again = 0

    @property
    def over(self) -> bool:
        """Whether every bucket of every chunk is done."""
        return not self._pending and not self._busy and self._chunk + 1 >= self._chunks

    def acquire(self, machine: int, next_lease: Callable[[], int]) -> Grant | None:
        """Grant a bucket, of those left the one for which the fewest partitions must be fetched, or None.

        No other machine holds any of its partitions. The machine is to write back what else it holds, and then to say
        so by :meth:`released`.
        """
        self._go_on()
        mine = self._of(machine)
        if mine.active is not None:
            raise ValueError(f"machine {machine} has the bucket {mine.active} and asks for another")
        taken = {key for other, found in self._machines.items() if other != machine for key in found.leases}
        ways = [
            (len(keys - mine.leases.keys()), number)
            for number, (_, bucket) in enumerate(self._pending)
            if not (keys := self._keys(bucket)) & taken and self._allowed(bucket, keys, mine)
        ]
        if not ways:
            return None
        chunk, bucket = mine.active = self._pending.pop(min(ways)[1])
        for key in sorted(self._keys(bucket) - mine.leases.keys()):
            mine.leases[key] = next_lease()
        return Grant(bucket, chunk, {key: mine.leases[key] for key in self._keys(bucket)})

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
            del mine.leases[key]
            for work, missing in list(mine.unsaved.items()):
                missing.discard(key)
                if not missing:
                    del mine.unsaved[work]
                    self.edges[work] = self._trained_edges[work]
                    self._known |= self._keys(work[1])
                    self._rooted.add(self._component[work[1][0]])

    def lose(self, machine: int) -> None:
        """A machine is gone: what it had not written back is to be trained again."""
        mine = self._machines.pop(machine, _Machine())
        self._pending[:0] = mine.works
        self.again += len(mine.works)

    @property
    def _busy(self) -> bool:
        return any(machine.works for machine in self._machines.values())

    def _of(self, machine: int) -> _Machine:
        return self._machines.setdefault(machine, _Machine())

    def _keys(self, bucket: Bucket) -> set[str]:
        return {partition_key(self._table, partition) for partition in bucket}

    def _allowed(self, bucket: Bucket, keys: set[str], mine: _Machine) -> bool:
        if not self._as_tree or keys & self._known or any(keys & self._keys(other) for _, other in mine.unsaved):
            return True
        begun = {self._component[other[0]] for machine in self._machines.values() for _, other in machine.works}
        return self._component[bucket[0]] not in begun | self._rooted

    def _go_on(self) -> None:
        """Go on to the next edge chunk once all of this one is done."""
        if not self._pending and not self._busy and self._chunk + 1 < self._chunks:
            self._chunk += 1
            self._pending = [(self._chunk, bucket) for bucket in self._order(self._chunk)]
