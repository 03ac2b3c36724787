"""A strategy on gtrain's base class that shards only the seeds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor
from torch_geometric.data import Data

from gtrain.backends import Serves
from gtrain.data.batches.loader import SeedLoader, full_batch
from gtrain.graph.shard import GraphShard, load_whole
from gtrain.graph.store import Store
from gtrain.strategy.base import GraphStrategy
from gtrain_example import REPLICATED
from gtrain_example.config import ReplicatedConfig


class ReplicatedStrategy(GraphStrategy):
    """Every rank computes on the whole graph; its loss and metrics are over its share of the seeds.

    Settings: :class:`gtrain_example.config.ReplicatedConfig`.
    """

    strategy_name: ClassVar[str] = "replicated"
    serves: ClassVar[Serves] = REPLICATED
    settings_type = ReplicatedConfig
    settings: ReplicatedConfig

    def open_shard(self, store: Store) -> GraphShard:
        return load_whole(store)

    def batches(self, shard: GraphShard, loader: SeedLoader) -> Iterable[Data]:
        batch = full_batch(shard, loader.split, self.dtype)
        batch.seeds = self._share(batch.seeds)
        batch.batch_size = batch.seeds.numel()
        # Every rank has one batch, if necessary without seeds: ranks take each step together.
        return [batch]

    def _share(self, seeds: Tensor) -> Tensor:
        if self.settings.share == "strided":
            return seeds[self.global_rank :: self.world_size]
        return seeds.tensor_split(self.world_size)[self.global_rank]
