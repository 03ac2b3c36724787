"""What a server keeps of the last steps for a worker that dies and goes through them once more."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gtrain_ps.server.memory import Region
from gtrain_ps.server.requests import Commit, Product
from gtrain_ps.server.slots import Slots

CARRIED = ("run/", "random/")
"""What a worker says of itself only when it has changed."""


class Kept:
    """What workers were answered in the last steps, and what they said of how they came into them.

    Args:
        count: steps that are kept.
        region: where.
    """

    def __init__(self, count: int, region: Region) -> None:
        self._slots = Slots(count, region)
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
