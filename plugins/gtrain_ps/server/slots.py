"""What a server keeps of the last steps, so that a worker that died can go through them once more."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gtrain_ps.packing import prepare, unpack
from gtrain_ps.server.memory import Region

Entries = Mapping[str, Tensor]


class Rooms:
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


class Slots:
    """Named tensors of each of the last steps, in a region.

    They are there as soon as the step counts as applied: a worker that comes back finds all of a step or nothing.

    Args:
        count: steps that are kept.
        region: where.
    """

    def __init__(self, count: int, region: Region) -> None:
        self._count, self._rooms = count, Rooms("slots", region)
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
