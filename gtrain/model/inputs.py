"""Handing a batch to a network: which of the batch's tensors its ``forward`` names."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule
from torch_geometric.data import Data, HeteroData

from gtrain.errors import ConfigError, DataError
from gtrain.model.trim import BY_TYPE, PER_HOP, targets_alone, trimming, without_unread

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


def _collect(batch: Data | HeteroData, names: list[str]) -> dict[str, Any]:
    if isinstance(batch, Data):
        return {name: batch[name] for name in names if name in batch}
    by_type = {name: batch.collect(_BY_TYPE.get(name, name), allow_empty=True) for name in names}
    return {name: values for name, values in by_type.items() if values}
