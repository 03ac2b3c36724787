"""A callback that writes the CPU seconds of each training epoch."""

from __future__ import annotations

import json
from pathlib import Path

import lightning.pytorch as pl

from gtrain.strategy.counters import cpu_seconds


class EpochProbe(pl.Callback):
    """Writes a list of numbers when training ends.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._started_at = 0.0
        self._seconds: list[float] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._started_at = cpu_seconds()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop it."""
        self._seconds.append(cpu_seconds() - self._started_at)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the seconds."""
        self._path.write_text(json.dumps(self._seconds))
