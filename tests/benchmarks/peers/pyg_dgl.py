"""DGL's loader on a store of gtrain's, for bench_pyg.py: ``pyg_dgl.py STORE FAN_OUT BATCH STEPS OUT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import dgl
import torch
from pyg_probe import now

from gtrain.graph.shard import load_whole
from gtrain.graph.store import Store

WARM_UP = 5


def main(store: str, fan_out: list[int], batch_size: int, steps: int, out: str) -> None:
    """Make batches with features, labels and edge ids, and leave the readings."""
    shard = load_whole(Store.open(Path(store)))
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
        counted += len(outputs)
    spent = {name: value - began[name] for name, value in now().items()}
    Path(out).write_text(json.dumps(spent | {"seeds": counted, "steps": steps}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], [int(n) for n in sys.argv[2].split(",")], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
