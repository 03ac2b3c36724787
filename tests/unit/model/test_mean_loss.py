"""The loss of an epoch: the mean over all its rows, however they were dealt to steps."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import torch
from lightning.pytorch.profilers import SimpleProfiler

from gtrain.model.module import MeanLoss, log_mean_loss
from gtrain.run.build import NoProfiler, make_trainer


class Module(pl.LightningModule):
    """What a loss is logged for."""

    def __init__(self) -> None:
        super().__init__()
        self.train_loss = MeanLoss()
        self.told: list[str] = []

    def log(self, name: str, *args: object, **kwargs: object) -> None:  # type: ignore[override]
        self.told.append(name)


def test_an_epochs_loss_is_the_mean_over_its_rows() -> None:
    module, rows = Module(), torch.rand(10, dtype=torch.float64)
    for some in rows.split(4):
        weight = torch.tensor(float(len(some)))
        step = log_mean_loss(module, "train", some.sum().float(), weight)
        assert torch.allclose(step, some.mean().float())
    empty = log_mean_loss(module, "train", torch.tensor(0.0), torch.tensor(0.0))
    assert empty == 0 and module.told == ["train/loss"]
    assert module.train_loss.mean_value.dtype == torch.float64
    assert abs(float(module.train_loss.compute()) - float(rows.mean())) < 1e-7
    module.train_loss.reset()
    assert module.train_loss.update_count == 0 and float(module.train_loss.weight) == 0


def test_a_loss_that_is_not_a_number_shows_in_the_epochs() -> None:
    module = Module()
    for value in (1.0, math.nan, 2.0):
        log_mean_loss(module, "train", torch.tensor(value), torch.tensor(1.0))
    assert math.isnan(float(module.train_loss.compute()))


def test_lightning_profiles_where_it_is_asked_to() -> None:
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    assert isinstance(make_trainer({**quiet, "profiler": None}).profiler, NoProfiler)  # type: ignore[attr-defined]
    assert isinstance(make_trainer({**quiet, "profiler": "simple"}).profiler, SimpleProfiler)  # type: ignore[attr-defined]
