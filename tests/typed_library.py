"""A graph with types that has everything a store can hold, for the tests of stores and shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from small_graphs import random_parts
from torch import Tensor
from torch_geometric.data import HeteroData

from gtrain.graph.store import Store
from gtrain.graph.store.writer import write_store

WRITES, BY = ("author", "writes", "paper"), ("paper", "by__", "author")
CITES = ("paper", "cites", "paper")


def library(seed: int = 0) -> HeteroData:
    """Authors, papers and a tiny type; an edge type that is empty, one with times, and held-out edges."""
    generator = torch.Generator().manual_seed(seed)

    def pairs(count: int, sources: int, targets: int) -> Tensor:
        ends = [torch.randint(0, n, (count,), generator=generator) for n in (sources, targets)]
        return torch.stack(ends)

    data = HeteroData()
    data["author"].x = torch.randn(30, 4, generator=generator)
    data["paper"].x = (torch.rand(50, 7, generator=generator) < 0.2).float().to_sparse_csr()
    data["paper"].y = torch.randint(0, 3, (50,), generator=generator)
    data["paper"].train_mask = torch.rand(50, generator=generator) < 0.5
    data["paper"].time = torch.arange(50)
    data["a/b"].num_nodes = 2
    data[WRITES].edge_index = pairs(200, 30, 50)
    data[WRITES].edge_weight = torch.rand(200, generator=generator)
    data[WRITES].val_edge_index = pairs(30, 30, 50)
    data[WRITES].val_edge_weight = torch.rand(30, generator=generator)
    data[WRITES].test_edge_index = pairs(0, 30, 50)
    data[BY].edge_index = torch.empty(2, 0, dtype=torch.int64)
    data[CITES].edge_index = pairs(300, 50, 50)
    data[CITES].edge_time = torch.randint(-5, 5, (300,), generator=generator)
    data[CITES].edge_attr = torch.randn(300, 3, generator=generator).to(torch.bfloat16)
    data["a/b", "of", "paper"].edge_index = pairs(9, 2, 50)
    return data


def library_parts(num_parts: int) -> dict[str, Tensor]:
    return {
        "author": random_parts(30, num_parts),
        "paper": random_parts(50, num_parts, seed=1),
        "a/b": torch.full((2,), num_parts - 1),
    }


def write(path: Path, graph: Any, parts: Any, num_parts: int, **options: Any) -> Store:
    return write_store(path, graph, parts, num_parts, source={}, facts={}, partitioner="file", seed=0, **options)
