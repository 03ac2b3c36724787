"""A callback that ends a server as Kubernetes does before it drains a node."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import lightning.pytorch as pl


class DrainServer(pl.Callback):
    """Send SIGTERM to a server's command in the sixth step of epoch 1; the step goes on once rank 0 was told.

    Args:
        process: process id of the command.
    """

    def __init__(self, process: int) -> None:
        self._process = process

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        """Send it, and wait for the request that the ranks end."""
        if (trainer.global_rank, trainer.current_epoch, index) != (0, 1, 5):
            return
        os.kill(self._process, signal.SIGTERM)
        deadline = time.monotonic() + 60
        while not trainer.strategy.interruption.requested:  # type: ignore[attr-defined]
            assert time.monotonic() < deadline, "rank 0 was not told that a server leaves"
            time.sleep(0.01)
