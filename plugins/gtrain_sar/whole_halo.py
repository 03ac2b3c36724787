"""Runs PyG's own methods over local and halo rows, after one exchange of the whole halo."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import aggr
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.conv import MessagePassing

from gtrain.engine.edges import EdgeBlockCache
from gtrain.engine.halo import halo_rows
from gtrain.engine.propagate import DeferredCoefficients
from gtrain.nn.dropout import DropoutRows, current_position, edge_ids, resumed_at
from gtrain.strategy.group import Group

_ORDER_INDEPENDENT = (
    aggr.SumAggregation,
    aggr.MeanAggregation,
    aggr.MaxAggregation,
    aggr.MinAggregation,
    aggr.MulAggregation,
    aggr.VarAggregation,
    aggr.StdAggregation,
    aggr.SoftmaxAggregation,
    aggr.PowerMeanAggregation,
    aggr.MultiAggregation,
    aggr.DegreeScalerAggregation,
    aggr.VariancePreservingAggregation,
)
"""Aggregations whose result does not depend on the order of edges."""


class WholeHalo:
    """The calls of ``propagate`` and ``edge_updater`` that do not run block by block."""

    def propagate(
        self, conv: MessagePassing, edge_index: Tensor, edges: EdgeBlockCache, kwargs: dict[str, Any]
    ) -> Tensor:
        """Return the result of ``conv.propagate``, [num_targets, ...]."""
        halo = _halo_of(edges, _source_tensors(conv._user_args, kwargs))
        return _propagate(conv, edge_index, edges, _with_halo(conv._user_args, kwargs, halo))

    def edge_updater(
        self, conv: MessagePassing, edge_index: Tensor, edges: EdgeBlockCache, kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of ``conv.edge_updater``, [E, ...]."""
        halo = _halo_of(edges, _source_tensors(conv._edge_user_args, kwargs))
        return _update_edges(conv, edge_index, edges, _with_halo(conv._edge_user_args, kwargs, halo))

    def attend(
        self,
        conv: MessagePassing,
        edge_index: Tensor,
        edges: EdgeBlockCache,
        kwargs: dict[str, Any],
        deferred: tuple[str, DeferredCoefficients],
    ) -> Tensor:
        """Return the result of ``conv.propagate``; one exchange serves both methods."""
        name, update = deferred
        methods = ((conv._edge_user_args, update.kwargs), (conv._user_args, kwargs))
        halo = _halo_of(edges, [tensor for pair in methods for tensor in _source_tensors(*pair)])
        alpha = _update_edges(conv, update.edge_index, edges, _with_halo(*methods[0], halo))
        return _propagate(conv, edge_index, edges, {**_with_halo(*methods[1], halo), name: alpha})


def as_pair(value: Any) -> tuple[Any, Any]:
    """Return an argument as its values at sources and at targets."""
    return (value[0], value[1]) if isinstance(value, (tuple, list)) else (value, value)


def _source_tensors(names: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that are read at sources."""
    values = [as_pair(value)[0] for name, value in kwargs.items() if f"{name}_j" in names]
    return [tensor for tensor in values if isinstance(tensor, Tensor)]


def _halo_of(edges: EdgeBlockCache, sources: list[Tensor]) -> dict[int, Tensor]:
    """Return local and halo rows of each tensor, by its identity."""
    distinct = list({id(tensor): tensor for tensor in sources}.values())
    fetched = halo_rows([(edges.exchange, tensor) for tensor in distinct]) if distinct else []
    return {id(tensor): rows for tensor, rows in zip(distinct, fetched, strict=True)}


def _with_halo(names: Any, kwargs: dict[str, Any], halo: dict[int, Tensor]) -> dict[str, Any]:
    """Return the arguments, with halo rows where a method reads at sources."""
    arguments = dict(kwargs)
    for name, value in kwargs.items():
        if f"{name}_j" in names:
            source, target = as_pair(value)
            rows, at_targets = halo.get(id(source), source), target if f"{name}_i" in names else None
            arguments[name] = rows if isinstance(value, Tensor) and at_targets is None else (rows, at_targets)
    return arguments


def _update_edges(conv: MessagePassing, edge_index: Tensor, edges: EdgeBlockCache, arguments: dict[str, Any]) -> Tensor:
    """Run ``conv.edge_updater`` over local and halo rows; the result is in the order of the edges."""
    return _run(conv, type(conv).edge_updater, edge_index, edges, arguments)


def _propagate(conv: MessagePassing, edge_index: Tensor, edges: EdgeBlockCache, arguments: dict[str, Any]) -> Tensor:
    """Run ``conv.propagate`` over local and halo rows."""
    # PyG's ``propagate`` that is generated for a class supports no decomposition and no explanation.
    general = conv.decomposed_layers > 1 or conv.explain
    method = MessagePassing.propagate if general else type(conv).propagate
    if is_order_independent(conv):
        return _run(conv, method, edge_index, edges, arguments)
    edge_index, arguments = _in_global_order(conv, edge_index, edges, arguments)
    with _padded_to_global_degree(conv, edges.exchange.group, edge_index):
        return _run(conv, method, edge_index, edges, arguments)


def _run(
    conv: MessagePassing, method: Any, edge_index: Tensor, edges: EdgeBlockCache, arguments: dict[str, Any]
) -> Tensor:
    """Run PyG's method over local and halo rows."""
    shard = edges.exchange.shard
    size = (shard.num_local + shard.num_halo, edges.num_targets)
    ids = partial(edge_ids, edge_index, edges.exchange.all_ids, edges.targets.all_ids)
    with resumed_at(current_position(), DropoutRows("edge", edge_index.size(1), ids)):
        return method(conv, edge_index, size=size, **arguments)  # type: ignore[no-any-return]


@contextmanager
def _padded_to_global_degree(conv: MessagePassing, group: Group, edge_index: Tensor) -> Iterator[None]:
    """Let aggregations that pad nodes to the largest in-degree use the largest one of the whole graph."""
    degrees = torch.bincount(edge_index[1], minlength=1)
    largest = int(group.all_reduce(degrees.max().double().view(1), "max"))
    padding = [layer for layer in conv.aggr_module.modules() if isinstance(layer, Aggregation)]
    for layer in padding:
        layer.__dict__["to_dense_batch"] = partial(_to_dense_batch, layer, largest)
    try:
        yield
    finally:
        for layer in padding:
            del layer.__dict__["to_dense_batch"]


def _to_dense_batch(layer: Aggregation, largest: int, *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(Aggregation.to_dense_batch).bind(layer, *args, **kwargs)
    if bound.arguments.get("max_num_elements") is None:
        bound.arguments["max_num_elements"] = largest
    return Aggregation.to_dense_batch(*bound.args, **bound.kwargs)


def is_order_independent(conv: MessagePassing) -> bool:
    """Whether the aggregation is the same in any order of edges: recurrent ones are not, custom ones count as such."""
    if conv.aggr_module is None:
        return True
    aggregations = [layer for layer in conv.aggr_module.modules() if isinstance(layer, Aggregation)]
    return all(isinstance(layer, _ORDER_INDEPENDENT) for layer in aggregations)


def _in_global_order(
    conv: MessagePassing, edge_index: Tensor, edges: EdgeBlockCache, arguments: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Sort edges and tensors of edges by target, then by the source's original id: the order of a single process."""
    order = torch.argsort(edges.exchange.all_ids[edge_index[0]], stable=True)
    order = order[torch.argsort(edge_index[1][order], stable=True)]
    for name, value in arguments.items():
        # A rank can have as many nodes as edges.
        of_nodes = {f"{name}_i", f"{name}_j"} & set(conv._user_args)
        if isinstance(value, Tensor) and value.dim() and value.size(0) == edge_index.size(1) and not of_nodes:
            arguments[name] = value[order]
    return edge_index[:, order], arguments
