"""How edges are chosen, the keys that their random numbers follow from, and checks of what a caller asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.errors import ConfigError, DataError
from gtrain.graph.sampling.columns import Columns, readable
from gtrain.kernels.splitmix import key, mix_one

Array = NDArray[Any]


@dataclass(frozen=True)
class Rule:
    """How edges are chosen. Where edges have weights, in proportion to them, and only those above 0 count.

    Attributes:
        replace: with replacement: ``count`` draws from every node that has an in-edge. Without: min(count, in-degree)
            distinct edges.
        temporal: None; ``uniform``: as without times, of the edges not later than the seed; ``last``: the latest of
            these (``replace`` is then without meaning). Times are those of the source nodes where they are given,
            otherwise those of the edges.
    """

    replace: bool = False
    temporal: str | None = None

    def __post_init__(self) -> None:
        if self.temporal not in (None, "uniform", "last"):
            raise ConfigError(
                f"temporal={self.temporal!r} was set.",
                hint="set 'uniform', 'last', or None for sampling without times.",
            )

    def check(self, columns: Columns) -> None:
        """Raise unless the columns have what the rule needs."""
        if self.temporal is not None and columns.edge_time is None and columns.loose_time is None:
            raise DataError(
                f"temporal={self.temporal} was set, and neither edges nor source nodes have times.",
                hint="give Columns(edge_time=...) or node_time=..., or set temporal=None.",
            )
        if self.temporal == "last" and columns.weight is not None:
            raise ConfigError(
                "temporal=last was set for edges with weights; the latest edges leave nothing to weigh.",
                hint="set temporal=uniform, or leave the weights out.",
            )


def batch_key(seed: int, epoch: int, batch: int) -> int:
    """The 64-bit key of a batch, from which all its random numbers follow."""
    return key(int(seed), int(epoch), int(batch))


def hop_key(of_batch: int, hop: int, relation: int) -> np.uint64:
    """The key of one hop of a batch and one edge type (its place in the graph's order)."""
    return np.uint64(mix_one(mix_one(of_batch + hop) + relation))


def check_count(count: Any) -> int:
    """A fan-out as an int.

    Raises:
        ConfigError: it is no number of edges and not -1.
    """
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < -1:
        raise ConfigError(
            f"num_neighbors holds {count!r}; a fan-out is a number of neighbours, 0 or more, or -1 for all of them.",
            hint="set a list with one such number for each hop.",
        )
    return int(count)


def checked_ids(ids: Any, size: int, name: str) -> Array:
    """Ids as an int64 vector of its own memory.

    Raises:
        DataError: they are no whole numbers, or one is out of range.
    """
    array = readable(ids, name, ("i8",))
    if array.size and (array.min() < 0 or array.max() >= size):
        wrong = int(array.min()) if array.min() < 0 else int(array.max())
        raise DataError(
            f"{name} hold {wrong}; the graph has {size} such nodes, 0 .. {size - 1}.",
            hint="give the numbers of this graph's nodes.",
        )
    return array.copy()


def checked_times(times: Any, size: int, name: str) -> Array:
    """Times as an int64 vector of its own memory.

    Raises:
        DataError: there are not ``size`` of them, or they are no whole numbers.
    """
    array = readable(times, name, ("i8",))
    if array.size != size:
        raise DataError(f"{name} has {array.size} values for {size} seeds.", hint="give each seed's time.")
    return array.copy()
