"""What a server keeps of the last steps, so that a worker that died can go through them once more."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gtrain_ps.packing import prepare, unpack
from gtrain_ps.server.memory import Region

Entries = Mapping[str, Tensor]


class Slots:
    """Named tensors of each of the last steps, in a region.

    They are there as soon as the step counts as applied: a worker that comes back finds all of a step or nothing.

    Args:
        count: steps that are kept.
        region: where.
    """

    def __init__(self, count: int, region: Region) -> None:
        self._count, self._region = count, region
        self._steps = region.tensor("slots/step", (count,), torch.int64)

    def write(self, step: int, entries: Entries) -> None:
        """Keep a step in place of the oldest one."""
        slot, packed = step % self._count, prepare(entries)
        self._steps[slot] = 0
        room = self._room(slot, packed.nbytes)
        packed.write(room)
        self._steps[slot] = step + 1

    def read(self, step: int) -> dict[str, Tensor]:
        """The tensors of a step, in the region's memory; none where it is not kept."""
        slot = step % self._count
        if step < 0 or int(self._steps[slot]) != step + 1:
            return {}
        found: dict[str, Tensor] = unpack(self._room(slot, 0))
        return found

    def _room(self, slot: int, nbytes: int) -> Tensor:
        """Memory of a slot, at least so large. A larger one is at least twice as large, so that little is wasted."""
        name = f"slots/{slot}"
        capacity = int(self._region.notes.get(name, 0))
        if capacity < nbytes:
            capacity = max(2 * capacity, nbytes)
            self._region.note(name, capacity)
        return self._region.tensor(f"{name}/{capacity}", (capacity,), torch.uint8)
