"""A program that knows Lightning and PyG, and of gtrain the strategy, the data module and the launch function."""

from __future__ import annotations

import json
import os
import sys

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from gtrain import PlantedData, SarStrategy, SingleStrategy, run_local


class Mine(pl.LightningModule):
    """Uses ordinary means over ordinary masks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = SAGEConv(16, 32), SAGEConv(32, 4)

    def forward(self, batch: Data) -> Tensor:
        return self.b(self.a(batch.x, batch.edge_index).relu(), batch.edge_index)

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        mask = batch.train_mask
        loss = F.cross_entropy(self(batch)[mask], batch.y[mask])
        self.log("loss", loss, on_epoch=True, sync_dist=True, batch_size=int(mask.sum()))
        return loss

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        mask = batch.val_mask
        hits = (self(batch)[mask].argmax(-1) == batch.y[mask]).double().mean()
        self.log("acc", hits, sync_dist=True, batch_size=int(mask.sum()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(strategy: str, ranks: int) -> dict[str, float]:
    """Train and return what was logged."""
    pl.seed_everything(1, verbose=False)
    data = PlantedData(num_nodes=400, num_edges=3000, num_features=16, num_classes=4)
    trainer = pl.Trainer(
        strategy={"single": SingleStrategy, "sar": SarStrategy, "lightning": lambda: "auto"}[strategy](),
        num_nodes=ranks,
        devices=1,
        accelerator="cpu",
        max_epochs=5,
        precision="32-true" if strategy == "lightning" else "64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Mine(), datamodule=data)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    name, ranks = sys.argv[1], int(sys.argv[2])
    if "RANK" in os.environ or "--alone" in sys.argv or name == "lightning":
        result = main(name, ranks)
    else:
        result = run_local(main, name, ranks, num_nodes=ranks)
    if os.environ.get("RANK", "0") == "0":
        print("RESULT", json.dumps(result), flush=True)
