"""Convolutions that are computed as a whole in one step of the graph, in place of their ``forward``.

Then dense products are under way while rows and gradients travel, and fewer matrices are alive at once than between the
operations of PyG's ``forward``. It is for calls of the common form only; any other goes PyG's own way.
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
from gtrain_sar.edges import BlockIndex
from gtrain_sar.propagate_call import reduction
from gtrain_sar.sage import sage_layer

HOOKS = (
    "_propagate_forward_pre_hooks",
    "_propagate_forward_hooks",
    "_message_forward_pre_hooks",
    "_message_forward_hooks",
    "_aggregate_forward_pre_hooks",
    "_aggregate_forward_hooks",
    "_message_and_aggregate_forward_pre_hooks",
    "_message_and_aggregate_forward_hooks",
    "_edge_update_forward_pre_hooks",
    "_edge_update_forward_hooks",
)
_SAGE = {SAGEConv: ("lin_l", "lin_r"), GraphConv: ("lin_rel", "lin_root")}


class FusedLayers:
    """Takes over the ``forward`` of convolutions of known classes.

    Args:
        schedule: how blocks are fetched.
        constants: inputs that never change.
        edges: the blocks of the running convolution.
    """

    def __init__(self, schedule: Schedule, constants: Constants, edges: Callable[[], BlockIndex]) -> None:
        self._schedule, self._constants, self._edges = schedule, constants, edges

    def of(self, conv: MessagePassing) -> Callable[..., Any] | None:
        """What to call in place of ``conv.forward``; None where its class is not known."""
        if type(conv) in _SAGE:
            return partial(self._forward, conv, self._sage)
        return partial(self._forward, conv, self._gat) if type(conv) is GATConv else None

    def _forward(self, conv: MessagePassing, layer: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Any:
        original = type(conv).forward
        given = inspect.signature(original).bind(conv, *args, **kwargs).arguments
        x, edge_index = given.pop("x"), given.pop("edge_index")
        del given["self"]
        common = isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point() and x.layout == torch.strided
        if not common or type(edge_index) is not Tensor or hooked(conv):
            return original(conv, *args, **kwargs)
        found = layer(conv, x, edge_index, **{name: value for name, value in given.items() if value is not None})
        return original(conv, *args, **kwargs) if found is None else found

    def _sage(
        self, conv: MessagePassing, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None, **rest: Any
    ) -> Tensor | None:
        names = _SAGE[type(conv)]
        left = plain_linear(conv, names[0])
        root = plain_linear(conv, names[1]) if getattr(conv, "root_weight", True) else None
        reduce = reduction(conv)
        weighted = edge_weight is not None and (edge_weight.requires_grad or edge_weight.dim() != 1)
        if left is None or root is None or reduce not in ("sum", "mean") or rest or weighted:
            return None
        if getattr(conv, "project", False):
            return None
        blocks = self._edges()(edge_index)
        layers = (left.weight, left.bias, root.weight)
        out = sage_layer(blocks, x, edge_index, edge_weight, reduce == "mean", layers, self._schedule, self._constants)
        return nn.functional.normalize(out, p=2.0, dim=-1) if getattr(conv, "normalize", False) else out

    def _gat(self, conv: Any, x: Tensor, edge_index: Tensor, **rest: Any) -> Tensor | None:
        lin = plain_linear(conv, "lin")
        if lin is None or lin.bias is not None or reduction(conv) != "sum" or rest:
            return None
        residual = None if conv.res is None else conv.res(x)
        if conv.add_self_loops:
            functions = inspect.getmodule(GATConv).__dict__
            edge_index, _ = functions["remove_self_loops"](edge_index, None)
            edge_index, _ = functions["add_self_loops"](edge_index, None, fill_value=conv.fill_value, num_nodes=len(x))
        dropout = conv.dropout if conv.training else 0.0
        fused = conv.bias if conv.concat and residual is None else None
        tensors = (x, lin.weight, conv.att_src, conv.att_dst, fused)
        out = gat_layer(self._edges()(edge_index), tensors, conv.negative_slope, dropout, self._schedule)
        if not conv.concat:
            out = out.view(len(out), conv.heads, -1).mean(1)
        out = out if residual is None else out + residual
        return out if fused is not None or conv.bias is None else out + conv.bias


def hooked(conv: MessagePassing) -> bool:
    """Whether a user's hooks want to see each step of ``propagate``."""
    return any(getattr(conv, hooks, None) for hooks in HOOKS)


def plain_linear(conv: nn.Module, name: str) -> Any:
    """A linear layer of ``conv`` that is nothing but its weight and bias; else None."""
    layer = getattr(conv, name, None)
    weight = getattr(layer, "weight", None)
    if not isinstance(layer, nn.Module) or not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    lazy = isinstance(weight, nn.parameter.UninitializedParameter)
    return None if lazy or layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks else layer
