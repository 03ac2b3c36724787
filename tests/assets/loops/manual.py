"""Manual optimization over two ranks of the strategy that is named, against one process.

Prints the largest difference of a parameter, and the largest change that training made.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import SAGEConv

from gtrain import GraphStrategy, PlantedData, SingleStrategy, run_local
from gtrain_pyg.strategy import PygStrategy
from gtrain_sar.strategy import SarStrategy

STRATEGIES = {"single": SingleStrategy, "sar": SarStrategy, "pyg": PygStrategy}


class Mine(pl.LightningModule):
    """Has two optimizers: one steps after two backward passes, the other after one more, with clipped gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = SAGEConv(6, 8), SAGEConv(8, 3)
        self.trained: list[float] = []  # as Lightning converts parameters to single precision in the end

    def loss(self, batch: Any) -> Tensor:
        scores = self.b(self.a(batch.x, batch.edge_index).relu(), batch.edge_index)
        return F.cross_entropy(scores[batch.seeds], batch.y[batch.seeds])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(0.5 * self.loss(batch))
        self.manual_backward(2.0 * self.loss(batch))
        first.step()
        self.manual_backward(self.loss(batch))  # the second one's gradients are those of three passes
        self.clip_gradients(second, 0.1, "norm")
        second.step()
        second.zero_grad()

    def on_train_end(self) -> None:
        self.trained = [float(value) for p in self.parameters() for value in p.detach().flatten()]

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.5) for layer in (self.a, self.b)]


def main(strategy: str, ranks: int, batch_size: int | None) -> tuple[list[float], float]:
    """Train and return all parameters, and the largest change."""
    pl.seed_everything(0, verbose=False)
    made: GraphStrategy = STRATEGIES[strategy](**{"seeds": "global"} if strategy == "pyg" else {})
    sampled = {"num_neighbors": [-1, -1]} if strategy == "pyg" else {}
    data = PlantedData(
        num_nodes=200,
        num_edges=1200,
        num_features=6,
        num_classes=3,
        num_parts=ranks,
        batch_size=batch_size,
        **sampled,
    )
    trainer = pl.Trainer(
        strategy=made,
        num_nodes=ranks,
        devices=1,
        accelerator="cpu",
        max_epochs=2,
        precision="64-true",
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Mine()
    before = [float(value) for p in model.parameters() for value in p.detach().flatten()]
    trainer.fit(model, datamodule=data)
    return model.trained, max(abs(one - other) for one, other in zip(before, model.trained, strict=True))


if __name__ == "__main__":
    name, size = sys.argv[1], 50 if sys.argv[1] == "pyg" else None
    (one, change), (two, _) = (run_local(main, s, n, size, num_nodes=n) for s, n in (("single", 1), (name, 2)))
    print("RESULT", json.dumps([max(abs(a - b) for a, b in zip(one, two, strict=True)), change]))
