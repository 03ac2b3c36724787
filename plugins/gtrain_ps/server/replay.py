"""Replay buffer: what a server keeps of the last steps, so that a restarted worker can go through them once more.

Products that were answered, what workers said of how they came into a step, and sums of gradients; all in a region that
outlives the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gtrain_ps.packing import prepare, unpack
from gtrain_ps.server.memory import Region
from gtrain_ps.server.requests import Commit, Product, factor_of

Entries = Mapping[str, Tensor]
CARRIED = ("run/", "random/")
"""What a worker says of itself only when it has changed."""


class GrowingMemory:
    """Memory of a region that grows: a larger room is at least twice as large, so that little is wasted.

    Args:
        name: of the rooms in the region.
        region: where they are.
    """

    def __init__(self, name: str, region: Region) -> None:
        self._name, self._region = name, region

    def room(self, number: int, nbytes: int = 0, kept: int = 0) -> Tensor:
        """A room's memory, uint8, at least so large.

        Args:
            number: of the room.
            nbytes: what it has to hold.
            kept: bytes at its beginning that a larger room has as well before it counts.
        """
        name = f"{self._name}/{number}"
        capacity = int(self._region.notes.get(name, 0))
        nothing = torch.empty(0, dtype=torch.uint8)
        before = self._region.tensor(f"{name}/{capacity}", (capacity,), torch.uint8) if capacity else nothing
        if capacity >= nbytes:
            return before
        capacity = max(2 * capacity, nbytes)
        larger = self._region.tensor(f"{name}/{capacity}", (capacity,), torch.uint8)
        larger[:kept] = before[:kept]
        self._region.note(name, capacity)
        return larger


class StepHistory:
    """Named tensors of each of the last steps, in a region.

    They are there as soon as the step counts as applied: a worker that comes back finds all of a step or nothing.

    Args:
        count: steps that are kept.
        region: where.
    """

    def __init__(self, count: int, region: Region) -> None:
        self._count, self._rooms = count, GrowingMemory("slots", region)
        self._steps = region.tensor("slots/step", (count,), torch.int64).numpy()  # quicker, one by one

    def write(self, step: int, entries: Entries) -> None:
        """Keep a step in place of the oldest one."""
        slot, packed = step % self._count, prepare(entries)
        self._steps[slot] = 0
        packed.write(self._rooms.room(slot, packed.nbytes))
        self._steps[slot] = step + 1

    def has(self, step: int) -> bool:
        """Whether a step is kept."""
        return step >= 0 and int(self._steps[step % self._count]) == step + 1

    def read(self, step: int) -> dict[str, Tensor]:
        """The tensors of a step, in the region's memory; none where it is not kept."""
        if not self.has(step):
            return {}
        found: dict[str, Tensor] = unpack(self._rooms.room(step % self._count))
        return found


class ReplayBuffer:
    """What workers were answered in the last steps, and what they said of how they came into them.

    Args:
        count: steps that are kept.
        region: where.
    """

    def __init__(self, count: int, region: Region) -> None:
        self._slots = StepHistory(count, region)
        self._carried: tuple[int, dict[str, Tensor]] = (-1, {})

    def keep(self, step: int, commits: Mapping[int, Commit], made: Mapping[tuple[int, int], Tensor]) -> None:
        """Keep a step, before it is applied: while rows change they are of two steps.

        Args:
            step: which.
            commits: the workers' parts.
            made: products that were answered, by worker and call.
        """
        if self._slots.has(step):
            return
        known, carried = self._carried
        if known != step - 1:  # this is a later life: they are in memory that will be another step's
            carried = {name: tensor.clone() for name, tensor in _carried(self._slots.read(step - 1)).items()}
        entries = dict(carried)
        for worker, commit in commits.items():
            entries |= {name if "/" in name else f"{name}/{worker}": tensor for name, tensor in commit.kept.items()}
        self._carried = step, _carried(entries)
        entries |= {f"product/{worker}/{call}": product for (worker, call), product in made.items()}
        self._slots.write(step, entries)

    def product(self, product: Product) -> Tensor | None:
        """What a former life of a worker was answered, if the step has begun to be applied."""
        kept = self._slots.read(product.step).get(f"product/{product.worker}/{product.call}")
        return None if kept is None else kept.clone()

    def recall(self, step: int, worker: int) -> dict[str, Tensor]:
        """What a worker needs in order to begin with a step that has been applied."""
        mine = {f"{name}{worker}" for name in ("step/", *CARRIED)}
        kept = self._slots.read(step)
        return {name: tensor.clone() for name, tensor in kept.items() if name in mine or name.startswith("rest/")}


def _carried(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in entries.items() if name.startswith(CARRIED)}


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
