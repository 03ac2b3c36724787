"""Calls of the convolutions that make up one layer of a network over a graph with types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch_geometric.nn.conv import MessagePassing

from gtrain_sar.halo import HaloExchange
from gtrain_sar.typed.relations import Relation


@dataclass(eq=False)
class Ends:
    """A convolution's argument with a row for each node: of the types that its edges start and end at.

    Attributes:
        exchange: of the nodes that edges start at.
        source: own rows ``[num_local, ...]`` of that type; None where there are none.
        target: own rows of the other type; None where there are none, or where it is the same tensor.
        pair: whether the convolution takes both as a pair, or ``source`` alone.
    """

    exchange: HaloExchange
    source: Tensor | None
    target: Tensor | None = None
    pair: bool = True

    def given(self, source: Tensor | None, target: Tensor | None) -> Any:
        """The argument, with other tensors in the place of its own."""
        return (source, target) if self.pair else source

    def own(self) -> Any:
        """The argument as the network gave it."""
        return self.given(self.source, self.target)


@dataclass(eq=False)
class LayerCall:
    """One call of a convolution.

    Attributes:
        conv: the convolution.
        relation: what it works on; None where it works on several at once.
        num_targets: own rows of the result, by node type where that is a dictionary.
        args: its arguments; those with a row for each node as :class:`Ends`.
        kwargs: likewise.
        function: called with them; None: the convolution.
    """

    conv: nn.Module
    relation: Relation | None
    num_targets: int | dict[str, int]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None

    @property
    def ends(self) -> list[Ends]:
        """The arguments with a row for each node."""
        return [leaf for leaf in self._leaves() if isinstance(leaf, Ends)]

    @property
    def tensors(self) -> list[Tensor]:
        """The other tensors among the arguments."""
        return [leaf for leaf in self._leaves() if isinstance(leaf, Tensor)]

    @property
    def convs(self) -> list[MessagePassing]:
        """Every convolution that the call may reach."""
        return [layer for layer in self.conv.modules() if isinstance(layer, MessagePassing)]

    def run(self, replace: Callable[[Any], Any]) -> Any:
        """Call the convolution with each leaf of its arguments replaced."""
        args, kwargs = tree_map(replace, (self.args, self.kwargs), is_leaf=_is_ends)
        return (self.function or self.conv)(*args, **kwargs)

    def run_as_given(self) -> Any:
        """Call the convolution with own rows."""
        return self.run(lambda leaf: leaf.own() if isinstance(leaf, Ends) else leaf)

    def cut(self, result: Any) -> Any:
        """The rows of own nodes."""
        if isinstance(result, dict) and isinstance(self.num_targets, dict):
            counts = self.num_targets
            return {key: value if value is None else _first(value, counts[key]) for key, value in result.items()}
        if not isinstance(result, Tensor) or not isinstance(self.num_targets, int):
            raise SeveralHops(self.conv)
        return _first(result, self.num_targets)

    def _leaves(self) -> list[Any]:
        return tree_leaves((self.args, self.kwargs), is_leaf=_is_ends)


class SeveralHops(Exception):
    """A convolution passes messages more than once in a call, or returns more than a row for each node.

    Args:
        conv: the convolution.
    """

    def __init__(self, conv: nn.Module) -> None:
        super().__init__(type(conv).__name__)
        self.conv = conv


def _first(rows: Tensor, count: int) -> Tensor:
    return rows if len(rows) == count else rows[:count]


def _is_ends(value: Any) -> bool:
    return isinstance(value, Ends)
