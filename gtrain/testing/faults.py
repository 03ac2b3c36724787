"""Fault injection for tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import lightning.pytorch as pl


class KillRank(pl.Callback):
    """Kill a rank by SIGKILL at the start of a training epoch, after the checkpoint of the previous one.

    Args:
        rank: the rank.
        epoch: the epoch, from 0.
        record: file into which the rank writes the process id of its session's leader before it dies.
        once: kill it only if the file does not exist.
    """

    def __init__(self, rank: int, epoch: int, record: str, once: bool = False) -> None:
        self._rank, self._epoch, self._record, self._once = rank, epoch, Path(record), once

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        due = (trainer.global_rank, trainer.current_epoch) == (self._rank, self._epoch)
        if due and not (self._once and self._record.exists()):
            self._record.write_text(str(os.getsid(0)))
            os.kill(os.getpid(), signal.SIGKILL)
