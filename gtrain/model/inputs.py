"""Call a network with the tensors of a batch that its ``forward`` names, and report the edge data that it reads.

Layer trimming: layer i of a network skips the last i hops of a sampled batch, which its seeds no longer need.
A batch that may be trimmed has ``trim=True``, ``num_sampled_nodes`` (seeds, then the new nodes of each hop) and
``num_sampled_edges`` (of each hop), by type in a ``HeteroData``; its nodes and edges are in the order of the hops.
Networks receive these numbers if their ``forward`` names them as PyG's do. The rows of the seeds, the first ones, are
the same as without trimming. The layers of PyG's GraphSAGE, GIN and GAT networks compute only the rows that the next
layer reads, see :func:`targets_only`. Statistics over all nodes (``BatchNorm`` in training) are over the remaining
ones; degrees that a layer counts in its edges (``gcn_norm``) are for the strategy to provide, which knows the graph.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.fx import GraphModule
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GATConv, GINConv, GraphConv, SAGEConv
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils import trim_to_layer

from gtrain.errors import ConfigError, DataError, negative_weight, zero_weights
from gtrain.model.skip import inner_conv
from gtrain.nn.depth import hop_bounds
from gtrain.nn.patching import normalises
from gtrain.protocols import ReadsEdgeData, WeighsLoss, batch_entry, network_of

if TYPE_CHECKING:
    from gtrain.graph.store import Store

PER_HOP = ("num_sampled_nodes_per_hop", "num_sampled_edges_per_hop")
"""The arguments of PyG's networks."""
PER_HOP_BY_TYPE = ("num_sampled_nodes_dict", "num_sampled_edges_dict")
"""The arguments of networks over ``x_dict``, named as in PyG's examples."""

_BIPARTITE = (SAGEConv, GINConv, GraphConv, GATConv)
_KNOWN = ("x", "edge_index", "edge_weight", "edge_attr", "edge_type")
_BY_TYPE = {f"{name}_dict": name for name in _KNOWN}
_HOPS = (*PER_HOP, *PER_HOP_BY_TYPE)
EDGE_DATA = {
    "edge_weight": "gcn, link_gcn, dgl_sage; link_sage and kg weigh the loss by it",
    "edge_attr": "gat with +model.edge_dim=COLUMNS",
    "edge_type": "rgcn, dgl_rgcn, kg, and link models with model.decoder=distmult or mlp",
    "edge_time": "data.split=time and data.temporal_strategy",
}
"""Data of edges, and the models and settings that read it, for messages; docs/models.md has the table."""
_READERS = {**EDGE_DATA, "time": "data.split=time and data.temporal_strategy"}
"""The same, with the times of nodes."""


_most_hops: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""The most hops of each network that was run, whose layers are looked at once."""


def trimming(network: nn.Module, parameters: Collection[str], batch: Data | HeteroData) -> dict[str, Any]:
    """Return the arguments by which a network trims its layers; empty if it must not or cannot.

    Args:
        network: the network.
        parameters: names of its forward's arguments.
        batch: its input.
    """
    names = next((names for names in (PER_HOP, PER_HOP_BY_TYPE) if set(names) <= set(parameters)), None)
    # jumping knowledge reads the same rows of every layer; to_hetero's translation of PyG's trimming does not run
    needs_all_rows = getattr(network, "jk", None) is not None or isinstance(network, GraphModule)
    if names is None or not batch_entry(batch, "trim") or needs_all_rows:
        return {}
    nodes, edges = _numbers(batch)
    hops = min((len(counts) for counts in (edges.values() if isinstance(edges, dict) else [edges])), default=0)
    if network not in _most_hops:
        _most_hops[network] = hop_bounds(network)[1]
    if _most_hops[network] > hops:
        # The network reads more hops than were sampled.
        return {}
    return dict(zip(names, (nodes, edges), strict=True))


@contextmanager
def targets_only(network: nn.Module) -> Iterator[None]:
    """Context in which the layers of a network that trims compute only the rows that the next layer reads.

    PyG's trimming drops rows of a layer's input, but still transforms the last hop's nodes, which have no in-edges.
    Networks with layers that cannot separate sources from targets, or are slower then, are left as they are.
    """
    if not isinstance(network, BasicGNN) or not all(
        isinstance(inner_conv(layer), _BIPARTITE) for layer in network.convs
    ):
        yield
        return
    original, network._trim = network._trim, _TrimToTargets()
    try:
        yield
    finally:
        network._trim = original


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
        # Zeros: PyG would shorten x a second time.
        _, edge_index, edge_data = trim_to_layer(layer, [0] * len(nodes), edges, x, edge_index, edge_data)
        # Layer i needs targets up to hop L - 1 - i; nodes are in the order of hops, the seeds (hop 0) first.
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


def input_names(network: nn.Module) -> dict[str, bool]:
    """Return the batch entries that the network's forward takes: name -> whether it is required.

    Heterogeneous networks take ``x_dict``, ``edge_index_dict`` and so on, by type; those of ``to_hetero`` keep the
    names of the original network. Networks may also name the numbers of each hop, by which they trim their layers; see
    the module.

    Raises:
        ConfigError: forward does not take node features.
    """
    parameters = inspect.signature(network.forward).parameters
    known = (*_KNOWN, *_BY_TYPE, *_HOPS)
    names = {n: p.default is inspect.Parameter.empty for n, p in parameters.items() if n in known}
    if "x" not in names and "x_dict" not in names:
        raise ConfigError(
            f"model._target_={type(network).__module__}.{type(network).__qualname__} was set; its forward takes "
            f"({', '.join(parameters)}), but a network over a graph takes x and, for message passing, edge_index "
            "(x_dict and edge_index_dict if the graph has several types).",
            hint="choose a network over node features, or set model._target_ to a LightningModule.",
        )
    return names


def run_network(network: nn.Module, names: dict[str, bool], encoder: nn.Module | None, batch: Data | HeteroData) -> Any:
    """Return the network's output for a batch: one row per node, by type if it takes ``x_dict``.

    Args:
        network: a network over a graph.
        names: from :func:`input_names`.
        encoder: makes the network's input features; None: the graph's features.
        batch: a graph.

    Raises:
        ConfigError, DataError: see :func:`network_inputs`.
    """
    inputs = network_inputs(network, names, batch, None if encoder is None else encoder(batch))
    with targets_only(network):
        return network(**inputs)


def check_types(network: nn.Module, names: Collection[str], *, hetero: bool) -> None:
    """Refuse a network for graphs with one type of nodes and edges on a graph with several, and the other way round.

    Args:
        network: the network.
        names: from :func:`input_names`.
        hetero: whether the graph has several types.

    Raises:
        ConfigError: the network does not fit the graph.
    """
    if hetero != ("x_dict" in names or isinstance(network, GraphModule)):
        actual, expected = ("several types", "one type") if hetero else ("one type", "several types")
        raise ConfigError(
            f"{type(network).__name__} is a network for graphs with {expected} of nodes and edges, and this graph has "
            f"{actual}.",
            hint="set model to hetero_sage or hgt." if hetero else "set model to gcn, sage, gat, gin or rgcn.",
        )


def network_inputs(
    network: nn.Module, names: dict[str, bool], batch: Data | HeteroData, x: Tensor | dict[str, Tensor] | None
) -> dict[str, Any]:
    """Return the keyword arguments of the network's forward.

    Args:
        network: for messages.
        names: from :func:`input_names`.
        batch: a graph.
        x: node features from an encoder; None: the batch's features.

    Raises:
        ConfigError: see :func:`check_types`.
        DataError: the graph lacks what the network needs.
    """
    check_types(network, names, hetero=isinstance(batch, HeteroData))
    inputs = _collect(batch, [name for name in names if name not in _HOPS])
    if x is not None:
        inputs["x_dict" if "x_dict" in names else "x"] = x
    missing = [name for name, required in names.items() if required and name not in inputs]
    if missing:
        raise DataError(
            f"{type(network).__name__} needs {', '.join(missing)}, which this graph does not have.",
            hint="give the graph features (data.features), learn some (model.learn_features=true), or "
            "choose another model."
            if "x" in missing
            else "choose another model.",
        )
    hops = trimming(network, names, batch)
    return {**without_unread(network, inputs), **hops} if hops else inputs


def edge_data_read(module: nn.Module) -> frozenset[str] | None:
    """Return which of :data:`EDGE_DATA` change what a model computes; None if unknown.

    Models of gtrain declare ``edge_data``, which they read in addition to their ``network``.
    """
    if not isinstance(module, ReadsEdgeData):
        return None
    network = network_of(module)
    return module.edge_data if network is None else module.edge_data | _network_reads(network)


def _network_reads(network: nn.Module) -> frozenset[str]:
    """Return the edge data that a network reads: PyG's networks name more than they read, others read all they name."""
    if not isinstance(network, BasicGNN):
        parameters = inspect.signature(network.forward).parameters
        return frozenset(name for name in EDGE_DATA if name in parameters or f"{name}_dict" in parameters)
    sized = any(getattr(layer, "edge_dim", None) is not None for layer in network.modules())
    reads = {"edge_weight": network.supports_edge_weight, "edge_attr": network.supports_edge_attr and sized}
    return frozenset(name for name, read in reads.items() if read)


def weight_demand(module: nn.Module, name: str) -> str | None:
    """Return why edge weights must not be negative, for a message that names a negative one; None if they may be.

    Args:
        module: the model.
        name: of the model in the message.
    """
    if "edge_weight" not in (edge_data_read(module) or ()):
        return None
    normalising = next((type(layer).__name__ for layer in module.modules() if normalises(layer)), None)
    if isinstance(module, WeighsLoss) and module.weighs_loss:
        reason = "an edge's weight is the factor of its loss"
    elif normalising is not None:
        reason = f"{normalising} divides by the square roots of sums of weights"
    else:
        return None
    return f"{name} takes weights of 0 or more: {reason}"


def zero_demand(module: nn.Module, name: str) -> str | None:
    """Return why some edge weight has to be above 0, for a message about zero weights; None if all may be 0.

    Args:
        module: the model.
        name: of the model in the message.
    """
    weighs = isinstance(module, WeighsLoss) and module.weighs_loss
    if not weighs or "edge_weight" not in (edge_data_read(module) or ()):
        return None
    return f"with {name} an edge's weight is the factor of its loss: nothing would be learned"


def check_weights(module: nn.Module, facts: dict[str, Any], name: str) -> None:
    """Raise for edge weights that a model cannot train with: negative ones, or only zeros as weights of the loss.

    Args:
        module: the model.
        facts: of the store; see :func:`~gtrain.data.prepare.validate.weight_facts`.
        name: of the model in messages.

    Raises:
        DataError: names the first such weight, by file and line if the source has them.
    """
    negative, demand = facts.get("negative_weight"), weight_demand(module, name)
    if negative is not None and demand is not None:
        raise negative_weight(negative, demand)
    demand = zero_demand(module, name)
    if demand is not None and facts.get("edge_weights") == [0, 0]:
        raise zero_weights("the graph", demand)


def unread_data(module: nn.Module, store: Store, used: set[str], name: str) -> list[str]:
    """Return a sentence about each edge tensor, and the times of nodes, that neither model nor settings read.

    Args:
        module: the model; the result is empty for a module that does not declare ``edge_data``.
        store: the graph.
        used: names of the tensors that the split or the sampling reads.
        name: of the model in the sentences.
    """
    read = edge_data_read(module)
    if read is None:
        return []
    stored = {tensor for edge_type in store.edge_types for tensor in store.edge_tensors(edge_type)}
    stored |= {"time"} & {tensor for node_type in store.node_types for tensor in store.node_tensors(node_type)}
    return [
        f"{name} does not read {'the time of nodes' if tensor == 'time' else tensor}, so training is the same without "
        f"it. Its readers: {readers} (docs/models.md#edge-data)."
        for tensor, readers in _READERS.items()
        if tensor in stored and tensor not in read | used
    ]


def _collect(batch: Data | HeteroData, names: list[str]) -> dict[str, Any]:
    if isinstance(batch, Data):
        return {name: batch[name] for name in names if name in batch}
    by_type = {name: batch.collect(_BY_TYPE.get(name, name), allow_empty=True) for name in names}
    return {name: values for name, values in by_type.items() if values}
