"""What bench_ps.py holds ``strategy=ps`` against: plain data parallelism. Imports nothing of gtrain's."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, multiprocessing

FEATURES, NONZEROS, WORKERS = 1 << 20, 72, 2
BATCHES = 40
"""As many as the command goes through in an epoch: rows of fewer would stay in the caches."""


def batches(rank: int, rows: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Ids, offsets, values and labels of the batches, ids by Zipf's law and then permuted."""
    rng, power = np.random.default_rng(rank), 1 - 1.05
    made = []
    for _ in range(BATCHES):
        drawn = ((FEATURES**power - 1) * rng.random(rows * NONZEROS) + 1) ** (1 / power)
        ids = (np.minimum(drawn.astype(np.int64), FEATURES) * 2654435761) % FEATURES
        values = rng.standard_normal(len(ids)).astype(np.float32)
        labels = rng.integers(0, 2, rows)
        offsets = np.arange(0, rows * NONZEROS + 1, NONZEROS)
        made.append(tuple(torch.from_numpy(array) for array in (ids, offsets, values, labels)))
    return made


def begin(rank: Callable[..., None], *given: Any) -> list[Any]:
    """Run the ranks, each in a new process, and return what each has to say.

    Args:
        rank: called with its number, all that is ``given`` but the last, a file to meet at, and a queue for its result.
        given: the last is a folder for that file.
    """
    *arguments, folder = given
    context = multiprocessing.get_context("spawn")
    results, where = context.Queue(), str(Path(folder) / f"meet-{time.time_ns()}")
    ranks = [context.Process(target=rank, args=(number, *arguments, where, results)) for number in range(WORKERS)]
    for process in ranks:
        process.start()
    found = [results.get(timeout=600) for _ in ranks]
    for process in ranks:
        process.join()
    return found


def data_parallel(
    rank: int, rows: int, width: int, sparse: bool, rule: str, steps: int, where: str, results: Any
) -> None:
    """One rank of plain data parallelism: torch's optimizer ``rule`` on the whole table, gradients summed by gloo."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=WORKERS)
    torch.manual_seed(0)
    table = torch.nn.Parameter(torch.randn(FEATURES, width) * 0.01)
    rest = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(width, 2))
    optimizer = getattr(torch.optim, rule)([table, *rest.parameters()], lr=0.05)
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
