"""Layers of PyG and DGL that strategy=sar refuses because they are not exact over shards, with the reasons."""

from __future__ import annotations

from torch import nn
from torch_geometric.nn import norm
from torch_geometric.nn.aggr import MedianAggregation, QuantileAggregation
from torch_geometric.nn.conv import (
    ChebConv,
    DirGNNConv,
    DynamicEdgeConv,
    GPSConv,
    GravNetConv,
    HANConv,
    HypergraphConv,
    MessagePassing,
    SuperGATConv,
    WLConv,
    XConv,
)
from torch_geometric.nn.models import AttentiveFP, DeepGraphInfomax
from torch_geometric.nn.models.linkx import SparseLinear
from torch_geometric.nn.to_hetero_module import ToHeteroMessagePassing
from torch_geometric.nn.to_hetero_with_bases_transformer import HeteroBasisConv

from gtrain.nn import DglGraph

_OVER_ALL_NODES = (
    norm.GraphNorm,
    norm.GraphSizeNorm,
    norm.PairNorm,
    norm.MeanSubtractionNorm,
    norm.InstanceNorm,
    norm.HeteroBatchNorm,
)
_CONVS: dict[type[nn.Module], str] = {
    ChebConv: "it builds the Laplacian of the whole graph itself",
    AttentiveFP: "it pools molecules whose atoms may lie in several parts",
    MedianAggregation: "its choice among equal messages depends on the order of edges, which partitioning changes",
    QuantileAggregation: "its choice among equal messages depends on the order of edges, which partitioning changes",
    DeepGraphInfomax: "it pools all nodes of the graph, of which a rank has only a part",
    DirGNNConv: "it reverses edges, which then point at nodes of other parts",
    GPSConv: "it attends to all nodes of the graph, of which a rank has only a part",
    HypergraphConv: "its edges join nodes to hyperedges, which are not partitioned",
    SparseLinear: "it has a row for each node, indexed by the node's position in the part",
    SuperGATConv: "it samples pairs of nodes without an edge, of which a rank sees only its own",
    WLConv: "it compares the neighbourhoods of all nodes of the graph, of which a rank has only a part",
    GravNetConv: "it searches neighbours among the input nodes, of which a rank has only a part",
    DynamicEdgeConv: "it searches neighbours among the input nodes, of which a rank has only a part",
    XConv: "it searches neighbours among the input nodes, of which a rank has only a part",
    HANConv: "it weights edge types by an average over all nodes, of which a rank has only a part; HGTConv works",
    HeteroBasisConv: "it joins the nodes of all types into one numbering without the halo; to_hetero works",
    ToHeteroMessagePassing: "it joins the nodes of all types into one numbering without the halo",
}

_DGL_CONVS = {
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
    """Return why ``layer`` is refused, or None; submodules are not examined."""
    if isinstance(layer, _OVER_ALL_NODES):
        return "it computes statistics over all nodes of the graph, of which a rank has only a part"
    if isinstance(layer, norm.LayerNorm) and layer.mode == "graph":
        return "mode='graph' computes statistics over all nodes, of which a rank has only a part; mode='node' works"
    if isinstance(layer, nn.modules.batchnorm._BatchNorm) and not isinstance(layer, nn.BatchNorm1d):
        return "only BatchNorm1d is synchronised over ranks"
    if isinstance(layer, nn.BatchNorm1d) and type(layer).forward is not nn.BatchNorm1d.forward:
        return "it overrides forward, and only that of BatchNorm1d is synchronised over ranks"
    if type(layer).__module__.startswith("torch_geometric.nn.pool"):
        return "pooling selects among all nodes of the graph, of which a rank has only a part"
    if type(layer).__module__.startswith("torch_geometric.nn.attention"):
        return "it attends to all nodes of the graph, of which a rank has only a part"
    for cls, why in _CONVS.items():
        if isinstance(layer, cls):
            return why
    return _conv_reason(layer) if isinstance(layer, MessagePassing) else _dgl_reason(layer)


def _conv_reason(conv: MessagePassing) -> str | None:
    if conv.flow != "source_to_target":
        return f"flow='{conv.flow}' reads at the targets of edges; flow='source_to_target' works"
    # PyG generates propagate for each class and stores the class's own method as _orig_propagate
    propagate = getattr(type(conv), "_orig_propagate", type(conv).propagate)
    if getattr(propagate, "__qualname__", "") not in ("MessagePassing.propagate", "propagate"):
        return "it overrides propagate, which then cannot run over shards"
    return None


def _dgl_reason(layer: nn.Module) -> str | None:
    module = type(layer).__module__
    if not module.startswith("dgl.nn."):
        return None
    if module.startswith("dgl.nn.pytorch.glob"):
        return "it pools all nodes of the graph, of which a rank has only a part"
    if type(layer).__name__.startswith("Dense") or type(layer).__name__.startswith("CuGraph"):
        return "its input is not a graph that could be sharded"
    return _DGL_CONVS.get(type(layer).__name__)


def lacks_dgl_graph(module: nn.Module) -> bool:
    """Whether the module has convolutions of DGL but no :class:`~gtrain.nn.DglGraph`, which gives them the shard."""
    layers = list(module.modules())
    convs = any(type(layer).__module__.startswith("dgl.nn.pytorch.conv") for layer in layers)
    return convs and not any(isinstance(layer, DglGraph) for layer in layers)
