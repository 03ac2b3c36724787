"""What cutting a table into partitions costs ``strategy=pbg``: MRR, memory, and time that is lost to swapping.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_pbg_partitions.py --folder FOLDER

It makes a graph of ``--nodes`` nodes and ten times as many edges. The degrees follow a power law: node i has a weight
proportional to (i + 10) ** -0.75. Nodes are dealt to communities of 50 at random; heads are drawn by weight, tails by
weight from the head's community, one in ten from all nodes. The same edges are trained with each shape: partitions,
machines (simulated here), partitions in memory at a time. The test MRR ranks both ends of 2,000 edges among all nodes,
unfiltered.

Printed for each: the MRR; seconds of the last epoch, and CPU seconds of all workers in all of them; ``lost``, the
share of the last epoch in which a machine's worker, the one that did most, stood still because partitions (on several
machines: buckets) were not there, with the fsync of what was written; ``tables``, the peak of a machine's tables in
memory above what was there before, and its share of that of one partition; ``all``, with everything else that workers
have, such as the edges of a bucket. The page cache is dropped before each run where that is allowed (root), and
partitions' files are never left in it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

HERE = Path(__file__).resolve().parent
COMMUNITY = 50
TEST_EDGES = 2000


@dataclass(frozen=True)
class Shape:
    """What a run is cut into; ``buffer`` as ``strategy.buffer_partitions``."""

    partitions: int
    machines: int = 1
    buffer: int | None = None

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From ``PARTITIONS[xMACHINES][:BUFFER]``."""
        cut, _, buffer = text.partition(":")
        partitions, _, machines = cut.partition("x")
        return cls(int(partitions), int(machines or 1), int(buffer) if buffer else None)

    @property
    def settings(self) -> list[str]:
        """As overrides."""
        found = [f"strategy.num_partitions={self.partitions}", f"trainer.num_nodes={self.machines}"]
        return [*found, *([] if self.buffer is None else [f"strategy.buffer_partitions={self.buffer}"])]


SHAPES = ["1", "4", "8", "4x2", "8x2", "8:2", "16:3"]


def main() -> None:
    """Make the graph, train each shape and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the graph, stores and runs")
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="P[xMACHINES][:BUFFER]")
    parser.add_argument("settings", nargs="*", help="further ones for all runs, such as strategy.matmul=bfloat16")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    graph = folder / f"edges-{arguments.nodes}.parquet"
    if not graph.exists():
        make(graph, arguments.nodes, 10 * arguments.nodes)
    print("partitions machines buffer     MRR   epoch s   CPU s   lost %   tables MB   / one   all MB")
    one: float | None = None
    for shape in map(Shape.parse, arguments.shapes):
        given = [*settings(graph, arguments.nodes, arguments.epochs), *shape.settings, *arguments.settings]
        run = measure(folder, given, folder / f"run-{shape.partitions}-{shape.machines}-{shape.buffer}")
        one = one or (run["tables"] if shape == Shape(1) else None)
        place = f"{shape.partitions:10} {shape.machines:8} {shape.buffer or 'all' if shape.machines == 1 else 3:>6}"
        spent = f"{run['mrr']:.4f} {run['epoch']:9.1f} {run['cpu']:7.1f} {100 * run['lost']:8.1f}"
        share = f"{run['tables'] / one:7.3f}" if one else "      -"
        print(f"{place}  {spent} {run['tables'] / 1e6:11.1f} {share} {run['all'] / 1e6:8.0f}", flush=True)


def settings(graph: Path, nodes: int, epochs: int) -> list[str]:
    """Of all runs."""
    share = TEST_EDGES / (10 * nodes)
    return ["strategy=pbg", "data=edges", f"data.path={graph}", "data.ids=int", f"data.num_nodes={nodes}",
            "data.task=link", "data.split=random", f"data.train_fraction={1 - 2 * share}", f"data.val_fraction={share}",
            "data.batch_size=10000", "model=kg", "model.dimension=100", "model.operator=none", "model.filtered=false",
            "model.reciprocal=false", "model.init_scale=0.1", f"trainer.max_epochs={epochs}",
            "trainer.limit_val_batches=0", "logger=none", "callbacks=none",
            "trainer.enable_progress_bar=false"]  # fmt: skip


def measure(folder: Path, given: list[str], run: Path) -> dict[str, float]:
    """Train, with nothing in the page cache, and read what the run left."""
    command([sys.executable, "-m", "gtrain", "partition", *given], folder)
    drop_caches()
    probe = f"+callbacks.probe={{_target_:pbg_probe.Probe,folder:{run}}}"
    command([sys.executable, "-m", "gtrain", *given, probe, f"hydra.run.dir={run}"], folder)
    summary = json.loads((run / "summary.json").read_text())
    probes = [json.loads((run / f"probe-{rank}.json").read_text()) for rank in range(summary["world_size"])]
    workers: list[dict[str, Any]] = [rank for rank in summary["ranks"] if rank["role"] == "worker"]
    epoch = summary["epoch_seconds"][-1]
    return {
        "mrr": summary["metrics"]["test/mrr"],
        "epoch": epoch,
        "cpu": sum(rank["cpu_seconds"] for rank in workers),
        "lost": max(probe["waited"][-1] for probe in probes) / epoch,
        "tables": max(probe["tables"] for probe in probes),
        "all": max(probe["all"] for probe in probes),
    }


def command(words: list[str], folder: Path) -> None:
    """Run with one thread a process; end with what it said if it fails."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"$ {' '.join(words)}\n{done.stdout}{done.stderr}")


def drop_caches() -> None:
    """Write back and forget what the page cache has, or say that this may not be done."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        print(f"the page cache is warm: {error.strerror}", file=sys.stderr)


def make(path: Path, nodes: int, edges: int) -> None:
    """Write the graph."""
    rng = np.random.default_rng(0)
    weight = (np.arange(nodes) + 10.0) ** -0.75
    order = rng.permutation(nodes)  # those of a community come one after the other
    total = np.concatenate([[0.0], weight[order].cumsum()])
    place = np.searchsorted(total, rng.random(edges) * total[-1], side="right") - 1
    first = place // COMMUNITY * COMMUNITY
    low, high = total[first], total[np.minimum(first + COMMUNITY, nodes)]
    anywhere = rng.random(edges) < 0.1
    low[anywhere], high[anywhere] = 0.0, total[-1]
    drawn = low + rng.random(edges) * (high - low)
    other = np.minimum(np.searchsorted(total, drawn, side="right") - 1, nodes - 1)
    names = rng.permutation(nodes)  # ids say nothing of degrees
    ends = {"source": names[order[place]], "target": names[order[other]]}
    temporary = path.with_suffix(".part")
    pyarrow.parquet.write_table(pyarrow.table(ends), temporary)
    temporary.rename(path)


if __name__ == "__main__":
    main()
