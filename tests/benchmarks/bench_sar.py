"""Time, CPU, memory and bytes of sar's modes beside the single process, in one run.

    python tests/benchmarks/bench_sar.py --model sage --ranks 1 2 4

One thread a rank. Prints, for each configuration, the median training epoch (wall seconds), CPU seconds of an epoch
summed over ranks, the largest rank's extra memory (peak less what imports took, less its part of the store, MiB), MiB
sent an epoch over all ranks, and the ratios of CPU and memory to ``strategy=single``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def measure(folder: Path, name: str, arguments: list[str]) -> dict[str, Any]:
    """Run the command and read its summary."""
    command = [sys.executable, "-m", "gtrain", *arguments, "trainer.limit_test_batches=0", "callbacks=none"]
    command += ["logger=none", f"hydra.run.dir={name}", "trainer.limit_val_batches=0"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    found: dict[str, Any] = json.loads((folder / name / "summary.json").read_text())
    nbytes = json.loads((Path(found["store"]["path"]) / "manifest.json").read_text())["nbytes"]
    if len(found["ranks"]) == 1:  # a single process loads all parts
        nbytes = [sum(nbytes)]
    extra = [r["peak_rss_bytes"] - r["baseline_rss_bytes"] - b for r, b in zip(found["ranks"], nbytes, strict=True)]
    return {
        "wall": statistics.median(found["epoch_seconds"]),
        "cpu": sum(rank["cpu_seconds"] for rank in found["ranks"]) / found["epochs"],
        "memory": max(extra) / 2**20,
        "sent": sum(rank["bytes_sent"] for rank in found["ranks"]) / found["epochs"] / 2**20,
    }


def main() -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gcn")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--modes", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--edges", type=int, default=2_000_000)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--partitioner", default="random")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    graph = [f"data.num_nodes={options.nodes}", f"data.num_edges={options.edges}"]
    graph += [f"data.num_features={options.features}", f"data.partitioner={options.partitioner}"]
    common = [*graph, f"model={options.model}", f"trainer.max_epochs={options.epochs}"]
    print(f"{'':<16}{'wall s':>9}{'CPU s':>9}{'extra MiB':>11}{'sent MiB':>10}{'CPU/single':>12}{'memory/single':>15}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        single = measure(folder, "single", ["strategy=single", *common])
        rows = {"single": single}
        for mode in options.modes:
            for ranks in options.ranks:
                name = f"sar-{mode} x {ranks}"
                rows[name] = measure(folder, name, [f"mode={mode}", f"trainer.num_nodes={ranks}", *common])
                if len(rows) == 2:
                    show("single", single, single)
                show(name, rows[name], single)


def show(name: str, row: dict[str, Any], single: dict[str, Any]) -> None:
    """Print one line."""
    print(
        f"{name:<16}{row['wall']:>9.3f}{row['cpu']:>9.3f}{row['memory']:>11.0f}{row['sent']:>10.2f}"
        f"{row['cpu'] / single['cpu']:>12.2f}{row['memory'] / single['memory']:>15.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
