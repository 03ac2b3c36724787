"""The order in which an epoch goes through the buckets: how often partitions must be swapped follows from it.

``random``: any. ``affinity``: each bucket shares a partition with the last, where one is left that does.
``inside_out``: buckets among the first partitions come before those with later ones, so that every bucket but the first
meets vectors that were trained already; ``outside_in`` is its reverse. ``beta``: for a buffer of c partitions, all
buckets among c - 1 of them and every other one are trained before these c - 1 are exchanged (Mohoney et al. 2021,
section 4). Which partition counts as first is drawn anew each epoch. ``sequential``: row by row, always the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

Bucket = tuple[int, int]


def bucket_order(order: str, partitions: int, buffer: int, seed: int) -> list[Bucket]:
    """Return each pair of partitions once.

    Args:
        order: one of ``gtrain_pbg.config.ORDERS``.
        partitions: P.
        buffer: partitions that fit into memory, for ``beta``.
        seed: of what is random.
    """
    rng = random.Random(seed)
    names = list(range(partitions))
    everything = [(i, j) for i in names for j in names]
    if order == "sequential":
        return everything
    if order == "random":
        rng.shuffle(everything)
        return everything
    if order == "affinity":
        return _by_affinity(everything, rng)
    rng.shuffle(names)
    found = _beta(partitions, max(2, min(buffer, partitions))) if order == "beta" else _layers(partitions)
    if order == "outside_in":
        found.reverse()
    return [(names[i], names[j]) for i, j in found]


def components(buckets: Iterable[Bucket]) -> dict[int, int]:
    """The connected component of each partition that a bucket has, as the number of one of its partitions."""
    root: dict[int, int] = {}

    def find(partition: int) -> int:
        while root.setdefault(partition, partition) != partition:
            root[partition] = partition = root[root[partition]]
        return partition

    for head, tail in buckets:
        root[find(head)] = find(tail)
    return {partition: find(partition) for partition in root}


def _by_affinity(buckets: list[Bucket], rng: random.Random) -> list[Bucket]:
    left: dict[int, set[Bucket]] = {}  # of each partition
    for bucket in buckets:
        for partition in bucket:
            left.setdefault(partition, set()).add(bucket)
    found = [rng.choice(buckets)]
    while True:
        last = found[-1]
        for partition in last:
            left[partition].discard(last)
        near = left[last[0]] | left[last[1]]
        held = near & {(i, j) for i in last for j in last}
        others = sorted(held or near or set().union(*left.values()))
        if not others:
            return found
        found.append(rng.choice(others))


def _layers(partitions: int) -> list[Bucket]:
    """Layer l has the buckets of partition l and those before it."""
    found = []
    for layer in range(partitions):
        for other in range(layer):
            found += [(other, layer), (layer, other)]
        found.append((layer, layer))
    return found


def _beta(partitions: int, capacity: int) -> list[Bucket]:
    """The buffer-aware order: c - 1 partitions stay while all others pass through the last place."""
    done: set[Bucket] = set()
    found: list[Bucket] = []

    def take(members: list[int]) -> None:
        for i in members:
            for j in members:
                if (i, j) not in done:
                    done.add((i, j))
                    found.append((i, j))

    rest = list(range(partitions))
    while rest:
        stay, rest = rest[: capacity - 1], rest[capacity - 1 :]
        take(stay)
        for other in reversed(rest):  # that which came last is still there
            take([*stay, other])
        rest.reverse()
    return found
