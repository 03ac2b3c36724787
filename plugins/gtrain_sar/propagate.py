"""Which way a call of ``propagate`` goes: a sparse product, fused attention, block by block, or one exchange."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import aggr
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.conv import GATConv, GATv2Conv, MessagePassing

from gtrain.errors import ConfigError
from gtrain.nn.dropout import Rows as DropoutRows
from gtrain.nn.dropout import again, edge_ids, here
from gtrain.strategy.group import Group
from gtrain_sar.attention.fused import attend
from gtrain_sar.attention.softmax import attend_by_blocks, calls_softmax, streams
from gtrain_sar.blocks import aggregate_by_blocks
from gtrain_sar.config import Schedule
from gtrain_sar.constants import Constants
from gtrain_sar.edges import BlockIndex, EdgeBlocks
from gtrain_sar.extremes import extreme
from gtrain_sar.fused_layers import hooked
from gtrain_sar.halo import halo_rows
from gtrain_sar.linear import LinearCall, aggregate
from gtrain_sar.linear_form import linear_call, source_rows
from gtrain_sar.propagate_call import PropagateCall, normalises_messages, reduction, sees_one_edge
from gtrain_sar.transform import Transforms

_PLAIN_FORWARD = (GATConv.forward, GATv2Conv.forward)
"""Forward passes that hand the result of ``edge_updater`` on to ``propagate`` and look at it no further."""


_UNORDERED = (
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
"""Aggregations that give the same in any order of edges."""


@dataclass
class Pending:
    """Coefficients of attention that nothing has asked for yet: a call of ``edge_updater`` put off."""

    edge_index: Tensor
    kwargs: dict[str, Any]


class Propagation:
    """Runs calls of ``propagate`` over blocks.

    Args:
        schedule: how blocks are worked off.
        constants: inputs that never change.
        shadow: sets an attribute of a module's instance until the run ends.
    """

    def __init__(
        self,
        schedule: Schedule,
        constants: Constants,
        shadow: Callable[[nn.Module, str, Callable[..., Any]], None],
    ) -> None:
        self._schedule, self._constants = schedule, constants
        self._transforms = Transforms(shadow)
        self._asked: weakref.WeakSet[MessagePassing] = weakref.WeakSet()

    def install(self, conv: MessagePassing) -> None:
        """Prepare what goes beyond ``propagate`` itself."""
        self._transforms.install(conv)

    def returns_weights(self, conv: MessagePassing, asked: bool) -> None:
        """Note whether the running call of ``conv`` wants the coefficients themselves as well."""
        (self._asked.add if asked else self._asked.discard)(conv)

    def propagate(self, conv: MessagePassing, edge_index: Tensor, edges: BlockIndex, kwargs: dict[str, Any]) -> Tensor:
        """The result of ``conv.propagate``, [num_targets, ...].

        Raises:
            ConfigError: nodes are not the first dimension.
        """
        _check_nodes_first(conv, kwargs)
        pending = next((name for name, value in kwargs.items() if isinstance(value, Pending)), None)
        reduce = None if hooked(conv) else reduction(conv)
        if pending is not None:
            return self._attend(conv, edge_index, edges, kwargs, pending)
        if reduce is not None and conv not in self._asked:
            call = PropagateCall(conv, edges(edge_index), reduce, kwargs)
            out = self._linear(conv, call, edge_index)
            if out is None:
                kwargs = {name: self._transforms.settle(value) for name, value in kwargs.items()}
                out = self._by_blocks(PropagateCall(conv, call.blocks, reduce, kwargs))
            if out is not None:
                return conv.update(out)
        kwargs = {name: self._transforms.settle(value) for name, value in kwargs.items()}
        return at_once(conv, _own_propagate(conv), conv._user_args, edge_index, edges, kwargs)

    def edge_updater(self, conv: MessagePassing, edge_index: Tensor, edges: BlockIndex, kwargs: dict[str, Any]) -> Any:
        """The result of ``conv.edge_updater``, [E, ...], or a promise of it."""
        put_off = type(conv).forward in _PLAIN_FORWARD and conv not in self._asked and not hooked(conv)
        if put_off and reduction(conv) == "sum":
            return Pending(edge_index, kwargs)
        return at_once(conv, type(conv).edge_updater, conv._edge_user_args, edge_index, edges, kwargs)

    # ------------------------------------------------------------------------ the ways

    def _linear(self, conv: MessagePassing, call: PropagateCall, edge_index: Tensor) -> Tensor | None:
        linear = linear_call(call)
        if linear is None:
            return None
        x, then = self._transforms.source(conv, linear.x)

        def compute() -> Tensor:
            replaced = LinearCall(linear.blocks, x, linear.weight, linear.mean)
            return aggregate([replaced], self._schedule)[0]

        return then(self._constants.result((x, edge_index, linear.weight), ("linear", linear.mean), compute))

    def _by_blocks(self, call: PropagateCall) -> Tensor | None:
        """Block by block where the mode and the convolution allow it."""
        rows = source_rows(call) if call.reduce in ("max", "min") else None
        if rows is not None:
            return extreme(call.blocks, rows, call.reduce == "max", self._schedule)
        if self._schedule.mode == 3 or normalises_messages(call):
            return None
        if sees_one_edge(call.conv):
            return aggregate_by_blocks(call, self._schedule)
        if calls_softmax(call.conv, "message") and call.conv not in self._asked and streams(call):
            return attend_by_blocks(call, self._schedule)
        return None

    def _attend(
        self, conv: MessagePassing, edge_index: Tensor, edges: BlockIndex, kwargs: dict[str, Any], name: str
    ) -> Tensor:
        blocks, promise = edges(edge_index), kwargs[name]
        fused = self._fused(conv, blocks, kwargs, promise)
        if fused is not None:
            return conv.update(fused)
        if self._schedule.mode != 3 and promise.edge_index is edge_index and calls_softmax(conv, "edge_update"):
            rest = {other: value for other, value in kwargs.items() if other != name}
            call = PropagateCall(conv, blocks, "sum", rest, (name, promise.kwargs))
            if streams(call):
                return conv.update(attend_by_blocks(call, self._schedule))
        return both_at_once(conv, edge_index, edges, kwargs, name, promise)

    def _fused(
        self, conv: MessagePassing, blocks: EdgeBlocks, kwargs: dict[str, Any], promise: Pending
    ) -> Tensor | None:
        """GAT without edge features, by kernels."""
        cls = type(conv)
        plain = cls.edge_update is GATConv.edge_update and cls.message is GATConv.message
        logits, x = promise.kwargs.get("alpha"), kwargs.get("x")
        if not plain or promise.kwargs.get("edge_attr") is not None or not isinstance(x, tuple):
            return None
        if not isinstance(logits, tuple) or logits[0] is None or logits[1] is None:
            return None
        dropout = conv.dropout if conv.training else 0.0
        return attend(blocks, x[0], logits[0], logits[1], conv.negative_slope, dropout, self._schedule)


def _check_nodes_first(conv: MessagePassing, kwargs: dict[str, Any]) -> None:
    read = [pair for name, pair in kwargs.items() if f"{name}_j" in conv._user_args]
    tensors = [value for pair in read for value in (pair if isinstance(pair, (tuple, list)) else [pair])]
    dims = [tensor.dim() for tensor in tensors if isinstance(tensor, Tensor)]
    if any(conv.node_dim % dim for dim in dims if dim):
        raise ConfigError(
            f"{type(conv).__name__} was given features of {max(dims)} dimensions, in which nodes are dimension "
            f"{conv.node_dim}; strategy=sar takes them as the first.",
            hint="use node_dim=0 and [nodes, ...], or strategy=single.",
        )


def _own_propagate(conv: MessagePassing) -> Any:
    """PyG's method; the one that it generates for a class knows no decomposition and no explanation."""
    general = conv.decomposed_layers > 1 or conv.explain
    return MessagePassing.propagate if general else type(conv).propagate


def at_once(
    conv: MessagePassing, method: Any, wanted: Any, edge_index: Tensor, edges: BlockIndex, kwargs: dict[str, Any]
) -> Tensor:
    """Fetch the whole halo of what the method reads at sources by one exchange, then run PyG's own method."""
    whole = _extended(edges, _sources(wanted, kwargs))
    return _run(conv, method, edge_index, edges, _with_halo(wanted, kwargs, whole))


def both_at_once(
    conv: MessagePassing, edge_index: Tensor, edges: BlockIndex, kwargs: dict[str, Any], name: str, promise: Pending
) -> Tensor:
    """``edge_updater`` and ``propagate``, with one exchange for what they read at sources."""
    of_update, of_messages = conv._edge_user_args, conv._user_args
    rest = {other: value for other, value in kwargs.items() if other != name}
    whole = _extended(edges, [*_sources(of_update, promise.kwargs), *_sources(of_messages, rest)])
    arguments = _with_halo(of_update, promise.kwargs, whole)
    alpha = _run(conv, type(conv).edge_updater, promise.edge_index, edges, arguments)
    arguments = {**_with_halo(of_messages, rest, whole), name: alpha}
    return _run(conv, _own_propagate(conv), edge_index, edges, arguments)


def _pair(value: Any) -> tuple[Any, Any]:
    return (value[0], value[1]) if isinstance(value, (tuple, list)) else (value, value)


def _sources(wanted: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that are read at sources."""
    read = [_pair(value)[0] for name, value in kwargs.items() if f"{name}_j" in wanted]
    return [tensor for tensor in read if isinstance(tensor, Tensor)]


def _extended(edges: BlockIndex, sources: list[Tensor]) -> dict[int, Tensor]:
    """Own and halo rows of each tensor, by its identity."""
    distinct = list({id(tensor): tensor for tensor in sources}.values())
    fetched = halo_rows([(edges.exchange, tensor) for tensor in distinct]) if distinct else []
    return {id(tensor): rows for tensor, rows in zip(distinct, fetched, strict=True)}


def _with_halo(wanted: Any, kwargs: dict[str, Any], whole: dict[int, Tensor]) -> dict[str, Any]:
    """The arguments, with halo rows where a method reads at sources."""
    arguments = dict(kwargs)
    for name, value in kwargs.items():
        if f"{name}_j" in wanted:
            source, target = _pair(value)
            own_target = target if f"{name}_i" in wanted else None
            rows = whole.get(id(source), source)
            arguments[name] = rows if isinstance(value, Tensor) and own_target is None else (rows, own_target)
    return arguments


def _run(conv: MessagePassing, method: Any, edge_index: Tensor, edges: BlockIndex, arguments: dict[str, Any]) -> Tensor:
    shard = edges.exchange.shard
    if not _any_order(conv):
        edge_index, arguments = _in_order(edge_index, edges, arguments)
    size = (shard.num_local + shard.num_halo, edges.num_targets)
    every = partial(edge_ids, edge_index, edges.exchange.all_ids, edges.targets.all_ids)
    with (
        _equally_padded(conv, edges.exchange.group, edge_index),
        again(here(), DropoutRows("edge", edge_index.size(1), every)),
    ):
        out: Tensor = method(conv, edge_index, size=size, **arguments)
    return out


@contextmanager
def _equally_padded(conv: MessagePassing, group: Group, edge_index: Tensor) -> Iterator[None]:
    """Have aggregations that pad nodes to the largest in-degree take that of the whole graph."""
    if _any_order(conv):
        yield
        return
    degrees = torch.bincount(edge_index[1], minlength=1)
    largest = int(group.all_reduce(degrees.max().double().view(1), "max"))
    padded = [layer for layer in conv.aggr_module.modules() if isinstance(layer, Aggregation)]
    for layer in padded:
        layer.__dict__["to_dense_batch"] = partial(_to_dense_batch, layer, largest)
    try:
        yield
    finally:
        for layer in padded:
            del layer.__dict__["to_dense_batch"]


def _to_dense_batch(layer: Aggregation, largest: int, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(Aggregation.to_dense_batch).bind(layer, *args, **kwargs)
    if given.arguments.get("max_num_elements") is None:
        given.arguments["max_num_elements"] = largest
    return Aggregation.to_dense_batch(*given.args, **given.kwargs)


def _any_order(conv: MessagePassing) -> bool:
    """Whether the aggregation is the same in any order of edges; a recurrent one is not."""
    aggregations = [layer for layer in conv.aggr_module.modules() if isinstance(layer, Aggregation)]
    return all(isinstance(layer, _UNORDERED) for layer in aggregations)


def _in_order(edge_index: Tensor, edges: BlockIndex, arguments: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Edges, and what there is of each, by target and then by the source's id, as one process has them."""
    exchange = edges.exchange
    (ids,) = halo_rows([(exchange, exchange.orig_id.to(edge_index.device))])
    order = torch.argsort(ids[edge_index[0]], stable=True)
    order = order[torch.argsort(edge_index[1][order], stable=True)]
    num_edges = edge_index.size(1)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.dim() and value.size(0) == num_edges:
            arguments[name] = value[order]
    return edge_index[:, order], arguments
