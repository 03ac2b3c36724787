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
        label = label[label]  # pointer jumping halves the chains
    return label


def largest_component(graph: Data) -> tuple[Data, Tensor]:
    """Return the largest component (the first of equal ones) and the ids of its nodes in ``graph``, ascending [n].

    Node i of the component is node ``ids[i]`` of the graph.
    """
    assert graph.edge_index is not None and graph.num_nodes is not None
    label = components(graph.edge_index, graph.num_nodes)
    ids = (label == int(label.bincount().argmax())).nonzero().flatten()
    component: Data = graph.subgraph(ids)
    return component, ids
