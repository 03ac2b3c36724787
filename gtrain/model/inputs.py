"""Handing a batch to a network: which of the batch's tensors its ``forward`` names, and which of them it reads."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.fx import GraphModule
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.models.basic_gnn import BasicGNN

from gtrain.errors import ConfigError, DataError, negative_weight, zero_weights
from gtrain.model.trim import BY_TYPE, PER_HOP, targets_alone, trimming, without_unread
from gtrain.protocols import ReadsEdgeData, WeighsLoss, network_of

if TYPE_CHECKING:
    from gtrain.graph.store import Store

_KNOWN = ("x", "edge_index", "edge_weight", "edge_attr", "edge_type")
_BY_TYPE = {f"{name}_dict": name for name in _KNOWN}
_HOPS = (*PER_HOP, *BY_TYPE)


def input_names(network: nn.Module) -> dict[str, bool]:
    """Return the batch entries that the network's forward takes: name -> whether it is required.

    Heterogeneous networks take ``x_dict``, ``edge_index_dict`` and so on, by type; those that ``to_hetero`` made keep
    the names of the network that they were made of. Networks may name the numbers of each hop as well, by which they
    trim their layers; see :mod:`gtrain.model.trim`.

    Raises:
        ConfigError: it takes no node features.
    """
    parameters = inspect.signature(network.forward).parameters
    known = (*_KNOWN, *_BY_TYPE, *_HOPS)
    names = {n: p.default is inspect.Parameter.empty for n, p in parameters.items() if n in known}
    if "x" not in names and "x_dict" not in names:
        raise ConfigError(
            f"model._target_={type(network).__module__}.{type(network).__qualname__} was set; its forward takes "
            f"({', '.join(parameters)}), but a network over a graph takes x and, for message passing, edge_index "
            "(x_dict and edge_index_dict where the graph has several types).",
            hint="choose a network over node features, or give a LightningModule of your own as model._target_.",
        )
    return names


def run_network(network: nn.Module, names: dict[str, bool], encoder: nn.Module | None, batch: Data | HeteroData) -> Any:
    """Return what the network makes of a batch: one row for each node, by type where it takes ``x_dict``.

    Args:
        network: a network over a graph.
        names: as :func:`input_names` returned them.
        encoder: makes the features that the network gets; None: the graph's own.
        batch: a graph.

    Raises:
        ConfigError, DataError: see :func:`network_inputs`.
    """
    inputs = network_inputs(network, names, batch, None if encoder is None else encoder(batch))
    with targets_alone(network):
        return network(**inputs)


def network_inputs(
    network: nn.Module, names: dict[str, bool], batch: Data | HeteroData, x: Tensor | dict[str, Tensor] | None
) -> dict[str, Any]:
    """Return the keyword arguments of the network's forward.

    Args:
        network: for messages.
        names: as :func:`input_names` returned them.
        batch: a graph.
        x: node features that an encoder made of the batch; None takes the batch's own.

    Raises:
        ConfigError: the network is made for the other kind of graph.
        DataError: the graph lacks what the network needs.
    """
    hetero, made_hetero = isinstance(batch, HeteroData), isinstance(network, GraphModule)
    if hetero != ("x_dict" in names or made_hetero):
        kind, other = ("several types", "one type") if hetero else ("one type", "several types")
        raise ConfigError(
            f"{type(network).__name__} is a network for graphs with {other} of nodes and edges, and this graph has "
            f"{kind}.",
            hint="set model to hetero_sage or hgt." if hetero else "set model to gcn, sage, gat, gin or rgcn.",
        )
    found = _collect(batch, [name for name in names if name not in _HOPS])
    if x is not None:
        found["x_dict" if "x_dict" in names else "x"] = x
    missing = [name for name, required in names.items() if required and name not in found]
    if missing:
        raise DataError(
            f"{type(network).__name__} needs {', '.join(missing)}, which this graph does not have.",
            hint="give the graph features (data.features), let the model learn some (model.learn_features=true), or "
            "choose another model."
            if "x" in missing
            else "choose another model.",
        )
    hops = trimming(network, names, batch)
    return {**without_unread(network, found), **hops} if hops else found


EDGE_DATA = {
    "edge_weight": "gcn, link_gcn, dgl_sage; link_sage and kg weigh the loss by it",
    "edge_attr": "gat with +model.edge_dim=COLUMNS",
    "edge_type": "rgcn, dgl_rgcn, kg, and link models with model.decoder=distmult or mlp",
    "edge_time": "data.split=time and data.temporal_strategy",
}
"""What edges may have, and what reads it, for messages; docs/models.md has the table."""
_DATA = {**EDGE_DATA, "time": "data.split=time and data.temporal_strategy"}
"""The same, and what nodes may have."""


def edge_data_read(module: nn.Module) -> frozenset[str] | None:
    """Return which of :data:`EDGE_DATA` change what a model computes; None where that is not known.

    Models of gtrain answer by ``edge_data``: what they read besides what their ``network``, if any, reads.
    """
    if not isinstance(module, ReadsEdgeData):
        return None
    network = network_of(module)
    return module.edge_data if network is None else module.edge_data | _network_reads(network)


def _network_reads(network: nn.Module) -> frozenset[str]:
    """Networks of PyG take edge data that their convolutions do not read; others read what they name."""
    if not isinstance(network, BasicGNN):
        parameters = inspect.signature(network.forward).parameters
        return frozenset(name for name in EDGE_DATA if name in parameters or f"{name}_dict" in parameters)
    sized = any(getattr(layer, "edge_dim", None) is not None for layer in network.modules())
    reads = {"edge_weight": network.supports_edge_weight, "edge_attr": network.supports_edge_attr and sized}
    return frozenset(name for name, read in reads.items() if read)


def weight_demand(module: nn.Module, name: str) -> str | None:
    """Return why edge weights have to be 0 or more, for a message that names a negative one; None: they need not.

    Args:
        module: the model.
        name: what the message calls it.
    """
    if "edge_weight" not in (edge_data_read(module) or ()):
        return None
    normalising = next((type(layer).__name__ for layer in module.modules() if _normalises(layer)), None)
    if isinstance(module, WeighsLoss) and module.weighs_loss:
        reason = "an edge's weight is the factor of its loss"
    elif normalising is not None:
        reason = f"{normalising} divides by the square roots of sums of weights"
    else:
        return None
    return f"{name} takes weights of 0 or more: {reason}"


def zero_demand(module: nn.Module, name: str) -> str | None:
    """Return why some edge weight has to be above 0, for a message that refuses zeros alone; None: none has to.

    Args:
        module: the model.
        name: what the message calls it.
    """
    weighs = isinstance(module, WeighsLoss) and module.weighs_loss
    if not weighs or "edge_weight" not in (edge_data_read(module) or ()):
        return None
    return f"with {name} an edge's weight is the factor of its loss: nothing would be learned"


def check_weights(module: nn.Module, facts: dict[str, Any], name: str) -> None:
    """Refuse edge weights that a model cannot train with: negative ones, or zeros alone where they weigh the loss.

    Args:
        module: the model.
        facts: of the store; see :func:`~gtrain.data.prepare.validate.weight_facts`.
        name: what messages call the model.

    Raises:
        DataError: names the first such weight, by file and line where the source knows them.
    """
    negative, demand = facts.get("negative_weight"), weight_demand(module, name)
    if negative is not None and demand is not None:
        raise negative_weight(negative, demand)
    demand = zero_demand(module, name)
    if demand is not None and facts.get("edge_weights") == [0, 0]:
        raise zero_weights("the graph", demand)


def _normalises(layer: nn.Module) -> bool:
    """Whether a convolution divides by degrees that are sums of weights: ``GCNConv``, ``APPNP``, ``SGConv``..."""
    home = vars(sys.modules.get(type(layer).__module__, inspect))
    return isinstance(layer, MessagePassing) and "gcn_norm" in home and bool(getattr(layer, "normalize", True))


def tell_unread(module: nn.Module, store: Store, used: set[str], name: str) -> list[str]:
    """Return a sentence about each tensor of the edges, and the times of nodes, that nothing reads.

    Args:
        module: the model; of a module that is not gtrain's nothing is known.
        store: the graph.
        used: names of the tensors that the split or the sampling reads.
        name: what the sentences call the model.
    """
    read = edge_data_read(module)
    if read is None:
        return []
    there = {tensor for kind in store.edge_types for tensor in store.edge_tensors(kind)}
    there |= {tensor for kind in store.node_types for tensor in store.node_tensors(kind) if tensor == "time"}
    return [
        f"{name} does not read {'the time of nodes' if tensor == 'time' else tensor}, so training is the same without "
        f"it. What reads it: {readers} (docs/models.md#edge-data)."
        for tensor, readers in _DATA.items()
        if tensor in there and tensor not in read | used
    ]


def _collect(batch: Data | HeteroData, names: list[str]) -> dict[str, Any]:
    if isinstance(batch, Data):
        return {name: batch[name] for name in names if name in batch}
    by_type = {name: batch.collect(_BY_TYPE.get(name, name), allow_empty=True) for name in names}
    return {name: values for name, values in by_type.items() if values}
