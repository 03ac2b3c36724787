"""Ranks that train on their own between the ends of epochs, in unequal numbers of steps, and survive each other."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch_geometric.data import Data

from gtrain.data.batches.loader import SeedLoader, full_batch
from gtrain.errors import PeerLostError
from gtrain.graph.shard import GraphShard, load_whole
from gtrain.graph.store import Store
from gtrain.launch import slot
from gtrain.strategy.base import GraphStrategy
from gtrain.strategy.group import flatten, unflatten_into


class CountingStrategy(GraphStrategy):
    """Every rank takes ``steps`` steps on its own seeds; then the weights are averaged, and all is well again.

    Args:
        steps: training batches of each rank.
        die_at: rank, epoch, batch.
        servers, max_restarts, worker_restarts: for the roles alone.
        kwargs: passed on to :class:`gtrain.strategy.base.GraphStrategy`.
    """

    strategy_name: ClassVar[str] = "counting"
    lockstep: ClassVar[bool] = False
    reforms: ClassVar[bool] = True

    def __init__(
        self,
        steps: list[int],
        die_at: list[int],
        servers: int = 0,
        max_restarts: int = 0,
        worker_restarts: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.steps, self.die_at = steps, die_at

    def open_shard(self, store: Store) -> GraphShard:
        return load_whole(store)

    def batches(self, shard: GraphShard, loader: SeedLoader) -> Iterable[Data]:
        batch = full_batch(shard, loader.split, self.dtype)
        batch.seeds = batch.seeds[self.global_rank :: self.world_size]
        batch.batch_size = batch.seeds.numel()
        return [batch] * (self.steps[self.global_rank % len(self.steps)] if loader.split == "train" else 1)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        here = [self.global_rank, self.lightning_module.current_epoch, args[1]]
        if here == list(self.die_at) and slot.restarts() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        count = self.servers.count("counter")
        if count:
            client = self.servers.client("counter", self.global_rank % count)
            client.request("count", {"name": f"rank {self.global_rank}"}, [torch.zeros(1000)])
        return super().training_step(*args, **kwargs)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._average()

    def _average(self) -> None:
        """Replace the weights by their mean over all ranks, once all are there."""
        assert self.lightning_module is not None
        weights = [parameter.data for parameter in self.lightning_module.parameters()]
        while True:
            try:
                if self.group.incarnation < 0:
                    self.group.reform()
                mean = self.group.all_reduce(flatten(weights), "mean")
            except PeerLostError:
                self.group.reform()
                continue
            return unflatten_into(mean, weights)
