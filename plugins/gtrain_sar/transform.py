"""Exchanging a convolution's linear layer and its aggregation, which commute, so that the narrower rows travel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn.conv import GCNConv, GraphConv, MessagePassing, SAGEConv, SGConv

from gtrain_sar.fused_layers import plain_linear

AFTER: dict[type[MessagePassing], str] = {SAGEConv: "lin_l", GraphConv: "lin_rel", SGConv: "lin"}
"""Convolutions that apply a linear layer to the aggregate, and its name."""
BEFORE: dict[type[MessagePassing], str] = {GCNConv: "lin"}
"""Convolutions that apply a linear layer to what they aggregate."""


class Transforms:
    """Linear layers of convolutions that are applied at another moment than the convolution does.

    Args:
        shadow: sets an attribute of a module's instance until the run ends.
    """

    def __init__(self, shadow: Callable[[nn.Module, str, Callable[..., Any]], None]) -> None:
        self._shadow = shadow
        self._applied: Any = WeakIdKeyDictionary()  # tensor -> the layer whose weight is in it already
        self._waiting: Any = WeakIdKeyDictionary()  # tensor -> the layer whose weight is to be applied

    def install(self, conv: MessagePassing) -> None:
        """Shadow the linear layers of ``conv``, where its class is known."""
        for table, forward in ((AFTER, self._after), (BEFORE, self._before)):
            layer = _layer(table, conv)
            if layer is not None:
                self._shadow(layer, "forward", partial(forward, layer))

    # ------------------------------------------------------------------------ what the layers do instead

    def _after(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self._applied.get(x) is layer:
            bias = layer.bias
            return x if bias is None else x + bias  # type: ignore[operator]
        out: Tensor = type(layer).forward(layer, x)
        return out

    def _before(self, layer: nn.Module, x: Tensor) -> Tensor:
        out_channels, in_channels = layer.weight.shape  # type: ignore[union-attr,misc]
        if in_channels >= out_channels or layer.bias is not None or not isinstance(x, Tensor) or x.is_sparse:
            out: Tensor = type(layer).forward(layer, x)
            return out
        waiting = x.view_as(x) if x.requires_grad else x
        self._waiting[waiting] = layer
        return waiting

    # ------------------------------------------------------------------------ around an aggregation

    def source(self, conv: MessagePassing, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What to aggregate in place of ``x``, and what to do with the aggregate."""
        waiting = self._waiting.pop(x, None)
        if waiting is not None:
            return x, partial(self._apply, waiting)
        layer = _layer(AFTER, conv)
        if layer is None or getattr(conv, "cached", False):
            return x, _same
        if self._applied.get(x) is layer:
            return x, partial(self._mark, layer)
        out_channels, in_channels = layer.weight.shape  # type: ignore[union-attr,misc]
        if out_channels >= in_channels or x.dim() != 2:
            return x, _same
        return F.linear(x, layer.weight), partial(self._mark, layer)  # type: ignore[arg-type]

    def settle(self, x: Any) -> Any:
        """``x`` with the layer applied that waits for the aggregate, where there is no linear aggregation after all."""
        if isinstance(x, (tuple, list)):
            return tuple(self.settle(value) for value in x)
        waiting = self._waiting.pop(x, None) if isinstance(x, Tensor) else None
        return x if waiting is None else self._apply(waiting, x)

    def _apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = type(layer).forward(layer, x)
        return out

    def _mark(self, layer: nn.Module, out: Tensor) -> Tensor:
        self._applied[out] = layer
        return out


def _same(out: Tensor) -> Tensor:
    return out


def _layer(table: dict[type[MessagePassing], str], conv: MessagePassing) -> Any:
    """The named linear layer, if it is a plain one whose shape is known."""
    name = table.get(type(conv))
    return plain_linear(conv, name) if name else None
