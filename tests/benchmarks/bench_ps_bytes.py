"""Bytes of a step as runs count them: of every way to cut a table, beside the formula, and what ``split=auto`` takes.

    python tests/benchmarks/bench_ps_bytes.py --servers 2,4,16

Two workers with 256 rows each, 200 columns, 5, 75 and 500 nonzeros a row. A line for each number of servers and
of nonzeros: KiB of a worker and step for each cut, the largest ratio to its formula (:mod:`gtrain_ps.costs`), and the
ratio of ``auto`` to the best cut. Ends with 1 where either ratio is above 1.05.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gtrain_ps.costs import Load, allowed_plans

WORKERS, ROWS, WIDTH, STEPS = 2, 256, 200, 30  # what a job sends once is spread over them
NONZEROS = (5, 75, 500)
MOST = 1.05


def measure(servers: int, splits: list[str], folder: Path) -> dict[tuple[int, str], float]:
    """Bytes of a worker and step, by nonzeros and split: one sweep, of jobs that are forked from one process."""
    batch = WORKERS * ROWS
    arguments = [
        "strategy=ps",
        f"trainer.num_nodes={WORKERS}",
        f"strategy.servers={servers}",
        f"strategy.split={','.join(splits)}",
        "data=planted_sparse",
        f"data.num_rows={batch * STEPS * 2}",
        "data.num_features=20000",
        f"data.features_per_row={','.join(map(str, NONZEROS))}",
        "data.binary=false",
        "data.train_fraction=0.5",
        "data.val_fraction=0.25",
        "data.partitioner=random",
        f"data.batch_size={batch}",
        "model=sparse",
        f"model.hidden_channels={WIDTH}",
        "model.sparse_optimizer._target_=gtrain.nn.SGD",
        "trainer.max_epochs=1",
        "trainer.limit_val_batches=0",
        "trainer.limit_test_batches=0",
        "trainer.enable_progress_bar=false",
        "callbacks=none",
        "logger=none",
        f"hydra.sweep.dir={folder / str(servers)}",
        f"paths.stores={folder / 'stores'}",
    ]
    command = [sys.executable, "-m", "gtrain", "--multirun", *arguments]
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    found = {}
    names = [(nonzeros, split) for split in splits for nonzeros in NONZEROS]  # as Hydra counts
    for number, name in enumerate(names):
        summary = json.loads((folder / str(servers) / str(number) / "summary.json").read_text())
        workers = [rank for rank in summary["ranks"] if rank["role"] == "worker"]
        found[name] = sum(rank["bytes_sent"] + rank["bytes_received"] for rank in workers) / WORKERS / STEPS
    return found


def formula(servers: int, split: str, nonzeros: int) -> float:
    """Bytes of the best plan of a split."""
    load = Load(ROWS * nonzeros, 0, ROWS)
    return min(plan.nbytes(load, WIDTH, 4, 4) for plan in allowed_plans("ship", split, servers, WIDTH))


def main() -> None:
    """Measure all, and hold it to the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default="2,4,16")
    given = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for servers in map(int, given.servers.split(",")):
            cuts = ["row", "column", "grid"] if servers > 2 else ["row", "column"]
            found = measure(servers, [*cuts, "auto"], Path(folder))
            for nonzeros in NONZEROS:
                sizes = {cut: found[nonzeros, cut] for cut in cuts}
                over = max(size / formula(servers, cut, nonzeros) for cut, size in sizes.items())
                chosen = found[nonzeros, "auto"] / min(sizes.values())
                listed = "  ".join(f"{cut} {size / 1024:,.1f}" for cut, size in sizes.items())
                print(
                    f"P {servers:>2}, {nonzeros:>3} nonzeros: {listed}; formula {over:.3f}, auto {chosen:.3f}",
                    flush=True,
                )
                worst = max(worst, over, chosen)
    sys.exit(int(worst > MOST))


if __name__ == "__main__":
    main()
