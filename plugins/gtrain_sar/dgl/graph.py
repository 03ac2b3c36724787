"""DGL's graph interface over a shard, for unmodified ``dgl.nn`` convolutions.

Imported only for models that have a :class:`~gtrain.nn.DglGraph`: it loads DGL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dgl
import torch
from dgl import core
from dgl.base import is_all
from dgl.udf import NodeBatch
from torch import Tensor

from gtrain.errors import ConfigError
from gtrain.nn import DglGraph
from gtrain.nn.dropout import active_dropout
from gtrain_sar.config import Schedule
from gtrain_sar.dgl import index
from gtrain_sar.dgl.functions import Frame, Function, LazyColumns, ShardEdgeBatch, aggregate_in_blocks
from gtrain_sar.dgl.index import DglGraphs, ShardIndex, UnsupportedAttributeError, evaluated
from gtrain_sar.edges import EdgeBlockCache, EdgeBlocks

NODE, EDGE = "_N", "_E"
Messages = dict[str, Tensor]


class DglShards:
    """Creates the graphs that convolutions of DGL are called with.

    Args:
        blocks: the shard's edges by block.
        schedule: when blocks are fetched.
    """

    def __init__(self, blocks: EdgeBlockCache, schedule: Schedule) -> None:
        self._blocks, self._schedule = blocks, schedule
        index.install_operators()

    def close(self) -> None:
        """Restore DGL's operators."""
        index.uninstall_operators()

    def graph(self, layer: DglGraph, edge_index: Tensor, num_nodes: int) -> ShardGraph:
        """Return the result of ``layer.forward``, in place of DGL's graph; the shard determines ``num_nodes``."""
        edges = layer.edges(edge_index, self._blocks.num_targets)
        blocks, constants = self._blocks(edges), self._blocks.exchange.constants
        dropout = active_dropout()
        if dropout is not None:
            dropout.add_edges(edges)
        if constants is not None and edge_index in constants:
            constants.add([blocks.in_degree])
        graph: ShardGraph = blocks.derived("dgl", lambda: ShardGraph(edges, blocks, self._schedule))
        return graph.local_var()


class ShardGraph:
    """A part of a graph with the interface of a homogeneous graph of DGL, whose nodes are the local ones.

    Node data are rows of local nodes; when a convolution reads them at sources, the halo's are fetched. The edges are
    all that point at local nodes, in the order of ``edge_index``. Other attributes of DGL's graph raise
    :class:`~gtrain_sar.dgl.index.UnsupportedAttributeError`.

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
        degrees: Tensor = self.blocks.derived("out_degree", lambda: index.out_degrees(self.blocks, self._ends[0]))
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
    block, order = graph._graph.whole.ordered  # the first access is an exchange, in which all ranks take part
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
