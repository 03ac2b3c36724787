"""Records what a run did, epoch by epoch, for ``summary.json``."""

from __future__ import annotations

import math
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from gtrain.errors import DataError
from gtrain.strategy.counters import Counters, cpu_seconds


class RunRecorder(Callback):
    """Times training epochs and keeps each epoch's metrics; evaluation is outside of the times and the counters.

    A run whose ``train/loss`` is no number ends with the epoch, and the checkpoint of the epoch before stays the last.

    Attributes:
        epoch_seconds: wall seconds of each epoch's training.
        history: per epoch ``{"epoch": number, "train/loss": ..., "val/...": ...}``; an epoch that was not validated
            has no ``val/`` entries.
        epoch_of: the epoch that the newest value of each metric is of.
        cpu_seconds: CPU seconds of this rank in training epochs.
    """

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self.epoch_seconds: list[float] = []
        self.history: list[dict[str, Any]] = []
        self.epoch_of: dict[str, int] = {}
        self._validated = False
        self.cpu_seconds = 0.0
        self._elapsed = 0.0
        self._began: tuple[float, float] | None = None

    def restart_state(self) -> dict[str, Any]:
        """What a rank that is restarted goes on with, in the middle of a run: plain values."""
        names = ("epoch_seconds", "history", "epoch_of", "cpu_seconds")
        return {name: getattr(self, name) for name in names}

    def load_restart_state(self, state: dict[str, Any]) -> None:
        """Go on as the life before that gave :meth:`restart_state`; times of the epoch under way begin anew."""
        self.epoch_seconds, self.history = list(state["epoch_seconds"]), list(state["history"])
        self.epoch_of, self.cpu_seconds = dict(state["epoch_of"]), state["cpu_seconds"]

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        if self._began is None:  # the run goes on in the middle of an epoch
            self._resume()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._elapsed = 0.0
        self._resume()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = self._validated or not trainer.sanity_checking
        if trainer.training and not trainer.sanity_checking and self._elapsed:
            self._resume()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause()
        self.epoch_seconds.append(self._elapsed)
        # reading the metrics computes them, over all ranks: so every rank reads here, and only here
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if not self._validated:  # Lightning keeps the values of the last validation
            metrics = {name: value for name, value in metrics.items() if not name.startswith(("val/", "val_"))}
        self._validated = False
        self.history.append({"epoch": trainer.current_epoch, **metrics})
        self.epoch_of |= dict.fromkeys(metrics, trainer.current_epoch)
        if not math.isfinite(metrics.get("train/loss", 0.0)):  # before the epoch's checkpoint is written
            raise DataError(
                f"the training loss of epoch {trainer.current_epoch} is {metrics['train/loss']}.",
                hint="lower the learning rates (model.optimizer.lr; model.sparse_optimizer.lr of tables), and look for "
                "features, labels or weights that are no numbers in the data.",
            )

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause()

    def _resume(self) -> None:
        self.counters.start()
        self._began = (time.perf_counter(), cpu_seconds())

    def _pause(self) -> None:
        self.counters.stop()
        if self._began is not None:
            wall, cpu = self._began
            self._elapsed += time.perf_counter() - wall
            self.cpu_seconds += cpu_seconds() - cpu
            self._began = None
