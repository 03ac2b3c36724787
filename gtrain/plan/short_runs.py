"""Constants of :class:`~gtrain.plan.machine.Machine` that short trainings show: what a step costs beside arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 12  # of an epoch of the small runs: 384 nodes of 600 train
_RUN = (
    *("strategy=single", "callbacks=none", "logger=none", "trainer.enable_progress_bar=false"),
    *("trainer.limit_val_batches=0", "trainer.limit_test_batches=0", "hydra.run.dir=run", "model=sage"),
)
_SMALL = ("data.num_nodes=600", "data.num_edges=4000", "trainer.max_epochs=12", "model.hidden_channels=16")
_LARGE = (
    *("data.num_nodes=40000", "data.num_edges=600000", "trainer.max_epochs=6"),
    *("model.hidden_channels=256", "model.num_layers=3"),
)
_MANY = 6  # layers


def constants() -> dict[str, float]:
    """Train five times for a few seconds, and return the constants ``step``, ``layer`` and ``threads``.

    Raises:
        RuntimeError: a training failed; the text is its last line.
    """
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few = _epoch(folder, 1, *_SMALL, "data.batch_size=32", "model.num_layers=2") / STEPS
        many = _epoch(folder, 1, *_SMALL, "data.batch_size=32", f"model.num_layers={_MANY}") / STEPS
        layer = max((many - few) / (_MANY - 2), 0.0)
        measured = {"layer": layer, "step": max(few - 2 * layer, 0.0)}
        if cores > 1:
            gain = _epoch(folder, 1, *_LARGE) / _epoch(folder, cores, *_LARGE) - 1
            measured["threads"] = min(max(gain / (cores - 1), 0.0), 1.0)
    return measured


def _epoch(folder: Path, threads: int, *settings: str) -> float:
    """Return the seconds of the fastest epoch of a training but the first, which compiles."""
    command = [sys.executable, "-m", "gtrain", *_RUN, *settings]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["a training ended without a message"])[-1])
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return float(min(summary["epoch_seconds"][1:]))
