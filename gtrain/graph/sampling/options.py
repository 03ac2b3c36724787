"""What a user may ask of neighbour sampling, checked before anything is sampled. Light: imports no numba."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
"""The key of a mapping that stands for the edge types not named in it."""


@dataclass(frozen=True)
class SamplingOptions:
    """How the subgraph around seeds is sampled; PyG's words where PyG has one.

    Attributes:
        num_neighbors: fan-out of each hop, 0 none, -1 all: one sequence for all edge types, or one for each by
            (source, relation, target); the key ``default`` stands for those not named.
        replace: draw with replacement.
        disjoint: a subgraph of its own for each seed. Sampling by times is always disjoint.
        subgraph_type: see :data:`SUBGRAPH_TYPES`.
        temporal: see :data:`TEMPORAL_STRATEGIES`; None: times do not matter.
        weight: the edge tensor that neighbours are drawn in proportion to; None: all are equally likely. An edge type
            without that tensor is sampled without weights.
        node_time: the node tensor that holds the times of the edges' sources; None: see ``edge_time``.
        edge_time: the edge tensor that holds the times of the edges. With ``temporal``, one of the two is set.

    Raises:
        ConfigError: a word is unknown, a fan-out is no number of neighbours, or settings contradict each other.
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
        object.__setattr__(self, "num_neighbors", checked_fan_out(self.num_neighbors))
        check_word("subgraph_type", self.subgraph_type, SUBGRAPH_TYPES)
        if self.temporal is not None:
            check_temporal(self.temporal, self.weight)
            object.__setattr__(self, "disjoint", True)
            if (self.node_time is None) == (self.edge_time is None):
                raise ConfigError(
                    f"temporal={self.temporal} was set with node_time={self.node_time} and edge_time={self.edge_time}.",
                    hint="name the one tensor that holds the times.",
                )

    @property
    def trimmable(self) -> bool:
        """Whether each hop's edges lead to the nodes of the hop before, so that layers may leave hops out."""
        return self.subgraph_type == "directional"

    @property
    def num_hops(self) -> int:
        """Hops that are sampled: the length of the fan-out."""
        fan_out = self.num_neighbors
        return max(map(len, fan_out.values()), default=0) if isinstance(fan_out, Mapping) else len(fan_out)

    def fan_out(self, edge_types: Iterable[EdgeType]) -> dict[EdgeType, tuple[int, ...]]:
        """Return the fan-out of each of these edge types.

        Raises:
            ConfigError: the setting leaves one out, or names one that is not there.
        """
        kinds: list[EdgeType] = [(source, relation, target) for source, relation, target in edge_types]
        given = self.num_neighbors
        if not isinstance(given, Mapping):
            return dict.fromkeys(kinds, given)
        unknown = [kind for kind in given if kind not in (*kinds, DEFAULT)]
        missing = [kind for kind in kinds if kind not in given and DEFAULT not in given]
        if unknown or missing:
            wrong = f"names {words(unknown[0])}, which the graph does not have" if unknown else ""
            wrong = wrong or f"leaves out {words(missing[0])}"
            listed = " or ".join(words(kind) for kind in kinds)
            raise ConfigError(
                f"data.num_neighbors {wrong}.",
                hint=f"give a list for each of {listed}; the key default stands for those not named.",
            )
        return {kind: given[kind if kind in given else DEFAULT] for kind in kinds}


def checked_fan_out(given: Any) -> FanOut:
    """Return a fan-out as tuples, by edge type where it is a mapping.

    Args:
        given: a sequence, or a mapping of sequences by (source, relation, target), ``source,relation,target`` or PyG's
            ``source__relation__target``.

    Raises:
        ConfigError: a number is below -1 or no whole number, a key is no edge type, or lists differ in length.
    """
    if not isinstance(given, Mapping):
        return _counts(given)
    lists = {_edge_type(key): _counts(counts) for key, counts in given.items()}
    if len({len(counts) for counts in lists.values()}) > 1:
        lengths = "; ".join(f"{words(kind)}: {len(counts)}" for kind, counts in lists.items())
        raise ConfigError(
            f"data.num_neighbors has lists of different lengths ({lengths}).",
            hint="give one number for each hop; 0 draws none.",
        )
    return lists


def check_word(key: str, value: Any, options: Mapping[str, str]) -> None:
    """Raise unless the value of ``data.<key>`` is one of the options."""
    if value not in options:
        listed = "; ".join(f"{word}: {text}" for word, text in options.items())
        raise ConfigError(f"data.{key}={value} was set.", hint=f"choose {listed}.")


def check_temporal(strategy: Any, weight: str | None) -> None:
    """Raise unless that is a way of sampling by times, with these weights."""
    check_word("temporal_strategy", strategy, TEMPORAL_STRATEGIES)
    if strategy == "last" and weight is not None:
        raise ConfigError(
            f"data.temporal_strategy=last was set with data.weight_attr={weight}; the latest edges leave nothing to "
            "weigh.",
            hint="set data.temporal_strategy=uniform, or data.weight_attr=null.",
        )


def words(kind: Any) -> str:
    """An edge type as it is written in a setting."""
    return kind if isinstance(kind, str) else ",".join(kind)


def _counts(given: Any) -> tuple[int, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ConfigError(
            f"data.num_neighbors={given!r} was set; it is a list with one number for each hop.",
            hint="set it like data.num_neighbors=[15,10].",
        )
    for count in given:
        if isinstance(count, bool) or not isinstance(count, int) or count < -1:
            raise ConfigError(
                f"data.num_neighbors holds {count!r}; a fan-out is a number of neighbours, 0 or more, or -1 for all "
                "of them.",
                hint="set it like data.num_neighbors=[15,10].",
            )
    return tuple(given)


def _edge_type(key: Any) -> Any:
    if key == DEFAULT:
        return DEFAULT
    kind = tuple(key.split("__") if "__" in key else key.split(",")) if isinstance(key, str) else key
    if not isinstance(kind, tuple) or len(kind) != 3 or not all(isinstance(word, str) and word for word in kind):
        raise ConfigError(
            f"data.num_neighbors has a list for {key!r}, which is no edge type.",
            hint="write an edge type as source,relation,target, or source__relation__target on the command line.",
        )
    return tuple(word.strip() for word in kind)
