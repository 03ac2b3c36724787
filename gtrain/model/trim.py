"""Layer trimming: layer i of a network leaves out the last i hops of a sampled batch, which its seeds no longer need.

A batch that may be trimmed says so with ``trim=True`` beside ``num_sampled_nodes`` (seeds, then the new nodes of each
hop) and ``num_sampled_edges`` (of each hop), by type in a ``HeteroData``: its nodes and edges are in the order of the
hops. Networks then get these numbers, if their ``forward`` names them as PyG's do; what they return for the seeds, the
first rows, is what it is without. Layers of PyG's own GraphSAGE and GIN compute no rows but those that the next layer
reads, see :func:`targets_alone`. Statistics over all nodes (``BatchNorm`` in training) are over those that are left;
degrees that a layer counts in its edges (``gcn_norm``) are a matter of the strategy, which knows the graph's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GINConv, SAGEConv
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils import trim_to_layer

from gtrain.nn.depth import hop_bounds
from gtrain.protocols import entry

PER_HOP = ("num_sampled_nodes_per_hop", "num_sampled_edges_per_hop")
"""The arguments of PyG's own networks."""
BY_TYPE = ("num_sampled_nodes_dict", "num_sampled_edges_dict")
"""The arguments of networks over ``x_dict``, as PyG's examples call them."""


def trimming(network: nn.Module, parameters: Collection[str], batch: Data | HeteroData) -> dict[str, Any]:
    """Return the arguments by which a network trims its layers; none where it must not, or cannot.

    Args:
        network: what will be called.
        parameters: names of its forward's arguments.
        batch: what it will be called with.
    """
    names = next((names for names in (PER_HOP, BY_TYPE) if set(names) <= set(parameters)), None)
    if names is None or not entry(batch, "trim") or _needs_all_rows(network):
        return {}
    nodes, edges = _numbers(batch)
    hops = min((len(counts) for counts in (edges.values() if isinstance(edges, dict) else [edges])), default=0)
    if hop_bounds(network)[1] > hops:  # a hop that is looked at was not sampled: leave out none of the others
        return {}
    return dict(zip(names, (nodes, edges), strict=True))


@contextmanager
def targets_alone(network: nn.Module) -> Iterator[None]:
    """While this lasts, have the layers of a network that trims compute no rows but those that the next layer reads.

    PyG's own trimming leaves out rows of a layer's input; the last hop's, which have no in-edges, it still transforms.
    Networks whose layers do not take sources and targets apart, or do more work then, are left as they are.
    """
    if not isinstance(network, BasicGNN) or not all(isinstance(conv, _APART) for conv in network.convs):
        yield
        return
    own, network._trim = network._trim, _ToTargets()
    try:
        yield
    finally:
        network._trim = own


_APART = (SAGEConv, GINConv)


class _ToTargets(nn.Module):
    """In place of PyG's ``TrimToLayer``: a layer gets the pair of its sources and its targets, the first of them."""

    def forward(
        self,
        layer: int,
        nodes: list[int],
        edges: list[int],
        x: Tensor,
        edge_index: Any,
        edge_data: Tensor | None = None,
    ) -> tuple[tuple[Tensor, Tensor], Any, Tensor | None]:
        """What PyG's gives, ``x`` excepted; of this, earlier layers have left out their share already."""
        _, edge_index, edge_data = trim_to_layer(layer, [0] * len(nodes), edges, x, edge_index, edge_data)
        return (x, x[: sum(nodes[: len(nodes) - 1 - layer])]), edge_index, edge_data


def without_unread(network: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs without edge data that a network of PyG's takes and does not read.

    Such a network trims ``edge_weight`` or ``edge_attr``, not both.
    """
    if not isinstance(network, BasicGNN):
        return inputs
    unread = {"edge_weight": not network.supports_edge_weight, "edge_attr": not network.supports_edge_attr}
    return {name: value for name, value in inputs.items() if not unread.get(name, False)}


def trim(layer: int, hops: tuple[Any, Any], x: Any, edge_index: Any, edge_data: Any = None) -> tuple[Any, Any, Any]:
    """Leave out the last ``layer`` hops, given that ``layer - 1`` are left out already; all by type or none.

    Args:
        layer: number of the layer that comes next, from 0.
        hops: numbers of nodes and of edges of each hop; (None, None) leaves everything in.
        x: node features.
        edge_index: edges.
        edge_data: one tensor with a row for each edge.

    Returns:
        x, edge_index, edge_data.
    """
    nodes, edges = hops
    if nodes is None or edges is None:
        return x, edge_index, edge_data
    found: tuple[Any, Any, Tensor | None] = trim_to_layer(layer, nodes, edges, x, edge_index, edge_data)
    return found


def _needs_all_rows(network: nn.Module) -> bool:
    """Jumping knowledge reads the same rows of every layer; what ``to_hetero`` makes of PyG's trimming does not run."""
    return getattr(network, "jk", None) is not None or isinstance(network, GraphModule)


def _numbers(batch: Data | HeteroData) -> tuple[Any, Any]:
    """Numbers of nodes and of edges of each hop, by type where the batch has types."""
    if isinstance(batch, HeteroData):
        nodes = {kind: list(batch[kind].num_sampled_nodes) for kind in batch.node_types}
        return nodes, {kind: list(batch[kind].num_sampled_edges) for kind in batch.edge_types}
    return list(batch.num_sampled_nodes), list(batch.num_sampled_edges)
