"""Chooses how a call of ``propagate`` runs: a sparse product, fused attention, block by block, or as PyG wrote it.

A linear layer and a linear aggregation commute: they are swapped where the aggregated rows are then narrower.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeGuard

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn.conv import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphConv,
    MessagePassing,
    SAGEConv,
    SGConv,
    TransformerConv,
)

from gtrain.engine.attention.fused import attend
from gtrain.engine.attention.pairs import attend_additive, attend_by_products
from gtrain.engine.attention.softmax import attend_by_blocks, calls_softmax, is_linear_in_coefficients
from gtrain.engine.blocks import aggregate_by_blocks, extreme
from gtrain.engine.constants import Constants
from gtrain.engine.edges import BlockSource, EdgeBlocks
from gtrain.engine.fused_layers import has_hooks, plain_linear
from gtrain.engine.linear import LinearCall, aggregate
from gtrain.engine.patching import RunHook
from gtrain.engine.precision import product_dtype
from gtrain.engine.propagate_call import (
    PropagateCall,
    linear_call,
    normalises_messages,
    reduction,
    sees_one_edge,
    source_rows,
)
from gtrain.engine.schedule import Schedule
from gtrain.nn.compressed import is_compressed, with_gradient

_FORWARDS_COEFFICIENTS = (GATConv.forward, GATv2Conv.forward)
"""Forward passes that only pass the result of ``edge_updater`` on to ``propagate``."""

AFTER: dict[type[MessagePassing], str] = {SAGEConv: "lin_l", GraphConv: "lin_rel", SGConv: "lin"}
"""Convolutions that apply a linear layer to the aggregate, and its name."""
BEFORE: dict[type[MessagePassing], str] = {GCNConv: "lin"}
"""Convolutions that apply a linear layer to the rows that they aggregate, and its name."""


@dataclass
class DeferredCoefficients:
    """A call of ``edge_updater`` that is deferred until ``propagate`` receives its result as an argument."""

    edge_index: Tensor
    kwargs: dict[str, Any]


class OtherCalls(Protocol):
    """Runs the calls that the engine does not compute itself, by PyG's methods.

    Args of all methods:
        conv: the convolution.
        edge_index: of the call.
        edges: gives the blocks of edges between the same nodes.
        kwargs: of the call.
    """

    def propagate(self, conv: MessagePassing, edge_index: Tensor, edges: Any, kwargs: dict[str, Any]) -> Tensor:
        """Return the result of ``conv.propagate``, [num_targets, ...]."""

    def edge_updater(self, conv: MessagePassing, edge_index: Tensor, edges: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of ``conv.edge_updater``, [E, ...]."""

    def attend(
        self,
        conv: MessagePassing,
        edge_index: Tensor,
        edges: Any,
        kwargs: dict[str, Any],
        deferred: tuple[str, DeferredCoefficients],
    ) -> Tensor:
        """Return the result of ``conv.propagate``; ``deferred`` is the argument that ``edge_updater`` computes."""


class Propagation:
    """Runs calls of ``propagate`` and ``edge_updater`` over blocks.

    Args:
        schedule: when blocks are fetched.
        constants: inputs that never change.
        shadow: sets an attribute of a module's instance until the run ends.
        others: runs the calls that are not computed over blocks.

    Attributes:
        transforms: swaps linear layers and aggregations; patches the linear layers.
    """

    def __init__(
        self,
        schedule: Schedule,
        constants: Constants,
        shadow: Callable[[nn.Module, str, Callable[..., Any]], None],
        others: OtherCalls,
    ) -> None:
        self._schedule, self._constants, self._others = schedule, constants, others
        self.transforms = Transforms(shadow)
        self._returning_weights: weakref.WeakSet[MessagePassing] = weakref.WeakSet()

    def watch(self, conv: MessagePassing) -> list[Callable[[], None]]:
        """Note which calls of ``conv`` also return the coefficients themselves; return the functions that end this."""
        if "return_attention_weights" not in inspect.signature(type(conv).forward).parameters:
            return []
        return [conv.register_forward_pre_hook(RunHook(self._note_weights), with_kwargs=True).remove]

    def _note_weights(self, conv: MessagePassing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = inspect.signature(type(conv).forward).bind_partial(conv, *args, **kwargs).arguments
        returns = arguments.get("return_attention_weights") is not None
        (self._returning_weights.add if returns else self._returning_weights.discard)(conv)

    def propagate(self, conv: MessagePassing, edge_index: Tensor, edges: BlockSource, kwargs: dict[str, Any]) -> Tensor:
        """Return the result of ``conv.propagate``, [num_targets, ...]; nodes are the first dimension."""
        deferred = next((name for name, value in kwargs.items() if isinstance(value, DeferredCoefficients)), None)
        kwargs = {name: with_gradient(value) for name, value in kwargs.items()}
        reduce = None if has_hooks(conv) else reduction(conv)
        if deferred is not None:
            return self._attend(conv, edge_index, edges, kwargs, deferred)
        out = call = None
        if reduce is not None and conv not in self._returning_weights:
            call = PropagateCall(conv, edges(edge_index), reduce, kwargs)
            if self._schedule.compiled:
                out = self._by_products(conv, call, kwargs)
                out = self._linear(conv, call, edge_index) if out is None else out
        if out is None:
            kwargs = {name: self.transforms.settle(value) for name, value in kwargs.items()}
            if call is not None:
                out = self._by_blocks(PropagateCall(conv, call.blocks, call.reduce, kwargs))
        if out is not None:
            return conv.update(out)
        return self._others.propagate(conv, edge_index, edges, kwargs)

    def edge_updater(self, conv: MessagePassing, edge_index: Tensor, edges: BlockSource, kwargs: dict[str, Any]) -> Any:
        """Return the result of ``conv.edge_updater``, [E, ...], or defer it."""
        deferrable = type(conv).forward in _FORWARDS_COEFFICIENTS and conv not in self._returning_weights
        if deferrable and not has_hooks(conv) and reduction(conv) == "sum":
            return DeferredCoefficients(edge_index, kwargs)
        return self._others.edge_updater(conv, edge_index, edges, kwargs)

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

    def _by_products(self, conv: MessagePassing, call: PropagateCall, kwargs: dict[str, Any]) -> Tensor | None:
        """The attention of transformers without edge features, by kernels; None for other convolutions."""
        if type(conv).message is not TransformerConv.message or call.reduce != "sum":
            return None
        key, value, query = (kwargs.get(name) for name in ("key", "value", "query"))
        # Nodes are the first dimension.
        rows = all(isinstance(tensor, Tensor) and tensor.dim() == 3 for tensor in (key, value, query))
        if not rows or kwargs.get("edge_attr") is not None or conv.lin_edge is not None:
            return None
        dropout = conv.dropout if conv.training else 0.0
        return attend_by_products(call.blocks, key, value, query, dropout, self._schedule)  # type: ignore[arg-type]

    def _by_blocks(self, call: PropagateCall) -> Tensor | None:
        """Block by block; None where the mode or the convolution does not allow it."""
        rows = source_rows(call) if call.reduce in ("max", "min") and self._schedule.compiled else None
        if rows is not None:
            return extreme(call.blocks, rows, call.reduce == "max", self._schedule)
        # Messages that read nothing at sources need no exchange.
        if self._schedule.mode == 3 or not call.sources or normalises_messages(call):
            return None
        if sees_one_edge(call.conv):
            return aggregate_by_blocks(call, self._schedule)
        if calls_softmax(call.conv, "message") and is_linear_in_coefficients(call):
            return attend_by_blocks(call, self._schedule)
        return None

    def _attend(
        self, conv: MessagePassing, edge_index: Tensor, edges: BlockSource, kwargs: dict[str, Any], name: str
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
        return self._others.attend(conv, edge_index, edges, others, (name, deferred))

    def _fused(
        self, conv: MessagePassing, blocks: EdgeBlocks, kwargs: dict[str, Any], deferred: DeferredCoefficients
    ) -> Tensor | None:
        """GAT and GATv2 without edge features, by kernels; None for other convolutions."""
        x, inputs = kwargs.get("x"), deferred.kwargs.get("alpha", deferred.kwargs.get("x"))
        if not self._schedule.compiled or deferred.kwargs.get("edge_attr") is not None:
            return None
        if not _is_pair(x) or not _is_pair(inputs):
            return None
        dropout = conv.dropout if conv.training else 0.0
        methods = type(conv).edge_update, type(conv).message
        if methods == (GATConv.edge_update, GATConv.message):
            return attend(blocks, x[0], *inputs, conv.negative_slope, dropout, self._schedule)
        if methods == (GATv2Conv.edge_update, GATv2Conv.message) and x[0] is inputs[0]:
            return attend_additive(blocks, *inputs, conv.att[0], conv.negative_slope, dropout, self._schedule)
        return None


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
            x, bias = x.to(product_dtype(x)), layer.bias
            return x if bias is None else x + bias.to(x.dtype)  # type: ignore[operator]
        return _forward(layer, x)

    def _before(self, layer: nn.Module, x: Tensor) -> Tensor:
        out_channels, in_channels = layer.weight.shape  # type: ignore[union-attr,misc]
        if in_channels >= out_channels or layer.bias is not None or not isinstance(x, Tensor) or x.is_sparse:
            return _forward(layer, x)
        if is_compressed(x):  # a sum of rows has more entries than they have
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
        if (out_channels >= in_channels and not is_compressed(x)) or x.dim() != 2:
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


def _is_pair(value: Any) -> TypeGuard[tuple[Tensor, Tensor]]:
    """Whether an argument of a call has tensors for both ends of edges."""
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(end, Tensor) for end in value)


def _identity(out: Tensor) -> Tensor:
    return out


def _forward(layer: Any, x: Tensor) -> Tensor:
    """The class's ``forward``, which the instance shadows."""
    return type(layer).forward(layer, x)


def _layer(table: dict[type[MessagePassing], str], conv: MessagePassing) -> Any:
    """Return the named linear layer if it is a plain one whose shape is known."""
    name = table.get(type(conv))
    return plain_linear(conv, name) if name else None
