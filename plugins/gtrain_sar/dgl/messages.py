"""Message and reduce functions that are written in Python, over a shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import dgl
from dgl import core
from dgl.udf import NodeBatch
from torch import Tensor

from gtrain_sar.dgl.calls import Batch, Function, aggregate_in_blocks
from gtrain_sar.dgl.frames import Columns
from gtrain_sar.dgl.index import plain

if TYPE_CHECKING:
    from gtrain_sar.dgl.graph import ShardGraph

Messages = dict[str, Tensor]


def call_on_edges(graph: ShardGraph, function: Function) -> Messages:
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


def pass_messages(graph: ShardGraph, message: Any, reduce: Any) -> Messages:
    """``update_all`` where one of the functions, or both, are written in Python."""
    if not core.is_builtin(message) and core.is_builtin(reduce):
        out = aggregate_in_blocks(graph, message, reduce.msg_field, reduce.name, graph._graph.schedule)
        if out is not None:
            return {reduce.out_field: out}
    messages = core.invoke_gsddmm(graph, message) if core.is_builtin(message) else call_on_edges(graph, message)
    if not core.is_builtin(reduce):
        return _reduce_by_function(graph, {name: plain(value) for name, value in messages.items()}, reduce)
    copied = dgl.function.copy_e(reduce.msg_field, reduce.msg_field)
    found: Messages = core.invoke_gspmm(graph, copied, reduce, edata=messages)
    return found


def _reduce_by_function(graph: ShardGraph, messages: Messages, reduce: Callable[[NodeBatch], Messages]) -> Messages:
    """A mailbox for each node, of the nodes with as many edges together, as DGL does."""
    block, order = graph._graph.whole.ordered  # an exchange, the first time, in which all ranks take part
    if not graph.num_edges():
        return _of_no_messages(graph, messages, reduce)
    with block.local_scope():
        block.dstdata.update({name: plain(value) for name, value in graph.ndata.items()})
        found = core.invoke_udf_reduce(block, reduce, {name: value[order] for name, value in messages.items()})
        return dict(found.items())


def _of_no_messages(graph: ShardGraph, messages: Messages, reduce: Callable[[NodeBatch], Messages]) -> Messages:
    """Zeros, shaped as the function's results; they hang on the messages, for whose gradient the peers wait."""
    mail = {name: value.new_zeros((1, 1, *value.shape[1:])) + value.sum() for name, value in messages.items()}
    data = {name: plain(value)[:1] for name, value in graph.ndata.items()}
    found = reduce(NodeBatch(graph, graph.nodes()[:1], graph.ntypes[0], data, msgs=mail))
    return {name: value.expand(graph.num_nodes(), *value.shape[1:]) * 0 for name, value in found.items()}
