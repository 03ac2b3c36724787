"""Lazy values of edges: they recognise attention, whose coefficients need not be stored for every edge.

Convolutions of DGL compute attention in steps: a number for each edge and head from its ends, a function of that, a
softmax over each target's edges, dropout, and the sum of source rows with the result as weights. Each step returns a
tensor with one row per edge; here it returns a :class:`LazyEdgeValues`, which records the expression. Any other use
evaluates the expression, by one exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.utils import softmax

from gtrain.nn.dropout import current_position
from gtrain_sar.attention.softmax import attend_by_blocks
from gtrain_sar.config import Schedule
from gtrain_sar.edges import EdgeBlock, EdgeBlocks
from gtrain_sar.propagate_call import PropagateCall, TensorPool

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "dot": lambda a, b: (a * b).sum(-1, keepdim=True),
}
EdgewiseRule = Callable[[Tensor, list[Any], dict[str, Any]], bool]
_PROPERTIES: Any = [Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.layout, Tensor.is_sparse]
_SHAPE_FUNCTIONS = {
    Tensor.size,
    Tensor.dim,
    Tensor.__len__,
    Tensor.numel,
    Tensor.is_floating_point,
    *(getter.__get__ for getter in _PROPERTIES),
}


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
        with torch.no_grad():
            shape = expression.logits(*ends).shape[1:]
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
    """Sum of source rows ``x`` with the coefficients of an expression, for :mod:`gtrain_sar.attention.softmax`."""

    def __init__(self, blocks: EdgeBlocks, x: Tensor, expression: EdgeExpression) -> None:
        self.conv: Any = ParameterOwner([tensor for step in expression.steps for tensor in step.tensors])
        self.blocks, self.reduce, self.pool, self.attention = blocks, "sum", TensorPool(), None
        self.position = current_position()
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
