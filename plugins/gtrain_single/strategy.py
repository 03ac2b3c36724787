"""Full-graph training in one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.backends import Serves
from gtrain.data.batches.edge_seeds import EdgeSeeds
from gtrain.data.batches.loader import SeedLoader, graph_batch, hetero_batch
from gtrain.errors import ConfigError
from gtrain.graph.shard import GraphShard, load_whole
from gtrain.graph.shard.whole import load_whole_hetero
from gtrain.graph.store import Store
from gtrain.strategy.base import GraphStrategy
from gtrain_single import SERVES


class SingleStrategy(GraphStrategy):
    """Trains the unchanged module on the whole graph in one process. The store may have any number of parts."""

    strategy_name: ClassVar[str] = "single"
    serves: ClassVar[Serves] = SERVES

    @property
    def full_batch(self) -> bool:  # type: ignore[override]
        return self.data is None or self.data.batch_size is None

    def setup_environment(self) -> None:
        ranks = self.num_nodes * self.num_processes
        if ranks != 1:
            raise ConfigError(
                f"trainer.num_nodes {self.num_nodes} * trainer.devices {self.num_processes} = {ranks} ranks were set; "
                "strategy=single is one process.",
                hint="set both to 1, or choose another strategy.",
            )
        super().setup_environment()

    def open_shard(self, store: Store) -> GraphShard | HeteroData:
        return load_whole_hetero(store) if store.is_hetero else load_whole(store)

    def batches(self, shard: GraphShard | HeteroData, loader: SeedLoader) -> Iterable[Data | HeteroData]:
        if isinstance(shard, HeteroData):
            return _Steps(loader, hetero_batch(shard, loader.store, self.dtype))
        return _Steps(loader, graph_batch(shard, self.dtype))


class _Steps:
    """Batches of the whole graph, one for each group of seeds in the loader's order."""

    def __init__(self, loader: SeedLoader, whole: Data | HeteroData) -> None:
        self._loader, self._whole = loader, whole
        self._seeds: Tensor | EdgeSeeds | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Data | HeteroData]:
        if self._seeds is None:
            self._seeds = self._loader.seeds(self._whole)
        return self._loader.steps(self._whole, self._seeds)
