"""Kinds of models; a strategy lists those that it can train."""

from __future__ import annotations

from torch import nn
from torch_geometric.nn.conv import MessagePassing

from gtrain.nn import DglGraph
from gtrain.protocols import HasKind

MESSAGE_PASSING = "message-passing"
PER_NODE = "per-node"
EMBEDDING = "embedding"
SPARSE = "sparse"


def kind(module: nn.Module) -> str:
    """Return a model's ``kind``; by default ``message-passing`` with convolutions of PyG or DGL, else ``per-node``."""
    if isinstance(module, HasKind) and isinstance(module.kind, str):
        return module.kind
    passes = any(isinstance(layer, MessagePassing | DglGraph) for layer in module.modules())
    return MESSAGE_PASSING if passes else PER_NODE
