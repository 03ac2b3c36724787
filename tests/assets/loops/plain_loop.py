"""Print losses and gradients of a plain loop: ``plain_loop.py RANKS``, 0 for PyG alone, without gtrain."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv

import gtrain


class Network(nn.Module):
    """A weighted convolution, the statistics of a batch norm, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = GCNConv(6, 8), nn.BatchNorm1d(8), GATConv(8, 3, heads=2, concat=False)

    def forward(self, data: Data) -> torch.Tensor:
        hidden = self.norm(self.first(data.x, data.edge_index, data.edge_weight)).relu()
        return self.second(hidden, data.edge_index)


def graph() -> Data:
    made = torch.Generator().manual_seed(3)
    index = torch.randint(90, (2, 500), generator=made)
    index = index[:, index[0] != index[1]]
    x = torch.randn(90, 6, dtype=torch.float64, generator=made)
    weight = torch.rand(index.shape[1], dtype=torch.float64, generator=made)
    y, mask = torch.randint(3, (90,), generator=made), torch.rand(90, generator=made) < 0.4
    return Data(x=x, y=y, edge_index=index, edge_weight=weight, train_mask=mask)


def train(ranks: int) -> str:
    sharded = gtrain.shard(graph(), strategy=gtrain.SarStrategy(mode=2) if ranks > 1 else "sar") if ranks else None
    data = graph() if sharded is None else sharded.data
    # Other weights on each rank: the ranks have to agree on those of rank 0.
    torch.manual_seed(0 if sharded is None else sharded.rank)
    network = Network().double()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    seeds = data.train_mask.sum()
    result = []
    with nullcontext() if sharded is None else sharded.exchange(network):
        for _ in range(4):
            optimizer.zero_grad()
            total = seeds if sharded is None else sharded.sum(seeds)
            loss = F.cross_entropy(network(data)[data.train_mask], data.y[data.train_mask], reduction="sum") / total
            loss.backward()
            if sharded is not None:
                sharded.sum_gradients(network)
                loss = sharded.sum(loss)
            gradients = [parameter.grad.flatten().tolist() for parameter in network.parameters()]
            result.append({"loss": loss.item(), "gradients": sum(gradients, [])})
            optimizer.step()
    return json.dumps({"steps": result, "mean": network.norm.running_mean.tolist()})


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    print("RESULT", gtrain.run_local(train, ranks, num_nodes=ranks) if ranks else train(0))
