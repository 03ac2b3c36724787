"""Networks for graphs with relations: stacks of PyG's convolutions, unmodified."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import HeteroConv, HGTConv, RGCNConv, SAGEConv

from gtrain.model.inputs import trim
from gtrain.nn.relational import IdRGCNConv

__all__ = ["HGT", "RGCN", "HeteroSAGE", "IdRGCNConv", "Relational"]

EdgeType = tuple[str, str, str]


class Relational(nn.Module):
    """Base of the networks of convolutions over edges with relations.

    Args:
        in_channels: columns of x; None if x has the ids.
        hidden_channels: width of hidden layers.
        out_channels: columns of the result.
        num_relations: R, relations of ``edge_type``.
        num_nodes: N, needed if x has the ids.
        num_layers: convolutions.
        num_bases: matrices that the relations share; None: one per relation.
        root_weight: add a transformation of the node's features to the messages.
        dropout: after each hidden layer.
    """

    def __init__(
        self,
        in_channels: int | None,
        hidden_channels: int,
        out_channels: int,
        num_relations: int,
        num_nodes: int | None = None,
        *,
        num_layers: int = 2,
        num_bases: int | None = None,
        root_weight: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dropout, self.hidden_channels = float(dropout), hidden_channels
        widths = [*[hidden_channels] * (num_layers - 1), out_channels]
        bases = None if num_bases is None else min(num_bases, num_relations)
        self.build(in_channels, widths, num_relations, num_nodes, bases, root_weight)

    def build(
        self, before: int | None, widths: list[int], relations: int, nodes: int | None, bases: int | None, root: bool
    ) -> None:
        """Make the layers.

        Args:
            before: columns of x; None if x has the ids.
            widths: output columns of each convolution.
            relations: R.
            nodes: N, or None.
            bases: matrices that the relations share, at most R; None: one per relation.
            root: see ``root_weight``.
        """
        raise NotImplementedError


class RGCN(Relational):
    """Relational graph convolutional network (Schlichtkrull et al. 2018), with basis decomposition (eq. 3 there).

    Without node features, the first layer reads ids: a learned row per relation and node, as in the paper's entity
    classification (features that are one-hot vectors).

    Args:
        in_channels: columns of x; None if x has the ids.
        hidden_channels: width of hidden layers.
        out_channels: columns of the result.
        num_relations: R, relations of ``edge_type``.
        num_nodes: N, needed if x has the ids: the first layer then has R * N * hidden_channels numbers.
        num_layers: convolutions.
        num_bases: matrices that the relations share; None: one per relation.
        root_weight: add a transformation of the node's features to the messages.
        dropout: after each hidden layer.

    Shapes:
        x [N, in_channels], or int64 [N]; edge_index [2, E], edge_type [E]; result [N, out_channels].
    """

    layers_in_turn = True

    def build(
        self, before: int | None, widths: list[int], relations: int, nodes: int | None, bases: int | None, root: bool
    ) -> None:
        """Make the convolutions."""
        shared: dict[str, Any] = {"num_bases": bases, "root_weight": root}
        self.convs = nn.ModuleList()
        for width in widths:
            if before is None:
                assert nodes is not None  # passed if the graph has no features
                self.convs.append(IdRGCNConv(nodes, width, relations, **shared))
            else:
                self.convs.append(RGCNConv(before, width, relations, **shared))
            before = width

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_type: Tensor,
        num_sampled_nodes_per_hop: list[int] | None = None,
        num_sampled_edges_per_hop: list[int] | None = None,
    ) -> Tensor:
        """Return the scores of every node; with the numbers of each hop, at least of the seeds (:func:`.trim`)."""
        hops = num_sampled_nodes_per_hop, num_sampled_edges_per_hop
        for number, conv in enumerate(self.convs):
            x, edge_index, edge_type = trim(number, hops, x, edge_index, edge_type)
            x = conv(x, edge_index, edge_type)
            if number + 1 < len(self.convs):
                x = F.dropout(x.relu(), self.dropout, self.training)
        return x


class HeteroSAGE(nn.Module):
    """GraphSAGE with separate weights per edge type (``HeteroConv`` over ``SAGEConv``), messages summed.

    A node type without in-edges keeps its features from layer to layer.

    Args:
        hidden_channels: columns of every node type's features and of hidden layers.
        out_channels: columns of the result.
        edge_types: edge types of the graph.
        num_layers: convolutions.
        dropout: after each hidden layer.
        aggr: ``mean``, ``max`` or ``sum``, within an edge type.

    Shapes:
        x_dict: type -> [n, hidden_channels]; result: type -> [n, out_channels].
    """

    layers_in_turn = True

    def __init__(
        self,
        hidden_channels: int,
        out_channels: int,
        edge_types: list[EdgeType],
        *,
        num_layers: int = 2,
        dropout: float = 0.0,
        aggr: str = "mean",
    ) -> None:
        super().__init__()
        self.dropout = float(dropout)
        self.convs = nn.ModuleList(
            HeteroConv(
                {tuple(t): SAGEConv((hidden_channels, hidden_channels), hidden_channels, aggr=aggr) for t in edge_types}
            )
            for _ in range(num_layers)
        )
        self.head = nn.Linear(hidden_channels, out_channels)

    def forward(
        self,
        x_dict: dict[str, Tensor],
        edge_index_dict: dict[EdgeType, Tensor],
        num_sampled_nodes_dict: dict[str, list[int]] | None = None,
        num_sampled_edges_dict: dict[EdgeType, list[int]] | None = None,
    ) -> dict[str, Tensor]:
        """Return the scores of every node by type; with the numbers of each hop, at least of the seeds."""
        hops = num_sampled_nodes_dict, num_sampled_edges_dict
        # The encoder before this network is linear, so its activation and dropout are here.
        x_dict = {node_type: F.dropout(x.relu(), self.dropout, self.training) for node_type, x in x_dict.items()}
        for number, conv in enumerate(self.convs):
            x_dict, edge_index_dict, _ = trim(number, hops, x_dict, edge_index_dict)
            new = {node_type: x.relu() for node_type, x in conv(x_dict, edge_index_dict).items()}
            x_dict = x_dict | {node_type: F.dropout(x, self.dropout, self.training) for node_type, x in new.items()}
        return {node_type: self.head(x) for node_type, x in x_dict.items()}


class HGT(nn.Module):
    """Heterogeneous graph transformer (Hu et al. 2020): ``HGTConv`` layers and a linear head.

    Args:
        hidden_channels: columns of every node type's features and of hidden layers; a multiple of ``heads``.
        out_channels: columns of the result.
        node_types: node types of the graph.
        edge_types: edge types of the graph.
        num_layers: convolutions.
        heads: attention heads.
        dropout: after each layer.

    Shapes:
        x_dict: type -> [n, hidden_channels]; result: type -> [n, out_channels].
    """

    layers_in_turn = True

    def __init__(
        self,
        hidden_channels: int,
        out_channels: int,
        node_types: list[str],
        edge_types: list[EdgeType],
        *,
        num_layers: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dropout = float(dropout)
        metadata = (node_types, [tuple(t) for t in edge_types])
        self.convs = nn.ModuleList(
            HGTConv(hidden_channels, hidden_channels, metadata, heads) for _ in range(num_layers)
        )
        self.head = nn.Linear(hidden_channels, out_channels)

    def forward(
        self,
        x_dict: dict[str, Tensor],
        edge_index_dict: dict[EdgeType, Tensor],
        num_sampled_nodes_dict: dict[str, list[int]] | None = None,
        num_sampled_edges_dict: dict[EdgeType, list[int]] | None = None,
    ) -> dict[str, Tensor]:
        """Return the scores of every node by type; with the numbers of each hop, at least of the seeds."""
        hops = num_sampled_nodes_dict, num_sampled_edges_dict
        # The encoder before this network is linear.
        x_dict = {node_type: x.relu() for node_type, x in x_dict.items()}
        for number, conv in enumerate(self.convs):
            x_dict, edge_index_dict, _ = trim(number, hops, x_dict, edge_index_dict)
            # HGTConv returns None for a node type without in-edges.
            new = {node_type: x for node_type, x in conv(x_dict, edge_index_dict).items() if x is not None}
            x_dict = x_dict | {t: F.dropout(x, self.dropout, self.training) for t, x in new.items()}
        return {node_type: self.head(x) for node_type, x in x_dict.items()}
