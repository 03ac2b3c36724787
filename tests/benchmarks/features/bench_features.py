"""Features in CSR form beside dense ones: CPU seconds of an epoch, memory of training and of preparation, store.

    OMP_NUM_THREADS=1 python tests/benchmarks/features/bench_features.py
    OMP_NUM_THREADS=1 python tests/benchmarks/features/bench_features.py strategy=pyg trainer.num_nodes=1

The graph is random, with the sizes of Coauthor Physics (34,493 nodes, 495,924 directed edges, 8,415 features of which
at most 33 in a row are 1), in the format of its raw file. Overrides are added to both commands, which run in turn.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

NODES, PAIRS, WORDS, ROW, CLASSES = 34_493, 247_962, 8_415, 33, 5
COMMAND = ["model=sage", "model.hidden_channels=256", "model.num_layers=3", "strategy=single", "trainer.max_epochs=8"]


def write_graph(folder: Path) -> None:
    """Write the raw file."""
    rng = np.random.default_rng(0)
    # Words of Zipf frequencies, as texts have.
    weights = 1 / np.arange(1, WORDS + 1)
    rows = [np.unique(rng.choice(WORDS, ROW, p=weights / weights.sum())) for _ in range(NODES)]
    source, target = rng.integers(0, NODES, (2, PAIRS))
    order = np.argsort(source, kind="stable")
    matrices = {
        "attr": (np.cumsum([0, *map(len, rows)]), np.concatenate(rows), (NODES, WORDS)),
        "adj": (np.cumsum([0, *np.bincount(source, minlength=NODES)]), target[order], (NODES, NODES)),
    }
    arrays: dict[str, Any] = {"labels": rng.integers(0, CLASSES, NODES)}
    for name, (indptr, indices, shape) in matrices.items():
        parts = {"data": np.ones(len(indices), np.float32), "indices": indices, "indptr": indptr, "shape": shape}
        arrays.update({f"{name}_{part}": np.asarray(array) for part, array in parts.items()})
    folder.mkdir(parents=True)
    np.savez(folder / "ms_academic_phy.npz", **arrays)


def measure(folder: Path, layout: str, overrides: list[str]) -> dict[str, float]:
    """Return the figures of a run."""
    run = folder / f"run-{layout}"
    data = ["data=coauthor", "data.name=Physics", f"data.root={folder}", f"data.store={run / 'stores'}"]
    options = [*COMMAND, *data, "data.largest_component=false", f"data.feature_layout={layout}", *overrides]
    command = [sys.executable, "-m", "gtrain", *options, "callbacks=none", "logger=none", f"hydra.run.dir={run}"]
    subprocess.run(command, check=True, capture_output=True)
    summary = json.loads((run / "summary.json").read_text())
    (rank,) = summary["ranks"]
    prepared = summary["store"]["preparation"]
    base = rank["baseline_rss_bytes"]
    files = sum(file.stat().st_size for file in (run / "stores").rglob("part-*/nodes/node/x*"))
    return {
        "CPU s per epoch": rank["cpu_seconds"] / summary["epochs"],
        "peak MiB above imports": (rank["peak_rss_bytes"] - base) / 2**20,
        "anonymous MiB": (rank["peak_anonymous_bytes"] - rank["baseline_anonymous_bytes"]) / 2**20,
        "preparation MiB": (prepared["peak_rss_bytes"] - prepared["baseline_rss_bytes"]) / 2**20,
        "features on disk MiB": files / 2**20,
        "last loss": summary["history"][-1]["train/loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*")
    overrides = parser.parse_args().overrides
    with tempfile.TemporaryDirectory(prefix="gtrain-bench-") as scratch:
        folder = Path(scratch)
        write_graph(folder / "coauthor/Physics/raw")
        results = {layout: measure(folder, layout, overrides) for layout in ("auto", "dense")}
    for name in results["auto"]:
        print(f"{name:28} " + "  ".join(f"{layout} {result[name]:10.4g}" for layout, result in results.items()))


if __name__ == "__main__":
    main()
