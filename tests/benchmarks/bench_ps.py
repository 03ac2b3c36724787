"""The sparse parameter server end to end, beside data parallelism with dense and with sparse gradients.

    python tests/benchmarks/bench_ps.py --shape 512,52 --rounds 3 --torchrec ../torchrec/bin/python

Two workers, two servers, one thread each, on loopback: n = 2^20 features, Zipf ids, 72 nonzeros a row, row-wise
Adagrad. ``gtrain`` runs as a user runs it, through the command and Lightning (``encrypted``: over TCP with keys, as
between machines). The peers are plain loops over ``embedding_bag`` and gloo with batches made beforehand and torch's
SGD, which flatters them; one has torch's Adagrad. With ``--torchrec PYTHON`` TorchRec's row-wise sharding is measured
too (ps_torchrec.py), by the interpreter of an environment that has it:

    python -m venv ../torchrec --system-site-packages
    ../torchrec/bin/pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 pyre-extensions tensordict pyvers tqdm

Prints for each: examples/s of its fastest epoch, CPU ms of all processes a step, bytes of a worker and step beside
those of the formula (:mod:`gtrain_ps.costs`). Rounds are interleaved, so that a busy machine disturbs all
alike; on a machine with fewer cores than processes CPU is what can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from peers.ps_peers import BATCHES, FEATURES, NONZEROS, WORKERS, begin, data_parallel

from gtrain_ps.costs import Load, Plan

SERVERS = 2
STEPS, EPOCHS = BATCHES, 4


@dataclass(frozen=True)
class Reading:
    """What one run came to: examples/s, CPU ms a step over all processes, bytes sent by a worker in a step."""

    examples: float
    cpu: float
    nbytes: float


def settings(rows: int, width: int, folder: Path, steps: int = STEPS, epochs: int = EPOCHS) -> list[str]:
    """What all runs of the command have in common; data are made once."""
    batch = rows * WORKERS
    arguments = {
        "strategy": "ps",
        "trainer.num_nodes": WORKERS,
        "strategy.servers": SERVERS,
        "data": "planted_sparse",
        "data.num_rows": int(batch * steps * 1.05),
        "data.num_features": FEATURES,
        "data.features_per_row": NONZEROS,
        "data.zipf_exponent": 1.05,
        "data.binary": "false",
        "data.train_fraction": 1 / 1.05,
        "data.val_fraction": 0.02,
        "data.partitioner": "random",
        "data.batch_size": batch,
        "model": "sparse",
        "model.hidden_channels": width,
        "model.sparse_optimizer._target_": "gtrain.nn.RowwiseAdagrad",
        "model.sparse_optimizer.lr": 0.05,
        "trainer.max_epochs": epochs,
        "trainer.limit_val_batches": 0,
        "trainer.limit_test_batches": 0,
        "trainer.enable_progress_bar": "false",
        "callbacks": "none",
        "logger": "none",
        "paths.stores": folder / "stores",
    }
    return [f"{key}={value}" for key, value in arguments.items()]


def gtrain(rows: int, width: int, folder: Path, *more: str) -> Reading:
    """The command."""
    given = [*settings(rows, width, folder), f"hydra.run.dir={folder / 'run'}", *more]
    command, batch = [sys.executable, "-m", "gtrain", *given], rows * WORKERS
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    found = json.loads((folder / "run" / "summary.json").read_text())
    steps = EPOCHS * STEPS
    workers = [rank for rank in found["ranks"] if rank["role"] == "worker"]
    return Reading(
        batch * STEPS / min(found["epoch_seconds"]),
        1e3 * sum(rank["cpu_seconds"] for rank in found["ranks"]) / steps,
        sum(rank["bytes_sent"] + rank["bytes_received"] for rank in workers) / WORKERS / steps,
    )


def data_parallel_reading(rows: int, width: int, sparse: bool, rule: str, steps: int, folder: Path) -> Reading:
    """Both ranks of data parallelism."""
    found = begin(data_parallel, rows, width, sparse, rule, steps, folder)
    wall, cpu = max(seconds for seconds, _ in found), sum(seconds for _, seconds in found)
    return Reading(rows * WORKERS * steps / wall, 1e3 * cpu / steps, float("nan"))


def torchrec(rows: int, width: int, python: str) -> Reading:
    """TorchRec, run by the interpreter of the environment that has it."""
    command = [python, str(Path(__file__).with_name("peers") / "ps_torchrec.py"), "--shape", f"{rows},{width}"]
    done = subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return Reading(found["examples"], found["cpu"], float("nan"))


def main() -> None:
    """Measure, and print the median of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="512,52", help="rows of a worker in a step, columns")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="names to run, with semicolons")
    parser.add_argument("--torchrec", help="an interpreter that has TorchRec; without it TorchRec is not measured")
    given = parser.parse_args()
    rows, width = (int(number) for number in given.shape.split(","))
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        key = f"cluster.key_file={here / 'job.key'}"
        subprocess.run([sys.executable, "-m", "gtrain", "key", key], check=True, cwd=here, capture_output=True)
        loose = ("strategy.consistency=async", "strategy.staleness=2")
        runs: dict[str, Callable[[], Reading]] = {
            "gtrain ps": lambda: gtrain(rows, width, here),
            "gtrain ps async": lambda: gtrain(rows, width, here, *loose),
            "gtrain ps encrypted": lambda: gtrain(rows, width, here, key),
            "gtrain ps durability=none": lambda: gtrain(rows, width, here, "strategy.durability=none"),
            "gtrain ps durability=disk": lambda: gtrain(rows, width, here, "strategy.durability=disk"),
            "DDP sparse": lambda: data_parallel_reading(rows, width, True, "SGD", 20, here),
            "DDP dense": lambda: data_parallel_reading(rows, width, False, "SGD", 4, here),
            "DDP dense, Adagrad": lambda: data_parallel_reading(rows, width, False, "Adagrad", 4, here),
        }
        if given.torchrec:
            runs["TorchRec row-wise"] = lambda: torchrec(rows, width, given.torchrec)
        else:
            print("TorchRec is skipped: no --torchrec was given")
        chosen = {name: run for name, run in runs.items() if not given.only or name in given.only.split(";")}
        readings: dict[str, list[Reading]] = {name: [] for name in chosen}
        for _ in range(given.rounds):
            for name, run in chosen.items():
                readings[name].append(run())
    formula = Plan("ship", SERVERS, 1).nbytes(Load(rows * NONZEROS, 0, rows), width, 4, 4)
    print(f"{rows} rows a worker, {width} columns; load average {os.getloadavg()[0]:.1f}; formula {formula:,.0f} bytes")
    print(f"{'':<28}{'examples/s':>12}{'CPU ms/step':>14}{'bytes/step':>14}")
    for name, found in readings.items():
        examples, cpu, nbytes = (
            float(np.median([getattr(one, key) for one in found])) for key in Reading.__annotations__
        )
        print(f"{name:<28}{examples:>12,.0f}{cpu:>14.1f}{nbytes:>14,.0f}")


if __name__ == "__main__":
    main()
