"""A three-layer GraphSAGE on PyG's own loader, for bench_pyg.py: ``pyg_nodeloader.py STORE FAN_OUT BATCH STEPS OUT``.

The loader samples with pyg-lib or torch-sparse where one is installed, and else with gtrain's kernels, so that the two
differ in what comes after sampling alone. The model sees every node and edge in every layer, as it does without
``trim_to_layer``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import torch_geometric.typing
from pyg_probe import now
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader, NodeLoader
from torch_geometric.nn import GraphSAGE

from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.shard import load_whole
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import NODE_TYPE
from gtrain.strategy.group import Group
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.graph_structure import GraphStructure
from gtrain_pyg.peers import PartBook, Peers, detect_hosting
from gtrain_pyg.pyg_loaders import ShardSampler
from gtrain_pyg.sampling.sampler import DistributedSampler

WARM_UP = 5


def loader_of(store: Store, fan_out: list[int], batch_size: int) -> NodeLoader:
    """PyG's loader over the graph in memory."""
    shard = load_whole(store)
    data = Data(x=shard.node_data["x"].clone(), y=shard.node_data["y"].clone(), edge_index=shard.edge_index)
    seeds = shard.node_data["train_mask"].nonzero().flatten()
    if torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE:
        return NeighborLoader(data, fan_out, seeds, batch_size=batch_size, shuffle=True, drop_last=True)
    group = Group()
    hosting = detect_hosting(group)
    structure = GraphStructure(store, PartBook.of(store), hosting)
    options = SamplingOptions(tuple(fan_out))
    sampler = DistributedSampler(structure, Peers(group, hosting), BufferPool(), options, seed=0)
    shards = ShardSampler(sampler, {NODE_TYPE: store.num_nodes}, hetero=False)
    return NodeLoader(data, shards, seeds, batch_size=batch_size, shuffle=True, drop_last=True)


def main(path: str, fan_out: list[int], batch_size: int, steps: int, out: str) -> None:
    """Train, and leave the readings."""
    store = Store.open(Path(path))
    loader = loader_of(store, fan_out, batch_size)
    network = GraphSAGE(store.facts["num_features"], 256, len(fan_out), store.facts["num_classes"])
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    counted, began = 0, now()
    for step, batch in enumerate(loader):
        if step == WARM_UP:
            counted, began = 0, now()
        if step == WARM_UP + steps:
            break
        optimizer.zero_grad()
        scores = network(batch.x, batch.edge_index)[: batch.batch_size]
        F.cross_entropy(scores, batch.y[: batch.batch_size]).backward()
        optimizer.step()
        counted += batch.batch_size
    spent = {name: value - began[name] for name, value in now().items()}
    Path(out).write_text(json.dumps(spent | {"seeds": counted, "steps": steps}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], [int(n) for n in sys.argv[2].split(",")], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
