"""A relational graph convolution over the ids of nodes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.inits import glorot


def check_ids(ids: Tensor, num_nodes: int) -> None:
    """Raise IndexError unless all ids [n] are 0 .. num_nodes-1: others would read rows of another relation."""
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= num_nodes):
        raise IndexError(
            f"a relational convolution was called with ids from {int(ids.min())} to {int(ids.max())}; it has learned "
            f"rows of the ids 0 to {num_nodes - 1}."
        )


class IdRGCNConv(MessagePassing):
    """``RGCNConv`` over one-hot vectors of ids: a learned row per relation and node.

    PyG's ``FastRGCNConv`` takes a node's position as its id; here ids are an input, so that the nodes of a part look up
    their rows of the whole graph.

    Args:
        num_nodes: N, number of ids.
        out_channels: columns of the result.
        num_relations: R, relations of ``edge_type``.
        num_bases: matrices that the relations share; None: one per relation.
        root_weight: add a learned row of the node to the messages.

    Shapes:
        ids int64 [n], edge_index [2, E], edge_type [E]; result [n, out_channels], the sum over relations of the mean
        over neighbours.
    """

    def __init__(
        self,
        num_nodes: int,
        out_channels: int,
        num_relations: int,
        *,
        num_bases: int | None = None,
        root_weight: bool = True,
    ) -> None:
        super().__init__(aggr="add", node_dim=0)
        self.num_nodes, self.num_relations = num_nodes, num_relations
        self.weight = nn.Parameter(torch.empty(num_bases or num_relations, num_nodes, out_channels))
        self.comp = nn.Parameter(torch.empty(num_relations, num_bases)) if num_bases else None
        self.root = nn.Parameter(torch.empty(num_nodes, out_channels)) if root_weight else None
        self.bias = nn.Parameter(torch.zeros(out_channels))
        glorot(self.weight)
        glorot(self.comp)
        glorot(self.root)

    def forward(self, ids: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        """Return the embeddings of every node.

        Raises:
            IndexError: an id is out of range.
        """
        check_ids(ids, self.num_nodes)
        # a rank has all in-edges of its targets, so counts of (target, relation) are exact
        pair = edge_index[1] * self.num_relations + edge_type
        _, index, count = torch.unique(pair, return_inverse=True, return_counts=True)
        share = 1 / count.to(self.weight.dtype)[index]
        out: Tensor = self.propagate(edge_index, ids=ids, edge_type=edge_type, share=share) + self.bias
        return out if self.root is None else out + self.root[ids]

    def message(self, ids_j: Tensor, edge_type: Tensor, share: Tensor) -> Tensor:
        return self.rows(ids_j, edge_type) * share.unsqueeze(1)

    def rows(self, ids: Tensor, edge_type: Tensor) -> Tensor:
        """Return the learned rows of pairs of an id and a relation, int64 [P] each, as [P, out_channels]."""
        if self.comp is None:
            return self.weight.flatten(0, 1)[edge_type * self.num_nodes + ids]
        return torch.einsum("eb,beh->eh", self.comp[edge_type], self.weight[:, ids])
