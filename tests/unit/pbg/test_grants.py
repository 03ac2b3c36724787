"""How long machines of strategy=pbg wait for each other: an epoch by the clock, in turns that a bucket takes."""

from __future__ import annotations

import heapq
import random

import pytest

from gtrain_pbg.buckets import bucket_order
from gtrain_pbg.machines.scheduler import BucketScheduler, GrantRanking


def played(partitions: int, machines: int, as_tree: bool, seed: int, ahead: bool) -> tuple[float, int]:
    """When an epoch ends, and how many leases were given; a bucket takes from 1 to 1.3 turns, and moving none."""
    rng, leases = random.Random(seed), iter(range(1, 10_000))
    scheduler = BucketScheduler(
        "node", lambda chunk: bucket_order("affinity", partitions, 2, seed), 1, as_tree, 0, ahead
    )
    held: list[set[str]] = [set() for _ in range(machines)]
    ends: list[tuple[float, int]] = []
    now, waiting, granted = 0.0, set(range(machines)), 0

    def ask(machine: int) -> None:
        grant = scheduler.acquire(machine, lambda: next(leases))
        keep = set(grant.leases) if grant else set()
        scheduler.released(machine, sorted(held[machine] - keep))
        held[machine] = keep
        if grant:
            waiting.discard(machine)
            heapq.heappush(ends, (now + 1 + 0.3 * rng.random(), machine))

    while not scheduler.over:
        for _ in range(2):  # what one gives back may be what another waits for
            for machine in sorted(waiting):
                ask(machine)
        now, machine = heapq.heappop(ends)
        scheduler.trained(machine, 1)
        waiting.add(machine)
        ask(machine)
        granted += 1
    assert granted == partitions**2
    return now, next(leases) - 1


@pytest.mark.parametrize(
    ("partitions", "machines", "as_tree", "idle"),
    [(4, 2, True, 0.13), (4, 2, False, 0.04), (8, 2, True, 0.05), (8, 2, False, 0.03), (8, 4, True, 0.19),
     (8, 4, False, 0.11), (16, 4, True, 0.05), (16, 4, False, 0.03)],
)  # fmt: skip
def test_machines_wait_for_each_other_no_longer_than_they_must(
    partitions: int, machines: int, as_tree: bool, idle: float
) -> None:
    """The tree alone keeps 2 machines at 4 partitions idle for one turn of two in 17; the last turns are uneven."""
    found = [played(partitions, machines, as_tree, seed, partitions > 2 * machines) for seed in range(12)]
    spent = sum(end for end, _ in found) / len(found)
    assert 1 - 1.15 * partitions**2 / machines / spent < idle
    assert sum(leases for _, leases in found) / len(found) < 0.88 * partitions**2


def test_a_bucket_is_chosen_that_leaves_another_machine_one() -> None:
    ways = [((0, 0), 0), ((0, 1), 0), ((0, 2), 1)]
    pending = [(0, 0), (0, 1), (0, 2), (1, 3), (4, 5), (5, 4), (4, 4), (5, 5)]
    assert GrantRanking(pending, 2).ranked(ways) == [0, 1, 2]  # fewest fetched, in the order of the epoch
    waits = GrantRanking(pending, 2, idle=True, free=[(0, 0), (0, 1), (1, 3)])
    assert waits.ranked(ways) == [0, 2, 1]  # (0, 1) leaves the machine that waits nothing
    assert GrantRanking(pending, 2, idle=True, free=pending, unknown=[2]).ranked(ways) == [2, 0, 1]  # the tree grows
    last = [(0, 0), (1, 2), (1, 3), (1, 1)]
    assert GrantRanking(last, 2).ranked([((0, 0), 0), ((1, 2), 2)]) == [1, 0]  # three buckets of 1, one after the other
