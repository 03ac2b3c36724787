"""Dealing seeds to steps and ranks, and making batches ahead."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from typing import Any

import pytest
import torch
from helpers import LIMIT

from gtrain_pyg.loader import pipelined
from gtrain_pyg.seeds import global_shares, local_shares, num_steps


@pytest.mark.parametrize(("total", "batch_size", "steps"), [(10, 4, 3), (8, 4, 2), (0, 4, 1), (9, None, 1), (1, 1, 1)])
def test_number_of_steps(total: int, batch_size: int | None, steps: int) -> None:
    assert num_steps(total, batch_size) == steps


@pytest.mark.parametrize("count", [0, 3, 10, 11])
def test_own_seeds_are_each_in_one_step(count: int) -> None:
    shares = local_shares(count, 4, order=7)
    assert len(shares) == 4
    assert sorted(torch.cat(list(shares)).tolist()) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert torch.equal(torch.cat(list(local_shares(count, 4, order=None))), torch.arange(count))


def test_orders_differ_between_epochs_and_repeat_for_the_same() -> None:
    first, again, other = (torch.cat(list(local_shares(50, 5, order))) for order in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_common_shares_make_up_a_single_process_steps(world: int) -> None:
    owner = torch.randint(world, (23,), generator=torch.Generator().manual_seed(0))
    expected = torch.randperm(23, generator=torch.Generator().manual_seed(5)).split(6)
    ranks = [global_shares(owner, 6, 5, rank, world) for rank in range(world)]
    for step, chunk in enumerate(expected):
        parts = [shares[step] for shares in ranks]
        assert sorted(torch.cat(parts).tolist()) == sorted(chunk.tolist())
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        owners = owner[torch.cat(parts)]
        assert torch.equal(owners, owners.sort().values)  # as local as equal shares allow


def test_common_shares_without_seeds_are_empty() -> None:
    (share,) = global_shares(torch.empty(0, dtype=torch.int64), 6, 5, 0, 2)
    assert share.numel() == 0


class Recorder:
    """Stages that note what was called."""

    def __init__(self) -> None:
        self.sampled: list[int] = []
        self.prefetched: list[int] = []
        self.assembled: list[int] = []

    def run(self, jobs: Iterable[int], **options: Any) -> Generator[str]:
        return pipelined(jobs, self.sample, self.prefetch, self.assemble, **options)

    def sample(self, job: int) -> int:
        self.sampled.append(job)
        return job * 10

    def prefetch(self, sample: int) -> int:
        self.prefetched.append(sample)
        return sample + 1

    def assemble(self, job: int, sample: int, rows: int) -> str:
        assert rows == sample + 1 == job * 10 + 1
        self.assembled.append(job)
        return f"batch {job}"


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("jobs", [0, 1, 7])
def test_batches_come_in_order(ahead: int, overlap: bool, jobs: int) -> None:
    recorder = Recorder()
    batches = list(recorder.run(range(jobs), threads=3, ahead=ahead, overlap=overlap))
    assert batches == [f"batch {job}" for job in range(jobs)]
    assert recorder.prefetched == [10 * job for job in range(jobs)]


@pytest.mark.parametrize("overlap", [False, True])
def test_no_more_is_made_ahead_than_asked(overlap: bool) -> None:
    recorder = Recorder()
    batches = recorder.run(range(100), ahead=2, overlap=overlap)
    for taken in range(1, 20):
        next(batches)
        assert len(recorder.assembled) <= taken + overlap
        assert len(recorder.sampled) <= taken + overlap + 2
    batches.close()


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("stage", ["sample", "prefetch", "assemble"])
def test_what_a_stage_raises_is_raised_where_batches_are_taken(stage: str, ahead: int) -> None:
    recorder = Recorder()

    def fail(*args: object) -> None:
        raise OSError("the peer is gone")

    setattr(recorder, stage, fail)
    with pytest.raises(OSError, match="the peer is gone"):
        list(recorder.run(range(3), ahead=ahead))


def test_a_consumer_that_leaves_waits_for_nobody() -> None:
    """A sample that never comes does not hold up the end of an epoch that was cut short."""
    release = threading.Event()
    recorder = Recorder()
    sample = recorder.sample

    def slow(job: int) -> int:
        if job >= 2:
            release.wait(LIMIT)
        return sample(job)

    recorder.sample = slow  # type: ignore[method-assign]
    batches = recorder.run(range(50), ahead=1)
    assert next(batches) == "batch 0"
    batches.close()
    assert not release.is_set()
    release.set()
