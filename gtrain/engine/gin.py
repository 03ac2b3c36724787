"""GIN over features in CSR form: the first layer of its network multiplies them before they are summed.

A sum of rows has more entries than they have, so that PyG's order makes the features dense.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn.conv import GINConv
from torch_geometric.nn.dense import Linear
from torch_geometric.nn.models import MLP

from gtrain.engine.edges import EdgeBlocks
from gtrain.engine.linear import LinearCall, aggregate
from gtrain.engine.precision import product_dtype
from gtrain.engine.schedule import Schedule


def first_linear(network: nn.Module) -> Any:
    """Return the linear layer that comes first in a network of GIN; None if another module does, or hooks see it."""
    layers: Iterable[Any] = [network]
    if type(network) is MLP:
        layers = cast(nn.ModuleList, network.lins)
    elif type(network) is nn.Sequential:
        layers = network
    first: Any = next(iter(layers), None)
    if type(first) not in (nn.Linear, Linear) or isinstance(first.weight, nn.parameter.UninitializedParameter):
        return None
    observed = any(module._forward_pre_hooks or module._backward_hooks for module in (network, first))
    return None if observed or first._forward_hooks else first


def gin_layer(conv: GINConv, first: Any, blocks: EdgeBlocks, x: Tensor, num_targets: int, schedule: Schedule) -> Tensor:
    """Return ``conv``'s result, [num_targets, ...].

    Args:
        conv: the layer.
        first: of its network, from :func:`first_linear`.
        blocks: edges among the nodes of ``x``; targets are the first of them.
        x: the rank's rows, [num_sources, in].
        num_targets: number of targets.
        schedule: when blocks are fetched.
    """
    rows = F.linear(x, first.weight)
    sums = aggregate([LinearCall(blocks, rows)], schedule)[0]
    with _adds_bias_only(first):
        return conv.nn((sums + (1 + conv.eps) * rows[:num_targets]).to(product_dtype(x)))  # type: ignore[no-any-return]


@contextmanager
def _adds_bias_only(layer: Any) -> Iterator[None]:
    """Have a linear layer add its bias to products that were computed before."""
    attributes = dict(layer.__dict__)
    layer.__dict__["forward"] = lambda product: (
        product if layer.bias is None else product + layer.bias.to(product.dtype)
    )
    try:
        yield
    finally:
        layer.__dict__.pop("forward")
        if "forward" in attributes:
            layer.__dict__["forward"] = attributes["forward"]
