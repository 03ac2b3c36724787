"""DGL on a store of gtrain's, for bench_pyg.py: ``pyg_dgl.py STORE FAN_OUT BATCH STEPS OUT [sage|gat]``.

Without a model, what its loader takes is measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import dgl
import torch
import torch.nn.functional as F
from pyg_probe import now
from sar_dgl import Gat, Sage
from torch import Tensor, nn

from gtrain.graph.shard import load_whole
from gtrain.graph.store import Store

WARM_UP = 5


NETWORKS = {"sage": (Sage, 256, torch.relu), "gat": (Gat, 64, F.elu)}


def main(store: str, fan_out: list[int], batch_size: int, steps: int, out: str, model: str = "") -> None:
    """Make batches with features, labels and edge ids, train if there is a model, and leave the readings."""
    opened = Store.open(Path(store))
    shard = load_whole(opened)
    train = trainer(model, opened.facts["num_features"], opened.facts["num_classes"]) if model else None
    graph = dgl.graph(tuple(shard.edge_index), num_nodes=shard.num_local)
    x, y = shard.node_data["x"].clone(), shard.node_data["y"].clone()
    seeds = shard.node_data["train_mask"].nonzero().flatten()
    del shard
    graph = graph.formats(["csc"])
    sampler = dgl.dataloading.NeighborSampler(fan_out[::-1])  # DGL counts from the layer that is farthest
    loader = dgl.dataloading.DataLoader(graph, seeds, sampler, batch_size=batch_size, shuffle=True, drop_last=True)
    counted, began, batches = 0, now(), iter(loader)
    for step in range(steps + WARM_UP):
        if step == WARM_UP:
            counted, began = 0, now()
        inputs, outputs, blocks = next(batches)
        features, labels = x[inputs], y[outputs]
        edges = [block.edata[dgl.EID] for block in blocks]
        assert len(features) == len(inputs) and len(labels) == len(outputs) and len(edges) == len(fan_out)
        if train is not None:
            train(blocks, features, labels)
        counted += len(outputs)
    spent = {name: value - began[name] for name, value in now().items()}
    Path(out).write_text(json.dumps(spent | {"seeds": counted, "steps": steps}))


def trainer(model: str, inputs: int, outputs: int) -> Callable[[list[dgl.DGLGraph], Tensor, Tensor], None]:
    """A step of training on the blocks, features and labels of a batch."""
    network_type, hidden, activation = NETWORKS[model]
    network: nn.Module = network_type(inputs, hidden, outputs)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)

    def train(blocks: list[dgl.DGLGraph], x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        for conv, block in zip(network.convs, blocks, strict=True):
            x = conv(block, x).flatten(1)
            x = x if conv is network.convs[-1] else activation(x)
        F.cross_entropy(x, y).backward()
        optimizer.step()

    return train


if __name__ == "__main__":
    torch.set_num_threads(1)
    fan_out = [int(n) for n in sys.argv[2].split(",")]
    main(sys.argv[1], fan_out, int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
