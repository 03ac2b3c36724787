"""``strategy=ps`` with its workers on a GPU, beside the same command on CPUs: seconds per step.

    python tests/benchmarks/gpu/bench_ps.py [--seconds 60] [--device cpu --small]

Two servers, and two workers that share the GPU, or one; n = 2^20 features, Zipf ids, 72 nonzeros a row, row-wise
Adagrad: the workload of ``tests/benchmarks/bench_ps.py``, with 1024 rows in a step and 52 columns; and a deep one of
4096 rows, 2^17 features, 256 columns and eight layers. Each command runs as a user runs it; the fastest epoch counts.
``cores`` are those that the command may use: all of them, or two.

Prints one JSON object per reading; the last compare where the products of fetched rows are computed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback

from gtrain.nn import Csr
from gtrain.nn.csr import product
from gtrain_ps.worker.device import WorkerDevice

FEATURES, NONZEROS, WORKERS, SERVERS = 1 << 20, 72, 2, 2
ZIPF = 1.05


@dataclass(frozen=True)
class Workload:
    """Rows of each of two workers in a step, columns, layers, and steps per epoch."""

    rows: int
    width: int
    layers: int
    steps: int
    features: int = FEATURES


WORKLOADS = {"bench": Workload(512, 52, 2, 30), "deep": Workload(2048, 256, 8, 8, 1 << 17)}
SMALL = {"bench": Workload(64, 8, 2, 6, 1 << 12), "deep": Workload(64, 32, 4, 6, 1 << 12)}


@dataclass(frozen=True)
class Run:
    """A command: its workload, the device and number of its workers, and the cores that it may use (None: all)."""

    workload: str
    accelerator: str
    workers: int = WORKERS
    cores: int | None = None

    def __str__(self) -> str:
        return f"{self.workload}, {self.workers} worker(s) on {self.accelerator}, {self.cores or 'all'} cores"


class PeakMemory(Callback):
    """Writes the peak of a rank's device memory, in bytes, to ``<folder>/<rank>``."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Write it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
        (self._folder / str(trainer.global_rank)).write_text(str(peak))


def command(workload: Workload, folder: Path, accelerator: str, workers: int, epochs: int) -> list[str]:
    """Return the command of a workload."""
    batch = workload.rows * WORKERS
    settings = {
        "strategy": "ps",
        "trainer.num_nodes": workers,
        "strategy.servers": SERVERS,
        "trainer.accelerator": accelerator,
        "data": "planted_sparse",
        "data.num_rows": int(batch * workload.steps * 1.05),
        "data.num_features": workload.features,
        "data.features_per_row": NONZEROS,
        "data.zipf_exponent": ZIPF,
        "data.binary": "false",
        "data.train_fraction": 1 / 1.05,
        "data.val_fraction": 0.02,
        "data.partitioner": "random",
        "data.batch_size": batch,
        "model": "sparse",
        "model.hidden_channels": workload.width,
        "model.num_layers": workload.layers,
        "model.sparse_optimizer._target_": "gtrain.nn.RowwiseAdagrad",
        "model.sparse_optimizer.lr": 0.05,
        "trainer.max_epochs": epochs,
        "trainer.limit_val_batches": 0,
        "trainer.limit_test_batches": 0,
        "trainer.enable_progress_bar": "false",
        "callbacks": "none",
        "+callbacks.memory": f"{{_target_:bench_ps.PeakMemory,folder:{folder}/peak}}",
        "logger": "none",
        "paths.stores": folder.parent / "stores",
        "hydra.run.dir": folder / "run",
    }
    return [sys.executable, "-m", "gtrain", *(f"{key}={value}" for key, value in settings.items())]


def steps_of_command(workload: Workload, folder: Path, run: Run, limit: float) -> dict[str, Any]:
    """Run the command, and return its seconds per step and what its processes took."""
    epochs = 4
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]])}
    usable = sorted(os.sched_getaffinity(0))[: run.cores]
    start = time.perf_counter()
    subprocess.run(
        command(workload, folder, run.accelerator, run.workers, epochs),
        check=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit,
        preexec_fn=lambda: os.sched_setaffinity(0, usable),
    )
    total = time.perf_counter() - start
    summary = json.loads((folder / "run" / "summary.json").read_text())
    workers = [rank for rank in summary["ranks"] if rank["role"] == "worker"]
    servers = [rank for rank in summary["ranks"] if rank["role"] != "worker"]
    steps = epochs * workload.steps
    return {
        "reading": f"seconds per step, {run}",
        "cores": len(usable),
        "seconds_per_step": min(summary["epoch_seconds"]) / workload.steps,
        "epoch_seconds": summary["epoch_seconds"],
        "last_loss": summary["history"][-1]["train/loss"] if summary["history"] else None,
        "worker_cpu_seconds_per_step": sum(rank["cpu_seconds"] for rank in workers) / steps,
        "server_cpu_seconds_per_step": sum(rank["cpu_seconds"] for rank in servers) / steps,
        "peak_device_bytes": [int(path.read_text()) for path in sorted((folder / "peak").iterdir())],
        "command_seconds": total,
    }


# ------------------------------------------------------------------------------------------- fetched rows


def fetched_rows(workload: Workload, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """Compare a product of fetched rows on the host with one on the device, each with its backward pass and copies.

    Rows come from the host, and the gradient of the rows goes back there: with a product on the host, the result is
    copied to the device and its gradient back; with one on the device, the distinct rows are.
    """
    generator = np.random.default_rng(0)
    power = 1 - ZIPF
    drawn = ((workload.features**power - 1) * generator.random(workload.rows * NONZEROS) + 1) ** (1 / power)
    ids = np.minimum(drawn.astype(np.int64), workload.features) - 1
    distinct, inverse = torch.unique(torch.from_numpy(ids), return_inverse=True)
    offsets = torch.arange(0, workload.rows * NONZEROS + 1, NONZEROS)
    values = torch.from_numpy(generator.random(len(ids), np.float32))
    rows, table = Csr(inverse, values, offsets), torch.randn(len(distinct), workload.width)
    gradient, worker = torch.randn(workload.rows, workload.width, device=device), WorkerDevice(device)

    def on_host() -> None:
        fetched = table.detach().requires_grad_()
        result = product(rows, fetched)
        result.detach().to(device)
        result.backward(gradient.cpu())

    def on_device() -> None:
        fetched = worker.buffer(*table.shape, dtype=table.dtype).copy_(table)
        there = worker.to_device(fetched).detach().requires_grad_()
        product(rows.to(device), there).backward(gradient)
        assert there.grad is not None
        worker.to_host(there.grad)
        worker.synchronize()

    readings = []
    for name, function in (("host", on_host), ("device", on_device)):
        seconds = median_seconds(function, repeats, device)
        readings.append(
            {
                "reading": f"product of fetched rows on the {name}",
                "rows": workload.rows,
                "width": workload.width,
                "entries": len(ids),
                "distinct": len(distinct),
                "threads": torch.get_num_threads(),
                "seconds": seconds,
            }
        )
    return readings


def median_seconds(function: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Return the median of the seconds of a call, without the first three."""
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times[3:]))


def main() -> None:
    """Print the readings, the most important first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="time limit of all readings")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small workloads, to try the script")
    given = parser.parse_args()
    deadline = time.monotonic() + given.seconds
    workloads = SMALL if given.small else WORKLOADS
    accelerator = "gpu" if given.device == "cuda" else "cpu"
    # Pairs of a command on the device and the same one on CPUs, then the CPUs alone.
    pairs = [("bench", WORKERS), ("bench", 1), ("deep", 1)]
    runs = [Run(name, kind, workers) for name, workers in pairs for kind in (accelerator, "cpu")]
    seconds: dict[Run, float] = {}
    with tempfile.TemporaryDirectory(prefix="bench-ps-") as folder:
        for number, run in enumerate([*runs, Run("bench", "cpu", WORKERS, 2), Run("deep", "cpu", 1, 2)]):
            if number == len(runs):
                device = torch.device("cuda:0" if given.device == "cuda" else "cpu")
                for workload in workloads.values():
                    for reading in fetched_rows(workload, device, 3 if given.small else 15):
                        print(json.dumps(reading), flush=True)
            left = deadline - time.monotonic()
            try:
                if left < 5:
                    raise TimeoutError
                reading = steps_of_command(workloads[run.workload], Path(folder, str(number)), run, left)
            except subprocess.CalledProcessError as error:
                print(json.dumps({"reading": f"failed: {run}", "error": error.stderr[-1500:]}), flush=True)
                continue
            except (TimeoutError, subprocess.TimeoutExpired):
                print(json.dumps({"reading": f"no time for {run}"}), flush=True)
                continue
            print(json.dumps(reading), flush=True)
            seconds.setdefault(run, reading["seconds_per_step"])
            other = runs[number - 1] if number < len(runs) else Run(run.workload, accelerator, run.workers)
            if run.accelerator == "cpu" and (number % 2 or number >= len(runs)) and other in seconds:
                ratio = seconds[other] / reading["seconds_per_step"]
                print(json.dumps({"reading": f"{other} / {run}", "ratio": ratio}), flush=True)


if __name__ == "__main__":
    main()
