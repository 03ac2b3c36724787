"""What machines evaluate, dealt among those that are left."""

from __future__ import annotations

from collections.abc import Iterator

from torch_geometric.data import Data

from gtrain.data.loader import SeedLoader
from gtrain_pbg.evaluation import EvaluationBatches
from gtrain_pbg.machines.group import MachinesGroup
from gtrain_pbg.tables import Partitions


class DealtAnew:
    """A worker's share of a split's edges, dealt whenever it is gone through.

    Args:
        loader: what to evaluate.
        partitions: how the table is cut.
        filtered: whether the model leaves out what is known.
        group: the workers.
    """

    def __init__(self, loader: SeedLoader, partitions: Partitions, filtered: bool, group: MachinesGroup) -> None:
        self._dealt = loader, partitions, filtered
        self._group = group
        self._place, self._batches = group.place, self._deal()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Data]:
        if self._group.place != self._place:
            self._place, self._batches = self._group.place, self._deal()
        return iter(self._batches)

    def _deal(self) -> EvaluationBatches:
        return EvaluationBatches(*self._dealt, *self._group.place, one_batch=True)
