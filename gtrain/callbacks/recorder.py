"""Record the metrics and times of each epoch, for ``summary.json``."""

from __future__ import annotations

import math
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from gtrain.callbacks.metrics_file import MetricsFile
from gtrain.errors import DataError
from gtrain.launch import slot as slots
from gtrain.strategy.counters import Counters, cpu_seconds


class RunRecorder(Callback):
    """Records the time and the metrics of each epoch; times and counters exclude evaluation.

    If ``train/loss`` is NaN or inf, the run ends, and the checkpoint of the previous epoch stays the last.

    Attributes:
        epoch_seconds: wall seconds of each epoch's training.
        history: per epoch ``{"epoch": number, "train/loss": ..., "val/...": ...}``; an epoch that was not validated
            has no ``val/`` entries.
        epoch_of: the epoch of the newest value of each metric.
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
        self._started_at: tuple[float, float] | None = None

    def restart_state(self) -> dict[str, Any]:
        """Return the state of a rank that is restarted during a run, as plain values."""
        names = ("epoch_seconds", "history", "epoch_of", "cpu_seconds")
        return {name: getattr(self, name) for name in names}

    def load_restart_state(self, state: dict[str, Any]) -> None:
        """Restore :meth:`restart_state`; the time of the interrupted epoch restarts at 0."""
        self.epoch_seconds, self.history = list(state["epoch_seconds"]), list(state["history"])
        self.epoch_of, self.cpu_seconds = dict(state["epoch_of"]), state["cpu_seconds"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a checkpoint."""
        return self.restart_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the epochs of the job's earlier attempts. A run that resumes another run records its own epochs only.

        Lightning calls this before a test too, with the state of the best epoch.
        """
        if slots.attempt() and not self.history:
            self.load_restart_state(state_dict)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile):
                logger.restore(trainer.global_step)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        if self._started_at is None:  # resumed within an epoch
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
        # reading metrics computes them, which is collective: every rank reads them, here only
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if not self._validated:
            # Lightning keeps the values of the last validation: do not report them again.
            metrics = {name: value for name, value in metrics.items() if not name.startswith(("val/", "val_"))}
        self._validated = False
        self.history.append({"epoch": trainer.current_epoch, **metrics})
        self.epoch_of |= dict.fromkeys(metrics, trainer.current_epoch)
        if not math.isfinite(metrics.get("train/loss", 0.0)):
            # Stop before the checkpoint of this epoch is written.
            raise DataError(
                f"the training loss of epoch {trainer.current_epoch} is {metrics['train/loss']}.",
                hint="lower the learning rates (model.optimizer.lr, and model.sparse_optimizer.lr for tables), and "
                "check the data for NaN or inf in features, labels or weights.",
            )

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause()

    def _resume(self) -> None:
        self.counters.start()
        self._started_at = (time.perf_counter(), cpu_seconds())

    def _pause(self) -> None:
        self.counters.stop()
        if self._started_at is not None:
            wall, cpu = self._started_at
            self._elapsed += time.perf_counter() - wall
            self.cpu_seconds += cpu_seconds() - cpu
            self._started_at = None
