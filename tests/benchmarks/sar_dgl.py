"""One process of DGL on a store of gtrain's, for bench_sar.py: ``sar_dgl.py STORE sage|gat HIDDEN EPOCHS OUT``."""

from __future__ import annotations

import sys
from pathlib import Path

import dgl
import torch
import torch.nn.functional as F
from dgl.nn import GATConv, SAGEConv
from sar_probe import Meter
from torch import Tensor, nn

from gtrain.graph.shard import load_whole
from gtrain.graph.store import Store


class Sage(nn.Module):
    """As ``sar_networks.Sage``."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        widths = [inputs, hidden, hidden, outputs]
        self.convs = nn.ModuleList(SAGEConv(a, b, "mean") for a, b in zip(widths, widths[1:], strict=False))

    def forward(self, graph: dgl.DGLGraph, x: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = conv(graph, x).relu()
        return self.convs[-1](graph, x)


class Gat(nn.Module):
    """As ``sar_networks.Gat``."""

    def __init__(self, inputs: int, hidden: int, outputs: int, heads: int = 4) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [
                GATConv(inputs, hidden, heads),
                GATConv(heads * hidden, hidden, heads),
                GATConv(heads * hidden, outputs, 1),
            ]
        )

    def forward(self, graph: dgl.DGLGraph, x: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = F.elu(conv(graph, x).flatten(1))
        return self.convs[-1](graph, x).squeeze(1)


def main(store: str, model: str, hidden: int, epochs: int, out: str) -> None:
    """Train full-batch and leave the readings."""
    opened = Store.open(Path(store))
    shard, facts = load_whole(opened), opened.facts
    sizes = facts["num_features"], hidden, facts["num_classes"]
    graph = dgl.graph(tuple(shard.edge_index), num_nodes=shard.num_local)
    graph.create_formats_()
    x, y, mask = (shard.node_data[name].clone() for name in ("x", "y", "train_mask"))
    del shard
    network = Sage(*sizes) if model == "sage" else Gat(*sizes)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    meter = Meter()
    meter.start()
    for _ in range(epochs):
        meter.begin()
        optimizer.zero_grad()
        F.cross_entropy(network(graph, x)[mask], y[mask]).backward()
        optimizer.step()
        meter.end(sent=0, bound=0, waited=0.0)
    meter.write(Path(out))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
