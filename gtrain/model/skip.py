"""Connections around a convolution, for graphs whose neighbours have other labels (Platonov et al. 2023).

:class:`SkipConv` adds to a convolution's output its input (residual), and its input times another weight matrix (ego).
If the convolution ``W_2 N(x)`` reads neighbours only, the layer with ego is ``W [x || N(x)] = W_1 x + W_2 N(x)``: it
transforms the concatenated representations of a node and of its neighbours.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch_geometric.nn.models.basic_gnn import BasicGNN


class SkipConv(nn.Module):
    """A convolution and the connections around it.

    Args:
        conv: called with ``x``, ``edge_index`` and the tensors of edges; strategies replace its methods as they do
            without connections.
        in_channels: columns of ``x``, F.
        out_channels: columns of the convolution's output, H.
        residual: add ``x``, multiplied by learned weights if F differs from H, as in ResNets (He et al. 2016, section
            3.2).
        ego: add ``x`` multiplied by learned weights.

    Shapes:
        x [N, F], or a pair of the sources' [N, F] and the targets' [M, F]; output [N, H], or [M, H].
    """

    def __init__(
        self, conv: nn.Module, in_channels: int, out_channels: int, *, residual: bool = False, ego: bool = False
    ) -> None:
        super().__init__()
        self.conv = conv
        self.ego = nn.Linear(in_channels, out_channels, bias=False) if ego else None
        self.shortcut: nn.Module | None = None
        if residual:
            same = in_channels == out_channels
            self.shortcut = nn.Identity() if same else nn.Linear(in_channels, out_channels, bias=False)

    def forward(self, x: Tensor | tuple[Tensor, Tensor], edge_index: Any, **edge_data: Any) -> Tensor:
        out: Tensor = self.conv(x, edge_index, **edge_data)
        targets = x[1] if isinstance(x, tuple) else x
        for connection in (self.ego, self.shortcut):
            if connection is not None:
                out = out + connection(targets)
        return out

    def reset_parameters(self) -> None:
        """Draw all parameters again."""
        for module in (self.conv, self.ego, self.shortcut):
            if module is not None and not isinstance(module, nn.Identity):
                module.reset_parameters()  # type: ignore[operator]


def add_connections(network: BasicGNN, *, residual: bool, ego: bool) -> None:
    """Replace each convolution of a network of PyG by a :class:`SkipConv`."""
    hidden, last = network.hidden_channels, len(network.convs) - 1
    for number, conv in enumerate(network.convs):
        in_channels = hidden if number else network.in_channels
        # With jumping knowledge a linear layer follows the last convolution.
        out_channels = network.out_channels if number == last and network.jk_mode is None else hidden
        network.convs[number] = SkipConv(conv, in_channels, out_channels, residual=residual, ego=ego)


def inner_conv(layer: nn.Module) -> nn.Module:
    """Return the convolution of a layer, which may have connections around it."""
    return layer.conv if isinstance(layer, SkipConv) else layer
