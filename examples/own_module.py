"""Train a LightningModule of your own on a graph that is split over two processes.

The module uses plain PyG convolutions; nothing in it knows that the graph is sharded. Change ``STRATEGY`` to train the
same module on the whole graph in one process: the losses agree to rounding.

    python examples/own_module.py
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from gtrain import PlantedData, SarStrategy, SingleStrategy, run_local


class TwoHops(pl.LightningModule):
    """GraphSAGE with two layers."""

    def __init__(self, num_features: int, hidden_channels: int, num_classes: int) -> None:
        super().__init__()
        self.first = SAGEConv(num_features, hidden_channels)
        self.second = SAGEConv(hidden_channels, num_classes)

    def training_step(self, batch: Data, batch_idx: int) -> torch.Tensor:
        hidden = self.first(batch.x, batch.edge_index).relu()
        scores = self.second(hidden, batch.edge_index)
        # batch.seeds are the training nodes of this rank. The strategy weighs the ranks' losses by their seeds.
        return F.cross_entropy(scores[batch.seeds], batch.y[batch.seeds])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(num_ranks: int) -> float:
    """Train on one rank; return the norm of all weights."""
    pl.seed_everything(0)
    strategy = SarStrategy(mode=1) if num_ranks > 1 else SingleStrategy()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        num_nodes=num_ranks,
        devices=1,
        max_epochs=10,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
    )
    model = TwoHops(num_features=64, hidden_channels=32, num_classes=8)
    trainer.fit(model, datamodule=PlantedData(num_nodes=2000, num_edges=20000))
    return torch.nn.utils.get_total_norm(model.parameters()).item()


if __name__ == "__main__":
    for ranks in (1, 2):
        print(f"norm of the weights, {ranks} rank(s): {run_local(train, ranks, num_nodes=ranks):.6f}")
