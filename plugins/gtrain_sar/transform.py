"""Swaps a convolution's linear layer and its aggregation, which commute, so that the narrower rows are sent."""

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
"""Convolutions that apply a linear layer to the rows that they aggregate, and its name."""


class Transforms:
    """Applies linear layers of convolutions earlier or later than the convolutions do.

    Args:
        shadow: sets an attribute of a module's instance until the run ends.
    """

    def __init__(self, shadow: Callable[[nn.Module, str, Callable[..., Any]], None]) -> None:
        self._shadow = shadow
        self._applied: Any = WeakIdKeyDictionary()  # tensor -> the layer whose weight is applied to it already
        self._deferred: Any = WeakIdKeyDictionary()  # tensor -> the layer whose weight is applied to its aggregate

    def install(self, conv: MessagePassing) -> None:
        """Shadow the linear layers of ``conv``, if its class is known."""
        for table, forward in ((AFTER, self._after), (BEFORE, self._before)):
            layer = _layer(table, conv)
            if layer is not None:
                self._shadow(layer, "forward", partial(forward, layer))

    # ------------------------------------------------------------------------ replacements of the layers' forward

    def _after(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self._applied.get(x) is layer:
            bias = layer.bias
            return x if bias is None else x + bias  # type: ignore[operator]
        return _forward(layer, x)

    def _before(self, layer: nn.Module, x: Tensor) -> Tensor:
        out_channels, in_channels = layer.weight.shape  # type: ignore[union-attr,misc]
        if in_channels >= out_channels or layer.bias is not None or not isinstance(x, Tensor) or x.is_sparse:
            return _forward(layer, x)
        alias = x.view_as(x) if x.requires_grad else x
        self._deferred[alias] = layer
        return alias

    # ------------------------------------------------------------------------ around an aggregation

    def source(self, conv: MessagePassing, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the tensor to aggregate instead of ``x``, and the function to apply to the aggregate."""
        deferred = self._deferred.pop(x, None)
        if deferred is not None:
            return x, partial(_forward, deferred)
        layer = _layer(AFTER, conv)
        if layer is None or getattr(conv, "cached", False):
            return x, _identity
        if self._applied.get(x) is layer:
            return x, partial(self._mark, layer)
        out_channels, in_channels = layer.weight.shape  # type: ignore[union-attr,misc]
        if out_channels >= in_channels or x.dim() != 2:
            return x, _identity
        return F.linear(x, layer.weight), partial(self._mark, layer)  # type: ignore[arg-type]

    def settle(self, x: Any) -> Any:
        """Apply the layer that was deferred for ``x``, a tensor or a tuple: the aggregation is not linear after all."""
        if isinstance(x, (tuple, list)):
            return tuple(self.settle(value) for value in x)
        deferred = self._deferred.pop(x, None) if isinstance(x, Tensor) else None
        return x if deferred is None else _forward(deferred, x)

    def _mark(self, layer: nn.Module, out: Tensor) -> Tensor:
        self._applied[out] = layer
        return out


def _identity(out: Tensor) -> Tensor:
    return out


def _forward(layer: Any, x: Tensor) -> Tensor:
    """The class's ``forward``, which the instance shadows."""
    return type(layer).forward(layer, x)


def _layer(table: dict[type[MessagePassing], str], conv: MessagePassing) -> Any:
    """Return the named linear layer if it is a plain one whose shape is known."""
    name = table.get(type(conv))
    return plain_linear(conv, name) if name else None
