"""Partitioning planted graphs: METIS and KaMinPar beside each other, and METIS's groups beside nested clusters.

    python tests/benchmarks/bench_partition.py --nodes 100000 1000000 --parts 4

Both run in one process on one thread, after the symmetric graph is made, on the same weights. A line has CPU and wall
seconds, the directed cut edges, the halo nodes, and largest / mean of nodes, in-edges and training nodes; ratios are to
METIS. The second table has the seconds that an order of the nodes within a part takes, and the reads of rows per edge
that miss a cache of 4,096 rows (the least recently used row is evicted).
"""

from __future__ import annotations

import argparse
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.data.planted.common import power_law
from gtrain.data.planted.pairs import draw_pairs
from gtrain.graph.partition import methods, metis
from gtrain.graph.partition.adjacency import Adjacency, node_weights
from gtrain.graph.partition.clusters import locality_order
from gtrain.graph.partition.kaminpar import kaminpar_partition
from gtrain.kernel_cache import find_cache

CACHE_ROWS = 4096
SAMPLE = 500_000
"""Edges of part 0 whose reads are simulated."""


def planted(nodes: int, classes: int, seed: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.bool_]]:
    """Sources, targets and training nodes: ten directed edges a node, 80 % of them within a class, skewed degrees."""
    random = np.random.default_rng(seed)
    inside = 4 * nodes
    pairs = draw_pairs(
        random.permutation(np.arange(nodes) % classes), power_law(nodes, 3.0, random), inside, nodes, random
    )
    source, target = np.concatenate([pairs, pairs[::-1]], axis=1)
    return source, target, random.random(nodes) < 0.6


def timed(function: Callable[[], Any]) -> tuple[Any, float, float]:
    """The result of a function, its CPU seconds and its wall seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    return result, time.process_time() - cpu, time.perf_counter() - wall


def misses(source: NDArray[Any], target: NDArray[Any], parts: NDArray[Any], order: NDArray[Any]) -> float:
    """Reads per edge that miss the cache, when part 0 sums over the in-edges of its nodes."""
    position = np.empty(parts.size, dtype=np.int64)
    position[np.lexsort((order, parts))] = np.arange(parts.size)
    mine = parts[target] == 0
    sources, targets = position[source[mine]], position[target[mine]]
    rows = sources[np.lexsort((sources, targets))][:SAMPLE].tolist()
    cache: OrderedDict[int, None] = OrderedDict()
    missed = 0
    for row in rows:
        missed += row not in cache
        cache[row] = None
        cache.move_to_end(row)
        if len(cache) > CACHE_ROWS:
            cache.popitem(last=False)
    return missed / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--classes", type=int, default=8)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(vars(options))
    find_cache()
    compare(20_000, options)  # compiles the kernels
    for nodes in options.nodes:
        print(f"\n{nodes:,} nodes")
        for line in compare(nodes, options):
            print(line, flush=True)


def compare(nodes: int, options: argparse.Namespace) -> list[str]:
    """Partition and order one graph by all methods; return a line for each."""
    parts = options.parts
    source, target, train = planted(nodes, options.classes, options.seed)
    graph, cpu, wall = timed(lambda: Adjacency.of(source, target, nodes, small=0))
    lines = [f"symmetric graph: {cpu:.2f} CPU s, {wall:.2f} s"]
    weights = node_weights(target, nodes, train)
    reference: tuple[float, ...] | None = None
    for name, method in (("METIS", metis.metis_partition), ("KaMinPar", kaminpar_partition)):
        result, cpu, wall = timed(lambda method=method: method(graph, parts, weights, seed=options.seed))
        remote = result[source] != result[target]
        halo = np.unique(result[target[remote]] * nodes + source[remote]).size
        figures = (cpu, float(remote.sum()), float(halo))
        reference = reference or figures
        ratios = ", ".join(f"{value / base:.4f}" for value, base in zip(figures, reference, strict=True))
        balance = ", ".join(f"{value:.3f}" for value in methods.imbalances(result, parts, target, train))
        lines.append(
            f"{name}: {cpu:.2f} CPU s, {wall:.2f} s, cut {int(remote.sum()):,}, halo {halo:,}, balance {balance}; "
            f"CPU, cut and halo / METIS: {ratios}"
        )
    orders = {
        "source data": lambda: np.zeros(nodes),
        "METIS's groups": lambda: metis.group_nodes(source, target, result, parts),
        "nested clusters": lambda: locality_order(graph, result, parts),
    }
    for name, make in orders.items():
        order, cpu, wall = timed(make)
        if order is not None:
            missed = misses(source, target, result, order)
            lines.append(f"order by {name}: {cpu:.2f} CPU s, {wall:.2f} s, {missed:.3f} misses per edge")
    return lines


if __name__ == "__main__":
    main()
