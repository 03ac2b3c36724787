"""Layers of DGL that would not be exact over shards, and why."""

from __future__ import annotations

from torch import nn

from gtrain.nn import DglGraph

_CONVS = {
    "ChebConv": "it takes the largest eigenvalue of the whole graph's Laplacian",
    "TWIRLSConv": "it builds the whole graph's adjacency matrix",
    "TWIRLSUnfoldingAndAttention": "it builds the whole graph's adjacency matrix",
    "PNAConv": "it scales by the number of nodes of the whole graph",
    "PNAConvTower": "it scales by the number of nodes of the whole graph",
    "DGNConv": "it scales by the number of nodes of the whole graph",
    "DGNConvTower": "it scales by the number of nodes of the whole graph",
    "HeteroGraphConv": "it is for graphs with several types of nodes or edges; a dgl.nn.RelGraphConv takes edge types",
}


def reason(layer: nn.Module) -> str | None:
    """Why a layer of DGL cannot be served, or None if it can, or is none."""
    home = type(layer).__module__
    if not home.startswith("dgl.nn."):
        return None
    if home.startswith("dgl.nn.pytorch.glob"):
        return "pooling is over all nodes of the graph, of which a rank has a part"
    if type(layer).__name__.startswith("Dense") or type(layer).__name__.startswith("CuGraph"):
        return "it takes no graph that could be sharded"
    return _CONVS.get(type(layer).__name__)


def lacks_graph(module: nn.Module) -> bool:
    """Whether convolutions of DGL are in the module, and nothing that could give them a shard."""
    layers = list(module.modules())
    convs = any(type(layer).__module__.startswith("dgl.nn.pytorch.conv") for layer in layers)
    return convs and not any(isinstance(layer, DglGraph) for layer in layers)
