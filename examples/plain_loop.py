"""Train in a loop of your own, without Lightning or Hydra, on a graph that is divided among two processes.

``gtrain.shard`` gives each process its part, and inside of ``exchange`` convolutions read the neighbours on the other
one. Losses and gradients are those of one process.

    python examples/plain_loop.py
    torchrun --nproc-per-node=2 examples/plain_loop.py
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv, Sequential

import gtrain


def ring_of_groups(num_nodes: int = 1200, num_classes: int = 4) -> Data:
    """Return a random graph, the same on every rank: nodes have noisy features of their class, and cite that class."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(num_nodes) % num_classes
    x = F.one_hot(y) + 2 * torch.randn(num_nodes, num_classes, generator=generator, dtype=torch.float64)
    source = torch.randint(num_nodes, (8 * num_nodes,), generator=generator)
    step = num_classes * torch.randint(num_nodes // num_classes, source.shape, generator=generator)
    mask = torch.rand(num_nodes, generator=generator) < 0.5
    return Data(x=x, y=y, edge_index=torch.stack([source, (source + step) % num_nodes]), train_mask=mask)


def train() -> list[tuple[float, float]]:
    """Train on this rank; return the loss and the norm of the gradients of each epoch."""
    graph = gtrain.shard(ring_of_groups())
    part = graph.data
    torch.manual_seed(0)
    layers = [(SAGEConv(4, 16), "x, edge_index -> x"), torch.nn.ReLU(), (SAGEConv(16, 4), "x, edge_index -> x")]
    model = Sequential("x, edge_index", layers).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    num_seeds = graph.sum(part.train_mask.sum())  # of all ranks
    history = []
    with graph.exchange(model):
        for _ in range(20):
            optimizer.zero_grad()
            scores = model(part.x, part.edge_index)
            loss = F.cross_entropy(scores[part.train_mask], part.y[part.train_mask], reduction="sum") / num_seeds
            loss.backward()
            graph.sum_gradients(model)
            optimizer.step()
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            history.append((graph.sum(loss).item(), norm.item()))
    return history


def report(title: str, history: list[tuple[float, float]]) -> None:
    """Print the last epoch."""
    print(f"{title}: loss {history[-1][0]:.12f}, norm of the gradients {history[-1][1]:.12f}")


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        history = train()
        if os.environ["RANK"] == "0":
            report(f"{os.environ['WORLD_SIZE']} ranks of torchrun", history)
    else:
        for ranks in (1, 2):
            report(f"{ranks} rank(s)", gtrain.run_local(train, num_nodes=ranks))
