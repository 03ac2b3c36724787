"""Values of edges that are put off: they name attention, whose coefficients need not be held for every edge.

Convolutions of DGL compute attention in steps: a number for each edge and head from its ends, a function of that, a
softmax over each target's edges, dropout, and the sum of source rows with the result as weights. Each step returns a
tensor of one row an edge; here it returns an :class:`EdgeValues`, which knows how it would be computed. Where it is
used in another way, it is computed then, by one exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.utils import softmax

from gtrain.nn.dropout import here
from gtrain_sar.attention.softmax import attend_by_blocks
from gtrain_sar.config import Schedule
from gtrain_sar.edges import EdgeBlock, EdgeBlocks
from gtrain_sar.propagate_call import Pool, PropagateCall

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "dot": lambda a, b: (a * b).sum(-1, keepdim=True),
}
Rule = Callable[[Tensor, list[Any], dict[str, Any]], bool]
_PROPERTIES: Any = [Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.layout, Tensor.is_sparse]
_OF_SHAPE = {
    Tensor.size,
    Tensor.dim,
    Tensor.__len__,
    Tensor.numel,
    Tensor.is_floating_point,
    *(getter.__get__ for getter in _PROPERTIES),
}


@dataclass(frozen=True)
class Step:
    """A function of each edge's row alone, the other arguments being the same for all edges."""

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
class Recipe:
    """How values of edges are computed.

    Attributes:
        op: ``add``, ``sub``, ``mul`` or ``dot`` of the rows of an edge's ends.
        ends: the two operands, [n, ...] each.
        targets: ``u`` (of sources) or ``v`` (of targets) for each operand; one of each.
        steps: done to the result.
        normalised: whether the softmax over each target's edges was taken of that.
        dropout: chance that a coefficient is dropped.
    """

    op: str
    ends: tuple[Tensor, Tensor]
    targets: tuple[str, str]
    steps: tuple[Step, ...] = field(default=())
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
        """What the softmax is taken of, given rows of each edge's ends."""
        ends = (source, target) if self.targets[0] == "u" else (target, source)
        values = _COMBINE[self.op](*ends)
        for step in self.steps:
            values = step(values)
        return values

    @property
    def slope(self) -> float | None:
        """Slope of leaky_relu, where that and a sum are all that is done, as in GAT; 1 for the sum alone."""
        if self.op != "add" or len(self.steps) > 1:
            return None
        if not self.steps:
            return 1.0
        (step,) = self.steps
        slope = step.settings.get("negative_slope", 0.01)
        return float(slope) if step.function is F.leaky_relu and not step.before and not step.after else None


Compute = Callable[[Recipe], Tensor]


class EdgeValues(Tensor):
    """[E, ...], computed when it is needed; see the module.

    Attributes:
        recipe: how it is computed.
        compute: computes a recipe for all edges, by one exchange.
        value: the values, once they are computed.
    """

    recipe: Recipe
    compute: Compute
    value: Tensor | None

    @staticmethod
    def of(
        num_edges: int, compute: Compute, op: str, ends: tuple[Tensor, Tensor], targets: tuple[str, str]
    ) -> EdgeValues | None:
        """Values of edges from those of their ends; None where it is not worth while to put them off."""
        dims = {end.dim() for end in ends}
        if op not in _COMBINE or sorted(targets) != ["u", "v"] or len(dims) > 1 or min(dims) < 2:
            return None
        if not ends[0].is_floating_point() or ends[0].dtype != ends[1].dtype:
            return None
        return EdgeValues._make(num_edges, compute, Recipe(op, ends, targets))

    @classmethod
    def _make(cls, num_edges: int, compute: Compute, recipe: Recipe) -> EdgeValues:
        with torch.no_grad():
            tail = recipe.logits(*(end.new_zeros((2, *end.shape[1:])) for end in (recipe.source, recipe.target))).shape
        made: EdgeValues = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, (num_edges, *tail[1:]), dtype=recipe.source.dtype, device=recipe.source.device
        )
        made.compute, made.recipe, made.value = compute, recipe, None
        return made

    def with_recipe(self, **changes: Any) -> EdgeValues:
        """Values of the same edges by this recipe with changes."""
        return self._make(self.size(0), self.compute, replace(self.recipe, **changes))

    def normalised(self) -> EdgeValues | None:
        """The softmax over each target's edges; None where that cannot be put off."""
        if self.recipe.normalised or self.value is not None:
            return None
        return self.with_recipe(normalised=True)

    def weighs(self, x: Tensor) -> bool:
        """Whether a sum of source rows ``x`` [n, C] or [n, H, C] with these as weights is attention."""
        heads = (1,) if x.dim() == 2 else (x.size(1), 1) if x.dim() == 3 else None
        ready = self.recipe.normalised and self.value is None and x.dtype == self.dtype
        return ready and tuple(self.shape[1:]) == heads

    def computed(self) -> Tensor:
        """The values, [E, ...], by one exchange."""
        if self.value is None:
            self.value = self.compute(self.recipe)
        return self.value

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"EdgeValues(op={self.recipe.op}, normalised={self.recipe.normalised})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OF_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is F.dropout and isinstance(args[0], EdgeValues):
            later: EdgeValues | None = _dropout(args[0], *args[1:], **kwargs)
        else:
            later = _step(func, args, kwargs)
        if later is not None:
            return later
        return func(*(_computed(a) for a in args), **{name: _computed(a) for name, a in kwargs.items()})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of values that were put off")  # it would not be differentiable


def _computed(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_computed(item) for item in value)
    return value.computed() if isinstance(value, EdgeValues) else value


def _dropout(values: EdgeValues, p: float = 0.5, training: bool = True, inplace: bool = False) -> EdgeValues | None:
    if not training or p == 0:
        return values
    recipe = values.recipe
    if not recipe.normalised or recipe.dropout or inplace or values.value is not None:
        return None
    return values.with_recipe(dropout=float(p))


def _step(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> EdgeValues | None:
    """The function put off, if it looks at one edge at a time."""
    places = [i for i, value in enumerate(args) if isinstance(value, EdgeValues)]
    if func not in _EDGEWISE or len(places) != 1 or kwargs.get("inplace") or kwargs.get("out") is not None:
        return None
    (place,) = places
    values: EdgeValues = args[place]
    others = [value for i, value in enumerate(args) if i != place]
    if values.recipe.normalised or values.value is not None or not _EDGEWISE[func](values, others, kwargs):
        return None
    kwargs = {name: value for name, value in kwargs.items() if name != "inplace"}
    step = Step(func, args[:place], args[place + 1 :], kwargs)
    return values.with_recipe(steps=(*values.recipe.steps, step))


def _always(values: Tensor, others: list[Any], kwargs: dict[str, Any]) -> bool:
    return not any(isinstance(value, Tensor) for value in (*others, *kwargs.values()))


def _same_for_all_edges(values: Tensor, others: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the other operand has no row for each edge, and adds no dimension."""
    (other,) = others or [None]
    if isinstance(other, Tensor):
        small = other.dim() < values.dim() or (other.dim() == values.dim() and other.size(0) == 1)
        return small and not kwargs and other.dtype == values.dtype
    return isinstance(other, (int, float)) and not kwargs


def _within_rows(values: Tensor, others: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the one dimension that is named is not that of edges."""
    dims = [*others, *(value for name, value in kwargs.items() if name == "dim")]
    plain = set(kwargs) <= {"dim", "keepdim"} and len(dims) == 1 and isinstance(dims[0], int)
    return plain and dims[0] != 0 and dims[0] > -values.dim()


_EDGEWISE: dict[Callable[..., Any], Rule] = {
    **dict.fromkeys((F.leaky_relu, F.relu, F.elu, torch.tanh, Tensor.tanh, Tensor.relu, Tensor.neg), _always),
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul), _same_for_all_edges),
    **dict.fromkeys((Tensor.div, Tensor.__truediv__, torch.div), _same_for_all_edges),
    **dict.fromkeys((Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add), _same_for_all_edges),
    **dict.fromkeys((Tensor.sum, torch.sum, Tensor.unsqueeze, torch.unsqueeze), _within_rows),
}


class ParameterOwner:
    """What a call says are its convolution's parameters; its module has the name ``softmax``."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters

    def parameters(self) -> Iterator[Tensor]:
        return iter(self._parameters)


class AttentionCall(PropagateCall):
    """Sum of source rows ``x`` with the coefficients of a recipe, for :mod:`gtrain_sar.attention.softmax`."""

    def __init__(self, blocks: EdgeBlocks, x: Tensor, recipe: Recipe) -> None:
        self.conv: Any = ParameterOwner([tensor for step in recipe.steps for tensor in step.tensors])
        self.blocks, self.reduce, self.pool, self.attention = blocks, "sum", Pool(), None
        self.layer = here()
        self._recipe = recipe
        self._x, self._source = self.pool.add("source", x), self.pool.add("source", recipe.source)
        self._target = self.pool.add("target", recipe.target)

    def message_of(self, block: EdgeBlock, tensors: list[Tensor]) -> Tensor:
        """Source rows times coefficients, [E_r, ...]."""
        source = tensors[self._source].index_select(0, block.sources)
        logits = self._recipe.logits(source, tensors[self._target].index_select(0, block.targets))
        weights = softmax(logits.flatten(1), block.targets).view_as(logits)
        weights = F.dropout(weights, self._recipe.dropout)
        rows = source if self._x == self._source else tensors[self._x].index_select(0, block.sources)
        return rows * weights


def attend_in_blocks(blocks: EdgeBlocks, x: Tensor, recipe: Recipe, schedule: Schedule) -> Tensor:
    """Attention by a running maximum and sum over blocks (modes 1 and 2), [num_local, ...]."""
    return attend_by_blocks(AttentionCall(blocks, x, recipe), schedule)
