"""The sums of the workers' gradients that are not of tables, step by step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gtrain_ps.server.memory import Region
from gtrain_ps.server.requests import Commit, factor_of


class Sums:
    """The sums of the workers' rests in the last steps, for workers that have not got them when a server dies.

    Args:
        count: steps that are kept.
        region: where.
    """

    def __init__(self, count: int, region: Region) -> None:
        self._count, self._region = count, region
        self._steps = region.tensor("sums/step", (count,), torch.int64).numpy()
        self._tensors: Tensor | None = None
        if "sums" in region.notes:
            self._open(region.notes["sums"][0], getattr(torch, region.notes["sums"][1]))

    def of(self, step: int) -> Tensor | None:
        """The sum of a step; None where it is not known."""
        slot = step % self._count
        if self._tensors is None or int(self._steps[slot]) != step + 1:
            return None
        return self._tensors[slot].clone()

    def make(self, step: int, commits: Sequence[Commit]) -> Tensor | None:
        """Add up a step's rests in the order of the workers' ranks; None where they sum them themselves."""
        rests = [commit.rest for commit in commits if commit.rest is not None]
        if len(rests) < len(commits):
            return None
        known = self.of(step)
        if known is not None:
            return known
        total = rests[0].clone()
        for rest in rests[1:]:
            total += rest
        factor = factor_of(commits)
        if factor != 1.0:
            total *= factor
        if self._tensors is None:
            self._open(total.numel(), total.dtype)
            self._region.note("sums", [total.numel(), str(total.dtype).removeprefix("torch.")])
        assert self._tensors is not None
        slot = step % self._count
        self._steps[slot] = 0
        self._tensors[slot] = total
        self._steps[slot] = step + 1
        return total

    def _open(self, size: int, dtype: torch.dtype) -> None:
        self._tensors = self._region.tensor("sums", (self._count, size), dtype)
