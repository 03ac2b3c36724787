"""CPU seconds and peak memory of one step of each convolution: as PyG wrote it, and by the layer engine.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_layers.py
    OMP_NUM_THREADS=1 python tests/benchmarks/bench_layers.py --nodes 10000 --edges 150000 --layers GATv2Conv

A step is a forward and a backward pass over a random graph whose features need a gradient. Both ways run in processes
of their own, in turn; the table has the smallest time of the steps after the first, and memory above the inputs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch_geometric.nn import conv as convs

from gtrain.engine.local import LocalEngine

LAYERS: dict[str, Callable[[int], Any]] = {
    "GCNConv": lambda width: convs.GCNConv(width, width),
    "SAGEConv": lambda width: convs.SAGEConv(width, width),
    "GraphConv": lambda width: convs.GraphConv(width, width),
    "GATConv": lambda width: convs.GATConv(width, width // 4, heads=4),
    "GATv2Conv": lambda width: convs.GATv2Conv(width, width // 4, heads=4),
    "TransformerConv": lambda width: convs.TransformerConv(width, width // 4, heads=4),
}


def measure(name: str, engine: bool, options: argparse.Namespace) -> tuple[float, float]:
    """Return the CPU seconds of a step, and MiB above the inputs."""
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(0, options.nodes, (2, options.edges), generator=generator)
    x = torch.randn(options.nodes, options.width, generator=generator).requires_grad_()
    layer = LAYERS[name](options.width)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if engine:
        LocalEngine(constant=True).install(layer)
    seconds = []
    for _ in range(options.steps + 1):
        start = time.process_time()
        layer(x, edge_index).square().mean().backward()
        seconds.append(time.process_time() - start)
    return min(seconds[1:]), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--edges", type=int, default=750_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    print(f"{'layer':16} {'PyG s':>7} {'here s':>7} {'ratio':>6} {'PyG MiB':>8} {'here MiB':>8} {'ratio':>6}")
    for name in options.layers:
        ways = []
        for engine in (False, True):
            with ProcessPoolExecutor(1, mp_context=spawn) as pool:
                ways.append(pool.submit(measure, name, engine, options).result())
        (plain, plain_mib), (here, mib) = ways
        print(
            f"{name:16} {plain:7.2f} {here:7.2f} {here / plain:6.2f} "
            f"{plain_mib:8.0f} {mib:8.0f} {mib / plain_mib:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
