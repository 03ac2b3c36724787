"""Which seeds each rank takes in each step of an epoch. Every rank takes the same number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gtrain.data.batches.loader import epoch_order


@dataclass(frozen=True)
class Step:
    """A rank's share of one optimizer step.

    Attributes:
        epoch: number of the epoch; 0 in evaluation, whose batches are the same every time.
        number: of the step in the epoch, from 0.
        batch: number of the batch in the epoch over all ranks, which with seed and epoch names its random numbers.
        seeds: int64 ``[s]``, positions among the seeds that the rank draws from; may be empty.
    """

    epoch: int
    number: int
    batch: int
    seeds: Tensor


def num_steps(total: int, batch_size: int | None) -> int:
    """Steps of an epoch over ``total`` seeds of all ranks, at least 1; None is one step with all of them."""
    return 1 if batch_size is None else max(1, -(-total // batch_size))


def own_shares(count: int, steps: int, order: int | None) -> Sequence[Tensor]:
    """Deal a rank's own seeds to the steps in nearly equal shares, each seed to one of them.

    Args:
        count: the rank's seeds.
        steps: of the epoch.
        order: seed of the order; None leaves it.
    """
    return epoch_order(count, order).tensor_split(steps)


def common_shares(owner: Tensor, batch_size: int | None, order: int | None, rank: int, world: int) -> Sequence[Tensor]:
    """Deal everybody's seeds to the steps as a single process does, and each step's to the ranks in equal shares.

    Within a step seeds go to the rank that owns them as far as equal shares allow.

    Args:
        owner: int64 ``[S]``, the part that owns each seed of the split, in the order of the source data.
        batch_size: seeds of a step; None takes all.
        order: seed of the order; None leaves it.
        rank: whose shares to return.
        world: number of ranks.
    """
    seeds = epoch_order(owner.numel(), order)
    chunks = [seeds] if batch_size is None or not seeds.numel() else seeds.split(batch_size)
    return [chunk[owner[chunk].argsort(stable=True)].tensor_split(world)[rank] for chunk in chunks]
