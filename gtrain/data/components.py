"""Connected components of a graph."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data


def components(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return the smallest node of each node's component, int64 [N]; edges count in both directions."""
    label, before = torch.arange(num_nodes), None
    source, target = edge_index
    while before is None or not torch.equal(label, before):
        before = label
        label = label.scatter_reduce(0, target, label[source], "amin")
        label = label.scatter_reduce(0, source, label[target], "amin")
        label = label[label]  # the chain of smaller nodes is halved
    return label


def largest_component(graph: Data) -> Data:
    """Return the largest component; its nodes keep their order, and are numbered anew. Of equal ones, the first."""
    assert graph.edge_index is not None and graph.num_nodes is not None
    label = components(graph.edge_index, graph.num_nodes)
    found: Data = graph.subgraph(label == int(label.bincount().argmax()))
    return found
