"""The settings of neighbour sampling and their checks. Light: does not import numba."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from gtrain.errors import ConfigError

EdgeType = tuple[str, str, str]
FanOut = tuple[int, ...] | Mapping[EdgeType | str, tuple[int, ...]]

SUBGRAPH_TYPES = {
    "directional": "the sampled edges",
    "bidirectional": "the sampled edges, and the reverse of each",
    "induced": "every edge between sampled nodes",
}
TEMPORAL_STRATEGIES = {
    "uniform": "any of the neighbours that are not later than the seed",
    "last": "the latest of them",
}
DEFAULT = "default"
"""Key of a mapping for all edge types without an entry."""


@dataclass(frozen=True)
class SamplingOptions:
    """Settings of subgraph sampling, named as in PyG.

    Attributes:
        num_neighbors: fan-out of each hop, 0 none, -1 all: one sequence for all edge types, or one per edge type by
            (source, relation, target); the key ``default`` stands for the edge types without an entry.
        replace: draw with replacement.
        disjoint: a separate subgraph for each seed. Temporal sampling is always disjoint.
        subgraph_type: see :data:`SUBGRAPH_TYPES`.
        temporal: see :data:`TEMPORAL_STRATEGIES`; None ignores times.
        weight: the edge tensor with the sampling weights; None draws uniformly. An edge type without that tensor is
            sampled uniformly.
        node_time: the node tensor with the times of the edges' sources; None: see ``edge_time``.
        edge_time: the edge tensor with the times of the edges. With ``temporal``, exactly one of the two is set.

    Raises:
        ConfigError: a value is unknown, a fan-out is invalid, or settings contradict each other.
    """

    num_neighbors: FanOut = field(default_factory=tuple)
    replace: bool = False
    disjoint: bool = False
    subgraph_type: str = "directional"
    temporal: str | None = None
    weight: str | None = None
    node_time: str | None = None
    edge_time: str | None = None

    def __post_init__(self) -> None:
        # The dataclass is frozen; this is how a field is normalised before anyone reads it.
        object.__setattr__(self, "num_neighbors", checked_fan_out(self.num_neighbors))
        check_word("subgraph_type", self.subgraph_type, SUBGRAPH_TYPES)
        if self.temporal is not None:
            check_temporal(self.temporal, self.weight)
            # Two seeds with different times may see different edges of the same node, so they cannot share it.
            object.__setattr__(self, "disjoint", True)
            if (self.node_time is None) == (self.edge_time is None):
                raise ConfigError(
                    f"temporal={self.temporal} was set with node_time={self.node_time} and edge_time={self.edge_time}.",
                    hint="set exactly one of the two to the tensor with the times.",
                )

    @property
    def trimmable(self) -> bool:
        """Whether each hop's edges point at nodes of the hop before, so that later layers may skip outer hops."""
        return self.subgraph_type == "directional"

    @property
    def num_hops(self) -> int:
        """Number of hops: the length of the fan-out."""
        fan_out = self.num_neighbors
        return max(map(len, fan_out.values()), default=0) if isinstance(fan_out, Mapping) else len(fan_out)

    def fan_out(self, edge_types: Iterable[EdgeType]) -> dict[EdgeType, tuple[int, ...]]:
        """Return the fan-out of each of the graph's edge types.

        Raises:
            ConfigError: the setting lacks an edge type, or names an unknown one.
        """
        types: list[EdgeType] = [(source, relation, target) for source, relation, target in edge_types]
        fan_out = self.num_neighbors
        if not isinstance(fan_out, Mapping):
            return dict.fromkeys(types, fan_out)
        unknown = [name for name in fan_out if name not in (*types, DEFAULT)]
        missing = [name for name in types if name not in fan_out and DEFAULT not in fan_out]
        if unknown or missing:
            unknown_text = f"names {words(unknown[0])}, which the graph does not have" if unknown else ""
            listed = " or ".join(map(words, types))
            raise ConfigError(
                f"data.num_neighbors {unknown_text or 'leaves out ' + words(missing[0])}.",
                hint=f"set a list for each of {listed}; the key default stands for edge types without an entry.",
            )
        return {name: fan_out[name if name in fan_out else DEFAULT] for name in types}


def checked_fan_out(fan_out: Any) -> FanOut:
    """Return a fan-out as tuples; as a mapping by edge type if it is a mapping.

    Args:
        fan_out: a sequence, or a mapping of sequences by (source, relation, target), ``source,relation,target`` or
            PyG's ``source__relation__target``.

    Raises:
        ConfigError: a number is not an integer from -1, a key is not an edge type, or lists differ in length.
    """
    if not isinstance(fan_out, Mapping):
        return checked_counts(fan_out)
    lists = {_edge_type(key): checked_counts(counts) for key, counts in fan_out.items()}
    if len({len(counts) for counts in lists.values()}) > 1:
        lengths = "; ".join(f"{words(name)}: {len(counts)}" for name, counts in lists.items())
        raise ConfigError(
            f"data.num_neighbors has lists of different lengths ({lengths}).",
            hint="set one number per hop; 0 draws no neighbours.",
        )
    return lists


def check_word(key: str, value: Any, options: Mapping[str, str]) -> None:
    """Raise ConfigError unless the value of ``data.<key>`` is one of the options."""
    if value not in options:
        listed = "; ".join(f"{word}: {text}" for word, text in options.items())
        raise ConfigError(f"data.{key}={value} is not an option.", hint=f"choose {listed}.")


def check_temporal(strategy: Any, weight: str | None) -> None:
    """Raise ConfigError unless the temporal strategy is known and compatible with the weights."""
    check_word("temporal_strategy", strategy, TEMPORAL_STRATEGIES)
    if strategy == "last" and weight is not None:
        raise ConfigError(
            f"data.temporal_strategy=last is set with data.weight_attr={weight}, but the latest edges are taken "
            "regardless of weights.",
            hint="set data.temporal_strategy=uniform, or data.weight_attr=null.",
        )


def words(edge_type: Any) -> str:
    """Return an edge type as it is written in a setting."""
    return edge_type if isinstance(edge_type, str) else ",".join(edge_type)


def checked_counts(counts: Any) -> tuple[int, ...]:
    """Return the fan-out of each hop as a tuple.

    Raises:
        ConfigError: it is not a sequence of integers from -1.
    """
    if isinstance(counts, str) or not isinstance(counts, Sequence):
        raise ConfigError(
            f"data.num_neighbors={counts!r} is not a list with one number per hop.",
            hint="set it like data.num_neighbors=[15,10].",
        )
    for count in counts:
        # bool is a subclass of int.
        if isinstance(count, bool) or not isinstance(count, Integral) or int(count) < -1:
            raise ConfigError(
                f"data.num_neighbors holds {count!r}; a fan-out is a number of neighbours, 0 or more, or -1 for all "
                "of them.",
                hint="set it like data.num_neighbors=[15,10].",
            )
    return tuple(map(int, counts))


def _edge_type(key: Any) -> Any:
    if key == DEFAULT:
        return DEFAULT
    edge_type = tuple(key.split("__") if "__" in key else key.split(",")) if isinstance(key, str) else key
    is_triple = isinstance(edge_type, tuple) and len(edge_type) == 3
    if not is_triple or not all(isinstance(word, str) and word for word in edge_type):
        raise ConfigError(
            f"data.num_neighbors has a list for {key!r}, which is not an edge type.",
            hint="write an edge type as source,relation,target, or source__relation__target on the command line.",
        )
    return tuple(word.strip() for word in edge_type)
