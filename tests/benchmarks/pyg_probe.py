"""What bench_pyg.py has gtrain run in each rank: a module that computes nothing, and a callback that counts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch_geometric.nn import GraphSAGE

from gtrain.strategy.counters import cpu_seconds
from gtrain_pyg.loader import SampledBatches


class Idle(pl.LightningModule):
    """Takes batches and trains nothing, so that what is measured is making them."""

    def __init__(self) -> None:
        super().__init__()
        self.network = GraphSAGE(1, 1, 3)  # three layers, as the fan-out has; never called
        self.weight = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The smallest loss there is."""
        assert batch.x.size(0) == batch.n_id.numel() and batch.y.numel() and batch.e_id.numel()
        return self.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing is validated."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing is tested."""

    def configure_optimizers(self) -> Any:
        """Any will do."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Probe(pl.Callback):
    """Writes what the steps after the first few took.

    Args:
        folder: where ``probe-<rank>.json`` goes.
        warm_up: steps that are not counted.
        stages: whether to measure sampling and assembling apart, by the CPU seconds of their threads.
    """

    def __init__(self, folder: str, warm_up: int = 5, stages: bool = False) -> None:
        self.path, self._warm_up = Path(folder), warm_up
        self._began: dict[str, float] = {}
        self._seeds = self._epoch_seeds = self._steps = 0
        self._rows = self._nodes = self._edges = 0
        self._resident: list[int] = []
        self._targets: list[list[int]] = []
        self._baseline = self._pss = pss_bytes()
        self._stages = {"sample": Stage(), "prefetch": Stage(), "assemble": Stage()} if stages else {}
        for name, stage in self._stages.items():
            setattr(SampledBatches, f"_{name}", stage.measured(getattr(SampledBatches, f"_{name}")))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch."""
        self._steps += 1
        self._epoch_seeds += int(batch.batch_size)
        if self._steps == self._warm_up:
            self._began, self._rows = now(), remote_rows(trainer)
        elif self._steps > self._warm_up:
            self._seeds += int(batch.batch_size)
            counts = list(batch.num_sampled_nodes)
            self._nodes += sum(counts)
            self._edges += sum(batch.num_sampled_edges)
            # A layer computes the rows that the following layers read, the first layer all but the last hop's.
            self._targets.append([sum(counts[: len(counts) - 1 - layer]) for layer in range(len(counts) - 1)])
        if self._steps % 10 == 0:
            self._resident.append(resident_bytes())
        if self._steps % 25 == 0:  # while all ranks run: pages of the process that they were forked from count in part
            self._pss = max(self._pss, pss_bytes())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write what was counted."""
        spent = {name: value - self._began[name] for name, value in now().items()}
        content = spent | {
            "seeds": self._seeds,
            "nodes": self._nodes,
            "edges": self._edges,
            "targets": [sum(counts) / len(self._targets) for counts in zip(*self._targets, strict=True)],
            "epoch_seeds": self._epoch_seeds,
            "remote_rows": remote_rows(trainer) - self._rows,
            "steps": self._steps - self._warm_up,
            "stages": {name: stage.seconds[self._warm_up :] for name, stage in self._stages.items()},
            "pss": self._pss,
            "baseline_pss": self._baseline,
            "resident": self._resident,
        }
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / f"probe-{trainer.strategy.global_rank}.json").write_text(json.dumps(content))


class Stage:
    """One stage of making batches: the CPU seconds that its thread spent on each batch, in ``seconds``."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def measured(self, method: Any) -> Any:
        """Return the method, measured."""

        def measure(*args: Any) -> Any:
            start = time.thread_time()
            result = method(*args)
            self.seconds.append(time.thread_time() - start)
            return result

        return measure


def remote_rows(trainer: pl.Trainer) -> int:
    """Rows of nodes that were asked of other ranks so far."""
    return int(trainer.strategy._opened.features.counts.fetched_nodes)


def now() -> dict[str, float]:
    """Wall and CPU seconds so far."""
    return {"wall": time.perf_counter(), "cpu": cpu_seconds()}


def resident_bytes() -> int:
    """Resident set size, bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pss_bytes() -> int:
    """Proportional set size: memory shared by k processes counts 1/k."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
