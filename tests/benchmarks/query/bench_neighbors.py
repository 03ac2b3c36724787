"""Recall and latency of the approximate index of ``gtrain neighbors``, against the exact search.

    python tests/benchmarks/query/bench_neighbors.py build [--rows 1000000] [--dimension 100] [--folder DIR]
    python tests/benchmarks/query/bench_neighbors.py query [--queries 1000] [--folder DIR]

``build`` draws rows near 1000 communities in a subspace of 32 dimensions, with noise in all of them; with ``--structure
none`` random rows, the hardest case. ``query`` asks one query at a time, in one thread. It prints recall@10, and the
50th and 99th percentile of milliseconds, of wall and of CPU: on a machine with other work they differ. The last line is
of ``TrainedModel.neighbors``, which looks up names and vectors and measures the answers again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import torch

from gtrain.model.kg.embedding import KGEmbedding
from gtrain.nn import deferred
from gtrain.query.index import NeighborIndex
from gtrain.query.model import TrainedModel
from gtrain.query.neighbors import exact_neighbors
from gtrain.query.opening import OpenedRun

K = 10
SOURCE = "rows node"


def rows(count: int, dimension: int, structure: str) -> torch.Tensor:
    """Draw rows of length 1."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(count, dimension, generator=generator)
    if structure == "none":
        return torch.nn.functional.normalize(noise, dim=1)
    spread = torch.randn(32, dimension, generator=generator) / 6
    centers = torch.randn(1000, 32, generator=generator)
    latent = centers[torch.randint(1000, (count,), generator=generator)]
    latent = latent + 0.7 * torch.randn(count, 32, generator=generator)
    return torch.nn.functional.normalize(latent @ spread + 0.3 * noise, dim=1)


def build(arguments: argparse.Namespace) -> None:
    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    table = rows(arguments.rows, arguments.dimension, arguments.structure)
    np.save(folder / "rows.npy", table.numpy())
    start, cpu = time.perf_counter(), time.process_time()
    blocks = torch.arange(len(table)).split(1 << 16)
    index = NeighborIndex.build(
        lambda: ((ids, table[ids]) for ids in blocks),
        tuple(table.shape),
        metric="cos",
        source=SOURCE,
        path=folder / "rows.index",
    )
    size = (folder / "rows.index").stat().st_size
    seconds = time.perf_counter() - start
    print(f"built in {seconds:.0f} s, {time.process_time() - cpu:.0f} CPU s; {size / 2**20:.0f} MiB")
    print(f"a query scans {index.probes} groups")


def query(arguments: argparse.Namespace) -> None:
    faiss.omp_set_num_threads(1)
    torch.set_num_threads(1)
    folder = Path(arguments.folder)
    table = torch.from_numpy(np.load(folder / "rows.npy"))
    index = NeighborIndex.load(folder / "rows.index", SOURCE)
    asked = torch.randperm(len(table), generator=torch.Generator().manual_seed(1))[: arguments.queries]
    start = time.perf_counter()
    whole = [(torch.arange(len(table)), table)]
    exact = torch.cat([exact_neighbors(iter(whole), table[ids], K, "cos")[0] for ids in asked.split(100)])
    print(f"exact: {1e3 * (time.perf_counter() - start) / len(asked):.1f} ms per query, 100 at a time")
    for probes in (16, 32, 64, 128, 256, None):
        found, times = timed(lambda number: index.search(table[number : number + 1], K, probes=probes), asked)  # noqa: B023
        hits = (torch.cat(found).unsqueeze(2) == exact.unsqueeze(1)).sum() / exact.numel()
        print(f"probes {probes or 'default'}: recall@{K} {hits:.4f}, {times}", flush=True)
    model = model_of(table)
    _, times = timed(lambda number: model.neighbors([str(number)], k=K, index=index), asked)
    print(f"by name: {times}")


def timed(ask: Callable[[int], Any], asked: torch.Tensor) -> tuple[list[Any], str]:
    """Ask one query at a time; return the answers and the percentiles of the times."""
    times, found = [], []
    for number in asked.tolist():
        wall, cpu = time.perf_counter(), time.thread_time()
        found.append(ask(number))
        times.append((time.perf_counter() - wall, time.thread_time() - cpu))
    wall, cpu = (1e3 * np.percentile(column, (50, 99)) for column in np.array(times).T)
    return found, f"ms p50 and p99: wall {wall[0]:.2f} {wall[1]:.2f}, CPU {cpu[0]:.2f} {cpu[1]:.2f}"


def model_of(table: torch.Tensor) -> TrainedModel:
    """A model with these vectors, whose entities have numbers for names."""
    facts = {"entity_types": None}
    store: Any = SimpleNamespace(
        names=lambda kind: None, facts=facts, node_types=["node"], num_nodes_of=lambda k: len(table)
    )
    with deferred():
        model = KGEmbedding(len(table), 1, dimension=table.size(1), operator="none", comparator="cos")
    model.entities[0].move_back(table)
    return TrainedModel(OpenedRun(Path(), Path(), "rows", store, model.requires_grad_(False)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("build", "query"))
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dimension", type=int, default=100)
    parser.add_argument("--structure", choices=("communities", "none"), default="communities")
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--folder", default="bench_neighbors")
    chosen = parser.parse_args()
    (build if chosen.step == "build" else query)(chosen)
