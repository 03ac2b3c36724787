"""Timeline of each rank: operators, and the spans in which it waits for other ranks."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.profiler import ProfilerActivity, profile, record_function

from gtrain.errors import ConfigError
from gtrain.strategy.base import GraphStrategy


class Timeline(Callback):
    """Records some epochs with torch's profiler and writes ``trace-rank<r>.json`` per rank.

    The files are Chrome traces for ``chrome://tracing`` and https://ui.perfetto.dev. They contain torch's operators,
    forward and backward, and the spans in which the rank waited for others (``wait: ...``). The recording stays in
    memory until the last recorded epoch ends. Writing the file is excluded from a run's times, but recorded epochs are
    slower than others.

    Args:
        folder: folder of the files; created if missing.
        first_epoch: epochs of this run before the recording; the first epoch also warms caches up. A run that is too
            short is recorded from its start.
        epochs: epochs to record.
        max_batches: most batches to record, including validation. It bounds the file, about 250 bytes per operator.
    """

    def __init__(self, folder: str | Path, first_epoch: int = 1, epochs: int = 2, max_batches: int = 20) -> None:
        limits = {"first_epoch": (first_epoch, 0), "epochs": (epochs, 1), "max_batches": (max_batches, 1)}
        for name, (value, least) in limits.items():
            if not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"callbacks.timeline.{name}={value} was set; it must be an integer from {least}.",
                    hint=f"remove callbacks.timeline.{name} for the default.",
                )
        self._folder, self._first, self._epochs, self._max_batches = Path(folder), first_epoch, epochs, max_batches
        self._epoch = self._batches = 0
        self._profile: Any = None
        self._batch: Any = None
        self._running = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        last = trainer.max_epochs if trainer.max_epochs is not None else -1
        if 0 <= last - trainer.current_epoch < self._first + self._epochs:
            self._first = 0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._epoch == self._first:
            self._begin(trainer)

    def on_train_batch_start(self, *args: Any) -> None:
        self._enter("training batch")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._leave(trainer)

    def on_validation_batch_start(self, *args: Any) -> None:
        self._enter("validation batch")

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._leave(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._epoch += 1
        if self._profile is not None and self._epoch == self._first + self._epochs:
            self._finish(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._profile is not None:  # training stopped early
            self._finish(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop(trainer)

    def _begin(self, trainer: pl.Trainer) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # Otherwise the profiler prints a line when it starts and when it stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile = profile(activities=activities)
        self._profile.start()
        self._profile.add_metadata("gtrain_rank", str(trainer.global_rank))
        self._running = True
        _set_span(trainer, record_function)

    def _enter(self, name: str) -> None:
        if self._running:
            self._batch = record_function(name)
            self._batch.__enter__()

    def _leave(self, trainer: pl.Trainer) -> None:
        if self._running:
            self._batch.__exit__(None, None, None)
            self._batches += 1
            if self._batches == self._max_batches:
                self._stop(trainer)

    def _stop(self, trainer: pl.Trainer) -> None:
        if self._running:
            self._running = False
            _set_span(trainer, nullcontext)
            self._profile.stop()

    def _finish(self, trainer: pl.Trainer) -> None:
        self._stop(trainer)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._folder / f"trace-rank{trainer.global_rank}.json"))
        self._profile = None


def _set_span(trainer: pl.Trainer, span: Any) -> None:
    if isinstance(trainer.strategy, GraphStrategy):
        trainer.strategy.counters.span = span
