"""CPU seconds of an epoch of R-GCN on AIFB and of HeteroConv on ACM, by the layer engine and as PyG wrote the layers.

    python tests/benchmarks/relational/bench_relational.py --root DIR

DIR has the raw files (``aifb/raw`` below ``rdf`` or ``entities``, ``heco/acm.npz``). Runs alternate between both ways;
the table has the median of the epochs after the first three of all repetitions, and their quartiles. One thread.
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

HERE = Path(__file__).resolve().parent
GRAPHS = {
    "AIFB": ["experiment=aifb"],
    "ACM": ["data=heco", "data.name=acm", "model=hetero_sage"],
}


def epochs(run: Path, options: argparse.Namespace, overrides: list[str]) -> list[float]:
    """Train, and return the CPU seconds of each epoch."""
    command = [
        *(
            sys.executable,
            "-m",
            "gtrain",
            *overrides,
            f"data.root={options.root}",
            f"data.store={run.parent / 'stores'}",
        ),
        *("trainer.num_nodes=1", f"trainer.max_epochs={options.epochs}", "trainer.enable_progress_bar=false"),
        *("trainer.check_val_every_n_epoch=100000", "callbacks=none", "logger=none", f"hydra.run.dir={run}"),
        f"+callbacks.probe={{_target_:epoch_probe.EpochProbe,path:{run}/epochs.json}}",
    ]
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    seconds: list[float] = json.loads((run / "epochs.json").read_text())
    return seconds[3:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    options.root = options.root.resolve()
    print(f"{'':16} {'plain ms':>20} {'engine ms':>20} {'plain / engine':>15}")
    with tempfile.TemporaryDirectory(prefix="gtrain-bench-") as scratch:
        for graph in options.graphs:
            for strategy in ("single", "pyg"):
                seconds: dict[str, list[float]] = {"plain": [], "auto": []}
                for repetition in range(options.repetitions):
                    for layers, spent in seconds.items():
                        run = Path(scratch) / f"{graph}-{strategy}-{layers}-{repetition}"
                        overrides = [*GRAPHS[graph], f"strategy={strategy}", f"strategy.layers={layers}"]
                        spent += epochs(run, options, overrides)
                cells = []
                for spent in seconds.values():
                    low, middle, high = (1000 * value for value in statistics.quantiles(spent))
                    cells.append(f"{middle:6.1f} ({low:.1f}-{high:.1f})")
                ratio = statistics.median(seconds["plain"]) / statistics.median(seconds["auto"])
                print(f"{graph + ' ' + strategy:16} {cells[0]:>20} {cells[1]:>20} {ratio:15.2f}", flush=True)


if __name__ == "__main__":
    main()
