"""What depends on the number of machines, chosen once when the group is made: partitions, buckets, shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from gtrain.graph.store import Store
from gtrain.strategy.group import Group
from gtrain_pbg.config import PBGConfig
from gtrain_pbg.planned import PlannedBuckets, buckets_of
from gtrain_pbg.typed import TypedTables
from gtrain_pbg.worker import BucketSource


class Deployment(Protocol):
    """The machines of a job, for one of its workers.

    Attributes:
        slots: partitions in memory at a time.
        folder: where the machine has files of partitions, in the run's folder.
    """

    slots: int
    folder: str

    @property
    def group(self) -> Group:
        """All workers."""

    @property
    def machine(self) -> Group:
        """The workers of this machine."""

    def share(self) -> tuple[int, int]:
        """This worker's number among those that are left, and how many these are."""

    def connect(self, tables: TypedTables, run_dir: Path, publishes: bool) -> None:
        """Let the tables have the store that machines share, if they share one.

        Args:
            tables: not yet filled.
            run_dir: of the run.
            publishes: whether this worker fills the store.
        """

    def source(
        self,
        tables: TypedTables,
        shared: Mapping[str, Tensor],
        store: Store,
        first: Callable[[int], int],
        limit: int | None,
    ) -> BucketSource:
        """Where the worker's buckets come from.

        Args:
            tables: the tables.
            shared: memory of the machine's workers.
            store: the graph.
            first: says with which chunk an epoch begins.
            limit: ``trainer.limit_train_batches``, as an int.
        """


class OneMachine:
    """A :class:`Deployment`: partitions are in memory and in files, and the order of the buckets is known.

    Args:
        settings: of the strategy.
        group: the workers.
    """

    folder = "partitions"

    def __init__(self, settings: PBGConfig, group: Group) -> None:
        self._settings, self._group = settings, group
        self.slots = min(settings.num_partitions, settings.buffer_partitions or settings.num_partitions)

    @property
    def group(self) -> Group:
        return self._group

    @property
    def machine(self) -> Group:
        return self._group

    def share(self) -> tuple[int, int]:
        return self._group.rank, self._group.size

    def connect(self, tables: TypedTables, run_dir: Path, publishes: bool) -> None:
        """Nothing: files stay on the machine."""

    def source(
        self,
        tables: TypedTables,
        shared: Mapping[str, Tensor],
        store: Store,
        first: Callable[[int], int],
        limit: int | None,
    ) -> BucketSource:
        def order(epoch: int, seed: int) -> Any:
            return buckets_of(store, self._settings, self.slots, (seed, epoch), first(epoch))

        return PlannedBuckets(tables, self._group, order, limit)
