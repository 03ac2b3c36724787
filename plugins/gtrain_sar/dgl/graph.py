"""DGL's graph interface over a shard, for unmodified ``dgl.nn`` convolutions.

Imported where a model has a :class:`~gtrain.nn.DglGraph` only: it loads DGL.
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
from gtrain.nn.dropout import active
from gtrain_sar.config import Schedule
from gtrain_sar.dgl import index
from gtrain_sar.dgl.functions import Batch, Columns, Frame, Function, aggregate_in_blocks
from gtrain_sar.dgl.index import DglBlocks, ShardIndex, Unserved, plain
from gtrain_sar.edges import BlockIndex, EdgeBlocks

NODE, EDGE = "_N", "_E"
Messages = dict[str, Tensor]


class DglShards:
    """Gives DGL's convolutions the shard in place of the whole graph.

    Args:
        blocks: sorts edges into blocks.
        schedule: how blocks are fetched.
    """

    def __init__(self, blocks: BlockIndex, schedule: Schedule) -> None:
        self._blocks, self._schedule = blocks, schedule
        index.serve()

    def close(self) -> None:
        """Leave DGL as it was found."""
        index.unserve()

    def graph(self, layer: DglGraph, edge_index: Tensor, num_nodes: int) -> ShardGraph:
        """What ``layer.forward`` returns in place of DGL's graph; ``num_nodes`` is the shard's own."""
        edges = layer.edges(edge_index, self._blocks.num_targets)
        blocks, constants = self._blocks(edges), self._blocks.exchange.constants
        dropout = active()
        if dropout is not None:
            dropout.add(edges)
        if "dgl" not in blocks.extra:
            blocks.extra["dgl"] = ShardGraph(edges, blocks, self._schedule)
            if constants is not None and edge_index in constants:
                constants.add([blocks.in_degree])
        graph: ShardGraph = blocks.extra["dgl"]
        return graph.local_var()


class ShardGraph:
    """A part of a graph, as convolutions of DGL see it: a homogeneous graph of the part's own nodes.

    Node data are rows of the own nodes; where a convolution reads them at sources, those of the halo are fetched.
    Edges are all that point at the own nodes, in the order of ``edge_index``. What DGL's graph has beyond that,
    :class:`~gtrain_sar.dgl.index.Unserved` refuses.

    Args:
        edge_index: int64 [2, E], in the shard's local ids.
        blocks: the same by the blocks of their sources.
        schedule: how blocks are fetched.
    """

    is_block, is_homogeneous, is_unibipartite = False, True, False
    ntypes, srctypes, dsttypes, etypes = [NODE], [NODE], [NODE], [EDGE]
    canonical_etypes = [(NODE, EDGE, NODE)]
    idtype = torch.int64

    def __init__(self, edge_index: Tensor, blocks: EdgeBlocks, schedule: Schedule) -> None:
        self.blocks, self._ends = blocks, edge_index.detach()
        self.ndata = Frame(blocks.num_targets, "nodes")
        self.edata = Frame(blocks.num_edges, "edges")
        self._graph = ShardIndex(blocks, schedule, DglBlocks(self._ends, blocks))

    def __getattr__(self, name: str) -> Any:
        raise Unserved(name)

    # ------------------------------------------------------------------------ data

    @property
    def srcdata(self) -> Frame:
        """Rows of the own nodes, as everywhere in a homogeneous graph."""
        return self.ndata

    @property
    def dstdata(self) -> Frame:
        """Rows of the own nodes."""
        return self.ndata

    @contextmanager
    def local_scope(self) -> Iterator[None]:
        """Columns that are set inside are gone outside."""
        before = self.ndata, self.edata
        self.ndata, self.edata = self.ndata.copied(), self.edata.copied()
        try:
            yield
        finally:
            self.ndata, self.edata = before
            self._graph.forget()

    def local_var(self) -> ShardGraph:
        """The same graph with data of its own."""
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
        if core.is_builtin(reduce_func) and reduce_func.name in ("max", "min"):  # nodes without edges have 0
            reduced = {name: value.masked_fill(value.isinf(), 0.0) for name, value in reduced.items()}
        self.ndata.update(reduced)
        if apply_node_func is not None:
            self.ndata.update(apply_node_func(dgl.udf.NodeBatch(self, self.nodes(), NODE, self.ndata)))

    def apply_edges(self, func: Any, edges: Any = "__ALL__", etype: Any = None) -> None:
        """Compute values of every edge.

        Raises:
            ConfigError: of some edges only: a rank has perhaps none of those, and would not take part.
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
        """Where the edges are."""
        return self._ends.device

    def to(self, device: Any) -> ShardGraph:
        """The graph itself: it is where the batch is."""
        return self

    def num_nodes(self, ntype: Any = None) -> int:
        """Own nodes."""
        return self.blocks.num_targets

    number_of_nodes = num_src_nodes = num_dst_nodes = num_nodes
    number_of_src_nodes = number_of_dst_nodes = num_nodes

    def num_edges(self, etype: Any = None) -> int:
        """Edges that point at the own nodes."""
        return self.blocks.num_edges

    number_of_edges = num_edges

    def nodes(self, ntype: Any = None) -> Tensor:
        """Local ids of the own nodes."""
        return torch.arange(self.num_nodes(), device=self.device)

    srcnodes = dstnodes = nodes

    def edges(self, form: str = "uv", order: str | None = None, etype: Any = None) -> Any:
        """Ends of the edges in local ids, halo sources after the own nodes; ``form`` as DGL's, the order by edge id.

        Raises:
            Unserved: another order.
        """
        if order not in (None, "eid"):
            raise Unserved(f"edges(order={order!r})")
        source, target = self._ends
        ids = torch.arange(self.num_edges(), device=self.device)
        return {"uv": (source, target), "eid": ids, "all": (source, target, ids)}[form]

    all_edges = edges

    def find_edges(self, eid: Tensor, etype: Any = None) -> tuple[Tensor, Tensor]:
        """Ends of some edges, as :meth:`edges`."""
        return self._ends[0, eid], self._ends[1, eid]

    def in_degrees(self, v: Any = "__ALL__", etype: Any = None) -> Tensor:
        """Edges that point at each own node, or at some, int64."""
        return self.blocks.in_degree if is_all(v) else self.blocks.in_degree[v]

    def out_degrees(self, u: Any = "__ALL__", etype: Any = None) -> Tensor:
        """Edges that leave each own node, or some, counted over all parts, int64."""
        if "out_degree" not in self.blocks.extra:
            self.blocks.extra["out_degree"] = index.out_degrees(self.blocks, self._ends[0])
        degrees: Tensor = self.blocks.extra["out_degree"]
        return degrees if is_all(u) else degrees[u]


def _call_on_edges(graph: ShardGraph, function: Function) -> Messages:
    """What a function of edges returns for all of them, [E, ...] each; the halo of what it reads is fetched."""
    source, target, ids = graph.edges("all")
    batch = Batch(
        graph,
        (source, target),
        ids,
        Columns(graph.ndata, lambda rows: graph._graph.with_halo(rows).index_select(0, source)),
        Columns(graph.edata, plain),
        Columns(graph.ndata, lambda rows: plain(rows).index_select(0, target)),
    )
    return function(batch)


def _pass_messages(graph: ShardGraph, message: Any, reduce: Any) -> Messages:
    """``update_all`` where one of the functions, or both, are written in Python."""
    if not core.is_builtin(message) and core.is_builtin(reduce):
        out = aggregate_in_blocks(graph, message, reduce.msg_field, reduce.name, graph._graph.schedule)
        if out is not None:
            return {reduce.out_field: out}
    messages = core.invoke_gsddmm(graph, message) if core.is_builtin(message) else _call_on_edges(graph, message)
    if not core.is_builtin(reduce):
        return _reduce_by_function(graph, {name: plain(value) for name, value in messages.items()}, reduce)
    copied = dgl.function.copy_e(reduce.msg_field, reduce.msg_field)
    reduced: Messages = core.invoke_gspmm(graph, copied, reduce, edata=messages)
    return reduced


def _reduce_by_function(graph: ShardGraph, messages: Messages, reduce: Callable[[NodeBatch], Messages]) -> Messages:
    """A mailbox for each node, of the nodes with as many edges together, as DGL does."""
    block, order = graph._graph.whole.ordered  # an exchange, the first time, in which all ranks take part
    if not graph.num_edges():
        return _of_no_messages(graph, messages, reduce)
    with block.local_scope():
        block.dstdata.update({name: plain(value) for name, value in graph.ndata.items()})
        reduced = core.invoke_udf_reduce(block, reduce, {name: value[order] for name, value in messages.items()})
        return dict(reduced.items())


def _of_no_messages(graph: ShardGraph, messages: Messages, reduce: Callable[[NodeBatch], Messages]) -> Messages:
    """Zeros, shaped as the function's results; they hang on the messages, for whose gradient the peers wait."""
    mail = {name: value.new_zeros((1, 1, *value.shape[1:])) + value.sum() for name, value in messages.items()}
    data = {name: plain(value)[:1] for name, value in graph.ndata.items()}
    reduced = reduce(NodeBatch(graph, graph.nodes()[:1], graph.ntypes[0], data, msgs=mail))
    return {name: value.expand(graph.num_nodes(), *value.shape[1:]) * 0 for name, value in reduced.items()}
