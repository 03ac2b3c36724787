"""The number of hops of a network: how often it passes messages between a seed's inputs and its result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch_geometric.nn import ARMAConv, ChebConv, GatedGraphConv, HeteroConv, MessagePassing, MixHopConv, PANConv
from torch_geometric.nn.models.basic_gnn import BasicGNN

from gtrain.protocols import LayersInTurn


def conv_hops(conv: MessagePassing) -> int:
    """Return the hops of one convolution: 1, or its setting (``K`` of ``APPNP``, ``SGConv``, ``TAGConv``, ...)."""
    if isinstance(conv, (ARMAConv, GatedGraphConv)):
        return int(conv.num_layers)
    if isinstance(conv, MixHopConv):
        return max(conv.powers)
    if isinstance(conv, ChebConv):
        return len(conv.lins) - 1
    if isinstance(conv, PANConv):
        return int(conv.filter_size)
    hops = getattr(conv, "K", 1)
    return hops if isinstance(hops, int) else 1


def hop_bounds(module: nn.Module) -> tuple[int, int]:
    """Return the least and the most hops of a module, derived from its layers.

    They are equal for PyG's ``BasicGNN`` networks (``GCN``, ``GraphSAGE``, ``GAT``...), and for networks that declare
    by ``layers_in_turn = True`` that their layers follow each other in the order of ``named_children``. In others,
    layers may be in sequence or in parallel. A layer that is called several times counts once.
    """
    if isinstance(module, MessagePassing):
        return conv_hops(module), conv_hops(module)
    if type(module).__module__.startswith("dgl.nn.pytorch.conv"):
        hops = getattr(module, "_k", 1)
        return (hops, hops) if isinstance(hops, int) else (1, 1)
    bounds = [hop_bounds(child) for child in module.children()]
    least, total = max((low for low, _ in bounds), default=0), sum(high for _, high in bounds)
    if isinstance(module, (HeteroConv, nn.ModuleDict)):  # in parallel: one for each type
        return least, max((high for _, high in bounds), default=0)
    in_sequence = isinstance(module, BasicGNN) or (isinstance(module, LayersInTurn) and module.layers_in_turn)
    return (total if in_sequence else least), total


class HopMeter:
    """Counts hops while a module runs with gradients: the longest sequence of message passing.

    Example:
        >>> from torch_geometric.nn import SGConv
        >>> conv, edges = SGConv(2, 1, K=3), torch.tensor([[0, 1], [1, 0]])
        >>> with HopMeter(conv) as meter:
        ...     out = conv(torch.ones(2, 2), edges)
        >>> meter.hops(out)
        3

    Args:
        module: contains convolutions of PyG; its hooks are removed at the end.
    """

    def __init__(self, module: nn.Module) -> None:
        self._convs = [layer for layer in module.modules() if isinstance(layer, MessagePassing)]
        self._results: list[Node] = []  # kept alive, so that no other node gets the same identity
        self._hooks: list[Any] = []

    def __enter__(self) -> HopMeter:
        self._hooks = [conv.register_propagate_forward_hook(self.note) for conv in self._convs]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def note(self, conv: nn.Module, inputs: Any, result: Any) -> None:
        """Count the message passing that computed ``result``."""
        if not isinstance(result, Tensor) or not torch.is_grad_enabled():
            return
        if not result.requires_grad:
            # Computed from inputs without a gradient, so not in the graph yet.
            result.requires_grad_()
        self._results.append(get_gradient_edge(result).node)

    def hops(self, result: Tensor) -> int:
        """Return the hops between the inputs and a result that was computed inside the context, with its graph."""
        passed = set(self._results)
        best: dict[Node, int] = {}
        # A depth-first search without recursion, which long graphs would overflow.
        stack = [result.grad_fn] if result.grad_fn is not None else []
        while stack:
            node = stack[-1]
            operands = [operand for operand, _ in node.next_functions if operand is not None]
            unknown = [operand for operand in operands if operand not in best]
            if unknown:
                stack += unknown
            else:
                best[stack.pop()] = max((best[operand] for operand in operands), default=0) + (node in passed)
        return best.get(result.grad_fn, 0) if result.grad_fn is not None else 0


def meters(conv: MessagePassing) -> list[HopMeter]:
    """Return the meters that count the hops of a convolution."""
    owners = (getattr(hook, "__self__", None) for hook in conv._propagate_forward_hooks.values())
    return [owner for owner in owners if isinstance(owner, HopMeter)]
