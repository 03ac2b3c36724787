"""Networks of DGL's convolutions, unmodified, with the same names of settings as the other networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn.resolver import activation_resolver

from gtrain.errors import ConfigError
from gtrain.model.networks import indivisible
from gtrain.model.relational import Relational
from gtrain.nn.dgl_graph import DglGraph, load_dgl

_NORMS: dict[str, type[nn.Module]] = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm, "none": nn.Identity}
_SAGE = ("mean", "gcn", "pool", "lstm")


class DglNetwork(nn.Module):
    """A sequence of convolutions; norm, activation and dropout follow each but the last.

    Args:
        convs: called with a DGL graph and node features; heads (a third dimension) are concatenated, in the last layer
            averaged.
        hidden_channels: columns of hidden layers.
        dropout: after each hidden layer.
        input_dropout: on the input features.
        norm: ``batch``, ``layer``, ``none`` or None.
        act: name of the activation.
        self_loops: see :class:`~gtrain.nn.DglGraph`.

    Shapes:
        x [N, in_channels], edge_index int64 [2, E]; result [N, out_channels].

    Raises:
        ConfigError: the norm is unknown.
    """

    def __init__(
        self,
        convs: Sequence[nn.Module],
        hidden_channels: int,
        *,
        dropout: float = 0.0,
        input_dropout: float = 0.0,
        norm: str | None = None,
        act: str = "relu",
        self_loops: bool = False,
    ) -> None:
        super().__init__()
        if (norm or "none") not in _NORMS:
            raise ConfigError(f"model.norm={norm} was set.", hint=f"the norms are {', '.join(_NORMS)}.")
        self.graph = DglGraph(self_loops)
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList(_NORMS[norm or "none"](hidden_channels) for _ in convs[1:])
        self.act = activation_resolver(act)
        self.dropout, self.input_dropout = float(dropout), float(input_dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return the scores of every node."""
        return self.run(x, self.graph(edge_index, len(x)))

    def run(self, x: Tensor, graph: Any, **edge_inputs: Any) -> Tensor:
        """Apply all layers; ``edge_inputs`` are passed to every convolution."""
        x = F.dropout(x, self.input_dropout, self.training)
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = self.act(norm(conv(graph, x, **edge_inputs).flatten(1)))
            x = F.dropout(x, self.dropout, self.training)
        x = self.convs[-1](graph, x, **edge_inputs)
        return x.mean(1) if x.dim() == 3 else x


class DglSAGE(DglNetwork):
    """GraphSAGE (Hamilton et al. 2017): ``dgl.nn.SAGEConv``; edge weights, if any, multiply messages.

    Args:
        in_channels, hidden_channels, out_channels: columns of x, of hidden layers and of the result.
        num_layers: convolutions.
        aggr: ``mean``, ``gcn``, ``pool`` or ``lstm``.
        settings: see :class:`DglNetwork`.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        aggr: str = "mean",
        **settings: Any,
    ) -> None:
        if aggr not in _SAGE:
            raise ConfigError(f"model.aggr={aggr} was set.", hint=f"dgl.nn.SAGEConv supports {', '.join(_SAGE)}.")
        conv = load_dgl("model=dgl_sage").nn.SAGEConv
        widths = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
        convs = [conv(a, b, aggr) for a, b in zip(widths, widths[1:], strict=False)]
        super().__init__(convs, hidden_channels, **settings)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Return the scores of every node; ``edge_weight`` [E]."""
        return self.run(x, self.graph(edge_index, len(x)), edge_weight=edge_weight)


class DglGAT(DglNetwork):
    """Graph attention network (Velickovic et al. 2018): ``dgl.nn.GATConv``.

    Args:
        in_channels, hidden_channels, out_channels: columns of x, of hidden layers (all heads) and of the result.
        num_layers: convolutions.
        heads: attention heads.
        self_loops: every node attends to itself, once.
        settings: see :class:`DglNetwork`.

    Raises:
        ConfigError: ``hidden_channels`` cannot be divided among the heads.
    """

    conv_name = "GATConv"

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int = 2,
        heads: int = 8,
        self_loops: bool = True,
        **settings: Any,
    ) -> None:
        if hidden_channels % heads:
            raise indivisible(hidden_channels, heads)
        conv = getattr(load_dgl(f"model=dgl_{self.conv_name.removesuffix('Conv').lower()}").nn, self.conv_name)
        before = [in_channels, *[hidden_channels] * (num_layers - 1)]
        after = [*[hidden_channels // heads] * (num_layers - 1), out_channels]
        convs = [conv(a, b, heads, allow_zero_in_degree=True) for a, b in zip(before, after, strict=True)]
        super().__init__(convs, hidden_channels, self_loops=self_loops, **settings)


class DglGATv2(DglGAT):
    """Graph attention network, version 2 (Brody et al. 2022): ``dgl.nn.GATv2Conv``; arguments as :class:`DglGAT`."""

    conv_name = "GATv2Conv"


class DglRGCN(Relational):
    """Relational graph convolutional network (Schlichtkrull et al. 2018): ``dgl.nn.RelGraphConv``.

    The messages of a relation are averaged (equation 2 there). Without node features, the first convolution reads a
    learned row per node, as in DGL's example for entities.

    Args:
        in_channels: columns of x; None if x has the ids.
        hidden_channels, out_channels: columns of hidden layers and of the result.
        num_relations: R, relations of ``edge_type``.
        num_nodes: N, needed if x has the ids.
        num_layers: convolutions.
        num_bases: matrices that the relations share; None: one per relation.
        root_weight: add a transformation of the node's features to the messages.
        dropout: after each hidden layer.

    Shapes:
        x [N, in_channels], or int64 [N]; edge_index [2, E], edge_type [E]; result [N, out_channels].
    """

    def build(
        self, before: int | None, widths: list[int], relations: int, nodes: int | None, bases: int | None, root: bool
    ) -> None:
        """Make the node embeddings and the convolutions."""
        conv = load_dgl("model=dgl_rgcn").nn.RelGraphConv
        self.graph, self.rows = DglGraph(), None
        if before is None:
            # The caller passes the number of nodes if the graph has no features.
            assert nodes is not None
            before = self.hidden_channels
            self.rows = nn.Embedding(nodes, before)
        shared: dict[str, Any] = {"self_loop": root}
        if bases is not None:
            shared.update(regularizer="basis", num_bases=bases)
        pairs = zip([before, *widths], widths, strict=False)
        self.convs = nn.ModuleList(conv(a, b, relations, **shared) for a, b in pairs)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        """Return the scores of every node."""
        if self.rows is not None:
            x = self.rows(x)
        graph, share = self.graph(edge_index, len(x)), _shares(edge_index, edge_type).to(x.dtype)
        for number, conv in enumerate(self.convs):
            x = conv(graph, x, edge_type, share)
            if number + 1 < len(self.convs):
                x = F.dropout(x.relu(), self.dropout, self.training)
        return x


_share_cache: Any = WeakIdKeyDictionary()  # by edge_index and edge_type


def _shares(edge_index: Tensor, edge_type: Tensor) -> Tensor:
    """Return 1 / number of edges with the same target and relation, float64 [E, 1].

    The counts are exact since a rank has all in-edges of its targets. They are computed once per graph.
    """
    cache = _share_cache.setdefault(edge_index, WeakIdKeyDictionary())
    if edge_type not in cache:
        pair = edge_index[1] * (int(edge_type.max()) + 1 if edge_type.numel() else 1) + edge_type
        _, index, count = torch.unique(pair, return_inverse=True, return_counts=True)
        cache[edge_type] = count.double().reciprocal()[index].unsqueeze(1)
    shares: Tensor = cache[edge_type]
    return shares
