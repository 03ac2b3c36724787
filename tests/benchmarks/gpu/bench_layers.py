"""Seconds and memory of training steps on one GPU: the layer engine, and PyG's layers as written and compiled.

    python tests/benchmarks/gpu/bench_layers.py
    python tests/benchmarks/gpu/bench_layers.py --device cpu --small

A step is a forward pass, the loss of half of the nodes, a backward pass and Adam, in float32, on a random graph with
169,343 nodes and 2.5 million edges, in-degrees uniform or skewed. Each way prints a JSON object with the median of its
steps and the peak of device memory above graph and features.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, SAGEConv

from gtrain.engine.local import LocalEngine

WIDTH, HEADS = 256, 4
LAYERS: dict[str, Callable[[int, int, bool], nn.Module]] = {
    "sage": lambda inputs, outputs, last: SAGEConv(inputs, outputs),
    "gat": lambda inputs, outputs, last: GATConv(
        inputs, outputs if last else outputs // HEADS, heads=1 if last else HEADS
    ),
    "gcn": lambda inputs, outputs, last: GCNConv(inputs, outputs),
    "gatv2": lambda inputs, outputs, last: GATv2Conv(
        inputs, outputs if last else outputs // HEADS, heads=1 if last else HEADS
    ),
}


class Network(nn.Module):
    """Three convolutions with ReLU in between."""

    def __init__(self, kind: str, inputs: int, classes: int) -> None:
        super().__init__()
        widths = [inputs, WIDTH, WIDTH, classes]
        self.convs = nn.ModuleList(LAYERS[kind](widths[i], widths[i + 1], i == 2) for i in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = F.relu(conv(x, edge_index))
        return self.convs[-1](x, edge_index)


def graph(nodes: int, edges: int, skewed: bool, device: str) -> dict[str, Tensor]:
    """Return features, edges ordered by target as stores have them, and labels."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(0, nodes, (edges,), generator=generator)
    target = torch.rand(edges, generator=generator, dtype=torch.float64)
    # Density 1 / sqrt(node): the largest in-degree is 3,000 times that of most nodes.
    target = (target.square() if skewed else target).mul(nodes).long().clamp(max=nodes - 1).sort().values
    data = {
        "x": torch.randn(nodes, 128, generator=generator),
        "edge_index": torch.stack([source, target]),
        "y": torch.randint(0, 40, (nodes,), generator=generator),
        "train": torch.randperm(nodes, generator=generator)[: nodes // 2],
    }
    return {name: tensor.to(device) for name, tensor in data.items()}


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def measure(way: str, kind: str, data: dict[str, Tensor], device: str, seconds: float) -> dict[str, Any]:
    """Return the readings of one way to run one network: ``engine``, ``plain`` or ``compiled``."""
    torch.manual_seed(0)
    network = Network(kind, 128, 40).to(device)
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    run: Any = network
    if way == "engine":
        engine = LocalEngine(constant=True)
        engine.add_constants(data.values())
        engine.install(network)
    elif way == "compiled":
        run = torch.compile(network)
    before = 0
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()

    def step() -> Tensor:
        optimizer.zero_grad()
        out = run(data["x"], data["edge_index"])
        loss = F.cross_entropy(out[data["train"]], data["y"][data["train"]])
        loss.backward()
        optimizer.step()
        return loss.detach()

    start = time.perf_counter()
    losses = [step() for _ in range(3)]
    synchronize(device)
    first, times = time.perf_counter() - start, []
    end = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 100):
        synchronize(device)
        start = time.perf_counter()
        losses.append(step())
        synchronize(device)
        times.append(time.perf_counter() - start)
    peak = 0 if device == "cpu" else torch.cuda.max_memory_allocated() - before
    return {
        "network": kind, "way": way, "ms": round(1000 * statistics.median(times), 3), "steps": len(times),
        "first_s": round(first, 2), "mib": round(peak / 2**20, 1), "loss": float(losses[4]),
    }  # fmt: skip


PLAN = [
    *((kind, way, False) for kind in ("sage", "gat") for way in ("engine", "compiled")),
    *((kind, "engine", True) for kind in ("sage", "gat")),
    *((kind, "plain", False) for kind in ("sage", "gat")),
    *((kind, way, False) for kind in ("gatv2", "gcn") for way in ("engine", "plain")),
]
"""Network, way, and whether in-degrees are skewed; the most important first."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a graph of 2,000 nodes")
    parser.add_argument("--seconds", type=float, default=70.0, help="after which no other way starts")
    parser.add_argument("--each", type=float, default=1.0, help="seconds of the steps of each way")
    parser.add_argument("--networks", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--ways", nargs="+", default=["engine", "plain", "compiled"])
    options = parser.parse_args()
    nodes, edges = (2_000, 30_000) if options.small else (169_343, 2_500_000)
    end, graphs = time.perf_counter() + options.seconds, {}
    for kind, way, skewed in PLAN:
        if kind not in options.networks or way not in options.ways or (way == "compiled" and options.device == "cpu"):
            continue
        if time.perf_counter() > end:
            print(json.dumps({"left_out": [kind, way, skewed]}), flush=True)
            continue
        if skewed not in graphs:
            graphs = {skewed: graph(nodes, edges, skewed, options.device)}
        try:
            reading = measure(way, kind, graphs[skewed], options.device, options.each)
        except torch.OutOfMemoryError as error:
            reading = {"network": kind, "way": way, "error": str(error)[:100]}
        print(json.dumps({"skewed": skewed, **reading}), flush=True)


if __name__ == "__main__":
    main()
