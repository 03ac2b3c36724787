"""Record the metrics and times of each epoch, for ``summary.json`` and for the record of the run."""

from __future__ import annotations

import math
import time
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import Callback

from gtrain.callbacks.metrics_file import MetricsFile
from gtrain.errors import DataError
from gtrain.launch import slot as slots
from gtrain.record.process_log import ProcessLog
from gtrain.strategy.base import GraphStrategy
from gtrain.strategy.counters import Counters, anonymous_bytes, cpu_seconds
from gtrain.strategy.servers import Traffic

_SUMS = ("bytes_sent", "bytes_received", "comm_seconds", "wait_seconds", "bound_bytes")
"""Counters whose sums over all epochs are in ``summary.json``."""


class RunRecorder(Callback):
    """Records the time and the metrics of each epoch; times and counters exclude evaluation.

    If ``train/loss`` is NaN or inf, the run ends, and the checkpoint of the previous epoch stays the last.

    Args:
        counters: of this rank.
        log: receives a row per epoch, and the progress within long epochs; None: nobody does.

    Attributes:
        epoch_seconds: wall seconds of each epoch's training.
        epochs_trained: epochs by their trained batches: half an epoch with ``trainer.limit_train_batches=0.5``.
        history: per epoch ``{"epoch": number, "train/loss": ..., "val/...": ...}``; an epoch that was not validated
            has no ``val/`` entries.
        epoch_of: the epoch of the newest value of each metric.
        cpu_seconds: CPU seconds of this rank in training epochs.
    """

    def __init__(self, counters: Counters, log: ProcessLog | None = None) -> None:
        self.counters, self._log = counters, log or ProcessLog(None)
        self.epoch_seconds: list[float] = []
        self.epochs_trained = 0.0
        self._batches = 0  # of the epoch so far
        self.history: list[dict[str, Any]] = []
        self.epoch_of: dict[str, int] = {}
        self._validated = False
        self.cpu_seconds = 0.0
        self._elapsed = 0.0
        self._started_at: tuple[float, float] | None = None
        self._fetch_seconds = 0.0  # of the epoch: the main thread waits for batches, and for nothing else
        self._fetching: tuple[float, float] | None = None
        self._counts = _counts(counters, self.cpu_seconds)  # at the end of the last epoch
        self._traffic: Traffic = {}

    def restart_state(self) -> dict[str, Any]:
        """Return the state of a rank that is restarted during a run, as plain values."""
        names = ("epoch_seconds", "epochs_trained", "history", "epoch_of", "cpu_seconds")
        counts = {name: getattr(self.counters, name) for name in _SUMS}
        return {**{name: getattr(self, name) for name in names}, "counters": counts}

    def load_restart_state(self, state: dict[str, Any]) -> None:
        """Restore :meth:`restart_state`; the time of the interrupted epoch restarts at 0."""
        self.epoch_seconds, self.history = list(state["epoch_seconds"]), list(state["history"])
        self.epoch_of, self.cpu_seconds = dict(state["epoch_of"]), state["cpu_seconds"]
        self.epochs_trained = state.get("epochs_trained", float(len(self.epoch_seconds)))  # earlier releases lack it
        for name, value in state.get("counters", {}).items():  # earlier releases lack them
            setattr(self.counters, name, value)
        self._counts = _counts(self.counters, self.cpu_seconds)

    @property
    def newest(self) -> dict[str, float]:
        """The newest value of each metric in the history."""
        return {name: value for epoch in self.history for name, value in epoch.items() if name != "epoch"}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a checkpoint, which is that of rank 0; each rank has its own counts in its rows."""
        self._log.flush()
        return self.restart_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the epochs of the job's earlier attempts. A run that resumes another run records its own epochs only.

        Lightning calls this before a test too, with the state of the best epoch.
        """
        if slots.attempt() and not self.history:
            self.load_restart_state(state_dict)
            self._load_own_counts()

    def _load_own_counts(self) -> None:
        """Replace the counts of rank 0 by this rank's own, if its rows have all restored epochs."""
        rows, epochs = self._log.epochs(), [row["epoch"] for row in self.history]
        if not epochs or not rows.keys() >= set(epochs):
            return
        own = [rows[epoch] for epoch in epochs]
        for name in ("bytes_sent", "bytes_received", "comm_seconds", "wait_seconds"):
            setattr(self.counters, name, sum(row[name] for row in own))
        bounds = [row["bound"] for row in own]
        self.counters.bound_bytes = None if None in bounds else sum(bounds)
        self.cpu_seconds = sum(row["cpu_seconds"] for row in own)
        self._counts = _counts(self.counters, self.cpu_seconds)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _restore_metrics(trainer)
        self._log.write("fit", first_epoch=trainer.current_epoch, max_epochs=trainer.max_epochs)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        if self._started_at is None:  # resumed within an epoch
            self._resume()
        self._stop_fetching()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._batches += 1
        self._start_fetching()
        if self._log.is_due("step"):
            batches = trainer.num_training_batches
            step = {"epoch": trainer.current_epoch, "batch": trainer.fit_loop.batch_idx + 1}
            self._log.write("step", **step, batches=int(batches) if math.isfinite(batches) else None)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._elapsed = self._fetch_seconds = 0.0
        self._batches = 0
        self._resume()
        self._start_fetching()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_fetching()
        self._pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = self._validated or not trainer.sanity_checking
        if trainer.training and not trainer.sanity_checking and self._elapsed:
            self._resume()
            self._start_fetching()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_fetching()
        self._pause()
        self.epoch_seconds.append(self._elapsed)
        batches = sized_len(trainer.train_dataloader)
        self.epochs_trained += min(self._batches / batches, 1.0) if batches else 1.0
        # reading metrics computes them, which is collective: every rank reads them, here only
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if not self._validated:
            # Lightning keeps the values of the last validation: do not report them again.
            metrics = {name: value for name, value in metrics.items() if not name.startswith(("val/", "val_"))}
        self._validated = False
        self.history.append({"epoch": trainer.current_epoch, **metrics})
        self._log_epoch(trainer, metrics)
        self.epoch_of |= dict.fromkeys(metrics, trainer.current_epoch)
        if not math.isfinite(metrics.get("train/loss", 0.0)):
            # Stop before the checkpoint of this epoch is written.
            raise DataError(
                f"the training loss of epoch {trainer.current_epoch} is {metrics['train/loss']}.",
                hint="lower the learning rates (model.optimizer.lr, and model.sparse_optimizer.lr for tables), and "
                "check the data for NaN or inf in features, labels or weights.",
            )

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _restore_metrics(trainer)  # of a job that restarted after its last epoch, whose training does not start
        self._pause()
        self._log.write("fitted")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._log.write("failure", **slots.describe(exception))

    def _log_epoch(self, trainer: pl.Trainer, metrics: dict[str, float]) -> None:
        """Write this rank's row of the epoch: how its time divides, and what it sent, since the last epoch's end."""
        counts, before = _counts(self.counters, self.cpu_seconds), self._counts
        self._counts = counts
        spent = {name: value - before[name] for name, value in counts.items()}
        bound = None if self.counters.bound_bytes is None else spent.pop("bound")
        reading = spent["reading"] + self._fetch_seconds
        computing = self._elapsed - reading - spent["waiting"] - spent["sending"]
        strategy, servers = trainer.strategy, {}
        if isinstance(strategy, GraphStrategy) and slots.roster().counts:
            traffic = dict(strategy.servers.traffic)
            servers = {
                name: [now - then for now, then in zip(both, self._traffic.get(name, (0, 0)), strict=True)]
                for name, both in traffic.items()
            }
            self._traffic = traffic
        row: dict[str, Any] = {**spent, "reading": reading, "computing": max(computing, 0.0), "bound": bound}
        row |= {"epoch": trainer.current_epoch, "seconds": self._elapsed, "anonymous": anonymous_bytes()}
        row |= {"servers": servers} if servers else {}
        self._log.write("epoch", **row, **({"metrics": metrics} if trainer.is_global_zero else {}))

    def _start_fetching(self) -> None:
        if self._started_at is not None:
            self._fetching = time.perf_counter(), self._busy_seconds()

    def _stop_fetching(self) -> None:
        if self._fetching is not None:
            start, busy = self._fetching
            spent = time.perf_counter() - start - (self._busy_seconds() - busy)
            self._fetch_seconds, self._fetching = self._fetch_seconds + max(spent, 0.0), None

    def _busy_seconds(self) -> float:
        """Return the time that the counters assign to the main thread so far."""
        return self.counters.blocked_seconds + self.counters.read_seconds + self.counters.send_seconds

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


def _restore_metrics(trainer: pl.Trainer) -> None:
    """Write the rows of earlier attempts of the job, once."""
    for logger in trainer.loggers:
        if isinstance(logger, MetricsFile):
            logger.restore(_stepped_batches(trainer))


def _stepped_batches(trainer: pl.Trainer) -> int:
    """Return the batches so far that ended with a step, by which Lightning numbers rows.

    ``trainer.global_step`` counts the steps of each of several optimizers.
    """
    loop = trainer.fit_loop.epoch_loop
    # After this hook Lightning counts the batch in which a checkpoint was saved, by the same condition.
    between_epochs = loop.restarted_on_last and not loop.restarted_on_train_batch_end
    uncounted = loop.restarting and not between_epochs and not loop._should_accumulate()
    return loop._batches_that_stepped + uncounted


def _counts(counters: Counters, cpu: float) -> dict[str, float]:
    """Return the sums so far whose differences make the row of an epoch."""
    return {
        "waiting": counters.blocked_seconds,
        "reading": counters.read_seconds,
        "sending": counters.send_seconds,
        "wait_seconds": counters.wait_seconds,
        "comm_seconds": counters.comm_seconds,
        "cpu_seconds": cpu,
        "bytes_sent": counters.bytes_sent,
        "bytes_received": counters.bytes_received,
        "bound": counters.bound_bytes or 0,
    }
