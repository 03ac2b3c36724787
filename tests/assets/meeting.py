"""A callback by which jobs of a sweep show that they run at the same time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import lightning.pytorch as pl

LIMIT = 300.0


class Meeting(pl.Callback):
    """Waits when training starts until as many jobs as there are to be have started; fails if they do not come.

    Args:
        folder: gets a file for each job.
        jobs: number of jobs.
    """

    def __init__(self, folder: str, jobs: int) -> None:
        self._folder, self._jobs = Path(folder), jobs

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Rank 0 waits; the others wait for it."""
        if trainer.global_rank > 0:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f"{os.getpid()}-{time.monotonic_ns()}").touch()
        deadline = time.monotonic() + LIMIT
        while len(list(self._folder.iterdir())) < self._jobs:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._jobs} jobs did not run at the same time")
            time.sleep(0.05)
