"""The two networks that bench_sar.py measures, of PyG's convolutions; ``model._target_=sar_networks.Sage``."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATConv, SAGEConv


class Sage(nn.Module):
    """Mean aggregation, ReLU between layers.

    Shapes:
        x [N, in_channels], edge_index [2, E]; result [N, out_channels].
    """

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int, num_layers: int = 3) -> None:
        super().__init__()
        widths = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
        self.convs = nn.ModuleList(SAGEConv(a, b) for a, b in zip(widths, widths[1:], strict=False))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = conv(x, edge_index).relu()
        return self.convs[-1](x, edge_index)


class Gat(nn.Module):
    """Attention with ``heads`` heads of ``hidden_channels``, ELU between layers; the last layer has one head.

    The graph has its self-loops already, so that the layers add none.

    Shapes:
        as :class:`Sage`.
    """

    def __init__(
        self, in_channels: int, hidden_channels: int, out_channels: int, num_layers: int = 3, heads: int = 4
    ) -> None:
        super().__init__()
        widths = [in_channels, *[heads * hidden_channels] * (num_layers - 1)]
        self.convs = nn.ModuleList(
            GATConv(width, hidden_channels, heads, add_self_loops=False) for width in widths[:-1]
        )
        self.convs.append(GATConv(widths[-1], out_channels, 1, add_self_loops=False))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = F.elu(conv(x, edge_index))
        return self.convs[-1](x, edge_index)
