"""A Trainer may evaluate a module before it trains it: tensors of inference mode do not reach the training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from gtrain import GraphDataModule, NodeClassifier

NODES = 60


class OwnModule(pl.LightningModule):
    """A module without metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.network = GraphSAGE(5, 8, 2, 3)

    def _loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.network(batch.x, batch.edge_index)[batch.seeds], batch.y[batch.seeds])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.network(batch.x, batch.edge_index)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def random_graph() -> Data:
    masks = {name: torch.arange(NODES) % 3 == k for k, name in enumerate(("train_mask", "val_mask", "test_mask"))}
    edges = torch.randint(NODES, (2, 200))
    return Data(x=torch.randn(NODES, 5), y=torch.randint(3, (NODES,)), edge_index=edges, num_nodes=NODES, **masks)


@pytest.mark.parametrize("verb", ["validate", "predict"])
@pytest.mark.parametrize("strategy", ["single", "sar", "pyg"])
def test_evaluation_comes_before_training(strategy: str, verb: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = GraphDataModule.from_pyg(random_graph(), num_parts=1, store=str(tmp_path / "store"))
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    for module in (OwnModule(), NodeClassifier(GraphSAGE(5, 8, 2, 3), num_classes=3)):
        before = [parameter.detach().clone() for parameter in module.parameters()]
        trainer = pl.Trainer(
            strategy=strategy, accelerator="cpu", max_epochs=1, default_root_dir=os.fspath(tmp_path), **quiet
        )
        getattr(trainer, verb)(module, datamodule=data)
        trainer.fit(module, datamodule=data)
        assert any(not old.equal(new) for old, new in zip(before, module.parameters(), strict=True))
