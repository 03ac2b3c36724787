"""The layers of networks over graphs with several types, as the formulas of backends read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch_geometric.nn import HeteroConv
from torch_geometric.nn.conv import GraphConv, HGTConv, MessagePassing, SAGEConv


@dataclass(frozen=True)
class TypedLayer:
    """A layer that passes messages along the edges of all types.

    Attributes:
        name: of its class.
        sums: whether every convolution is a weighted sum of source rows; otherwise values of edges are computed.
        inputs: columns of its input.
        outputs: columns of its result.
        sources: edge types that start at each node type.
        targets: edge types that end at each node type.
        weights: numbers in the matrices that a row of each node type is multiplied by.
    """

    name: str
    sums: bool
    inputs: int
    outputs: int
    sources: Mapping[str, int]
    targets: Mapping[str, int]
    weights: Mapping[str, int]

    def results(self, nodes: Mapping[str, float]) -> float:
        """Return the number of result rows, given the nodes of each type."""
        return sum(nodes[node_type] for node_type in self.targets)

    def sums_of_types(self, nodes: Mapping[str, float]) -> float:
        """Return the number of results of single edge types."""
        return sum(nodes[node_type] * count for node_type, count in self.targets.items())

    def source_rows(self, nodes: Mapping[str, float]) -> float:
        """Return the number of source rows, once for each edge type."""
        return sum(nodes[node_type] * count for node_type, count in self.sources.items())

    def products(self, nodes: Mapping[str, float]) -> float:
        """Return the multiplications of the layer's matrices with the rows of these nodes."""
        return sum(nodes[node_type] * count for node_type, count in self.weights.items())


def typed_layers(model: nn.Module) -> tuple[TypedLayer, ...]:
    """Return the layers of a network over several types, in order; empty if it has other convolutions."""
    found = [layer for layer in model.modules() if isinstance(layer, (HeteroConv, HGTConv))]
    inner = {id(conv) for layer in found for conv in layer.modules()}
    if any(isinstance(layer, MessagePassing) and id(layer) not in inner for layer in model.modules()):
        return ()
    described = [_hgt(layer) if isinstance(layer, HGTConv) else _hetero_conv(layer) for layer in found]
    return () if None in described else tuple(layer for layer in described if layer is not None)


def _hetero_conv(layer: HeteroConv) -> TypedLayer | None:
    """Describe the layer; None if a convolution is not a weighted sum of source rows, or the types differ in width."""
    convs = dict(layer.convs.items())
    if any(
        type(conv) not in (SAGEConv, GraphConv) or conv.aggr not in ("mean", "sum", "add") for conv in convs.values()
    ):
        return None
    inputs = {width for conv in convs.values() for width in _pair(conv.in_channels)}
    outputs = {conv.out_channels for conv in convs.values()}
    if len(inputs) > 1 or len(outputs) > 1:
        return None
    weights: Counter[str] = Counter()
    for (_, _, target), conv in convs.items():
        weights[target] += _matrices(conv)
    sources, targets = (Counter(edge_type[end] for edge_type in convs) for end in (0, 2))
    return TypedLayer("HeteroConv", True, inputs.pop(), outputs.pop(), sources, targets, weights)


def _hgt(layer: HGTConv) -> TypedLayer | None:
    inputs, outputs = set(layer.in_channels.values()), layer.out_channels
    if len(inputs) > 1:
        return None
    (width,) = inputs
    by_type = outputs * outputs // layer.heads  # of keys, and of values
    sources = Counter(edge_type[0] for edge_type in layer.edge_types)
    targets = Counter(edge_type[2] for edge_type in layer.edge_types)
    weights = {
        node_type: 3 * width * outputs
        + 2 * sources[node_type] * by_type
        + (outputs * outputs if node_type in targets else 0)
        for node_type in layer.node_types
    }
    return TypedLayer("HGTConv", False, width, outputs, sources, targets, weights)


def _pair(channels: int | tuple[int, int]) -> tuple[int, int]:
    return channels if isinstance(channels, tuple) else (channels, channels)


def _matrices(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.dim() == 2)
