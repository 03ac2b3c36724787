"""Fault injection for tests."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from gtrain.strategy.base import GraphStrategy


class KillRank(pl.Callback):
    """Kill a rank by SIGKILL when an epoch or the test starts, after the checkpoint of the previous epoch.

    Args:
        rank: the rank.
        epoch: the epoch, from 0; the number of all epochs is the test after them.
        record: file into which the rank writes the process id of its session's leader before it dies.
        once: kill it only if the file does not exist.
    """

    def __init__(self, rank: int, epoch: int, record: str, once: bool = False) -> None:
        self._rank, self._epoch, self._record, self._once = rank, epoch, Path(record), once

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._kill_if_due(trainer)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._kill_if_due(trainer)

    def _kill_if_due(self, trainer: pl.Trainer) -> None:
        due = (trainer.global_rank, trainer.current_epoch) == (self._rank, self._epoch)
        if due and not (self._once and self._record.exists()):
            self._record.write_text(str(os.getsid(0)))
            os.kill(os.getpid(), signal.SIGKILL)


_SECONDS = 60.0
"""How long a rank waits for a signal that its agent passes on."""


class Terminate(pl.Callback):
    """Send SIGTERM, as before a preemption, while a rank takes a step.

    The rank goes on with the step when the signal has reached it.

    Args:
        rank: the rank that sends it.
        epoch: the epoch, from 0.
        step: the step of the epoch, from 0.
        record: file that the rank creates before; it sends nothing if the file exists.
        to_agent: whether to send it to the process that started the rank, or else to the rank.
    """

    def __init__(self, rank: int, epoch: int, step: int, record: str, to_agent: bool = True) -> None:
        self._when, self._record, self._to_agent = (rank, epoch, step), Path(record), to_agent

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        if (trainer.global_rank, trainer.current_epoch, index) == self._when and not self._record.exists():
            self._record.touch()
            os.kill(os.getppid() if self._to_agent else os.getpid(), signal.SIGTERM)
            assert isinstance(trainer.strategy, GraphStrategy)
            late = time.monotonic() + _SECONDS
            while not trainer.strategy.interruption.requested:
                if time.monotonic() > late:
                    raise TimeoutError(f"rank {trainer.global_rank} got no SIGTERM within {_SECONDS:g} s.")
                time.sleep(0.005)
