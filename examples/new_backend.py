"""A strategy of your own in one file: every rank has the whole graph and trains on its share of the seeds.

A strategy says what a rank loads (``open_shard``) and what a step consumes (``batches``). The base class averages
gradients, weighs losses by seeds, checkpoints and reports. plugins/example_backend packages the same strategy with
settings and an entry point, so that ``gtrain strategy=replicated`` finds it; docs/write-a-backend.md is the tutorial.

    python examples/new_backend.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import lightning.pytorch as pl
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from gtrain import GraphShard, GraphStrategy, NodeClassifier, PlantedData, SeedLoader, SingleStrategy, Store, run_local
from gtrain.data.batches.loader import full_batch
from gtrain.graph.shard import load_whole


class EveryOther(GraphStrategy):
    """Rank r of w trains on the seeds r, r + w, r + 2w, ..."""

    strategy_name: ClassVar[str] = "every_other"

    def open_shard(self, store: Store) -> GraphShard:
        return load_whole(store)

    def batches(self, shard: GraphShard, loader: SeedLoader) -> Iterable[Data]:
        batch = full_batch(shard, loader.split, self.dtype)
        batch.seeds = batch.seeds[self.global_rank :: self.world_size]
        batch.batch_size = batch.seeds.numel()
        return [batch]  # every rank yields the same number of batches, even without a seed


def train(strategy_class: type[GraphStrategy], num_ranks: int) -> list[float]:
    """Train on one rank; return the training loss of each epoch."""
    pl.seed_everything(0)
    losses = []

    class Record(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            losses.append(float(trainer.callback_metrics["train/loss"]))

    trainer = pl.Trainer(
        strategy=strategy_class(),  # made in the rank: it reads which ranks were started
        callbacks=[Record()],
        accelerator="cpu",
        num_nodes=num_ranks,
        devices=1,
        max_epochs=5,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
    )
    model = NodeClassifier(GCN(64, hidden_channels=32, num_layers=2, out_channels=8), num_classes=8)
    trainer.fit(model, datamodule=PlantedData(num_nodes=600, num_edges=4800))
    return losses


if __name__ == "__main__":
    expected = run_local(train, SingleStrategy, 1, num_nodes=1)
    losses = run_local(train, EveryOther, 3, num_nodes=3)
    for epoch, pair in enumerate(zip(expected, losses, strict=True)):
        print(f"epoch {epoch}: loss {pair[0]:.10f} on one rank, {pair[1]:.10f} on three")
    assert torch.allclose(torch.tensor(expected), torch.tensor(losses), rtol=1e-10), "the strategy is not exact"
