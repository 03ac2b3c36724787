"""The sparse parameter server end to end, beside data parallelism with dense and with sparse gradients.

    python tests/benchmarks/bench_ps.py --shape 512,52 --rounds 3

Two workers, two servers, one thread each, on loopback: n = 2^20 features, Zipf ids, 72 nonzeros a row, row-wise
Adagrad. ``gtrain`` runs as a user runs it, through the command and Lightning; the peers are plain loops over
``embedding_bag`` and gloo with batches made beforehand, which flatters them. TorchRec is not among them: it is on no
machine of ours. Prints for each: examples/s of its fastest epoch, CPU ms of all processes a step, bytes of a worker and
step beside those of the formula (:mod:`gtrain_ps.costs`). Rounds are interleaved, so that a busy machine disturbs all
alike; on a machine with fewer cores than processes CPU is what can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import multiprocessing

from gtrain_ps.costs import Load, Plan

FEATURES, NONZEROS, WORKERS, SERVERS = 1 << 20, 72, 2, 2
STEPS, EPOCHS = 40, 4


@dataclass(frozen=True)
class Reading:
    """What one run came to: examples/s, CPU ms a step over all processes, bytes sent by a worker in a step."""

    examples: float
    cpu: float
    nbytes: float


def gtrain(rows: int, width: int, folder: Path, *more: str) -> Reading:
    """The command; its data are made once."""
    batch = rows * WORKERS
    arguments = {
        "strategy": "ps",
        "trainer.num_nodes": WORKERS,
        "strategy.servers": SERVERS,
        "data": "planted_sparse",
        "data.num_rows": int(batch * STEPS * 1.05),
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
        "trainer.max_epochs": EPOCHS,
        "trainer.limit_val_batches": 0,
        "trainer.limit_test_batches": 0,
        "trainer.enable_progress_bar": "false",
        "callbacks": "none",
        "logger": "none",
        "hydra.run.dir": folder / "run",
        "paths.stores": folder / "stores",
    }
    command = [sys.executable, "-m", "gtrain", *(f"{key}={value}" for key, value in arguments.items()), *more]
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    found = json.loads((folder / "run" / "summary.json").read_text())
    steps = EPOCHS * STEPS
    workers = [rank for rank in found["ranks"] if rank["role"] == "worker"]
    return Reading(
        batch * STEPS / min(found["epoch_seconds"]),
        1e3 * sum(rank["cpu_seconds"] for rank in found["ranks"]) / steps,
        sum(rank["bytes_sent"] + rank["bytes_received"] for rank in workers) / WORKERS / steps,
    )


def batches(rank: int, rows: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Ids, offsets, values and labels of eight batches, ids by Zipf's law and then permuted."""
    rng, power = np.random.default_rng(rank), 1 - 1.05
    made = []
    for _ in range(8):
        drawn = ((FEATURES**power - 1) * rng.random(rows * NONZEROS) + 1) ** (1 / power)
        ids = (np.minimum(drawn.astype(np.int64), FEATURES) * 2654435761) % FEATURES
        values = rng.standard_normal(len(ids)).astype(np.float32)
        labels = rng.integers(0, 2, rows)
        offsets = np.arange(0, rows * NONZEROS + 1, NONZEROS)
        made.append(tuple(torch.from_numpy(array) for array in (ids, offsets, values, labels)))
    return made


def data_parallel(rank: int, rows: int, width: int, sparse: bool, steps: int, where: str, results: Any) -> None:
    """One rank of plain data parallelism: SGD on the whole table, gradients summed by gloo."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=WORKERS)
    torch.manual_seed(0)
    table = torch.nn.Parameter(torch.randn(FEATURES, width) * 0.01)
    rest = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(width, 2))
    optimizer = torch.optim.SGD([table, *rest.parameters()], lr=0.05)
    data = batches(rank, rows)
    began, cpu = 0.0, 0.0
    for step in range(steps + 2):
        if step == 2:
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
        ids, offsets, values, labels = data[step % len(data)]
        hidden = F.embedding_bag(
            ids, table, offsets, mode="sum", per_sample_weights=values, include_last_offset=True, sparse=sparse
        )
        optimizer.zero_grad()
        F.cross_entropy(rest(hidden), labels).backward()
        for parameter in (table, *rest.parameters()):
            dist.all_reduce(parameter.grad)
        optimizer.step()
    dist.barrier()
    results.put((time.perf_counter() - began, time.process_time() - cpu))
    dist.destroy_process_group()


def peers(rows: int, width: int, sparse: bool, steps: int, folder: Path) -> Reading:
    """Both ranks of data parallelism."""
    context = multiprocessing.get_context("spawn")
    results, where = context.Queue(), str(folder / f"meet-{time.time_ns()}")
    arguments = [(rank, rows, width, sparse, steps, where, results) for rank in range(WORKERS)]
    ranks = [context.Process(target=data_parallel, args=given) for given in arguments]
    for rank in ranks:
        rank.start()
    found = [results.get(timeout=600) for _ in ranks]
    for rank in ranks:
        rank.join()
    wall, cpu = max(seconds for seconds, _ in found), sum(seconds for _, seconds in found)
    return Reading(rows * WORKERS * steps / wall, 1e3 * cpu / steps, float("nan"))


def main() -> None:
    """Measure, and print the median of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="512,52", help="rows of a worker in a step, columns")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="names to run, with commas")
    given = parser.parse_args()
    rows, width = (int(number) for number in given.shape.split(","))
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        loose = ("strategy.consistency=async", "strategy.staleness=2")
        runs: dict[str, Callable[[], Reading]] = {
            "gtrain ps": lambda: gtrain(rows, width, here),
            "gtrain ps async": lambda: gtrain(rows, width, here, *loose),
            "gtrain ps durability=none": lambda: gtrain(rows, width, here, "strategy.durability=none"),
            "gtrain ps durability=disk": lambda: gtrain(rows, width, here, "strategy.durability=disk"),
            "DDP sparse": lambda: peers(rows, width, True, 20, here),
            "DDP dense": lambda: peers(rows, width, False, 4, here),
        }
        chosen = {name: run for name, run in runs.items() if not given.only or name in given.only.split(",")}
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
