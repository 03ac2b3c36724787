"""Layer trimming: layer i of a network skips the last i hops of a sampled batch, which its seeds no longer need.

A batch that may be trimmed has ``trim=True``, ``num_sampled_nodes`` (seeds, then the new nodes of each hop) and
``num_sampled_edges`` (of each hop), by type in a ``HeteroData``; its nodes and edges are in the order of the hops.
Networks receive these numbers if their ``forward`` names them as PyG's do. The rows of the seeds, the first ones, are
the same as without trimming. The layers of PyG's GraphSAGE and GIN compute only the rows that the next layer reads, see
:func:`targets_only`. Statistics over all nodes (``BatchNorm`` in training) are over the remaining ones; degrees that a
layer counts in its edges (``gcn_norm``) are the strategy's responsibility, which knows the graph's.
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
"""The arguments of PyG's networks."""
BY_TYPE = ("num_sampled_nodes_dict", "num_sampled_edges_dict")
"""The arguments of networks over ``x_dict``, named as in PyG's examples."""


def trimming(network: nn.Module, parameters: Collection[str], batch: Data | HeteroData) -> dict[str, Any]:
    """Return the arguments by which a network trims its layers; empty if it must not or cannot.

    Args:
        network: the network.
        parameters: names of its forward's arguments.
        batch: its input.
    """
    names = next((names for names in (PER_HOP, BY_TYPE) if set(names) <= set(parameters)), None)
    # jumping knowledge reads the same rows of every layer; to_hetero's translation of PyG's trimming does not run
    needs_all_rows = getattr(network, "jk", None) is not None or isinstance(network, GraphModule)
    if names is None or not entry(batch, "trim") or needs_all_rows:
        return {}
    nodes, edges = _numbers(batch)
    hops = min((len(counts) for counts in (edges.values() if isinstance(edges, dict) else [edges])), default=0)
    if hop_bounds(network)[1] > hops:  # the network reads more hops than were sampled
        return {}
    return dict(zip(names, (nodes, edges), strict=True))


@contextmanager
def targets_only(network: nn.Module) -> Iterator[None]:
    """Context in which the layers of a network that trims compute only the rows that the next layer reads.

    PyG's trimming drops rows of a layer's input, but still transforms the last hop's nodes, which have no in-edges.
    Networks with layers that cannot separate sources from targets, or are slower then, are left as they are.
    """
    if not isinstance(network, BasicGNN) or not all(isinstance(conv, _BIPARTITE) for conv in network.convs):
        yield
        return
    original, network._trim = network._trim, _TrimToTargets()
    try:
        yield
    finally:
        network._trim = original


_BIPARTITE = (SAGEConv, GINConv)


class _TrimToTargets(nn.Module):
    """Replaces PyG's ``TrimToLayer``: a layer gets the pair of its sources and its targets, the first of them."""

    def forward(
        self,
        layer: int,
        nodes: list[int],
        edges: list[int],
        x: Tensor,
        edge_index: Any,
        edge_data: Tensor | None = None,
    ) -> tuple[tuple[Tensor, Tensor], Any, Tensor | None]:
        """Return the same as PyG's class, but for ``x``, which earlier layers have shortened already."""
        _, edge_index, edge_data = trim_to_layer(layer, [0] * len(nodes), edges, x, edge_index, edge_data)
        return (x, x[: sum(nodes[: len(nodes) - 1 - layer])]), edge_index, edge_data


def without_unread(network: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs without edge data that a network of PyG accepts and does not read.

    Such a network can trim ``edge_weight`` or ``edge_attr``, not both.
    """
    if not isinstance(network, BasicGNN):
        return inputs
    unread = {"edge_weight": not network.supports_edge_weight, "edge_attr": not network.supports_edge_attr}
    return {name: value for name, value in inputs.items() if not unread.get(name, False)}


def trim(layer: int, hops: tuple[Any, Any], x: Any, edge_index: Any, edge_data: Any = None) -> tuple[Any, Any, Any]:
    """Drop the last of ``layer`` hops, after earlier calls have dropped ``layer - 1``; all arguments by type, or none.

    Args:
        layer: number of the next layer, from 0.
        hops: numbers of nodes and of edges of each hop; (None, None) drops nothing.
        x: node features.
        edge_index: edges.
        edge_data: one tensor with a row per edge.

    Returns:
        x, edge_index, edge_data.
    """
    nodes, edges = hops
    if nodes is None or edges is None:
        return x, edge_index, edge_data
    trimmed: tuple[Any, Any, Tensor | None] = trim_to_layer(layer, nodes, edges, x, edge_index, edge_data)
    return trimmed


def _numbers(batch: Data | HeteroData) -> tuple[Any, Any]:
    """Return the numbers of nodes and of edges of each hop, by type in a heterogeneous batch."""
    if isinstance(batch, HeteroData):
        nodes = {node_type: list(batch[node_type].num_sampled_nodes) for node_type in batch.node_types}
        return nodes, {edge_type: list(batch[edge_type].num_sampled_edges) for edge_type in batch.edge_types}
    return list(batch.num_sampled_nodes), list(batch.num_sampled_edges)
