"""Epochs of single and sar on one GPU, through the command: losses, bytes, seconds, device memory.

    python tests/benchmarks/gpu/bench_sar.py
    python tests/benchmarks/gpu/bench_sar.py --device cpu --small

Two ranks share the GPU, so that seconds say what messages through host memory cost, not what another GPU gains. The
graph is ``data=planted`` with 169,343 nodes and 2.5 million edges. Each run prints a JSON object: the median epoch
after the first two, bytes that all ranks sent, and the difference of its losses from the first run's. The last line
compares the bytes with those of the same ranks on the CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SAGE = ["model=sage", "model.hidden_channels=256", "model.num_layers=3"]
GAT = ["model=gat", "model.hidden_channels=64", "model.heads=4", "model.num_layers=3"]
RUNS: list[tuple[str, list[str]]] = [
    ("single sage", ["strategy=single", *SAGE]),
    *((f"sar sage, mode {mode}", ["strategy=sar", f"mode={mode}", "trainer.num_nodes=2", *SAGE]) for mode in (1, 2, 3)),
    ("single gat", ["strategy=single", *GAT]),
    *((f"sar gat, mode {mode}", ["strategy=sar", f"mode={mode}", "trainer.num_nodes=2", *GAT]) for mode in (1, 3, 2)),
]
FIXED = ["callbacks=none", "logger=none", "trainer.limit_val_batches=0", "trainer.limit_test_batches=0"]


def train(settings: list[str], folder: Path, number: int, limit: float) -> dict[str, Any]:
    """Return the summary of a run."""
    run = folder / str(number)
    command = [sys.executable, "-m", "gtrain", *settings, f"hydra.run.dir={run}", "trainer.enable_progress_bar=false"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=max(limit, 1))
    if done.returncode:
        raise RuntimeError(done.stdout[-1500:] + done.stderr[-1500:])
    return json.loads((run / "summary.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a graph of 2,000 nodes")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no other run starts")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--stores", type=Path, help="folder of stores, which later runs use again")
    options = parser.parse_args()
    nodes, edges = (2_000, 30_000) if options.small else (169_343, 2_500_000)
    data = ["data=planted", f"data.num_nodes={nodes}", f"data.num_edges={edges}", "data.partitioner=random", *FIXED]
    data += [f"paths.stores={options.stores.resolve()}"] if options.stores else []
    accelerator = "cpu" if options.device == "cpu" else "gpu"
    end, first, sent = time.perf_counter() + options.seconds, {}, {}
    with tempfile.TemporaryDirectory() as name:
        cpu = ("on the CPU", ["strategy=sar", "mode=1", "trainer.num_nodes=2", *SAGE, *data])
        runs = [(title, [*own, *data, f"trainer.accelerator={accelerator}"]) for title, own in RUNS]
        for number, (title, settings) in enumerate([*runs[:2], cpu, *runs[2:]]):
            if time.perf_counter() > end:
                print(json.dumps({"left_out": title}), flush=True)
                continue
            try:
                settings.append(f"trainer.max_epochs={options.epochs}")
                summary = train(settings, Path(name), number, end - time.perf_counter() + 10)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(json.dumps({"run": title, "error": str(error)}), flush=True)
                continue
            losses = [epoch["train/loss"] for epoch in summary["history"]]
            reference = first.setdefault("gat" if "gat" in title else "sage", losses)
            sent[title] = sum(rank["bytes_sent"] for rank in summary["ranks"]) / len(losses)
            reading = {
                "run": title, "ms": round(1000 * statistics.median(summary["epoch_seconds"][2:] or [0]), 2),
                "epoch_seconds": [round(seconds, 4) for seconds in summary["epoch_seconds"]],
                "mib_sent": round(sent[title] / 2**20, 1), "losses": losses[:2] + losses[-1:],
                "largest_difference": max(abs(a - b) for a, b in zip(losses, reference, strict=False)),
                "device_mib": [round(rank["peak_device_bytes"] / 2**20) for rank in summary["ranks"]],
            }  # fmt: skip
            print(json.dumps(reading), flush=True)
    if {"sar sage, mode 1", "on the CPU"} <= sent.keys():
        print(json.dumps({"bytes over those on the CPU": sent["sar sage, mode 1"] / sent["on the CPU"]}))


if __name__ == "__main__":
    main()
