"""Chooses how a call of ``propagate`` runs: a sparse product, fused attention, block by block, or one exchange.

A linear layer and a linear aggregation commute: they are swapped where the narrower rows are then sent.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn import aggr
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.conv import GATConv, GATv2Conv, GCNConv, GraphConv, MessagePassing, SAGEConv, SGConv

from gtrain.errors import ConfigError
from gtrain.nn.dropout import DropoutRows, current_position, edge_ids, resumed_at
from gtrain.strategy.group import Group
from gtrain_sar.attention.fused import attend
from gtrain_sar.attention.softmax import attend_by_blocks, calls_softmax, is_linear_in_coefficients
from gtrain_sar.blocks import aggregate_by_blocks, extreme
from gtrain_sar.config import Schedule
from gtrain_sar.constants import Constants
from gtrain_sar.edges import EdgeBlockCache, EdgeBlocks
from gtrain_sar.fused_layers import has_hooks, plain_linear
from gtrain_sar.halo import halo_rows
from gtrain_sar.linear import LinearCall, aggregate
from gtrain_sar.propagate_call import (
    PropagateCall,
    linear_call,
    normalises_messages,
    reduction,
    sees_one_edge,
    source_rows,
)

_FORWARDS_COEFFICIENTS = (GATConv.forward, GATv2Conv.forward)
"""Forward passes that only pass the result of ``edge_updater`` on to ``propagate``."""

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

AFTER: dict[type[MessagePassing], str] = {SAGEConv: "lin_l", GraphConv: "lin_rel", SGConv: "lin"}
"""Convolutions that apply a linear layer to the aggregate, and its name."""
BEFORE: dict[type[MessagePassing], str] = {GCNConv: "lin"}
"""Convolutions that apply a linear layer to the rows that they aggregate, and its name."""


@dataclass
class DeferredCoefficients:
    """A call of ``edge_updater`` that is deferred until ``propagate`` receives its result as an argument."""

    edge_index: Tensor
    kwargs: dict[str, Any]


class Propagation:
    """Runs calls of ``propagate`` and ``edge_updater`` over blocks.

    Args:
        schedule: when blocks are fetched.
        constants: inputs that never change.
        shadow: sets an attribute of a module's instance until the run ends.

    Attributes:
        transforms: swaps linear layers and aggregations; patches the linear layers.
    """

    def __init__(
        self,
        schedule: Schedule,
        constants: Constants,
        shadow: Callable[[nn.Module, str, Callable[..., Any]], None],
    ) -> None:
        self._schedule, self._constants = schedule, constants
        self.transforms = Transforms(shadow)
        self._returning_weights: weakref.WeakSet[MessagePassing] = weakref.WeakSet()

    def returns_weights(self, conv: MessagePassing, returns: bool) -> None:
        """Record whether the running call of ``conv`` also returns the coefficients themselves."""
        (self._returning_weights.add if returns else self._returning_weights.discard)(conv)

    def propagate(
        self, conv: MessagePassing, edge_index: Tensor, edges: EdgeBlockCache, kwargs: dict[str, Any]
    ) -> Tensor:
        """Return the result of ``conv.propagate``, [num_targets, ...].

        Raises:
            ConfigError: nodes are not the first dimension.
        """
        _check_nodes_first(conv, kwargs)
        deferred = next((name for name, value in kwargs.items() if isinstance(value, DeferredCoefficients)), None)
        reduce = None if has_hooks(conv) else reduction(conv)
        if deferred is not None:
            return self._attend(conv, edge_index, edges, kwargs, deferred)
        out = call = None
        if reduce is not None and conv not in self._returning_weights:
            call = PropagateCall(conv, edges(edge_index), reduce, kwargs)
            out = self._linear(conv, call, edge_index)
        if out is None:
            kwargs = {name: self.transforms.settle(value) for name, value in kwargs.items()}
            if call is not None:
                out = self._by_blocks(PropagateCall(conv, call.blocks, call.reduce, kwargs))
        if out is not None:
            return conv.update(out)
        return _at_once(conv, _general_propagate(conv), conv._user_args, edge_index, edges, kwargs)

    def edge_updater(
        self, conv: MessagePassing, edge_index: Tensor, edges: EdgeBlockCache, kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of ``conv.edge_updater``, [E, ...], or defer it."""
        deferrable = type(conv).forward in _FORWARDS_COEFFICIENTS and conv not in self._returning_weights
        if deferrable and not has_hooks(conv) and reduction(conv) == "sum":
            return DeferredCoefficients(edge_index, kwargs)
        return _at_once(conv, type(conv).edge_updater, conv._edge_user_args, edge_index, edges, kwargs)

    # ------------------------------------------------------------------------ the alternatives

    def _linear(self, conv: MessagePassing, call: PropagateCall, edge_index: Tensor) -> Tensor | None:
        """A sparse product; None where messages are not weighted source rows."""
        linear = linear_call(call)
        if linear is None:
            return None
        x, transform = self.transforms.source(conv, linear.x)

        def compute() -> Tensor:
            return aggregate([LinearCall(linear.blocks, x, linear.weight, linear.mean)], self._schedule)[0]

        return transform(self._constants.result((x, edge_index, linear.weight), ("linear", linear.mean), compute))

    def _by_blocks(self, call: PropagateCall) -> Tensor | None:
        """Block by block; None where the mode or the convolution does not allow it."""
        rows = source_rows(call) if call.reduce in ("max", "min") else None
        if rows is not None:
            return extreme(call.blocks, rows, call.reduce == "max", self._schedule)
        if self._schedule.mode == 3 or normalises_messages(call):
            return None
        if sees_one_edge(call.conv):
            return aggregate_by_blocks(call, self._schedule)
        if calls_softmax(call.conv, "message") and is_linear_in_coefficients(call):
            return attend_by_blocks(call, self._schedule)
        return None

    def _attend(
        self, conv: MessagePassing, edge_index: Tensor, edges: EdgeBlockCache, kwargs: dict[str, Any], name: str
    ) -> Tensor:
        """Attention whose coefficients, the argument ``name``, were deferred."""
        blocks, deferred = edges(edge_index), kwargs[name]
        fused = self._fused(conv, blocks, kwargs, deferred)
        if fused is not None:
            return conv.update(fused)
        others = {key: value for key, value in kwargs.items() if key != name}
        if self._schedule.mode != 3 and deferred.edge_index is edge_index and calls_softmax(conv, "edge_update"):
            call = PropagateCall(conv, blocks, "sum", others, (name, deferred.kwargs))
            if is_linear_in_coefficients(call):
                return conv.update(attend_by_blocks(call, self._schedule))
        # one exchange for all that both methods read at sources
        methods = ((conv._edge_user_args, deferred.kwargs), (conv._user_args, others))
        halo = _halo_of(edges, [tensor for pair in methods for tensor in _source_tensors(*pair)])
        update_arguments = _with_halo(*methods[0], halo)
        alpha = _run(conv, type(conv).edge_updater, deferred.edge_index, edges, update_arguments)
        return _run(conv, _general_propagate(conv), edge_index, edges, {**_with_halo(*methods[1], halo), name: alpha})

    def _fused(
        self, conv: MessagePassing, blocks: EdgeBlocks, kwargs: dict[str, Any], deferred: DeferredCoefficients
    ) -> Tensor | None:
        """GAT without edge features, by kernels; None for other convolutions."""
        cls = type(conv)
        plain = cls.edge_update is GATConv.edge_update and cls.message is GATConv.message
        logits, x = deferred.kwargs.get("alpha"), kwargs.get("x")
        if not plain or deferred.kwargs.get("edge_attr") is not None or not isinstance(x, tuple):
            return None
        if not isinstance(logits, tuple) or logits[0] is None or logits[1] is None:
            return None
        dropout = conv.dropout if conv.training else 0.0
        return attend(blocks, x[0], logits[0], logits[1], conv.negative_slope, dropout, self._schedule)


def _check_nodes_first(conv: MessagePassing, kwargs: dict[str, Any]) -> None:
    at_sources = [_pair(value) for name, value in kwargs.items() if f"{name}_j" in conv._user_args]
    dims = [tensor.dim() for pair in at_sources for tensor in pair if isinstance(tensor, Tensor)]
    if any(conv.node_dim % dim for dim in dims if dim):
        raise ConfigError(
            f"{type(conv).__name__} was called with features of {max(dims)} dimensions and has "
            f"node_dim={conv.node_dim}; strategy=sar requires nodes to be the first dimension.",
            hint="use node_dim=0 and [nodes, ...], or strategy=single.",
        )


def _general_propagate(conv: MessagePassing) -> Any:
    """Return PyG's ``propagate``; the one generated for a class supports no decomposition and no explanation."""
    general = conv.decomposed_layers > 1 or conv.explain
    return MessagePassing.propagate if general else type(conv).propagate


# ---------------------------------------------------------------------------- one exchange of the whole halo


def _at_once(
    conv: MessagePassing, method: Any, names: Any, edge_index: Tensor, edges: EdgeBlockCache, kwargs: dict[str, Any]
) -> Tensor:
    """Fetch the whole halo of the tensors that a method reads at sources by one exchange, then run PyG's method.

    Args:
        conv: the convolution.
        method: ``propagate`` or ``edge_updater`` of its class.
        names: of the parameters of the per-edge methods, such as ``x_j``.
        edge_index: of the call.
        edges: blocks of edges between the same nodes.
        kwargs: of the call.
    """
    halo = _halo_of(edges, _source_tensors(names, kwargs))
    return _run(conv, method, edge_index, edges, _with_halo(names, kwargs, halo))


def _pair(value: Any) -> tuple[Any, Any]:
    return (value[0], value[1]) if isinstance(value, (tuple, list)) else (value, value)


def _source_tensors(names: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that are read at sources."""
    values = [_pair(value)[0] for name, value in kwargs.items() if f"{name}_j" in names]
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
            source, target = _pair(value)
            rows, at_targets = halo.get(id(source), source), target if f"{name}_i" in names else None
            arguments[name] = rows if isinstance(value, Tensor) and at_targets is None else (rows, at_targets)
    return arguments


def _run(
    conv: MessagePassing, method: Any, edge_index: Tensor, edges: EdgeBlockCache, arguments: dict[str, Any]
) -> Tensor:
    """Run PyG's method over local and halo rows."""
    shard = edges.exchange.shard
    ordered = not _is_order_independent(conv)
    if ordered:
        edge_index, arguments = _in_global_order(edge_index, edges, arguments)
    size = (shard.num_local + shard.num_halo, edges.num_targets)
    ids = partial(edge_ids, edge_index, edges.exchange.all_ids, edges.targets.all_ids)
    with resumed_at(current_position(), DropoutRows("edge", edge_index.size(1), ids)):
        if not ordered:
            return method(conv, edge_index, size=size, **arguments)
        with _padded_to_global_degree(conv, edges.exchange.group, edge_index):
            return method(conv, edge_index, size=size, **arguments)


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


def _is_order_independent(conv: MessagePassing) -> bool:
    """Whether the aggregation is the same in any order of edges; a recurrent one is not."""
    aggregations = [layer for layer in conv.aggr_module.modules() if isinstance(layer, Aggregation)]
    return all(isinstance(layer, _ORDER_INDEPENDENT) for layer in aggregations)


def _in_global_order(
    edge_index: Tensor, edges: EdgeBlockCache, arguments: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Sort edges and tensors of edges by target, then by the source's original id: the order of a single process."""
    order = torch.argsort(edges.exchange.all_ids[edge_index[0]], stable=True)
    order = order[torch.argsort(edge_index[1][order], stable=True)]
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.dim() and value.size(0) == edge_index.size(1):
            arguments[name] = value[order]
    return edge_index[:, order], arguments


class Transforms:
    """Applies linear layers of convolutions earlier or later than the convolutions do.

    Args:
        shadow: sets an attribute of a module's instance until the run ends.
    """

    def __init__(self, shadow: Callable[[nn.Module, str, Callable[..., Any]], None]) -> None:
        self._shadow = shadow
        self._applied: Any = WeakIdKeyDictionary()  # tensor -> the layer whose weight is applied to it already
        self._deferred: Any = WeakIdKeyDictionary()  # tensor -> the layer whose weight is applied to its aggregate

    def install(self, conv: MessagePassing) -> None:
        """Shadow the linear layers of ``conv``, if its class is known."""
        for table, forward in ((AFTER, self._after), (BEFORE, self._before)):
            layer = _layer(table, conv)
            if layer is not None:
                self._shadow(layer, "forward", partial(forward, layer))

    # ------------------------------------------------------------------------ replacements of the layers' forward

    def _after(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self._applied.get(x) is layer:
            bias = layer.bias
            return x if bias is None else x + bias  # type: ignore[operator]
        return _forward(layer, x)

    def _before(self, layer: nn.Module, x: Tensor) -> Tensor:
        out_channels, in_channels = layer.weight.shape  # type: ignore[union-attr,misc]
        if in_channels >= out_channels or layer.bias is not None or not isinstance(x, Tensor) or x.is_sparse:
            return _forward(layer, x)
        alias = x.view_as(x) if x.requires_grad else x
        self._deferred[alias] = layer
        return alias

    # ------------------------------------------------------------------------ around an aggregation

    def source(self, conv: MessagePassing, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the tensor to aggregate instead of ``x``, and the function to apply to the aggregate."""
        deferred = self._deferred.pop(x, None)
        if deferred is not None:
            return x, partial(_forward, deferred)
        layer = _layer(AFTER, conv)
        if layer is None or getattr(conv, "cached", False):
            return x, _identity
        if self._applied.get(x) is layer:
            return x, partial(self._mark, layer)
        out_channels, in_channels = layer.weight.shape  # type: ignore[union-attr,misc]
        if out_channels >= in_channels or x.dim() != 2:
            return x, _identity
        return F.linear(x, layer.weight), partial(self._mark, layer)  # type: ignore[arg-type]

    def settle(self, x: Any) -> Any:
        """Apply the layer that was deferred for ``x``, a tensor or a tuple: the aggregation is not linear after all."""
        if isinstance(x, (tuple, list)):
            return tuple(self.settle(value) for value in x)
        deferred = self._deferred.pop(x, None) if isinstance(x, Tensor) else None
        return x if deferred is None else _forward(deferred, x)

    def _mark(self, layer: nn.Module, out: Tensor) -> Tensor:
        self._applied[out] = layer
        return out


def _identity(out: Tensor) -> Tensor:
    return out


def _forward(layer: Any, x: Tensor) -> Tensor:
    """The class's ``forward``, which the instance shadows."""
    return type(layer).forward(layer, x)


def _layer(table: dict[type[MessagePassing], str], conv: MessagePassing) -> Any:
    """Return the named linear layer if it is a plain one whose shape is known."""
    name = table.get(type(conv))
    return plain_linear(conv, name) if name else None
