"""How long four ranks take to start beside one, in pairs.

    python tests/benchmarks/bench_start.py --pairs 5

Wall and CPU seconds of a whole one-epoch run on a tiny graph whose store is there already; the difference is the cost
of three more forks, the group's rendezvous, and sharing the cores. The target is a difference under 3 s.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def timed(folder: Path, ranks: int, verb: str = "train") -> tuple[float, float]:
    """Wall and CPU seconds of one command."""
    arguments = [
        verb,
        f"trainer.num_nodes={ranks}",
        "trainer.max_epochs=1",
        "data.num_nodes=500",
        "data.num_edges=4000",
    ]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "gtrain", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Run the pairs and print each and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    differences = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for ranks in (1, 4):
            timed(folder, ranks, "partition")
        for _ in range(options.pairs):
            (one, one_cpu), (four, four_cpu) = timed(folder, 1), timed(folder, 4)
            differences.append(four - one)
            print(f"1 rank {one:.2f} s (CPU {one_cpu:.2f})   4 ranks {four:.2f} s (CPU {four_cpu:.2f})", flush=True)
    print(f"median difference {statistics.median(differences):.2f} s")


if __name__ == "__main__":
    main()
