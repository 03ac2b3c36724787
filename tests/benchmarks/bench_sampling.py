"""Neighbour sampling in one process: seeds/s of each variant, and what compiling costs.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_sampling.py
    OMP_NUM_THREADS=1 python tests/benchmarks/bench_sampling.py --variants plain --threads 2

A degree-corrected planted graph (mean in-degree 35) of 500,000 nodes and 17.6 M directed edges, fan-out 15-10-5,
batches of 1024 seeds. Seeds/s are given by wall time and by CPU time, medians over batches; the second is the one to
trust where other programs compute. The target is 45,000 seeds/s for ``plain`` on one core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

COMMUNITIES = 47


def planted(num_nodes: int, num_edges: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A symmetric degree-corrected planted graph in columns: 90 % of edges stay within a community.

    Source: Karrer & Newman, "Stochastic blockmodels and community structure in networks", Phys. Rev. E 83, 2011, with
    log-normal degrees.
    """
    rng = np.random.default_rng(seed)
    weight = rng.lognormal(0.0, 0.85, num_nodes)
    community = rng.integers(0, COMMUNITIES, num_nodes)
    order = np.argsort(community, kind="stable")
    running = np.concatenate([[0.0], np.cumsum(weight[order])])
    bounds = np.searchsorted(community[order], np.arange(COMMUNITIES + 1))
    half = num_edges // 2
    one = np.searchsorted(running, rng.random(half) * running[-1], side="right") - 1
    home = community[order[one]]
    inside = rng.random(half) < 0.9
    low = np.where(inside, running[bounds[home]], 0.0)
    high = np.where(inside, running[bounds[home + 1]], running[-1])
    other = np.searchsorted(running, low + rng.random(half) * (high - low), side="right") - 1
    one, other = order[np.minimum(one, num_nodes - 1)], order[np.minimum(other, num_nodes - 1)]
    source, target = np.concatenate([one, other]), np.concatenate([other, one])
    by_target = np.argsort(target * np.int64(num_nodes) + source, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(target, minlength=num_nodes))])
    return indptr, source[by_target].astype(np.int32)


def variants(indptr: np.ndarray, indices: np.ndarray) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Arguments of the graph and of the sampler, by the name of the variant."""
    rng = np.random.default_rng(1)
    num_nodes, num_edges = indptr.size - 1, indices.size
    columns = np.repeat(np.arange(num_nodes), np.diff(indptr))
    edge_time = np.sort(columns * 1000 + rng.integers(0, 1000, num_edges)) % 1000
    node_time = {"node_time": rng.integers(0, 1000, num_nodes)}
    weight, times = {"weight": rng.random(num_edges, np.float32)}, {"edge_time": edge_time}
    return {
        "plain": ({}, {}),
        "plain, views": ({}, {}),
        "plain, hashed": ({}, {}),
        "replace": ({}, {"replace": True}),
        "weighted": (weight, {}),
        "weighted, replace": (weight, {"replace": True}),
        "disjoint": ({}, {"disjoint": True}),
        "edge times, uniform": (times, {"temporal": "uniform"}),
        "edge times, last": (times, {"temporal": "last"}),
        "edge times, weighted": ({**times, **weight}, {"temporal": "uniform"}),
        "node times, uniform": ({}, {"temporal": "uniform", **node_time}),
        "node times, last": ({}, {"temporal": "last", **node_time}),
        "induced": ({}, {"induced": True}),
    }


def timed(sampler: Any, name: str, num_nodes: int, options: argparse.Namespace) -> tuple[float, float, Any]:
    """Median wall and CPU seconds of a batch, and the last sample."""
    times = np.full(options.batch_size, 700)
    seed_time = times if sampler.typed.rule.temporal else None
    copy = not name.endswith("views")
    walls, cpus, sample = [], [], None
    for batch in range(options.warm_up + options.batches):
        seeds = np.random.default_rng(batch).choice(num_nodes, options.batch_size, replace=False)
        wall, cpu = time.perf_counter(), time.thread_time()
        sample = sampler.sample(seeds, batch=batch, seed_time=seed_time, copy=copy)
        cpus.append(time.thread_time() - cpu)
        walls.append(time.perf_counter() - wall)
    return statistics.median(walls[options.warm_up :]), statistics.median(cpus[options.warm_up :]), sample


def main() -> None:
    """Run the variants and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=500_000)
    parser.add_argument("--edges", type=int, default=17_600_000)
    parser.add_argument("--fan-out", type=int, nargs="+", default=[15, 10, 5])
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="threads that sample at the same time, each its batches")
    parser.add_argument("--variants", nargs="+", help="names of variants; all unless given")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["NUMBA_CACHE_DIR"] = cache  # so that compiling is measured
        run(options)


def run(options: argparse.Namespace) -> None:
    """Build the graph and time the variants."""
    from gtrain.graph.sampling import Columns, NeighborSampler, scratch

    indptr, indices = planted(options.nodes, options.edges)
    degree = np.diff(indptr)
    print(f"{options.nodes} nodes, {indices.size} edges, in-degree {degree.mean():.1f}, at most {degree.max()}")
    compiling, dense_limit = 0.0, scratch.DENSE_LIMIT
    for name, (graph, arguments) in variants(indptr, indices).items():
        if options.variants and name not in options.variants:
            continue
        scratch.DENSE_LIMIT = 0 if name.endswith("hashed") else dense_limit
        columns = Columns(indptr, indices, **graph)
        sampler = NeighborSampler(columns, options.fan_out, **arguments)
        seed_time = [0] if sampler.typed.rule.temporal else None
        cpu = time.process_time()
        sampler.sample([0], seed_time=seed_time)
        compiling += time.process_time() - cpu
        with ThreadPoolExecutor(options.threads) as pool:
            began = time.perf_counter()
            jobs = [pool.submit(timed, sampler, name, options.nodes, options) for _ in range(options.threads)]
            found = [job.result() for job in jobs]
            wall = time.perf_counter() - began
        batches = options.threads * (options.warm_up + options.batches)
        together = f"  all threads {batches * options.batch_size / wall:8.0f}" if options.threads > 1 else ""
        (batch_wall, batch_cpu, sample) = found[0]
        print(
            f"{name:<22} {options.batch_size / batch_wall:8.0f} seeds/s  by CPU {options.batch_size / batch_cpu:8.0f}"
            f"  {1000 * batch_cpu:7.2f} CPU ms a batch  {sample.node.size:8d} nodes"
            f" {sample.row.size:9d} edges{together}",
            flush=True,
        )
    print(f"compiling all of these: {compiling:.1f} CPU seconds")


if __name__ == "__main__":
    main()
