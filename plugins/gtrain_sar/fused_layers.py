"""Convolutions that run as a single autograd function instead of their ``forward``.

Dense products then overlap with the exchange of rows and gradients, and fewer matrices are alive at once than between
the operations of PyG's ``forward``. Only calls of the common form run so; any other call runs PyG's ``forward``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.conv import GATConv, GraphConv, MessagePassing, SAGEConv

from gtrain_sar.attention.gat import gat_layer
from gtrain_sar.config import Schedule
from gtrain_sar.constants import Constants
from gtrain_sar.edges import EdgeBlockCache
from gtrain_sar.propagate_call import reduction
from gtrain_sar.sage import sage_layer

_HOOKS = tuple(
    f"_{method}_forward_{hooks}"
    for method in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for hooks in ("pre_hooks", "hooks")
)
_SAGE = {SAGEConv: ("lin_l", "lin_r"), GraphConv: ("lin_rel", "lin_root")}


class FusedLayers:
    """Replaces the ``forward`` of convolutions of known classes.

    Args:
        schedule: when blocks are fetched.
        constants: inputs that never change.
        edges: returns the blocks of the running convolution.
    """

    def __init__(self, schedule: Schedule, constants: Constants, edges: Callable[[], EdgeBlockCache]) -> None:
        self._schedule, self._constants, self._edges = schedule, constants, edges

    def forward_of(self, conv: MessagePassing) -> Callable[..., Any] | None:
        """Return the replacement of ``conv.forward``; None if its class is not known."""
        if type(conv) in _SAGE:
            return partial(self._forward, conv, self._sage)
        return partial(self._forward, conv, self._gat) if type(conv) is GATConv else None

    def _forward(self, conv: MessagePassing, layer: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Any:
        original = type(conv).forward
        arguments = inspect.signature(original).bind(conv, *args, **kwargs).arguments
        x, edge_index = arguments.pop("x"), arguments.pop("edge_index")
        del arguments["self"]
        common = isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point() and x.layout == torch.strided
        if common and type(edge_index) is Tensor and not has_hooks(conv):
            options = {name: value for name, value in arguments.items() if value is not None}
            out = layer(conv, x, edge_index, **options)
            if out is not None:
                return out
        return original(conv, *args, **kwargs)

    def _sage(
        self, conv: MessagePassing, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None, **options: Any
    ) -> Tensor | None:
        names = _SAGE[type(conv)]
        left = plain_linear(conv, names[0])
        root = plain_linear(conv, names[1]) if getattr(conv, "root_weight", True) else None
        reduce = reduction(conv)
        learned_weight = edge_weight is not None and (edge_weight.requires_grad or edge_weight.dim() != 1)
        if left is None or root is None or reduce not in ("sum", "mean") or options or learned_weight:
            return None
        if getattr(conv, "project", False):
            return None
        blocks = self._edges()(edge_index)
        layers = (left.weight, left.bias, root.weight)
        out = sage_layer(blocks, x, edge_index, edge_weight, reduce == "mean", layers, self._schedule, self._constants)
        return nn.functional.normalize(out, p=2.0, dim=-1) if getattr(conv, "normalize", False) else out

    def _gat(self, conv: Any, x: Tensor, edge_index: Tensor, **options: Any) -> Tensor | None:
        lin = plain_linear(conv, "lin")
        if lin is None or lin.bias is not None or reduction(conv) != "sum" or options:
            return None
        residual = None if conv.res is None else conv.res(x)
        if conv.add_self_loops:
            functions = inspect.getmodule(GATConv).__dict__
            edge_index, _ = functions["remove_self_loops"](edge_index, None)
            edge_index, _ = functions["add_self_loops"](edge_index, None, fill_value=conv.fill_value, num_nodes=len(x))
        dropout = conv.dropout if conv.training else 0.0
        fused_bias = conv.bias if conv.concat and residual is None else None
        tensors = (x, lin.weight, conv.att_src, conv.att_dst, fused_bias)
        out = gat_layer(self._edges()(edge_index), tensors, conv.negative_slope, dropout, self._schedule)
        if not conv.concat:
            out = out.view(len(out), conv.heads, -1).mean(1)
        out = out if residual is None else out + residual
        return out if fused_bias is not None or conv.bias is None else out + conv.bias


def has_hooks(conv: MessagePassing) -> bool:
    """Whether a user's hooks observe the steps of ``propagate``."""
    return any(getattr(conv, hooks, None) for hooks in _HOOKS)


def plain_linear(conv: nn.Module, name: str) -> Any:
    """Return a linear layer of ``conv`` if its weight and bias are all that it computes with; else None."""
    layer = getattr(conv, name, None)
    weight = getattr(layer, "weight", None)
    if not isinstance(layer, nn.Module) or not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    lazy = isinstance(weight, nn.parameter.UninitializedParameter)
    return None if lazy or layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks else layer
