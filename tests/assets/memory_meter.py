"""A callback that writes down the peak memory of a command's processes, for verbs without a ``summary.json``."""

from __future__ import annotations

import json
from pathlib import Path

import lightning.pytorch as pl

from gtrain.strategy.base import GraphStrategy
from gtrain.strategy.counters import PeakMemory


class MemoryMeter(pl.Callback):
    """Samples from the set-up to the tear-down of a run.

    Args:
        folder: gets ``<role>-<rank>.json`` for each process, with the keys of ``summary.json``.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._memory = Path(folder), PeakMemory()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Start to sample."""
        self._memory.start()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write the figures of this process; rank 0 also those of the servers."""
        strategy = trainer.strategy
        assert isinstance(strategy, GraphStrategy)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._write("worker", trainer.global_rank, self._memory.figures())
        for number, figures in enumerate(strategy.servers.figures() if trainer.is_global_zero else []):
            self._write("parameter", number, figures)

    def _write(self, role: str, rank: int, figures: dict[str, int]) -> None:
        content = {"role": role, "rank": rank, **figures}
        (self._folder / f"{role}-{rank}.json").write_text(json.dumps(content))
