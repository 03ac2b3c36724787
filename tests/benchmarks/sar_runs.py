"""Running gtrain and DGL for bench_sar.py, and reading what they spent."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sar_readings import HIDDEN, MODELS, Workload

HERE = Path(__file__).resolve().parent
QUIET = ["callbacks=none", "logger=none", "trainer.limit_val_batches=0", "trainer.limit_test_batches=0"]


@dataclass
class Row:
    """What one configuration spent.

    Attributes:
        name: what ran.
        wall: median epoch, seconds.
        cpu: median epoch, CPU seconds summed over ranks; ``spread`` is half of largest less smallest.
        extra: largest rank's extra peak memory, MB (10^6 bytes); see :mod:`sar_probe`.
        sent, bound: median epoch, MiB summed over ranks, and the strategy's lower bound of it.
        per_rank: bytes that the busiest rank sends in an epoch.
        halo: remote rows that the ranks read, summed.
    """

    name: str
    wall: float = 0.0
    cpu: float = 0.0
    spread: float = 0.0
    extra: float = 0.0
    sent: float = 0.0
    bound: float = 0.0
    per_rank: float = 0.0
    halo: int = 0
    ranks: int = 1
    mode: int = 0


@dataclass
class Bench:
    """Where runs are made, and how.

    Attributes:
        folder: of stores and runs.
        scale: share of the workloads' nodes and edges.
        epochs: measured ones; one more goes before.
    """

    folder: Path
    scale: float = 1.0
    epochs: int = 3

    def store(self, workload: Workload, parts: int, partitioner: str) -> list[str]:
        """Make the store in a process of its own, so that no rank's memory has it, and return its settings."""
        settings = [*workload.settings(self.scale), f"data.partitioner={partitioner}"]
        self.command(["partition", "strategy=single", f"data.num_parts={parts}", *settings])
        return settings

    def gtrain(self, name: str, settings: list[str], epochs: int | None = None) -> Row:
        """Train, and read every rank's probe."""
        run = self.folder / "runs" / re.sub(r"\W+", "-", name)
        self.command([*settings, *QUIET, *self.probe(run, epochs), f"hydra.run.dir={run}"])
        return self.read(name, run)

    def probe(self, run: Path, epochs: int | None = None) -> list[str]:
        """Settings that measure a run of one warm-up epoch and the measured ones."""
        probe = f"+callbacks.probe={{_target_:sar_probe.Probe,folder:{run}}}"
        return [f"trainer.max_epochs={1 + (epochs or self.epochs)}", "trainer.enable_progress_bar=false", probe]

    def read(self, name: str, run: Path) -> Row:
        """The row of a run that is over."""
        summary = json.loads((run / "summary.json").read_text())
        probes = [json.loads((run / f"probe-{rank}.json").read_text()) for rank in range(summary["world_size"])]
        row = make_row(name, probes)
        row.halo = sum(summary["store"]["halo"])
        return row

    @staticmethod
    def metric(run: Path, name: str) -> float:
        """A metric of a run that is over."""
        return float(json.loads((run / "summary.json").read_text())["metrics"][name])

    def dgl(self, model: str, settings: list[str]) -> Row:
        """One process of DGL on the store of one part."""
        out = self.folder / "dgl.json"
        store = self.command(["partition", "strategy=single", "data.num_parts=1", *settings]).rpartition("store: ")[2]
        arguments = [store.strip(), model, str(HIDDEN[model]), str(1 + self.epochs), str(out)]
        self.run([sys.executable, str(HERE / "sar_dgl.py"), *arguments], {"DGLBACKEND": "pytorch"})
        return make_row("DGL", [json.loads(out.read_text())])

    def command(self, arguments: list[str]) -> str:
        """Run gtrain and return what it printed."""
        return self.run([sys.executable, "-m", "gtrain", *arguments])

    def run(self, command: list[str], extra: dict[str, str] | None = None) -> str:
        """Run a command with one thread a process; end with what it said if it fails."""
        done = subprocess.run(
            command, cwd=self.folder, env=environment(extra), capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}")
        return done.stdout


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Variables of a measured process."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(extra or {})}


def make_row(name: str, probes: list[list[dict[str, Any]]]) -> Row:
    """Medians over the epochs after the first; sums and maxima over ranks."""
    measured = list(zip(*(probe[1:] for probe in probes), strict=True))
    cpu = [sum(rank["cpu"] for rank in epoch) for epoch in measured]
    return Row(
        name,
        wall=statistics.median(max(rank["wall"] for rank in epoch) for epoch in measured),
        cpu=statistics.median(cpu),
        spread=(max(cpu) - min(cpu)) / 2,
        extra=max(epoch["extra"] for probe in probes for epoch in probe) / 1e6,
        sent=statistics.median(sum(rank["sent"] for rank in epoch) for epoch in measured) / 2**20,
        bound=statistics.median(sum(rank["bound"] for rank in epoch) for epoch in measured) / 2**20,
        per_rank=statistics.median(max(rank["sent"] for rank in epoch) for epoch in measured),
        ranks=len(probes),
    )


def sar(bench: Bench, model: str, mode: int, ranks: int, settings: list[str], name: str = "") -> Row:
    """A run of ``strategy=sar``."""
    name = name or f"sar mode {mode} x {ranks}"
    chosen = ["strategy=sar", f"mode={mode}", f"trainer.num_nodes={ranks}", *MODELS[model], *settings]
    row = bench.gtrain(name, chosen)
    row.mode = mode
    return row


def dgl_reason() -> str | None:
    """Why DGL cannot be measured; None where it can."""
    if importlib.util.find_spec("dgl") is None:
        return "DGL is not installed: pip install 'gtrain[dgl]'"
    return None
