"""Seconds to a stated validation accuracy: the whole graph in one process, full batches of two ranks, and mini-batches.

    python tests/benchmarks/accuracy/bench_accuracy.py --data ../shared/data --seeds 3

Each strategy trains the same GraphSAGE on three graphs until its validation accuracy reaches the target of the graph:

- ``photo``: Amazon Photo, 7,650 nodes, 160 labels; 88 %.
- ``cs``: Coauthor CS, 18,333 nodes of 6,805 sparse features, 300 labels; 87 %.
- ``planted``: 500,000 nodes and 5,000,000 edges whose best possible accuracy is known; 97 % of it.

Printed are medians over the seeds: wall seconds from the start of training, validation included; CPU seconds of all
ranks, validation excluded; epochs. A run that has not reached the target after its last epoch has no seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gtrain.record.run import RunRecord

STRATEGIES = {
    "single": ("strategy=single",),
    "sar": ("strategy=sar", "mode=2", "trainer.num_nodes=2"),
    "pyg": ("strategy=pyg", "trainer.num_nodes=2", "data.num_neighbors=[10,10]"),
}


@dataclass(frozen=True)
class Workload:
    """A graph, the accuracy to reach, and how long a strategy may take.

    Attributes:
        settings: of the data and the model.
        target: validation accuracy; with ``of_best``, a share of the best possible one.
        batch: seeds of a mini-batch on each rank.
        epochs: the most epochs of full batches.
        batch_epochs: the most epochs of mini-batches.
    """

    settings: tuple[str, ...]
    target: float
    batch: int
    epochs: int
    batch_epochs: int
    of_best: bool = False


WORKLOADS = {
    "photo": Workload(("data=amazon", "data.name=Photo", "data.root={data}/amazon"), 0.88, 40, 200, 60),
    "cs": Workload(("data=coauthor", "data.name=CS", "data.root={data}/coauthor"), 0.87, 75, 100, 30),
    "planted": Workload(("data.num_nodes=500000", "data.num_edges=5000000"), 0.97, 1024, 60, 3, of_best=True),
}


@dataclass(frozen=True)
class Reached:
    """What a run needed to reach its target."""

    wall: float
    cpu: float
    epochs: int


def train(workload: Workload, strategy: str, seed: int, data: Path, folder: Path) -> Reached | None:
    """Train until the last epoch; return None if no epoch reached the target."""
    run = folder / f"{strategy}-{seed}"
    sampled = strategy == "pyg"
    epochs = workload.batch_epochs if sampled else workload.epochs
    subprocess.run(
        [
            *(sys.executable, "-m", "gtrain", *STRATEGIES[strategy], "model=sage", "callbacks=none"),
            *(setting.format(data=data) for setting in workload.settings),
            *([f"data.batch_size={workload.batch}"] if sampled else []),
            *(f"seed={seed}", f"trainer.max_epochs={epochs}", "trainer.enable_progress_bar=false"),
            *("trainer.limit_test_batches=0", f"hydra.run.dir={run}"),
        ],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "2" if strategy == "single" else "1"},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    record = RunRecord(run)
    assert record.summary is not None
    target = workload.target * (record.summary["metrics"]["data/best_acc"] if workload.of_best else 1)
    first = record.ranks[0]
    started = first.of("fit")[0]["time"]
    for number, row in enumerate(first.epochs):
        if row["metrics"].get("val/acc", 0.0) >= target:
            cpu = sum(epoch["cpu_seconds"] for rank in record.ranks for epoch in rank.epochs[: number + 1])
            return Reached(row["time"] - started, cpu, number + 1)
    return None


def main() -> None:
    """Train all of them and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with amazon and coauthor")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    options = parser.parse_args()
    print("| graph | strategy | s | CPU s | epochs | reached |\n| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.only:
            for strategy in STRATEGIES:
                runs = [
                    train(WORKLOADS[name], strategy, seed, options.data.resolve(), Path(scratch))
                    for seed in range(options.seeds)
                ]
                reached = [run for run in runs if run is not None]
                middle = [
                    f"{statistics.median(getattr(run, key) for run in reached):.3g}" if reached else "-"
                    for key in ("wall", "cpu", "epochs")
                ]
                print(f"| {name} | {strategy} | {' | '.join(middle)} | {len(reached)} of {len(runs)} |", flush=True)


if __name__ == "__main__":
    main()
