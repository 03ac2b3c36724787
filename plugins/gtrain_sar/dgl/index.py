"""DGL's three kernels over a shard, what they run on, and where DGL looks them up.

Everything that ``dgl.nn`` computes over edges goes through ``gspmm`` (messages of sources and edges, reduced at
targets), ``gsddmm`` (values of edges from values of nodes) and ``edge_softmax``. They are handed the graph's index; an
index of ours answers itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
from typing import Any

import dgl
import torch
import torch.nn.functional as F
from torch import Tensor

from gtrain.errors import ConfigError
from gtrain_sar.attention.fused import attend
from gtrain_sar.config import Schedule
from gtrain_sar.dgl.edge_values import EdgeValues, Recipe, attend_in_blocks
from gtrain_sar.edges import EdgeBlocks
from gtrain_sar.halo import add_rows, halo_rows, push
from gtrain_sar.linear import LinearCall, aggregate

_PLACES = {
    "gspmm": ("dgl.ops.spmm", "gspmm_internal"),
    "gsddmm": ("dgl.ops.sddmm", "gsddmm_internal"),
    "edge_softmax": ("dgl.ops.edge_softmax", "edge_softmax_internal"),
}
_ORIGINAL: dict[str, Callable[..., Any]] = {}
_users = 0


class Unserved(ConfigError, AttributeError):
    """A part of DGL's interface that a shard does not have."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"strategy=sar does not serve this convolution: it asks for graph.{name}, which a part of the graph does "
            "not have.",
            hint="use strategy=single, or another convolution.",
        )


class DglBlocks:
    """What DGL's kernels run on where a convolution is not worked off block by block.

    Args:
        ends: int64 [2, E], in the shard's local ids.
        blocks: the same by the blocks of their sources.
    """

    def __init__(self, ends: Tensor, blocks: EdgeBlocks) -> None:
        self._ends, self._blocks = ends, blocks

    @cached_property
    def plain(self) -> Any:
        """The graph, its edges in the order of ``ends``."""
        return self._make(*self._ends)

    @cached_property
    def ordered(self) -> tuple[Any, Tensor]:
        """The graph, a target's edges ordered by the sources' ids in the source data, and each one's place in ``ends``.

        That is the order of one process. Functions of a mailbox depend on it (an LSTM), and so does the choice among
        messages that are the same maximum.
        """
        exchange, (source, target) = self._blocks.exchange, self._ends
        (ids,) = halo_rows([(exchange, exchange.orig_id.to(source.device))])
        order = ids[source].argsort(stable=True)
        order = order[target[order].argsort(stable=True)]
        return self._make(source[order], target[order]), order

    def _make(self, source: Tensor, target: Tensor) -> Any:
        shard = self._blocks.exchange.shard
        sizes = {"num_src_nodes": shard.num_local + shard.num_halo, "num_dst_nodes": self._blocks.num_targets}
        return dgl.create_block((source, target), **sizes)


class ShardIndex:
    """What DGL's kernels are handed as the graph.

    Sources are given as the own nodes' rows; those of the halo are fetched. Sums and products with a number for each
    edge and head, and GAT's attention, are aggregated block by block; all else by one exchange and DGL's own kernel.

    Args:
        blocks: the edges by the blocks of their sources; ``in_degree`` is the key of what is kept of constant inputs.
        schedule: how blocks are fetched.
        whole: DGL's graphs from [own nodes, halo] to the own nodes.
    """

    def __init__(self, blocks: EdgeBlocks, schedule: Schedule, whole: DglBlocks) -> None:
        self.blocks, self.schedule, self.whole = blocks, schedule, whole
        self._fetched: list[tuple[Tensor, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        raise Unserved(name)

    def number_of_etypes(self) -> int:
        """Always 1."""
        return 1

    def with_halo(self, rows: Tensor) -> Tensor:
        """[num_local, ...] -> [num_local + num_halo, ...], exchanged once while a convolution runs."""
        rows = plain(rows)
        for known, fetched in self._fetched:
            if known is rows:
                return fetched
        (fetched,) = halo_rows([(self.blocks.exchange, rows)])
        self._fetched.append((rows, fetched))
        return fetched

    def forget(self) -> None:
        """Let go of fetched rows."""
        self._fetched.clear()

    # ------------------------------------------------------------------------ the kernels

    def gspmm(self, op: str, reduce: str, lhs: Tensor | None, rhs: Tensor | None) -> Tensor:
        """Reduced messages, [num_local, ...]; arguments as DGL's: ``lhs`` of sources, ``rhs`` of edges."""
        sums = self._in_blocks(op, lhs, rhs) if reduce == "sum" and lhs is not None else None
        if sums is not None:
            return sums
        sources = None if lhs is None else self.with_halo(lhs)
        of_edges, block = None if rhs is None else plain(rhs), self.whole.plain
        if reduce != "sum":
            block, order = self.whole.ordered
            of_edges = None if of_edges is None else of_edges[order]
            if not self.blocks.num_edges:
                return _nothing(self.blocks.num_targets, [x for x in (sources, of_edges) if x is not None])
        out: Tensor = _ORIGINAL["gspmm"](block._graph, op, reduce, sources, of_edges)
        return out

    def _in_blocks(self, op: str, x: Tensor, weight: Tensor | None) -> Tensor | None:
        """A weighted sum of source rows, without holding the halo; None where the operator is none."""
        x = plain(x)
        if not x.is_floating_point() or op not in ("copy_lhs", "mul", "div"):
            return None
        if isinstance(weight, EdgeValues) and op == "mul" and weight.weighs(x):
            recipe = weight.recipe
            if recipe.slope is not None and x.dim() == 3:
                logits = recipe.source.flatten(1), recipe.target.flatten(1)
                return attend(self.blocks, x, *logits, recipe.slope, recipe.dropout, self.schedule)
            if self.schedule.mode != 3:
                return attend_in_blocks(self.blocks, x, recipe, self.schedule)
        if weight is not None:
            weight = per_head(x, 1.0 / plain(weight) if op == "div" else plain(weight))
            if weight is None:
                return None
        return self._linear(x, weight)

    def _linear(self, x: Tensor, weight: Tensor | None) -> Tensor:
        def compute() -> Tensor:
            return aggregate([LinearCall(self.blocks, x, weight)], self.schedule)[0]

        constants, key = self.blocks.exchange.constants, (x, self.blocks.in_degree, weight)
        return compute() if constants is None else constants.result(key, ("linear", False), compute)

    def gsddmm(self, op: str, lhs: Tensor, rhs: Tensor, lhs_target: str = "u", rhs_target: str = "v") -> Tensor:
        """Values of edges, [E, ...]; arguments as DGL's."""
        if lhs is not None and rhs is not None:
            later = EdgeValues.of(
                self.blocks.num_edges, self.compute, op, (plain(lhs), plain(rhs)), (lhs_target, rhs_target)
            )
            if later is not None:
                return later
        return self.on_edges(op, lhs, rhs, lhs_target, rhs_target)

    def on_edges(self, op: str, lhs: Tensor, rhs: Tensor, lhs_target: str = "u", rhs_target: str = "v") -> Tensor:
        """The same by one exchange, whatever the operands are."""
        operands = [
            None if tensor is None else self.with_halo(tensor) if target == "u" else plain(tensor)
            for tensor, target in ((lhs, lhs_target), (rhs, rhs_target))
        ]
        out: Tensor = _ORIGINAL["gsddmm"](self.whole.plain._graph, op, *operands, lhs_target, rhs_target)
        return out

    def compute(self, recipe: Recipe) -> Tensor:
        """Values of edges that were put off, [E, ...]."""
        values = self.on_edges(recipe.op, *recipe.ends, *recipe.targets)
        for step in recipe.steps:
            values = step(values)
        if recipe.normalised:
            values = self.edge_softmax(values)
        return F.dropout(values, recipe.dropout) if recipe.dropout else values

    def edge_softmax(self, logits: Tensor, eids: Any = "__ALL__", norm_by: str = "dst") -> Tensor:
        """Softmax over the edges of each target, which are all here.

        Raises:
            ConfigError: over the edges of each source.
        """
        if norm_by != "dst":
            raise ConfigError(
                f"strategy=sar does not serve edge_softmax(norm_by={norm_by!r}): a node's out-edges are on several "
                "ranks.",
                hint="use norm_by='dst', or strategy=single.",
            )
        later = logits.normalised() if isinstance(logits, EdgeValues) and isinstance(eids, str) else None
        if later is not None:
            return later
        out: Tensor = _ORIGINAL["edge_softmax"](self.whole.plain._graph, plain(logits), eids=eids, norm_by=norm_by)
        return out


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself; a value of edges that was put off is computed."""
    return tensor.computed() if isinstance(tensor, EdgeValues) else tensor


def _nothing(rows: int, operands: list[Tensor]) -> Tensor:
    """Zeros that hang on the operands; DGL's kernels of maxima have no backward pass where there is no edge."""
    shape = torch.broadcast_shapes(*(tensor.shape[1:] for tensor in operands))
    return sum((tensor.sum() for tensor in operands), operands[0].new_zeros(())).mul(0).expand(rows, *shape)


def per_head(x: Tensor, weight: Tensor) -> Tensor | None:
    """``weight`` [E, ...] as one number an edge, [E], or an edge and head, [E, H], or None where it is neither.

    Args:
        x: source rows, [n, ...] or [n, H, ...]; both have as many dimensions.
        weight: broadcast against them.
    """
    if weight.dtype != x.dtype or weight.dim() != x.dim():
        return None
    if all(size == 1 for size in weight.shape[1:]):
        return weight.flatten()
    heads = weight.size(1) == x.size(1) and all(size == 1 for size in weight.shape[2:])
    return weight.flatten(1) if heads and x.dim() > 2 else None


# ---------------------------------------------------------------------------- where DGL finds them


def serve() -> None:
    """Have DGL's operators ask a :class:`ShardIndex` where they are handed one; calls are counted."""
    global _users
    _users += 1
    if _users > 1:
        return
    for name, (module, attribute) in _PLACES.items():
        operators = sys.modules[module].__dict__
        _ORIGINAL[name] = operators[attribute]
        operators[attribute] = _switch(name)


def unserve() -> None:
    """Undo one :func:`serve`."""
    global _users
    _users -= 1
    if _users == 0:
        for name, (module, attribute) in _PLACES.items():
            sys.modules[module].__dict__[attribute] = _ORIGINAL.pop(name)


def _switch(name: str) -> Callable[..., Any]:
    original = _ORIGINAL[name]

    def operator(index: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(index, ShardIndex):
            return getattr(index, name)(*args, **kwargs)
        return original(index, *args, **kwargs)

    return operator


def out_degrees(blocks: EdgeBlocks, sources: Tensor) -> Tensor:
    """Edges that leave each own node, to any part: int64 [num_local]."""
    exchange, starts = blocks.exchange, blocks.exchange.shard.block_ptr.tolist()
    counts = torch.bincount(sources, minlength=starts[-1])
    own, tag = counts[: starts[1]].clone(), exchange.group.next_tag()
    transfers = [push([(exchange, counts[starts[r] : starts[r + 1]])], r, tag) for r in range(1, exchange.rounds)]
    for r, transfer in enumerate(transfers, start=1):
        (arrived,) = transfer.wait()
        add_rows(own, exchange.send_rows[r], arrived)
    return own
