"""Compare strategies and seeds in one Hydra multirun, and collect the results in a table.

Each job of the sweep has a run folder with a summary.json; its keys are described in docs/summary.md.

    python examples/sweep.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path("sweep")


def main() -> None:
    """Run two strategies with two seeds each, one job after the other."""
    command = [
        *(sys.executable, "-m", "gtrain", "--multirun"),
        "strategy=single,sar",
        "seed=1,2",
        "data.num_nodes=1000",
        "data.num_edges=8000",
        "trainer.max_epochs=5",
        f"hydra.sweep.dir={FOLDER}",
    ]
    subprocess.run(command, check=True)
    print(f"{'strategy':<10}{'ranks':>6}{'training loss':>15}{'test accuracy':>15}{'seconds per epoch':>19}")
    for path in sorted(FOLDER.glob("*/summary.json")):
        summary = json.loads(path.read_text())
        metrics, seconds = summary["metrics"], summary["epoch_seconds"]
        print(
            f"{summary['strategy']:<10}{summary['world_size']:>6}{metrics['train/loss']:>15.6f}"
            f"{metrics['test/acc']:>15.3f}{sum(seconds) / len(seconds):>19.3f}"
        )


if __name__ == "__main__":
    main()
