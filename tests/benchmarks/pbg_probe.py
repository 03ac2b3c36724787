"""What one rank of bench_pbg_partitions.py holds in memory while it trains, and how long it stands still.

Bytes are proportional (PSS): what several ranks share counts once over all of them. Pages of mapped files are left out,
for the kernel takes those back whenever it likes. The baseline is read before the data set and tables are opened.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

PAUSE_SECONDS = 0.1


class Probe(Callback):
    """Looks at memory in training epochs; leaves ``probe-<rank>.json``.

    It has the peak bytes above the baseline by kind, ``tables`` and ``all``, and of each epoch the seconds that the
    rank waited, ``waited``.

    Args:
        folder: of that file.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._stop = Path(folder), threading.Event()
        self._before: dict[str, int] = {}
        self._peak = {"tables": 0, "all": 0}
        self._waited: list[float] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._before = self._before or held()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        threading.Thread(target=self._watch, name="probe", daemon=True).start()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        counters: Any = trainer.strategy.counters
        self._waited.append(counters.wait_seconds - sum(self._waited))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop.set()
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f"probe-{trainer.global_rank}.json").write_text(
            json.dumps({**self._peak, "waited": self._waited})
        )

    def _watch(self) -> None:
        while not self._stop.wait(PAUSE_SECONDS):
            now = held()
            self._peak = {kind: max(self._peak[kind], now[kind] - self._before[kind]) for kind in now}


def held() -> dict[str, int]:
    """Bytes of this process now: ``tables``, in memory that ranks share, and ``all``, that and its own."""
    found = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split()[:2]
        found[name.rstrip(":")] = int(value) * 1024
    return {"tables": found["Pss_Shmem"], "all": found["Pss_Shmem"] + found["Pss_Anon"]}
