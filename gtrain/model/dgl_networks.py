"""Networks of DGL's convolutions, unmodified, with the settings of the other networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn.resolver import activation_resolver

from gtrain.errors import ConfigError
from gtrain.model.relational import Relational
from gtrain.nn.dgl_graph import DglGraph, load_dgl

_NORMS: dict[str, type[nn.Module]] = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm, "none": nn.Identity}
_SAGE = ("mean", "gcn", "pool", "lstm")


class DglNetwork(nn.Module):
    """Convolutions in a row, each but the last followed by norm, activation and dropout.

    Args:
        convs: called with a DGL graph and node features; heads (a third dimension) are joined, of the last averaged.
        hidden_channels: columns between them.
        dropout: after each hidden layer.
        input_dropout: on the input features.
        norm: ``batch``, ``layer``, ``none`` or None.
        act: name of the activation.
        self_loops: see :class:`~gtrain.nn.DglGraph`.

    Shapes:
        x [N, in_channels], edge_index int64 [2, E]; result [N, out_channels].

    Raises:
        ConfigError: no such norm.
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
        self.norms = nn.ModuleList(_norm(norm or "none", hidden_channels) for _ in convs[1:])
        self.act = activation_resolver(act)
        self.dropout, self.input_dropout = float(dropout), float(input_dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Scores of every node."""
        return self.run(x, self.graph(edge_index, len(x)))

    def run(self, x: Tensor, graph: Any, **of_edges: Any) -> Tensor:
        """Apply all layers; ``of_edges`` goes to every convolution."""
        x = F.dropout(x, self.input_dropout, self.training)
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = self.act(norm(conv(graph, x, **of_edges).flatten(1)))
            x = F.dropout(x, self.dropout, self.training)
        x = self.convs[-1](graph, x, **of_edges)
        return x.mean(1) if x.dim() == 3 else x


class DglSAGE(DglNetwork):
    """GraphSAGE (Hamilton et al. 2017): ``dgl.nn.SAGEConv``; edge weights multiply messages where the graph has them.

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
            raise ConfigError(f"model.aggr={aggr} was set.", hint=f"dgl.nn.SAGEConv has {', '.join(_SAGE)}.")
        conv = load_dgl("model=dgl_sage").nn.SAGEConv
        widths = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
        convs = [conv(a, b, aggr) for a, b in zip(widths, widths[1:], strict=False)]
        super().__init__(convs, hidden_channels, **settings)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Scores of every node; ``edge_weight`` [E]."""
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
            raise ConfigError(
                f"model.hidden_channels={hidden_channels} cannot be divided among model.heads={heads}: "
                f"{hidden_channels} / {heads} = {hidden_channels / heads:g}.",
                hint="choose hidden_channels as a multiple of heads.",
            )
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

    A relation's messages are averaged (equation 2 there). Where nodes have no features, a learned row for each node
    comes before the first convolution, as in DGL's example for entities.

    Args:
        in_channels: columns of x; None where x is the ids.
        hidden_channels, out_channels: columns of hidden layers and of the result.
        num_relations: R, relations of ``edge_type``.
        num_nodes: N, needed where x is the ids.
        num_layers: convolutions.
        num_bases: matrices that the relations share; None gives each its own.
        root_weight: whether a node's own features count besides its neighbours'.
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
            assert nodes is not None  # the graph's, where it has no features
            before = self.hidden_channels
            self.rows = nn.Embedding(nodes, before)
        shared: dict[str, Any] = {"self_loop": root}
        if bases is not None:
            shared.update(regularizer="basis", num_bases=bases)
        pairs = zip([before, *widths], widths, strict=False)
        self.convs = nn.ModuleList(conv(a, b, relations, **shared) for a, b in pairs)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        """Scores of every node."""
        if self.rows is not None:
            x = self.rows(x)
        graph, share = self.graph(edge_index, len(x)), _shares(edge_index, edge_type).to(x.dtype)
        for number, conv in enumerate(self.convs):
            x = conv(graph, x, edge_type, share)
            if number + 1 < len(self.convs):
                x = F.dropout(x.relu(), self.dropout, self.training)
        return x


def _norm(name: str, channels: int) -> nn.Module:
    return nn.Identity() if name == "none" else _NORMS[name](channels)


_known_shares: Any = WeakIdKeyDictionary()  # by edge_index and edge_type


def _shares(edge_index: Tensor, edge_type: Tensor) -> Tensor:
    """1 / number of edges with the same target and relation, float64 [E, 1]; all edges of a target are here."""
    known = _known_shares.setdefault(edge_index, WeakIdKeyDictionary())
    if edge_type not in known:
        pair = edge_index[1] * (int(edge_type.max()) + 1 if edge_type.numel() else 1) + edge_type
        _, place, count = torch.unique(pair, return_inverse=True, return_counts=True)
        known[edge_type] = count.double().reciprocal()[place].unsqueeze(1)
    found: Tensor = known[edge_type]
    return found
