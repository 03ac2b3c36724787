"""Lazy values of edges: they recognise attention, whose coefficients need not be stored for every edge.

Convolutions of DGL compute attention in steps: a number for each edge and head from its ends, a function of that, a
softmax over each target's edges, dropout, and the sum of source rows with the result as weights. Each step returns a
tensor with one row per edge; here it returns a :class:`LazyEdgeValues`, which records the expression. Any other use
evaluates the expression, by one exchange. Python functions of edges run block by block; a probe finds the columns that
they read.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from dgl.udf import EdgeBatch
from torch import Tensor, nn
from torch_geometric.utils import softmax

from gtrain.engine.attention.softmax import attend_by_blocks
from gtrain.engine.blocks import aggregate_by_blocks
from gtrain.engine.edges import EdgeBlock, EdgeBlocks
from gtrain.engine.precision import AutocastState
from gtrain.engine.propagate_call import PropagateCall, TensorPool, probe_inputs, probing
from gtrain.engine.schedule import Schedule
from gtrain.errors import DataError
from gtrain.nn.dropout import current_position

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "dot": lambda a, b: (a * b).sum(-1, keepdim=True),
}
EdgewiseRule = Callable[[Tensor, list[Any], dict[str, Any]], bool]
"""Whether a function of values of edges, its other arguments and its keywords, computes each edge alone."""
_PROPERTIES: Any = [Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.layout, Tensor.is_sparse]
_SHAPE_FUNCTIONS = {
    Tensor.size,
    Tensor.dim,
    Tensor.__len__,
    Tensor.numel,
    Tensor.is_floating_point,
    *(getter.__get__ for getter in _PROPERTIES),
}
"""Functions of a tensor's shape and dtype: they need no values."""

Function = Callable[[EdgeBatch], dict[str, Tensor]]
_ERRORS = (RuntimeError, ValueError, IndexError, KeyError, TypeError, AssertionError, AttributeError)
"""What a function may raise on the few synthetic edges of a probe."""


@dataclass(frozen=True)
class EdgewiseStep:
    """A function of each edge's row alone; its other arguments are the same for all edges."""

    function: Callable[..., Tensor]
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    settings: dict[str, Any]

    def __call__(self, values: Tensor) -> Tensor:
        return self.function(*self.before, values, *self.after, **self.settings)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the other arguments."""
        return [value for value in (*self.before, *self.after) if isinstance(value, Tensor)]


@dataclass(frozen=True)
class EdgeExpression:
    """How values of edges are computed.

    Attributes:
        op: ``add``, ``sub``, ``mul`` or ``dot`` of the rows of an edge's ends.
        ends: the two operands, [n, ...] each.
        targets: ``u`` (source) or ``v`` (target) for each operand; one of each.
        steps: applied to the result.
        normalised: whether a softmax over each target's edges follows.
        dropout: probability that a coefficient is dropped then.
    """

    op: str
    ends: tuple[Tensor, Tensor]
    targets: tuple[str, str]
    steps: tuple[EdgewiseStep, ...] = field(default=())
    normalised: bool = False
    dropout: float = 0.0

    @property
    def source(self) -> Tensor:
        """The operand that is read at sources."""
        return self.ends[self.targets.index("u")]

    @property
    def target(self) -> Tensor:
        """The operand that is read at targets."""
        return self.ends[self.targets.index("v")]

    def logits(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the softmax's input, given rows of each edge's ends."""
        ends = (source, target) if self.targets[0] == "u" else (target, source)
        values = _COMBINE[self.op](*ends)
        for step in self.steps:
            values = step(values)
        return values

    @property
    def slope(self) -> float | None:
        """The slope of leaky_relu if the expression is ``leaky_relu(u + v)``, as in GAT; 1 for ``u + v``; else None."""
        if self.op != "add" or len(self.steps) > 1:
            return None
        if not self.steps:
            return 1.0
        (step,) = self.steps
        slope = step.settings.get("negative_slope", 0.01)
        return float(slope) if step.function is F.leaky_relu and not step.before and not step.after else None


Evaluate = Callable[[EdgeExpression], Tensor]


class LazyEdgeValues(Tensor):
    """[E, ...], evaluated when it is used; see the module.

    Attributes:
        expression: how it is computed.
        evaluate: evaluates an expression for all edges, by one exchange.
        value: the values, once they are evaluated.
    """

    expression: EdgeExpression
    evaluate: Evaluate
    value: Tensor | None

    @staticmethod
    def of(
        num_edges: int, evaluate: Evaluate, op: str, ends: tuple[Tensor, Tensor], targets: tuple[str, str]
    ) -> LazyEdgeValues | None:
        """Return lazy values of edges from those of their ends; None if they cannot be a part of attention."""
        dims = {end.dim() for end in ends}
        if op not in _COMBINE or sorted(targets) != ["u", "v"] or len(dims) > 1 or min(dims) < 2:
            return None
        if not ends[0].is_floating_point() or ends[0].dtype != ends[1].dtype:
            return None
        return LazyEdgeValues._create(num_edges, evaluate, EdgeExpression(op, ends, targets))

    @classmethod
    def _create(cls, num_edges: int, evaluate: Evaluate, expression: EdgeExpression) -> LazyEdgeValues:
        ends = (end.new_zeros((2, *end.shape[1:])) for end in (expression.source, expression.target))
        with torch.no_grad():  # a dry run on two edges gives the shape
            shape = expression.logits(*ends).shape[1:]
        # A tensor with a shape and a dtype, but without memory.
        values: LazyEdgeValues = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, (num_edges, *shape), dtype=expression.source.dtype, device=expression.source.device
        )
        values.evaluate, values.expression, values.value = evaluate, expression, None
        return values

    def with_expression(self, **changes: Any) -> LazyEdgeValues:
        """Return values of the same edges by this expression with changes."""
        return self._create(self.size(0), self.evaluate, replace(self.expression, **changes))

    def normalised(self) -> LazyEdgeValues | None:
        """Return the softmax over each target's edges; None if that cannot be lazy."""
        if self.expression.normalised or self.value is not None:
            return None
        return self.with_expression(normalised=True)

    def weighs(self, x: Tensor) -> bool:
        """Whether a sum of source rows ``x`` [n, C] or [n, H, C] with these weights is attention."""
        heads = (1,) if x.dim() == 2 else (x.size(1), 1) if x.dim() == 3 else None
        ready = self.expression.normalised and self.value is None and x.dtype == self.dtype
        return ready and tuple(self.shape[1:]) == heads

    def computed(self) -> Tensor:
        """Return the values, [E, ...], by one exchange."""
        if self.value is None:
            self.value = self.evaluate(self.expression)
        return self.value

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyEdgeValues(op={self.expression.op}, normalised={self.expression.normalised})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SHAPE_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is F.dropout and isinstance(args[0], LazyEdgeValues):
            deferred: LazyEdgeValues | None = _dropout(args[0], *args[1:], **kwargs)
        else:
            deferred = _step(func, args, kwargs)
        if deferred is not None:
            return deferred
        return func(*(_computed(a) for a in args), **{name: _computed(a) for name, a in kwargs.items()})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of lazy values of edges")  # it would not be differentiable


def _computed(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_computed(item) for item in value)
    return value.computed() if isinstance(value, LazyEdgeValues) else value


def _dropout(
    values: LazyEdgeValues, p: float = 0.5, training: bool = True, inplace: bool = False
) -> LazyEdgeValues | None:
    if not training or p == 0:
        return values
    expression = values.expression
    if not expression.normalised or expression.dropout or inplace or values.value is not None:
        return None
    return values.with_expression(dropout=float(p))


def _step(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyEdgeValues | None:
    """Append a function to the expression, if it computes each edge alone; else return None."""
    positions = [i for i, value in enumerate(args) if isinstance(value, LazyEdgeValues)]
    if func not in _EDGEWISE or len(positions) != 1 or kwargs.get("inplace") or kwargs.get("out") is not None:
        return None
    (position,) = positions
    values: LazyEdgeValues = args[position]
    others = [*args[:position], *args[position + 1 :]]
    if values.expression.normalised or values.value is not None or not _EDGEWISE[func](values, others, kwargs):
        return None
    kwargs = {name: value for name, value in kwargs.items() if name != "inplace"}
    step = EdgewiseStep(func, args[:position], args[position + 1 :], kwargs)
    return values.with_expression(steps=(*values.expression.steps, step))


def _always(values: Tensor, others: list[Any], kwargs: dict[str, Any]) -> bool:
    return not any(isinstance(value, Tensor) for value in (*others, *kwargs.values()))


def _same_for_all_edges(values: Tensor, others: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the other operand is the same for all edges, and adds no dimension."""
    (other,) = others or [None]
    if isinstance(other, Tensor):
        small = other.dim() < values.dim() or (other.dim() == values.dim() and other.size(0) == 1)
        return small and not kwargs and other.dtype == values.dtype
    return isinstance(other, (int, float)) and not kwargs


def _within_rows(values: Tensor, others: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the only named dimension is not that of edges."""
    dims = [*others, *(value for name, value in kwargs.items() if name == "dim")]
    plain = set(kwargs) <= {"dim", "keepdim"} and len(dims) == 1 and isinstance(dims[0], int)
    return plain and dims[0] != 0 and dims[0] > -values.dim()


_EDGEWISE: dict[Callable[..., Any], EdgewiseRule] = {
    **dict.fromkeys((F.leaky_relu, F.relu, F.elu, torch.tanh, Tensor.tanh, Tensor.relu, Tensor.neg), _always),
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul), _same_for_all_edges),
    **dict.fromkeys((Tensor.div, Tensor.__truediv__, torch.div), _same_for_all_edges),
    **dict.fromkeys((Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add), _same_for_all_edges),
    **dict.fromkeys((Tensor.sum, torch.sum, Tensor.unsqueeze, torch.unsqueeze), _within_rows),
}


class ParameterOwner:
    """Stands in for the convolution of a call: has its parameters, and a module that defines ``softmax``."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters

    def parameters(self) -> Iterator[Tensor]:
        return iter(self._parameters)


class AttentionCall(PropagateCall):
    """Sum of source rows ``x`` with the coefficients of an expression, for :mod:`gtrain.engine.attention.softmax`."""

    def __init__(self, blocks: EdgeBlocks, x: Tensor, expression: EdgeExpression) -> None:
        self.conv: Any = ParameterOwner([tensor for step in expression.steps for tensor in step.tensors])
        self.blocks, self.reduce, self.pool, self.attention = blocks, "sum", TensorPool(), None
        self.position, self.autocast = current_position(), AutocastState(blocks.in_degree.device.type)
        self._expression = expression
        self._x, self._source = self.pool.add("source", x), self.pool.add("source", expression.source)
        self._target = self.pool.add("target", expression.target)

    def message_of(self, block: EdgeBlock, tensors: list[Tensor]) -> Tensor:
        """Return source rows times coefficients, [E_r, ...]."""
        source = tensors[self._source].index_select(0, block.sources)
        logits = self._expression.logits(source, tensors[self._target].index_select(0, block.targets))
        weights = softmax(logits.flatten(1), block.targets).view_as(logits)
        weights = F.dropout(weights, self._expression.dropout)
        rows = source if self._x == self._source else tensors[self._x].index_select(0, block.sources)
        return rows * weights


def attend_in_blocks(blocks: EdgeBlocks, x: Tensor, expression: EdgeExpression, schedule: Schedule) -> Tensor:
    """Return attention by a running maximum and sum over blocks (modes 1 and 2), [num_local, ...]."""
    return attend_by_blocks(AttentionCall(blocks, x, expression), schedule)


class Frame(UserDict[str, Any]):
    """Named tensors with one row for each node, or for each edge.

    Args:
        num_rows: number of rows.
        unit: ``nodes`` or ``edges``, for messages.
        columns: initial tensors.

    Raises:
        DataError: a tensor with another number of rows is set.
    """

    def __init__(self, num_rows: int, unit: str, columns: dict[str, Tensor] | None = None) -> None:
        self.num_rows, self.unit = num_rows, unit
        super().__init__(columns or {})

    def __setitem__(self, name: str, value: Tensor) -> None:
        if len(value) != self.num_rows:
            raise DataError(
                f"a convolution sets {name!r} with {len(value)} rows; the part has {self.num_rows} {self.unit}.",
                hint="pass the convolution the features of the batch's nodes and edges.",
            )
        super().__setitem__(name, value)

    def copied(self) -> Frame:
        """Return another frame with the same columns."""
        return Frame(self.num_rows, self.unit, self.data)


class LazyColumns(Mapping[str, Any]):
    """Columns with one row per edge, each computed when it is first read.

    Args:
        frame: the columns.
        to_edges: [n, ...] -> [E, ...].
        on_read: called with the name of each column that is read.
    """

    def __init__(
        self,
        frame: Mapping[str, Tensor],
        to_edges: Callable[[Tensor], Tensor],
        on_read: Callable[[str], Any] = lambda name: None,
    ) -> None:
        self._frame, self._to_edges, self._on_read = frame, to_edges, on_read
        self._computed: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._computed:
            self._on_read(name)
            self._computed[name] = self._to_edges(self._frame[name])
        return self._computed[name]

    def __contains__(self, name: object) -> bool:
        return name in self._frame

    def __iter__(self) -> Iterator[str]:
        return iter(self._frame)

    def __len__(self) -> int:
        return len(self._frame)


class ShardEdgeBatch(EdgeBatch):
    """DGL's batch of edges, for some edges of a shard.

    Args:
        graph: the shard's graph.
        ends: sources and targets in local ids.
        ids: of the edges.
        columns: data of the sources, the edges and the targets.
    """

    def __init__(self, graph: Any, ends: tuple[Tensor, Tensor], ids: Tensor, *columns: LazyColumns) -> None:
        source, data, target = columns
        super().__init__(graph, ids, graph.canonical_etypes[0], source, data, target)
        self._ends = ends

    def edges(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sources, targets and ids."""
        return *self._ends, self._eid


class FunctionCall(PropagateCall):
    """Messages that a Python function computes from edges, for :mod:`gtrain.engine.blocks`.

    Args:
        graph: its ``blocks``, and its ``ndata`` and ``edata``, which the function may read.
        function: returns messages by name.
        field: the message that is reduced.
        reduce: sum, mean, max or min.
    """

    def __init__(self, graph: Any, function: Function, field: str, reduce: str) -> None:
        self.blocks, self.reduce, self.pool, self.attention = graph.blocks, reduce, TensorPool(), None
        self.position, self.autocast = current_position(), AutocastState(self.blocks.in_degree.device.type)
        self.conv: Any = ParameterOwner([])
        self._graph, self._function, self._field = graph, function, field
        self._columns: dict[tuple[str, str], int] = {}

    def message_of(self, block: EdgeBlock, tensors: list[Tensor]) -> Tensor:
        """Return the messages of any edges, [E_r, ...]."""
        return self._run(block, tensors, lambda role, name: None)

    def _run(self, block: EdgeBlock, tensors: list[Tensor], on_read: Callable[[str, str], Any]) -> Tensor:
        """Return the messages; ``on_read`` is called with role and name of each column that the function reads."""

        def columns_of(role: str, rows: Tensor) -> LazyColumns:
            columns = {name: tensors[i] for (of_role, name), i in self._columns.items() if of_role == role}
            return LazyColumns(columns, lambda tensor: tensor.index_select(0, rows), partial(on_read, role))

        positions = {"source": block.sources, "edge": block.ids, "target": block.targets}
        columns = [columns_of(role, rows) for role, rows in positions.items()]
        batch = ShardEdgeBatch(self._graph, (block.sources, block.targets), block.ids, *columns)
        return self._function(batch)[self._field]

    def runs_by_blocks(self) -> bool:
        """Find the columns and parameters that the function uses; return whether it can run block by block.

        A probe decides: a message must depend on its edge alone, draw no random numbers, and be computed from columns
        and parameters.
        """
        # Its statistics are over all edges, and the probe would change the running ones.
        if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in _modules(self._function)):
            return False
        graph = self._graph
        for role, frame in (("source", graph.ndata), ("edge", graph.edata), ("target", graph.ndata)):
            for name, tensor in frame.items():
                if not isinstance(tensor, LazyEdgeValues):
                    self._columns[role, name] = self.pool.add(role, tensor)
        try:
            with probing(), torch.enable_grad():
                return self._probe()
        except _ERRORS:
            return False

    def _probe(self) -> bool:
        block, tensors = probe_inputs(self)
        read: set[tuple[str, str]] = set()
        # A function that draws random numbers would draw others for each block.
        before, start = torch.get_rng_state(), _sequence_number()
        messages = self._run(block, tensors, lambda role, name: read.add((role, name)))
        if not torch.equal(before, torch.get_rng_state()):
            return False
        # A function that mixes edges, such as a mean over all of them, gives two edges alone another result.
        pair = block.select(slice(2))
        same = torch.allclose(self.message_of(pair, tensors), messages[:2], rtol=1e-3, atol=1e-6, equal_nan=True)
        leaves = _leaves(messages, start)
        if not same or len(messages) != len(block.ids) or leaves is None:
            return False
        self.conv = ParameterOwner(leaves)
        pool, columns = TensorPool(), {}
        for key, position in self._columns.items():
            if key in read:
                columns[key] = pool.add(key[0], self.pool.tensors[position])
        self.pool, self._columns = pool, columns
        return bool(self.sources)


def aggregate_in_blocks(graph: Any, function: Function, field: str, reduce: str, schedule: Schedule) -> Tensor | None:
    """``update_all`` with a Python function, block by block; None in mode 3, or if that is not exact."""
    if schedule.mode == 3 or reduce not in ("sum", "mean"):
        return None
    call = FunctionCall(graph, function, field, reduce)
    return aggregate_by_blocks(call, schedule) if call.runs_by_blocks() else None


def _modules(function: Any) -> Iterator[nn.Module]:
    """Yield the modules that a function references in its closure, or whose method it is."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    for value in (getattr(function, "__self__", None), *cells):
        if isinstance(value, nn.Module):
            yield from value.modules()


def _sequence_number() -> int:
    """Return the sequence number of autograd's next node, or one below."""
    node = (torch.ones((), requires_grad=True) * 1).grad_fn
    assert node is not None
    return int(node._sequence_nr())


def _leaves(tensor: Tensor, start: int) -> list[Tensor] | None:
    """Return the leaves that a tensor depends on; None if it depends on a node created before ``start``."""
    leaves: dict[int, Tensor] = {}
    seen: set[Any] = set()
    stack = [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves[id(variable)] = variable
        elif node._sequence_nr() < start:
            # Computed outside of the function: a block cannot return a gradient to it.
            return None
        stack += [operand for operand, _ in node.next_functions]
    return list(leaves.values())
