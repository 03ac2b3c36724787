"""A callback by which a run lasts until a test has done to it what it does: a fast machine would end it before."""

from __future__ import annotations

import os
from pathlib import Path

import lightning.pytorch as pl


class TrainUntil(pl.Callback):
    """Trains until the folder has a file ``enough``; all ranks stop after the same epoch.

    Rank 0 reads the file when an epoch begins, and writes the number of the last epoch, which is two later: no rank is
    so far ahead of it.

    Args:
        folder: of both files.
    """

    def __init__(self, folder: str) -> None:
        self._enough, self._last = Path(folder, "enough"), Path(folder, "last")
        self._last.parent.mkdir(parents=True, exist_ok=True)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Decide which epoch is the last."""
        if trainer.global_rank == 0 and self._enough.exists() and not self._last.exists():
            part = self._last.with_suffix(".part")
            part.write_text(str(trainer.current_epoch + 2))
            os.replace(part, self._last)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop after the last epoch."""
        if self._last.exists() and trainer.current_epoch >= int(self._last.read_text()):
            trainer.should_stop = True
