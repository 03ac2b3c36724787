"""Small graphs for the tests."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data

from gtrain.graph.store import Store
from gtrain.graph.store.writer import write_store


def messy_graph(num_nodes: int = 40, num_edges: int = 300, seed: int = 0) -> Data:
    """A random directed graph with loops, parallel edges, an isolated node, and tensors of several kinds."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, num_nodes - 1, (2, num_edges), generator=generator)
    edges[:, :3] = torch.tensor([[1, 1, 2], [2, 2, 2]])
    masks = torch.rand(num_nodes, generator=generator)
    return Data(
        x=torch.randn(num_nodes, 5, generator=generator),
        y=torch.randint(0, 3, (num_nodes,), generator=generator),
        edge_index=edges,
        edge_weight=torch.rand(num_edges, generator=generator),
        edge_attr=torch.randint(0, 9, (num_edges, 2), generator=generator),
        train_mask=masks < 0.5,
        val_mask=(masks >= 0.5) & (masks < 0.7),
        test_mask=masks >= 0.7,
        time=torch.arange(num_nodes),
        num_nodes=num_nodes,
    )


def random_parts(num_nodes: int, num_parts: int, seed: int = 0) -> Tensor:
    """An uneven assignment that leaves no part empty."""
    parts = torch.randint(0, num_parts, (num_nodes,), generator=torch.Generator().manual_seed(seed))
    parts[:num_parts] = torch.arange(num_parts)
    return parts


def stored(path: Path, data: Data, parts: Tensor) -> Store:
    """Write a graph as a store."""
    count = int(parts.max()) + 1
    return write_store(path, data, parts, count, source={"a": 1}, facts={"b": 2}, partitioner="file", seed=0)
