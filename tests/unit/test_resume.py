"""Going on from a checkpoint: the batches of the next epoch are those that an unbroken run would have taken."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from gtrain.data.planted import PlantedData
from gtrain.model.decoders import make_decoder
from gtrain.model.link_predictor import LinkPredictor
from gtrain.model.networks import sage
from gtrain.model.node_classifier import NodeClassifier
from gtrain_single.strategy import SingleStrategy


def train(folder: Path, epochs: int, task: str, checkpoint: Path | None = None) -> tuple[pl.Trainer, nn.Module]:
    pl.seed_everything(0, verbose=False)
    data = PlantedData(
        num_nodes=200, num_edges=1200, num_features=6, num_classes=3, batch_size=60, store=str(folder / "s"), task=task
    )
    settings = {"hidden_channels": 8, "num_layers": 2, "in_channels": 6}
    model = (
        NodeClassifier(sage(**settings, out_channels=3), 3)
        if task == "node"
        else LinkPredictor(sage(**settings, out_channels=8), make_decoder("dot", 8, None))
    )
    trainer = pl.Trainer(
        strategy=SingleStrategy(),
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(model, datamodule=data, ckpt_path=checkpoint, weights_only=False)
    return trainer, model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", ["node", "link"])
def test_a_resumed_run_takes_the_batches_of_an_unbroken_one(task: str, tmp_path: Path) -> None:
    _, straight = train(tmp_path, 4, task)
    halted, _ = train(tmp_path, 2, task)
    halted.save_checkpoint(tmp_path / "half.ckpt")
    _, resumed = train(tmp_path, 4, task, tmp_path / "half.ckpt")
    for name, value in straight.state_dict().items():
        if "loss" not in name:
            torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=0)
