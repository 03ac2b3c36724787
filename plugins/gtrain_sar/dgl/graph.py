"""DGL's graph interface over a shard, for unmodified ``dgl.nn`` convolutions.

Everything that ``dgl.nn`` computes over edges goes through three operators: ``gspmm`` (messages of sources and edges,
reduced at targets), ``gsddmm`` (values of edges from values of nodes) and ``edge_softmax``. Their first argument is the
graph's index; the replaced operators dispatch on :class:`ShardIndex`.

Imported only for models that have a :class:`~gtrain.nn.DglGraph`: it loads DGL.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import dgl
import torch
import torch.nn.functional as F
from dgl import core
from dgl.base import is_all
from dgl.udf import NodeBatch
from torch import Tensor

from gtrain.engine.attention.fused import attend
from gtrain.engine.edges import EdgeBlockCache, EdgeBlocks
from gtrain.engine.halo import halo_rows, return_gradients
from gtrain.engine.linear import LinearCall, aggregate
from gtrain.engine.schedule import Schedule
from gtrain.errors import ConfigError
from gtrain.nn import DglGraph
from gtrain.nn.dropout import active_dropout
from gtrain_sar.dgl.edge_values import (
    EdgeExpression,
    Frame,
    Function,
    LazyColumns,
    LazyEdgeValues,
    ShardEdgeBatch,
    aggregate_in_blocks,
    attend_in_blocks,
)

_OPERATORS = {
    "gspmm": ("dgl.ops.spmm", "gspmm_internal"),
    "gsddmm": ("dgl.ops.sddmm", "gsddmm_internal"),
    "edge_softmax": ("dgl.ops.edge_softmax", "edge_softmax_internal"),
}
_ORIGINAL: dict[str, Callable[..., Any]] = {}
_users = 0
"""Open :class:`DglShards`: the first one replaces DGL's operators, the last one restores them."""

NODE, EDGE = "_N", "_E"
Messages = dict[str, Tensor]


class UnsupportedAttributeError(ConfigError, AttributeError):
    """Raised for an attribute of DGL's graphs that a shard does not have."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"strategy=sar does not serve this convolution: it reads graph.{name}, which a part of the graph does "
            "not have.",
            hint="use strategy=single, or another convolution.",
        )


class DglGraphs:
    """The graphs from local and halo nodes to local nodes, for operators that do not run block by block.

    Args:
        ends: int64 [2, E], in the shard's local ids.
        blocks: the same by the blocks of their sources.
    """

    def __init__(self, ends: Tensor, blocks: EdgeBlocks) -> None:
        self._ends, self._blocks = ends, blocks

    @cached_property
    def unsorted(self) -> Any:
        """The graph, its edges in the order of ``ends``."""
        return self._create(*self._ends)

    @cached_property
    def ordered(self) -> tuple[Any, Tensor]:
        """The graph with a target's edges sorted by the sources' original ids, and each edge's position in ``ends``.

        That is the order of a single process. Reduce functions may depend on it (an LSTM), and so does the choice among
        equal maxima.
        """
        source, target = self._ends
        with torch.inference_mode(mode=False):
            order = self._blocks.exchange.all_ids[source].argsort(stable=True)
            order = order[target[order].argsort(stable=True)]
            return self._create(source[order], target[order]), order

    def _create(self, source: Tensor, target: Tensor) -> Any:
        shard = self._blocks.exchange.shard
        sizes = {"num_src_nodes": shard.num_local + shard.num_halo, "num_dst_nodes": self._blocks.num_targets}
        # An evaluation may be the first to ask, and autograd saves no tensor of inference mode.
        with torch.inference_mode(mode=False):
            return dgl.create_block((source.clone(), target.clone()), **sizes)


class ShardIndex:
    """The graph index that DGL's operators receive.

    Source tensors have the rows of local nodes; the halo's are fetched. Sums and products with a number for each
    edge and head, and GAT's attention, are aggregated block by block; all else by one exchange and DGL's operator.

    Args:
        blocks: the edges by the blocks of their sources; ``in_degree`` is the key of cached results.
        schedule: when blocks are fetched.
        whole: for the operators that do not run block by block.
    """

    def __init__(self, blocks: EdgeBlocks, schedule: Schedule, whole: DglGraphs) -> None:
        self.blocks, self.schedule, self.whole = blocks, schedule, whole
        self._fetched: list[tuple[Tensor, Tensor]] = []  # rows, compared by identity, and the same with halo

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedAttributeError(name)

    def number_of_etypes(self) -> int:
        """Return 1: a shard is homogeneous."""
        return 1

    def with_halo(self, rows: Tensor) -> Tensor:
        """Append halo rows, [num_local, ...] -> [num_local + num_halo, ...]; one exchange per tensor and call."""
        rows = evaluated(rows)
        for tensor, fetched in self._fetched:
            if tensor is rows:
                return fetched
        (fetched,) = halo_rows([(self.blocks.exchange, rows)])
        self._fetched.append((rows, fetched))
        return fetched

    def forget(self) -> None:
        """Free the fetched rows."""
        self._fetched.clear()

    # ------------------------------------------------------------------------ the operators

    def gspmm(self, op: str, reduce: str, lhs: Tensor | None, rhs: Tensor | None) -> Tensor:
        """Return reduced messages, [num_local, ...]; arguments as DGL's: ``lhs`` of sources, ``rhs`` of edges."""
        sums = self._in_blocks(op, lhs, rhs) if reduce == "sum" and lhs is not None else None
        if sums is not None:
            return sums
        sources = None if lhs is None else self.with_halo(lhs)
        edges, block = None if rhs is None else evaluated(rhs), self.whole.unsorted
        if reduce != "sum":
            # Among equal maxima the first edge gets the gradient, so the order matters.
            block, order = self.whole.ordered
            edges = None if edges is None else edges[order]
            if not self.blocks.num_edges:
                return _zeros(self.blocks.num_targets, [x for x in (sources, edges) if x is not None])
        return _ORIGINAL["gspmm"](block._graph, op, reduce, sources, edges)

    def _in_blocks(self, op: str, x: Tensor, weight: Tensor | None) -> Tensor | None:
        """Return a weighted sum of source rows, block by block; None if the operator is not one."""
        x = evaluated(x)
        if not x.is_floating_point() or op not in ("copy_lhs", "mul", "div"):
            return None
        if isinstance(weight, LazyEdgeValues) and op == "mul" and weight.weighs(x):
            expression = weight.expression
            if expression.slope is not None and x.dim() == 3:
                logits = expression.source.flatten(1), expression.target.flatten(1)
                return attend(self.blocks, x, *logits, expression.slope, expression.dropout, self.schedule)
            if self.schedule.mode != 3:
                return attend_in_blocks(self.blocks, x, expression, self.schedule)
        if weight is not None:
            weight = per_head(x, 1.0 / evaluated(weight) if op == "div" else evaluated(weight))
            if weight is None:
                return None
        call, constants = LinearCall(self.blocks, x, weight), self.blocks.exchange.constants
        assert constants is not None
        key = (x, self.blocks.in_degree, weight)
        return constants.result(key, ("linear", False), lambda: aggregate([call], self.schedule)[0])

    def gsddmm(self, op: str, lhs: Tensor, rhs: Tensor, lhs_target: str = "u", rhs_target: str = "v") -> Tensor:
        """Return values of edges, [E, ...]; arguments as DGL's."""
        if lhs is not None and rhs is not None:
            ends, targets = (evaluated(lhs), evaluated(rhs)), (lhs_target, rhs_target)
            lazy = LazyEdgeValues.of(self.blocks.num_edges, self.evaluate, op, ends, targets)
            if lazy is not None:
                return lazy
        return self._on_edges(op, (lhs, rhs), (lhs_target, rhs_target))

    def _on_edges(self, op: str, operands: tuple[Tensor, Tensor], targets: tuple[str, str]) -> Tensor:
        """Return values of edges by one exchange, whatever the operands are."""
        rows = [
            None if tensor is None else self.with_halo(tensor) if target == "u" else evaluated(tensor)
            for tensor, target in zip(operands, targets, strict=True)
        ]
        return _ORIGINAL["gsddmm"](self.whole.unsorted._graph, op, *rows, *targets)

    def evaluate(self, expression: EdgeExpression) -> Tensor:
        """Evaluate lazy values of edges, [E, ...]."""
        values = self._on_edges(expression.op, expression.ends, expression.targets)
        for step in expression.steps:
            values = step(values)
        if expression.normalised:
            values = self.edge_softmax(values)
        return F.dropout(values, expression.dropout) if expression.dropout else values

    def edge_softmax(self, logits: Tensor, eids: Any = "__ALL__", norm_by: str = "dst") -> Tensor:
        """Return the softmax over the edges of each target, all of which this rank has.

        Raises:
            ConfigError: the softmax is over the edges of each source.
        """
        if norm_by != "dst":
            raise ConfigError(
                f"strategy=sar does not serve edge_softmax(norm_by={norm_by!r}): a node's out-edges are on several "
                "ranks.",
                hint="use norm_by='dst', or strategy=single.",
            )
        lazy = logits.normalised() if isinstance(logits, LazyEdgeValues) and isinstance(eids, str) else None
        if lazy is not None:
            return lazy
        return _ORIGINAL["edge_softmax"](self.whole.unsorted._graph, evaluated(logits), eids=eids, norm_by=norm_by)


def evaluated(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or evaluate lazy values of edges."""
    return tensor.computed() if isinstance(tensor, LazyEdgeValues) else tensor


def _zeros(rows: int, operands: list[Tensor]) -> Tensor:
    """Return zeros that depend on the operands; DGL's operators for maxima fail in the backward pass without edges."""
    shape = torch.broadcast_shapes(*(tensor.shape[1:] for tensor in operands))
    return sum((tensor.sum() for tensor in operands), operands[0].new_zeros(())).mul(0).expand(rows, *shape)


def per_head(x: Tensor, weight: Tensor) -> Tensor | None:
    """Return ``weight`` [E, ...] as one number per edge, [E], or per edge and head, [E, H]; None if it is neither.

    Args:
        x: source rows, [n, ...] or [n, H, ...], with the same number of dimensions.
        weight: broadcast against them.
    """
    if weight.dtype != x.dtype or weight.dim() != x.dim():
        return None
    if all(size == 1 for size in weight.shape[1:]):
        return weight.flatten()
    heads = weight.size(1) == x.size(1) and all(size == 1 for size in weight.shape[2:])
    return weight.flatten(1) if heads and x.dim() > 2 else None


def _dispatch(name: str, original: Callable[..., Any], index: Any, *args: Any, **kwargs: Any) -> Any:
    operator = getattr(index, name) if isinstance(index, ShardIndex) else partial(original, index)
    return operator(*args, **kwargs)


class DglShards:
    """Creates the graphs that convolutions of DGL are called with, whose operators dispatch on them while one is open.

    Args:
        blocks: the shard's edges by block.
        schedule: when blocks are fetched.
    """

    def __init__(self, blocks: EdgeBlockCache, schedule: Schedule) -> None:
        global _users
        self._blocks, self._schedule = blocks, schedule
        _users += 1
        if _users > 1:
            return
        for name, (module, attribute) in _OPERATORS.items():
            operators = sys.modules[module].__dict__
            _ORIGINAL[name] = operators[attribute]
            operators[attribute] = partial(_dispatch, name, _ORIGINAL[name])

    def close(self) -> None:
        """Restore DGL's operators, unless other graphs need them."""
        global _users
        _users -= 1
        if _users == 0:
            for name, (module, attribute) in _OPERATORS.items():
                sys.modules[module].__dict__[attribute] = _ORIGINAL.pop(name)

    def graph(self, layer: DglGraph, edge_index: Tensor, num_nodes: int) -> ShardGraph:
        """Return the result of ``layer.forward``, in place of DGL's graph; the shard determines ``num_nodes``."""
        edges = layer.edges(edge_index, self._blocks.num_targets)
        blocks, constants = self._blocks(edges), self._blocks.exchange.constants
        dropout = active_dropout()
        if dropout is not None:
            dropout.add_edges(edges)
        if constants is not None and edge_index in constants:  # then the degrees are constant, too
            constants.add([blocks.in_degree])
        graph: ShardGraph = blocks.derived("dgl", lambda: ShardGraph(edges, blocks, self._schedule))
        return graph.local_var()


class ShardGraph:
    """A part of a graph with the interface of a homogeneous graph of DGL, whose nodes are the local ones.

    Node data are rows of local nodes; when a convolution reads them at sources, the halo's are fetched. The edges are
    all that point at local nodes, in the order of ``edge_index``. Other attributes of DGL's graph raise
    :class:`~gtrain_sar.dgl.graph.UnsupportedAttributeError`.

    Args:
        edge_index: int64 [2, E], in the shard's local ids.
        blocks: the same by the blocks of their sources.
        schedule: when blocks are fetched.
    """

    is_block, is_homogeneous, is_unibipartite = False, True, False
    ntypes, srctypes, dsttypes, etypes = [NODE], [NODE], [NODE], [EDGE]
    canonical_etypes = [(NODE, EDGE, NODE)]
    idtype = torch.int64

    def __init__(self, edge_index: Tensor, blocks: EdgeBlocks, schedule: Schedule) -> None:
        self.blocks, self._ends = blocks, edge_index.detach()
        self.ndata = Frame(blocks.num_targets, "nodes")
        self.edata = Frame(blocks.num_edges, "edges")
        self._graph = ShardIndex(blocks, schedule, DglGraphs(self._ends, blocks))

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedAttributeError(name)

    # ------------------------------------------------------------------------ data

    @property
    def srcdata(self) -> Frame:
        """Rows of local nodes: a homogeneous graph has one set of node data."""
        return self.ndata

    @property
    def dstdata(self) -> Frame:
        """Rows of local nodes."""
        return self.ndata

    @contextmanager
    def local_scope(self) -> Iterator[None]:
        """Discard columns that are set inside this context at its end."""
        before = self.ndata, self.edata
        self.ndata, self.edata = self.ndata.copied(), self.edata.copied()
        try:
            yield
        finally:
            self.ndata, self.edata = before
            self._graph.forget()

    def local_var(self) -> ShardGraph:
        """Return the same graph with separate node and edge data."""
        other = ShardGraph.__new__(ShardGraph)
        other.__dict__.update(self.__dict__)
        other.ndata, other.edata = self.ndata.copied(), self.edata.copied()
        other._graph = ShardIndex(self.blocks, self._graph.schedule, self._graph.whole)
        return other

    # ------------------------------------------------------------------------ messages

    def update_all(self, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None) -> None:
        """Send a message along every edge and reduce them at the targets; functions as DGL's."""
        if core.is_builtin(message_func) and core.is_builtin(reduce_func):
            reduced = core.message_passing(self, message_func, reduce_func, None)
        else:
            reduced = _pass_messages(self, message_func, reduce_func)
        if core.is_builtin(reduce_func) and reduce_func.name in ("max", "min"):  # DGL's 0 for nodes without edges
            reduced = {name: value.masked_fill(value.isinf(), 0.0) for name, value in reduced.items()}
        self.ndata.update(reduced)
        if apply_node_func is not None:
            self.ndata.update(apply_node_func(NodeBatch(self, self.nodes(), NODE, self.ndata)))

    def apply_edges(self, func: Any, edges: Any = "__ALL__", etype: Any = None) -> None:
        """Compute values of every edge.

        Raises:
            ConfigError: ``edges`` selects some edges: a rank without any of them would not take part in the exchange.
        """
        if not is_all(edges):
            raise ConfigError(
                "strategy=sar does not serve this convolution: it applies a function to some edges of the graph.",
                hint="apply it to all edges, or use strategy=single.",
            )
        values = core.invoke_gsddmm(self, func) if core.is_builtin(func) else _call_on_edges(self, func)
        self.edata.update(values)

    # ------------------------------------------------------------------------ structure

    @property
    def device(self) -> torch.device:
        """The device of the edges."""
        return self._ends.device

    def to(self, device: Any) -> ShardGraph:
        """Return the graph itself: it is on the batch's device."""
        return self

    def num_nodes(self, ntype: Any = None) -> int:
        """Return the number of local nodes."""
        return self.blocks.num_targets

    number_of_nodes = num_src_nodes = num_dst_nodes = num_nodes
    number_of_src_nodes = number_of_dst_nodes = num_nodes

    def num_edges(self, etype: Any = None) -> int:
        """Return the number of edges."""
        return self.blocks.num_edges

    number_of_edges = num_edges

    def nodes(self, ntype: Any = None) -> Tensor:
        """Return the ids of local nodes."""
        return torch.arange(self.num_nodes(), device=self.device)

    srcnodes = dstnodes = nodes

    def edges(self, form: str = "uv", order: str | None = None, etype: Any = None) -> Any:
        """Return the ends of the edges in local ids, halo sources after local nodes, in the order of edge ids.

        Raises:
            UnsupportedAttributeError: another order.
        """
        if order not in (None, "eid"):
            raise UnsupportedAttributeError(f"edges(order={order!r})")
        source, target = self._ends
        ids = torch.arange(self.num_edges(), device=self.device)
        return {"uv": (source, target), "eid": ids, "all": (source, target, ids)}[form]

    all_edges = edges

    def find_edges(self, eid: Tensor, etype: Any = None) -> tuple[Tensor, Tensor]:
        """Return the ends of some edges, as :meth:`edges`."""
        return self._ends[0, eid], self._ends[1, eid]

    def in_degrees(self, v: Any = "__ALL__", etype: Any = None) -> Tensor:
        """Return the number of edges that point at each local node, or at some of them, int64."""
        return self.blocks.in_degree if is_all(v) else self.blocks.in_degree[v]

    def out_degrees(self, u: Any = "__ALL__", etype: Any = None) -> Tensor:
        """Return the number of edges that leave each local node, or some of them, counted over all parts, int64."""
        shard = self.blocks.exchange.shard

        def count() -> Tensor:
            counts = torch.bincount(self._ends[0], minlength=shard.num_local + shard.num_halo)
            return return_gradients([(self.blocks.exchange, counts)])[0]

        degrees: Tensor = self.blocks.derived("out_degree", count)
        return degrees if is_all(u) else degrees[u]


def _call_on_edges(graph: ShardGraph, function: Function) -> Messages:
    """Return the results of a function for all edges, [E, ...] each, and fetch the halo rows that it reads."""
    source, target, ids = graph.edges("all")
    columns = (
        LazyColumns(graph.ndata, lambda rows: graph._graph.with_halo(rows).index_select(0, source)),
        LazyColumns(graph.edata, evaluated),
        LazyColumns(graph.ndata, lambda rows: evaluated(rows).index_select(0, target)),
    )
    return function(ShardEdgeBatch(graph, (source, target), ids, *columns))


def _pass_messages(graph: ShardGraph, message: Any, reduce: Any) -> Messages:
    """``update_all`` with a message or reduce function that is written in Python."""
    if not core.is_builtin(message) and core.is_builtin(reduce):
        out = aggregate_in_blocks(graph, message, reduce.msg_field, reduce.name, graph._graph.schedule)
        if out is not None:
            return {reduce.out_field: out}
    messages = core.invoke_gsddmm(graph, message) if core.is_builtin(message) else _call_on_edges(graph, message)
    if not core.is_builtin(reduce):
        return _reduce_by_function(graph, {name: evaluated(value) for name, value in messages.items()}, reduce)
    copied = dgl.function.copy_e(reduce.msg_field, reduce.msg_field)
    return core.invoke_gspmm(graph, copied, reduce, edata=messages)


def _reduce_by_function(graph: ShardGraph, messages: Messages, reduce: Callable[[NodeBatch], Messages]) -> Messages:
    """Reduce the mailbox of each node, of all nodes with the same in-degree together, as DGL does."""
    # The first access is an exchange, in which all ranks take part.
    block, order = graph._graph.whole.ordered
    if not graph.num_edges():
        return _reduce_nothing(graph, messages, reduce)
    with block.local_scope():
        block.dstdata.update({name: evaluated(value) for name, value in graph.ndata.items()})
        reduced = core.invoke_udf_reduce(block, reduce, {name: value[order] for name, value in messages.items()})
        return dict(reduced.items())


def _reduce_nothing(graph: ShardGraph, messages: Messages, reduce: Callable[[NodeBatch], Messages]) -> Messages:
    """Return zeros in the shape of the function's results.

    They depend on the messages, so that the backward pass reaches the exchange that the peers take part in.
    """
    mail = {name: value.new_zeros((1, 1, *value.shape[1:])) + value.sum() for name, value in messages.items()}
    data = {name: evaluated(value)[:1] for name, value in graph.ndata.items()}
    reduced = reduce(NodeBatch(graph, graph.nodes()[:1], graph.ntypes[0], data, msgs=mail))
    return {name: value.expand(graph.num_nodes(), *value.shape[1:]) * 0 for name, value in reduced.items()}
