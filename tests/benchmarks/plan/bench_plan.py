"""``gtrain plan`` against the runs that it plans: bytes, memory and seconds of an epoch, on an idle machine.

    python tests/benchmarks/plan/bench_plan.py [--only TEXT] [--epochs 6]

Runs ``gtrain doctor calibrate=true`` first, unless ``--calibrated``. Each configuration is planned and trained by the
command. An epoch is the median of all but the first, which compiles kernels; memory is that of the rank with most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GRAPH = ["data=planted", "data.num_nodes=60000", "data.num_edges=900000"]
SAGE = [*GRAPH, "model=sage", "model.hidden_channels=256", "model.num_layers=3"]
GAT = [*GRAPH, "model=gat", "model.hidden_channels=16", "model.heads=4", "model.num_layers=3"]
GCN = [*GRAPH, "model=gcn"]
SPARSE = [
    *("data=planted_sparse", "data.num_rows=200000", "data.num_features=1048576", "data.features_per_row=30"),
    *("model=sparse", "data.batch_size=10000"),
    "model.sparse_optimizer={_target_: gtrain.nn.RowwiseAdagrad, lr: 0.05}",
]
TRIPLES = [
    *("data=planted_kg", "model=kg", "data.num_entities=100000", "data.num_triples=1000000", "model.dimension=100"),
    *("data.batch_size=1000", "strategy.num_partitions=8"),
    *("trainer.limit_val_batches=0", "trainer.limit_test_batches=0"),  # ranking takes longer than training
]
TYPED = ["data=planted_hetero", "model=hetero_sage"]
RUNS: dict[str, tuple[str, int, list[str]]] = {
    "single, GraphSAGE": ("single", 1, SAGE),
    "sar mode 1, 1 rank, GraphSAGE": ("sar 1", 1, SAGE),
    "sar mode 1, 2 ranks, GraphSAGE": ("sar 1", 2, SAGE),
    "sar mode 3, 2 ranks, GraphSAGE": ("sar 3", 2, SAGE),
    "sar mode 1, 2 ranks, GAT": ("sar 1", 2, GAT),
    "sar mode 1, 2 ranks, GCN": ("sar 1", 2, GCN),
    "pyg, 2 ranks, GraphSAGE": ("pyg", 2, [*SAGE, "data.num_neighbors=[10,10,5]"]),
    "pyg, 2 ranks, several types": ("pyg", 2, TYPED),
    "ps, 2 workers and 2 servers": ("ps", 2, SPARSE),
    "pbg, 8 partitions": ("pbg", 1, TRIPLES),
}


def gtrain(folder: Path, *arguments: str) -> None:
    """Run the command."""
    done = subprocess.run([sys.executable, "-m", "gtrain", *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout[-800:] + done.stderr[-800:])


def compare(folder: Path, name: str, epochs: int) -> dict[str, Any]:
    """Plan and train a configuration; return what was planned and what was read."""
    row, ranks, settings = RUNS[name]
    strategy, _, mode = row.partition(" ")
    own = {"trainer.max_epochs": epochs, "logger": "none", "callbacks": "none", "trainer.enable_progress_bar": "false",
           "paths.stores": folder / "stores"}  # fmt: skip
    if strategy != "single":
        own |= {"trainer.num_nodes": ranks}
    common = [f"strategy={strategy}", *([f"mode={mode}"] if mode else []), *settings]
    common += [f"{key}={value}" for key, value in own.items()]
    runs = folder / name.replace(",", "").replace(" ", "-")
    gtrain(folder, "plan", *common, f"hydra.run.dir={runs}/plan")
    rows = json.loads((runs / "plan" / "plan.json").read_text())["rows"]
    planned = next(r for r in rows if r["strategy"] == strategy and str(r["variant"].get("mode", mode)) == mode)
    gtrain(folder, *common, f"hydra.run.dir={runs}/run")
    summary = json.loads((runs / "run" / "summary.json").read_text())
    workers = [rank for rank in summary["ranks"] if rank["role"] == "worker"]
    read = {
        "bytes": max(rank["bytes_sent"] for rank in workers) / epochs,
        "memory": max(rank["peak_anonymous_bytes"] for rank in workers),
        "seconds": statistics.median(summary["epoch_seconds"][1:]),
    }
    keys = {"bytes": "sent_bytes_per_epoch", "memory": "memory_bytes", "seconds": "seconds_per_epoch"}
    result: dict[str, Any] = {"run": name}
    for quantity, value in read.items():
        expected = planned[keys[quantity]]
        result |= {quantity: round(value, 4), f"planned {quantity}": round(expected, 4)}
        result[f"{quantity}, error"] = f"{100 * (expected / value - 1):+.1f} %" if value else None
    return result


def main() -> None:
    """Print one JSON object for each configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="configurations whose name has this text")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--calibrated", action="store_true", help="do not calibrate")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not options.calibrated:
            gtrain(folder, "doctor", "calibrate=true")
        for run in RUNS:
            if options.only in run:
                try:
                    print(json.dumps(compare(folder, run, options.epochs)), flush=True)
                except RuntimeError as error:
                    print(json.dumps({"run": run, "error": str(error)}), flush=True)


if __name__ == "__main__":
    main()
