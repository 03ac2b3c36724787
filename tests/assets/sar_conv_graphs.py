"""The graphs on which convolutions are compared, and how they are stored and seen."""

from __future__ import annotations

from pathlib import Path

import torch
from sar_conv_cases import EDGE_WIDTH, KINDS, WIDTH, View
from torch import Tensor
from torch_geometric.data import Data

from gtrain.graph.shard import GraphShard
from gtrain.graph.store import Store
from gtrain.graph.store.writer import write_store
from gtrain.strategy.group import Group

NODES, EDGES = 70, 420
SIZES = {1: [70], 2: [30, 40], 3: [30, 2, 38], 4: [30, 2, 25, 13]}
"""Nodes of each part, by the number of parts."""


def graph(silent: bool) -> Data:
    """A directed graph with parallel edges, self-loops, isolated nodes and a pair of parts that share no edge.

    Args:
        silent: let the last 13 nodes have no in-edges and be in no loss.
    """
    generator = torch.Generator().manual_seed(5)

    def real(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    source, target = torch.randint(0, NODES, (2, EDGES), generator=generator)
    source, target = torch.cat([source, source[:20]]), torch.cat([target, target[:20]])
    target[20:26] = source[20:26]
    parted = (source >= 32) & (target < 30) & (source < 57)
    isolated = (source % 17 == 3) | (target % 17 == 3)
    kept = ~(parted | isolated | ((target >= 57) & silent))
    index = torch.stack([source, target])[:, kept]
    count = index.size(1)
    x = real(NODES, WIDTH)
    return Data(
        x=torch.cat([x[:, :2].relu(), x[:, 2:]], 1),
        edge_index=index,
        y=torch.arange(NODES) % 2,
        place=real(NODES, 3),
        train_mask=torch.arange(NODES) < (57 if silent else NODES),
        edge_weight=real(count).abs() + 0.1,
        edge_attr=real(count, EDGE_WIDTH),
        edge_kind=torch.randint(0, KINDS, (count,), generator=generator),
        num_nodes=NODES,
    )


def view(shard: GraphShard) -> View:
    node, edge = shard.node_data, shard.edge_data
    return View(
        node["x"].clone(),
        shard.edge_index,
        edge["edge_weight"].clone(),
        edge["edge_attr"].clone(),
        edge["edge_kind"].clone(),
        node["y"].clone(),
        node["place"].clone(),
    )


def stored(folder: Path, group: Group, silent: bool) -> Store:
    path = folder / f"store-{group.size}-{silent}"
    if group.rank == 0 and not path.exists():
        parts = torch.repeat_interleave(torch.arange(group.size), torch.tensor(SIZES[group.size]))
        write_store(path, graph(silent), parts, group.size, source={}, facts={}, partitioner="file", seed=0)
    group.barrier()
    return Store.open(path)
