"""Going on from a checkpoint: the batches of the next epoch are those that an unbroken run would have taken.

And what a run remembers of its epochs: which one each metric is of, and which one was the best.
"""

from __future__ import annotations

import csv
import inspect
import json
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from gtrain.callbacks.checkpoint import RunCheckpoint
from gtrain.callbacks.metrics_file import MetricsFile
from gtrain.callbacks.recorder import RunRecorder
from gtrain.data.planted import PlantedData
from gtrain.launch import slot
from gtrain.model.classification import NodeClassifier
from gtrain.model.decoders import make_decoder
from gtrain.model.link_predictor import LinkPredictor
from gtrain.model.networks import sage
from gtrain.run import runs
from gtrain.run.runs import how_to_resume
from gtrain.strategy.counters import Counters
from gtrain_single.strategy import SingleStrategy

UNPICKLE = {"weights_only": False} if "weights_only" in inspect.signature(pl.Trainer.fit).parameters else {}
"""Lightning 2.6 asks for it; earlier releases have no such argument."""


def train(
    folder: Path, epochs: int, task: str, checkpoint: Path | None = None, **settings: Any
) -> tuple[pl.Trainer, nn.Module]:
    pl.seed_everything(0, verbose=False)
    data = PlantedData(
        num_nodes=200, num_edges=1200, num_features=6, num_classes=3, batch_size=60, store=str(folder / "s"), task=task
    )
    layers = {"hidden_channels": 8, "num_layers": 2, "in_channels": 6}
    model = (
        NodeClassifier(sage(**layers, out_channels=3), 3)
        if task == "node"
        else LinkPredictor(sage(**layers, out_channels=8), make_decoder("dot", 8, None))
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
        **settings,
    )
    trainer.fit(model, datamodule=data, ckpt_path=checkpoint, **UNPICKLE)
    return trainer, model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", ["node", pytest.param("link", marks=pytest.mark.slow)])
def test_a_resumed_run_takes_the_batches_of_an_unbroken_one(task: str, tmp_path: Path) -> None:
    _, straight = train(tmp_path, 4, task)
    halted, _ = train(tmp_path, 2, task)
    halted.save_checkpoint(tmp_path / "half.ckpt")
    _, resumed = train(tmp_path, 4, task, tmp_path / "half.ckpt")
    for name, value in straight.state_dict().items():
        if "loss" not in name:
            torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("limit", "batches"),
    [({}, 4), ({"limit_train_batches": 1}, 2), ({"overfit_batches": 1}, 2), ({"max_steps": 3}, 3)],
)
def test_throughput_counts_the_batches_that_were_trained(limit: dict[str, Any], batches: int, tmp_path: Path) -> None:
    """Of two epochs of two batches each."""
    recorder = RunRecorder(Counters())
    train(tmp_path, 2, "node", callbacks=[recorder], **limit)
    assert recorder.epochs_trained == batches / 2
    again = RunRecorder(Counters())
    again.load_restart_state(recorder.restart_state())
    assert again.epochs_trained == batches / 2


@pytest.mark.parametrize("restart", ["attempt", "restarts"])  # of the whole job, or of rank 0 alone
def test_metrics_up_to_the_checkpoint_outlive_a_restart(
    restart: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = MetricsFile(tmp_path, "", "")
    for step in range(3):
        killed.log_metrics({"train/loss": step / 4}, step)
    killed.save()
    monkeypatch.setattr(slot, restart, lambda: 1)
    for _ in range(2):  # the first is killed before it has resumed
        restarted = MetricsFile(tmp_path, "", "")
        assert restarted.experiment.metrics == [] and not (tmp_path / "metrics.csv").exists()
    restarted.restore(2)
    restarted.log_metrics({"train/loss": 9.0}, 2)
    restarted.save()
    rows = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()]
    assert [dict(zip(rows[0], row, strict=True))["train/loss"] for row in rows[1:]] == ["0.0", "0.25", "9.0"]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.csv"]


class TwoOptimizers(NodeClassifier):
    """Takes a step with each of two optimizers in a batch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)["loss"]
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=0.01) for parameter in list(self.parameters())[:2]]


@pytest.mark.filterwarnings("ignore")
# a checkpoint at the end of an epoch, or after three steps
@pytest.mark.parametrize("every", [pytest.param(None, marks=pytest.mark.slow), 3])
def test_metrics_of_two_optimizers_continue_from_the_batch_of_the_checkpoint(
    every: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``global_step`` is twice the number of batches."""

    def fit(checkpoint: Path | None, epochs: int) -> list[str]:
        data = PlantedData(
            num_nodes=100, num_edges=600, num_features=4, num_classes=2, batch_size=20, store=str(tmp_path / "s")
        )
        saver = pl.callbacks.ModelCheckpoint(tmp_path / "c", "{step}", save_top_k=-1, every_n_train_steps=every and 6)
        trainer = pl.Trainer(
            strategy=SingleStrategy(),
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            callbacks=[RunRecorder(Counters()), saver],
            logger=MetricsFile(tmp_path, "", ""),
            log_every_n_steps=1,
            limit_val_batches=0,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = TwoOptimizers(sage(hidden_channels=4, num_layers=1, in_channels=4, out_channels=2), 2)
        model.on_train_batch_end = lambda *_: model.log("each", float(trainer.global_step))  # type: ignore[method-assign]
        trainer.fit(model, datamodule=data, ckpt_path=checkpoint, **UNPICKLE)
        with open(tmp_path / "metrics.csv", newline="") as rows:
            return [row["step"] for row in csv.DictReader(rows) if row["each"]]

    steps = fit(None, 2)
    assert steps == [str(number) for number in range(len(steps))] and len(steps) >= 4
    monkeypatch.setattr(slot, "attempt", lambda: 1)
    assert fit(tmp_path / "c" / f"step={6 if every else len(steps)}.ckpt", 2) == steps


class Scripted(NodeClassifier):
    """Logs a score of each epoch that is given beforehand."""

    scores: tuple[float, ...] = ()

    def on_validation_epoch_end(self) -> None:
        self.log("val/score", self.scores[self.current_epoch])


def scripted(
    folder: Path, scores: tuple[float, ...], *, checkpoint: str | None = None, every: int = 1, **settings: Any
) -> tuple[RunRecorder, RunCheckpoint, SingleStrategy]:
    """Fit as many epochs as there are scores."""
    strategy = SingleStrategy()
    recorder = RunRecorder(strategy.counters)
    settings = {"filename": "best", "monitor": "val/score", "mode": "max", **settings}
    best = RunCheckpoint(folder / "c", save_on_train_epoch_end=True, **settings)
    data = PlantedData(num_nodes=60, num_edges=200, num_features=4, num_classes=2, store=str(folder / "s"))
    model = Scripted(sage(hidden_channels=4, num_layers=1, in_channels=4, out_channels=2), 2)
    model.scores = scores
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=len(scores),
        callbacks=[recorder, best],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=every,
    )
    trainer.fit(model, datamodule=data, ckpt_path=checkpoint, **UNPICKLE)
    return recorder, best, strategy


class Counting(RunCheckpoint):
    """Records the epoch and step of each checkpoint by its file's name."""

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        manifest = json.loads((Path(filepath) / "manifest.json").read_text())
        assert manifest["global_step"] == trainer.global_step
        self.saved.setdefault(Path(filepath).stem, []).append(trainer.global_step)


def saved_steps(
    folder: Path, kind: type[NodeClassifier], accumulated: int = 1, **interval: Any
) -> tuple[dict[str, list[int]], int]:
    """Train for two epochs; return the steps that were saved, by file, and the last step."""
    callback = Counting(
        folder / "c", "best", monitor="val/acc", save_last=True, save_on_train_epoch_end=True, **interval
    )
    callback.saved = {}
    data = PlantedData(
        num_nodes=100, num_edges=600, num_features=4, num_classes=2, batch_size=20, store=str(folder / "s")
    )
    pl.seed_everything(0, verbose=False)
    model = kind(sage(hidden_channels=4, num_layers=1, in_channels=4, out_channels=2), 2)
    trainer = pl.Trainer(
        strategy=SingleStrategy(),
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        accumulate_grad_batches=accumulated,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, datamodule=data)
    return callback.saved, trainer.global_step


class Diverging(NodeClassifier):
    """A model whose loss is not a number from the third step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "loss": outputs["loss"] * (math.nan if self.global_step >= 2 else 1.0)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_checkpoint_within_an_epoch_has_parameters_that_are_not_numbers(tmp_path: Path) -> None:
    """The one before stays the last. (A run of gtrain ends with the epoch, before its end is saved.)"""
    saved, last_step = saved_steps(tmp_path, Diverging, every_n_train_steps=1)
    assert saved["last"] == [1, 2, last_step // 2, last_step]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("interval", "accumulated"),
    [({"every_n_train_steps": 2}, 1), ({"train_time_interval": timedelta(0)}, 1), ({"every_n_train_steps": 2}, 2)],
)
def test_checkpoints_within_epochs_are_the_last_and_not_the_best(
    tmp_path: Path, interval: dict[str, Any], accumulated: int
) -> None:
    """From the first epoch on, which has no score yet; never between batches whose gradients are accumulated."""
    saved, last_step = saved_steps(tmp_path, NodeClassifier, accumulated, **interval)
    steps = last_step // 2
    within = [step for step in range(1, 2 * steps + 1) if step % 2 == 0 or "train_time_interval" in interval]
    assert saved["last"] == sorted([*within, steps, 2 * steps])
    assert set(saved["best"]) <= {steps, 2 * steps}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_epoch_of_the_best_score_outlives_the_run(tmp_path: Path) -> None:
    _, best, _ = scripted(tmp_path, (0.1, 0.7, 0.2))
    assert (float(best.best_model_score or 0), best.best_epoch) == (pytest.approx(0.7), 1)
    recorder, resumed, strategy = scripted(tmp_path, (0.1, 0.7, 0.6, 0.5), checkpoint=best.best_model_path)
    assert strategy.loaded_epoch == 1 and [epoch["epoch"] for epoch in recorder.history] == [2, 3]
    assert (float(resumed.best_model_score or 0), resumed.best_epoch) == (pytest.approx(0.7), 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_newest_epoch_is_the_best_while_the_score_is_undefined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nan = math.nan
    _, best, _ = scripted(tmp_path, (nan, nan, nan))
    assert best.best_epoch == 2 and caplog.text.count("val/score is not defined in epoch 1 (NaN)") == 1
    *_, strategy = scripted(tmp_path, (nan,) * 4, checkpoint=best.best_model_path)
    assert strategy.loaded_epoch == 2
    _, best, _ = scripted(tmp_path / "later", (nan, nan, 0.3, nan, 0.7, nan, 0.5))
    assert (float(best.best_model_score or 0), best.best_epoch) == (pytest.approx(0.7), 4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("monitor", "kept"),
    [("val/score", {"1", "3"}), pytest.param("train/loss", {"3", "4"}, marks=pytest.mark.slow)],
)
def test_epochs_without_validation_are_not_compared(monitor: str, kept: set[str], tmp_path: Path) -> None:
    """By the score of an earlier validation, that is; what training logs is of each epoch."""
    names = {"filename": "e{epoch}", "auto_insert_metric_name": False, "enable_version_counter": False}
    _, best, _ = scripted(
        tmp_path, (0.1, 0.9, 0.3, 0.5, 0.2), every=2, save_top_k=2, monitor=monitor, mode="auto", **names
    )
    assert {Path(path).stem.removeprefix("e") for path in best.best_k_models} == kept


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_metrics_are_of_the_epoch_that_measured_them(tmp_path: Path) -> None:
    recorder, _, strategy = scripted(tmp_path, (0.1, 0.2, 0.3, 0.4, 0.5), every=2)
    assert ["val/score" in epoch for epoch in recorder.history] == [False, True, False, True, False]
    assert recorder.epoch_of["val/score"] == 3 and recorder.epoch_of["train/loss"] == 4
    again = RunRecorder(strategy.counters)
    again.load_restart_state(recorder.restart_state())
    assert (again.history, again.epoch_of) == (recorder.history, recorder.epoch_of)


def test_how_to_resume(tmp_path: Path) -> None:
    assert how_to_resume(tmp_path) == "no checkpoint exists yet: the same command starts from the beginning"
    for name, epoch in (("best", 3), ("last", 6)):
        (tmp_path / "checkpoints" / f"{name}.ckpt").mkdir(parents=True)
        assert f"ckpt_path={name}" not in how_to_resume(tmp_path), "not complete"
        (tmp_path / "checkpoints" / f"{name}.ckpt" / "manifest.json").write_text(f'{{"epoch": {epoch}}}')
        assert (
            how_to_resume(tmp_path) == f"to resume after epoch {epoch + 1}, run the same command with ckpt_path={name}"
        )


def test_the_record_of_a_run_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """Rank 0 of a resumed run replaces it while other ranks read it to find their checkpoint."""
    run = tmp_path / "run"
    config = {"data": {"seed": 0}, "model": {}, "strategy": {}}
    runs.register(tmp_path, run, config)
    with open(run / runs.RUN) as record:
        first = record.read()
        runs.register(tmp_path, run, config | {"data": {"seed": 1}})
        record.seek(0)
        assert record.read() == first != (run / runs.RUN).read_text()
    assert [path.name for path in run.iterdir()] == [runs.RUN]


def test_the_lowest_value_of_an_error_is_the_best(tmp_path: Path) -> None:
    for monitor, mode in (("val/mae", "min"), ("val/loss", "min"), ("val/auc", "max"), ("val/r2", "max")):
        callback = RunCheckpoint(tmp_path)
        callback.select_by(monitor)
        assert callback.mode == RunCheckpoint(tmp_path, monitor=monitor).mode == mode
        assert math.isinf(callback.kth_value) and (callback.kth_value > 0) == (mode == "min")
        callback = RunCheckpoint(tmp_path, monitor=monitor, mode="max")
        callback.select_by(monitor)
        assert callback.mode == "max"
