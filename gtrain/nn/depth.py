"""How many hops a network looks: the number of times that it passes messages between a seed's inputs and its result."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch_geometric.nn import ARMAConv, ChebConv, GatedGraphConv, HeteroConv, MessagePassing, MixHopConv, PANConv
from torch_geometric.nn.models.basic_gnn import BasicGNN

from gtrain.protocols import LayersInTurn


def conv_hops(conv: MessagePassing) -> int:
    """Hops of one convolution: 1, or as many as it was made for (``K`` of ``APPNP``, ``SGConv``, ``TAGConv``, ...)."""
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
    """Return the least and the most hops that a module can look, judged by the layers in it.

    They are equal for PyG's ``BasicGNN`` networks (``GCN``, ``GraphSAGE``, ``GAT``...), and for networks that say with
    ``layers_in_turn = True`` that their layers follow each other in the order of ``named_children``. In other networks
    layers may be in turn or side by side. A layer that is called several times counts once.
    """
    if isinstance(module, MessagePassing):
        return conv_hops(module), conv_hops(module)
    if type(module).__module__.startswith("dgl.nn.pytorch.conv"):
        hops = getattr(module, "_k", 1)
        return (hops, hops) if isinstance(hops, int) else (1, 1)
    found = [hop_bounds(child) for child in module.children()]
    if isinstance(module, (HeteroConv, nn.ModuleDict)):  # side by side: one for each type
        return _most(least for least, _ in found), _most(most for _, most in found)
    total = sum(most for _, most in found)
    in_turn = isinstance(module, BasicGNN) or (isinstance(module, LayersInTurn) and module.layers_in_turn)
    return (total if in_turn else _most(least for least, _ in found)), total


class HopMeter:
    """Counts hops while a module runs with gradients: the most times in turn that messages were passed.

    Example:
        >>> from torch_geometric.nn import SGConv
        >>> conv, edges = SGConv(2, 1, K=3), torch.tensor([[0, 1], [1, 0]])
        >>> with HopMeter(conv) as meter:
        ...     out = conv(torch.ones(2, 2), edges)
        >>> meter.hops(out)
        3

    Args:
        module: with convolutions of PyG in it. It is left as it was found.
    """

    def __init__(self, module: nn.Module) -> None:
        self._convs = [layer for layer in module.modules() if isinstance(layer, MessagePassing)]
        self._results: list[Node] = []  # held, so that no other node is taken for one of them
        self._hooks: list[Any] = []

    def __enter__(self) -> HopMeter:
        self._hooks = [conv.register_propagate_forward_hook(self._note) for conv in self._convs]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, conv: nn.Module, inputs: Any, result: Any) -> None:
        if not isinstance(result, Tensor) or not torch.is_grad_enabled():
            return
        if not result.requires_grad:  # made of the inputs alone, and so far no part of the graph
            result.requires_grad_()
        self._results.append(get_gradient_edge(result).node)

    def hops(self, result: Tensor) -> int:
        """Hops between the inputs and a result, which was computed meanwhile and whose graph is still there."""
        passed = set(self._results)
        best: dict[Node, int] = {}
        stack = [result.grad_fn] if result.grad_fn is not None else []
        while stack:
            node = stack[-1]
            before = [other for other, _ in node.next_functions if other is not None]
            waiting = [other for other in before if other not in best]
            if waiting:
                stack += waiting
                continue
            best[stack.pop()] = _most(best[other] for other in before) + (node in passed)
        return best.get(result.grad_fn, 0) if result.grad_fn is not None else 0


def _most(numbers: Iterable[int]) -> int:
    return max(numbers, default=0)
