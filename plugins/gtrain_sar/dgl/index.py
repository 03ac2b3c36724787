"""DGL's three operators over a shard.

Everything that ``dgl.nn`` computes over edges goes through ``gspmm`` (messages of sources and edges, reduced at
targets), ``gsddmm`` (values of edges from values of nodes) and ``edge_softmax``. Their first argument is the graph's
index; the replaced operators dispatch on :class:`ShardIndex`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import dgl
import torch
import torch.nn.functional as F
from torch import Tensor

from gtrain.errors import ConfigError
from gtrain_sar.attention.fused import attend
from gtrain_sar.config import Schedule
from gtrain_sar.dgl.edge_values import EdgeExpression, LazyEdgeValues, attend_in_blocks
from gtrain_sar.edges import EdgeBlocks
from gtrain_sar.halo import halo_rows, return_gradients
from gtrain_sar.linear import LinearCall, aggregate

_OPERATORS = {
    "gspmm": ("dgl.ops.spmm", "gspmm_internal"),
    "gsddmm": ("dgl.ops.sddmm", "gsddmm_internal"),
    "edge_softmax": ("dgl.ops.edge_softmax", "edge_softmax_internal"),
}
_ORIGINAL: dict[str, Callable[..., Any]] = {}
_users = 0


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
        order = self._blocks.exchange.all_ids[source].argsort(stable=True)
        order = order[target[order].argsort(stable=True)]
        return self._create(source[order], target[order]), order

    def _create(self, source: Tensor, target: Tensor) -> Any:
        shard = self._blocks.exchange.shard
        sizes = {"num_src_nodes": shard.num_local + shard.num_halo, "num_dst_nodes": self._blocks.num_targets}
        return dgl.create_block((source, target), **sizes)


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
        self._fetched: list[tuple[Tensor, Tensor]] = []

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


# ---------------------------------------------------------------------------- replacement of DGL's operators


def install_operators() -> None:
    """Let DGL's operators dispatch on :class:`ShardIndex`; installations are counted."""
    global _users
    _users += 1
    if _users > 1:
        return
    for name, (module, attribute) in _OPERATORS.items():
        operators = sys.modules[module].__dict__
        _ORIGINAL[name] = operators[attribute]
        operators[attribute] = partial(_dispatch, name, _ORIGINAL[name])


def uninstall_operators() -> None:
    """Undo one :func:`install_operators`."""
    global _users
    _users -= 1
    if _users == 0:
        for name, (module, attribute) in _OPERATORS.items():
            sys.modules[module].__dict__[attribute] = _ORIGINAL.pop(name)


def _dispatch(name: str, original: Callable[..., Any], index: Any, *args: Any, **kwargs: Any) -> Any:
    operator = getattr(index, name) if isinstance(index, ShardIndex) else partial(original, index)
    return operator(*args, **kwargs)


def out_degrees(blocks: EdgeBlocks, sources: Tensor) -> Tensor:
    """Return the number of edges that leave each local node, to any part: int64 [num_local]."""
    shard = blocks.exchange.shard
    counts = torch.bincount(sources, minlength=shard.num_local + shard.num_halo)
    return return_gradients([(blocks.exchange, counts)])[0]
