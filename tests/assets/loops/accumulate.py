"""Mini-batches over ranks with accumulated gradients, against one process: prints the largest relative difference."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import ClassVar

import lightning.pytorch as pl
import torch
from torch_geometric.data import Data
from torch_geometric.nn.models import GCN

from gtrain import GraphStrategy, NodeClassifier, PlantedData, SingleStrategy, run_local
from gtrain.data.batches.loader import SeedLoader, full_batch
from gtrain.graph.shard import GraphShard, load_whole
from gtrain.graph.store import Store


class Shares(GraphStrategy):
    """Every rank holds the whole graph and takes its share of each step's seeds."""

    strategy_name: ClassVar[str] = "shares"
    full_batch = False

    def open_shard(self, store: Store) -> GraphShard:
        return load_whole(store)

    def batches(self, shard: GraphShard, loader: SeedLoader) -> Iterable[Data]:
        strategy = self

        class Steps:
            def __len__(self) -> int:
                return len(loader)

            def __iter__(self) -> Iterator[Data]:
                for batch in loader.steps(full_batch(shard, loader.split, strategy.dtype)):
                    batch.seeds = batch.seeds[strategy.global_rank :: strategy.world_size]
                    yield batch

        return Steps()


def main(ranks: int) -> list[float]:
    """Train and return all parameters."""
    pl.seed_everything(0, verbose=False)
    model = NodeClassifier(GCN(16, 8, 2, 4), 4, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    trainer = pl.Trainer(
        strategy=SingleStrategy() if ranks == 1 else Shares(),
        num_nodes=ranks,
        devices=1,
        accelerator="cpu",
        max_epochs=3,
        precision="64-true",
        accumulate_grad_batches=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = PlantedData(num_nodes=200, num_edges=1600, num_features=16, num_classes=4, batch_size=35, num_parts=1)
    trainer.fit(model, datamodule=data)
    return [float(value) for p in model.parameters() for value in p.flatten()]


if __name__ == "__main__":
    one = torch.tensor(run_local(main, 1, num_nodes=1))
    many = torch.tensor(run_local(main, 3, num_nodes=3))
    print("RESULT", json.dumps(float(((one - many).abs() / one.abs().max()).max())))
    sys.exit(0)
