"""A strategy directly on gtrain's base: nothing is sharded but the seeds."""

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
    """Every rank computes on the whole graph; loss and metrics of a rank are over its share of the seeds.

    Its settings are those of :class:`gtrain_example.config.ReplicatedConfig`.
    """

    strategy_name: ClassVar[str] = "replicated"
    serves: ClassVar[Serves] = REPLICATED
    settings_type = ReplicatedConfig
    settings: ReplicatedConfig

    def open_shard(self, store: Store) -> GraphShard:
        return load_whole(store)

    def batches(self, shard: GraphShard, loader: SeedLoader) -> Iterable[Data]:
        batch = full_batch(shard, loader.split, self.dtype)
        batch.seeds = self._mine(batch.seeds)
        batch.batch_size = batch.seeds.numel()
        return [batch]  # one batch on every rank, be it without a seed: ranks must not wait for each other

    def _mine(self, seeds: Tensor) -> Tensor:
        if self.settings.share == "strided":
            return seeds[self.global_rank :: self.world_size]
        return seeds.tensor_split(self.world_size)[self.global_rank]
