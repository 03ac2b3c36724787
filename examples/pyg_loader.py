"""Use gtrain's partitioned store with PyG's own NodeLoader and a training loop of your own.

The graph is partitioned once and stays on disk; the feature store and graph store map it into memory, and the sampler
runs gtrain's compiled kernels. Nothing here needs a Lightning Trainer or a strategy.

    python examples/pyg_loader.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import GraphSAGE

from gtrain import PlantedData
from gtrain_pyg.pyg_loaders import open_for_loaders


def main() -> float:
    """Train for five epochs; return the accuracy on the validation nodes."""
    torch.manual_seed(0)
    data = PlantedData(num_nodes=2000, num_edges=20000, num_parts=2)
    data.prepare_data()
    features, graph, sampler = open_for_loaders(data.open_store(), num_neighbors=[10, 5])

    def loader(mask: str, shuffle: bool) -> NodeLoader:
        nodes = features.get_tensor(group_name=None, attr_name=mask, index=None).nonzero().flatten()
        return NodeLoader((features, graph), sampler, input_nodes=nodes, batch_size=128, shuffle=shuffle)

    model = GraphSAGE(64, hidden_channels=32, num_layers=2, out_channels=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(5):
        losses = []
        for batch in loader("train_mask", shuffle=True):
            optimizer.zero_grad()
            scores = model(batch.x, batch.edge_index)[: batch.batch_size]  # the seeds come first
            loss = F.cross_entropy(scores, batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: mean loss {sum(losses) / len(losses):.4f}")
    correct = total = 0
    with torch.no_grad():
        for batch in loader("val_mask", shuffle=False):
            predicted = model(batch.x, batch.edge_index)[: batch.batch_size].argmax(dim=1)
            correct += int((predicted == batch.y[: batch.batch_size]).sum())
            total += batch.batch_size
    return correct / total


if __name__ == "__main__":
    print(f"validation accuracy: {main():.3f}")
