"""What one process of bench_sar.py spends, epoch by epoch.

Extra peak memory is the largest resident memory from the beginning of the training on, less the resident memory at that
moment: the packages, the shard (or the graph) with its features, and the parameters are there already; all that the
training makes, gradients, optimizer, kept blocks and messages included, is not. Freed memory is handed back to the
kernel before the first reading, so that it does not hide what is taken later.
"""

from __future__ import annotations

import ctypes
import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from gtrain.strategy.counters import cpu_seconds, peak_rss_bytes, rss_bytes


class Meter:
    """Reads time, CPU and memory; :attr:`epochs` has one entry an epoch."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []
        self.before = 0

    def start(self) -> None:
        """The training begins: forget the peak of loading."""
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self.before = rss_bytes()

    def begin(self) -> None:
        """An epoch begins."""
        self._wall, self._cpu = time.perf_counter(), cpu_seconds()

    def end(self, **counts: float) -> None:
        """An epoch ends."""
        spent = {"wall": time.perf_counter() - self._wall, "cpu": cpu_seconds() - self._cpu}
        self.epochs.append({**spent, **counts, "extra": peak_rss_bytes() - self.before})

    def write(self, path: Path) -> None:
        """Leave the readings as JSON."""
        path.write_text(json.dumps(self.epochs))


class Probe(Callback):
    """A :class:`Meter` in every rank of a gtrain run; leaves ``probe-<rank>.json``."""

    def __init__(self, folder: str) -> None:
        self._folder, self._meter = Path(folder), Meter()
        self._sent = self._bound = 0
        self._waited = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for batch in trainer.train_dataloader or ():
            batch.x.sum()  # features are mapped from files, and resident only once they were read
        self._meter.start()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        counters: Any = trainer.strategy.counters
        self._sent, self._bound, self._waited = counters.bytes_sent, counters.bound_bytes or 0, counters.wait_seconds
        self._meter.begin()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        counters: Any = trainer.strategy.counters
        self._meter.end(
            sent=counters.bytes_sent - self._sent,
            bound=(counters.bound_bytes or 0) - self._bound,
            waited=counters.wait_seconds - self._waited,
        )

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._meter.write(self._folder / f"probe-{trainer.global_rank}.json")
