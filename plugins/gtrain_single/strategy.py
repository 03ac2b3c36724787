"""The whole graph in one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from torch_geometric.data import Data

from gtrain.data.loader import SeedLoader, full_batch
from gtrain.errors import ConfigError
from gtrain.graph.shard import GraphShard, load_whole
from gtrain.graph.store import Store
from gtrain.strategy.base import GraphStrategy


class SingleStrategy(GraphStrategy):
    """One process trains on the whole graph with the module as it is; a store of any number of parts will do.

    Args:
        kwargs: passed on to :class:`gtrain.strategy.base.GraphStrategy`.
    """

    strategy_name: ClassVar[str] = "single"
    precisions: ClassVar[tuple[str, ...] | None] = None

    @property
    def full_batch(self) -> bool:  # type: ignore[override]
        module = getattr(self._trainer, "datamodule", None)
        return getattr(module, "batch_size", None) is None

    def setup_environment(self) -> None:
        ranks = self.num_nodes * self.num_processes
        if ranks != 1:
            raise ConfigError(
                f"trainer.num_nodes {self.num_nodes} * trainer.devices {self.num_processes} = {ranks} ranks were set; "
                "strategy=single is one process.",
                hint="leave both at 1, or choose another strategy.",
            )
        super().setup_environment()

    def open_shard(self, store: Store) -> GraphShard:
        return load_whole(store)

    def batches(self, shard: GraphShard, loader: SeedLoader) -> Iterable[Data]:
        return _Steps(loader, full_batch(shard, loader.split, self.dtype))


class _Steps:
    """The whole graph once for each group of seeds, in the order that the loader describes."""

    def __init__(self, loader: SeedLoader, whole: Data) -> None:
        self._loader, self._whole = loader, whole

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Data]:
        return self._loader.steps(self._whole)
