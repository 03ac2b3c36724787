"""Train on a graph of your own that is neither a file nor a data set of PyG.

A data source is a subclass of GraphDataModule with two methods: ``identity`` says what the graph depends on, and
``read`` returns it as PyG's Data or HeteroData. gtrain partitions it once and stores the parts on disk; runs with the
same identity open the store instead of reading again.

    python examples/own_data.py
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from gtrain import GraphDataModule, NodeClassifier, SarStrategy, run_local


class Grid(GraphDataModule):
    """A square grid of cells with noisy coordinates as features; the class of a cell is its quadrant."""

    name = "grid"

    def __init__(self, side: int = 30, **settings: Any) -> None:
        super().__init__(**settings)
        self.side = side

    def identity(self) -> dict[str, Any]:
        return {"version": 1, "side": self.side}

    def read(self) -> Data:
        cell = torch.arange(self.side * self.side)
        row, column = cell // self.side, cell % self.side
        right = torch.stack([cell[column < self.side - 1], cell[column < self.side - 1] + 1])
        down = torch.stack([cell[row < self.side - 1], cell[row < self.side - 1] + self.side])
        edges = torch.cat([right, down], dim=1)
        position = torch.stack([row, column], dim=1) / self.side
        noise = torch.randn(position.shape, generator=torch.Generator().manual_seed(self.seed))
        return Data(
            x=position + 0.2 * noise,  # (cells, 2)
            y=2 * (row >= self.side / 2).long() + (column >= self.side / 2).long(),  # (cells,)
            edge_index=torch.cat([edges, edges.flip(0)], dim=1),  # (2, directed edges)
        )


def train() -> float:
    """Train on one rank; return the accuracy on the test cells."""
    pl.seed_everything(0)
    trainer = pl.Trainer(
        strategy=SarStrategy(),
        accelerator="cpu",
        num_nodes=2,
        devices=1,
        max_epochs=60,
        logger=False,
        enable_checkpointing=False,
    )
    data = Grid(split="random")
    model = NodeClassifier(GraphSAGE(2, hidden_channels=16, num_layers=2, out_channels=4), num_classes=4)
    trainer.fit(model, datamodule=data)
    (metrics,) = trainer.test(model, datamodule=data)
    return metrics["test/acc"]


if __name__ == "__main__":
    print(f"test accuracy: {run_local(train, num_nodes=2):.3f}")
