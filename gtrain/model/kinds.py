"""Kinds of models, by which strategies say what they train."""

from __future__ import annotations

from torch import nn
from torch_geometric.nn.conv import MessagePassing

MESSAGE_PASSING = "message-passing"
PER_NODE = "per-node"
EMBEDDING = "embedding"
SPARSE = "sparse"


def kind(module: nn.Module) -> str:
    """``message-passing`` where a PyG convolution is inside, else ``per-node``; a module's own ``kind`` goes first."""
    own = getattr(module, "kind", None)
    if isinstance(own, str):
        return own
    return MESSAGE_PASSING if any(isinstance(layer, MessagePassing) for layer in module.modules()) else PER_NODE
