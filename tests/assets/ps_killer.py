"""A callback that kills workers and servers of its job at moments of a plan, each once."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl


class Killer(pl.Callback):
    """Kills the processes of a job of two workers and two servers, as SIGKILL does, and writes down whom.

    Args:
        folder: gets a file for each moment that has come, and ``killed``: the process ids of all victims.
        run: folder of the run, whose logs say which processes the servers are.
        plan: by a hook of callbacks and an epoch (``on_validation_end 3``) who kills whom (``rank-1 kills parameter-0
            rank-1``). With ``apart`` in place of a hook, the second server is killed before the epoch's first step is
            sent, and the victims as soon as the first server has applied this step.
    """

    def __init__(self, folder: str, run: str, plan: dict[str, str]) -> None:
        self._folder, self._run, self._plan = Path(folder), Path(run), dict(plan)
        self._folder.mkdir(parents=True, exist_ok=True)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Say which process this worker is."""
        (self._folder / f"rank-{trainer.global_rank}.pid").write_text(str(os.getpid()))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Before the first batch of validation."""
        self._strike(trainer, "on_validation_start")

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Behind a batch of validation."""
        self._strike(trainer, "on_validation_batch_end")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """When the metrics of validation are known."""
        self._strike(trainer, "on_validation_end")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """When a checkpoint is about to be written."""
        self._strike(trainer, "on_save_checkpoint")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Before a step is sent to the servers."""
        victims = self._due(trainer, "apart") if trainer.fit_loop.epoch_loop.batch_idx == 0 else []
        if victims:
            self._kill(["parameter-1"])
            threading.Thread(target=self._when_apart, args=(trainer, victims), daemon=True).start()

    def _when_apart(self, trainer: pl.Trainer, victims: list[str]) -> None:
        servers: Any = trainer.strategy.parameter_servers  # type: ignore[attr-defined]
        begun = trainer.global_step
        while servers.submit(0, "status", {}).result().fields["version"] <= begun:
            time.sleep(0.005)
        self._kill(victims)

    def _strike(self, trainer: pl.Trainer, hook: str) -> None:
        self._kill(self._due(trainer, hook))

    def _due(self, trainer: pl.Trainer, hook: str) -> list[str]:
        """The victims, if this is the moment, and it comes for the first time."""
        moment = f"{hook} {trainer.current_epoch}"
        killer, _, victims = self._plan.get(moment, "").partition(" kills ")
        if killer != f"rank-{trainer.global_rank}":
            return []
        try:
            os.close(os.open(self._folder / moment, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return []
        return victims.split()

    def _kill(self, victims: list[str]) -> None:
        for name in victims:
            pid = self._pid(name)
            with open(self._folder / "killed", "a") as killed:
                print(pid, file=killed)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _pid(self, name: str) -> int:
        if name.startswith("rank"):
            return int((self._folder / f"{name}.pid").read_text())
        return int(re.findall(r"process (\d+) serves", (self._run / "logs" / f"{name}.log").read_text())[-1])
