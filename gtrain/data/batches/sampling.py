"""The settings ``data.*`` of neighbour sampling and negative edges, for strategies with mini-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from gtrain.data.batches.negatives import check_negatives
from gtrain.data.config import DataConfig
from gtrain.errors import ConfigError, DataError
from gtrain.graph.sampling.options import (
    SUBGRAPH_TYPES,
    FanOut,
    SamplingOptions,
    check_temporal,
    check_word,
    checked_fan_out,
    words,
)
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EDGE_TYPE, NODE_TYPE, EdgeType

# Of nodes, of edges; the store keeps each node's in-edges in the order of edge_time.
_TIMES = ("time", "edge_time")


@dataclass(frozen=True)
class Sampling:
    """The settings ``data.*`` of the same names, as the user gave them; ``num_neighbors`` is separate.

    Attributes:
        replace: draw neighbours with replacement.
        disjoint: sample a separate subgraph for each seed.
        subgraph_type: ``directional``, ``bidirectional`` or ``induced``.
        temporal_strategy: ``uniform`` or ``last``: no neighbour is later than its seed; None: times do not matter.
        time_attr: ``time`` (of nodes) or ``edge_time``; None: the first of them that the graph has.
        weight_attr: the edge tensor that neighbours are drawn in proportion to; None: all are equally likely.
        neg_sampling: ``binary`` or ``triplet``: negative edges in the batch, for models that draw none; None: none.
        neg_sampling_ratio: negative edges per true edge.

    Raises:
        ConfigError: a word is unknown, or settings contradict each other.
    """

    replace: bool = DataConfig.replace
    disjoint: bool = DataConfig.disjoint
    subgraph_type: str = DataConfig.subgraph_type
    temporal_strategy: str | None = DataConfig.temporal_strategy
    time_attr: str | None = DataConfig.time_attr
    weight_attr: str | None = DataConfig.weight_attr
    neg_sampling: str | None = DataConfig.neg_sampling
    neg_sampling_ratio: float = DataConfig.neg_sampling_ratio

    def __post_init__(self) -> None:
        check_word("subgraph_type", self.subgraph_type, SUBGRAPH_TYPES)
        if self.temporal_strategy is not None:
            check_temporal(self.temporal_strategy, self.weight_attr)
        if self.time_attr not in (None, *_TIMES):
            raise ConfigError(
                f"data.time_attr={self.time_attr} was set.",
                hint="choose time (of nodes), edge_time (of edges) or null.",
            )
        if self.time_attr is not None and self.temporal_strategy is None:
            raise ConfigError(
                f"data.time_attr={self.time_attr} was set without data.temporal_strategy.",
                hint="set data.temporal_strategy=uniform or last, or data.time_attr=null.",
            )
        self._check_negatives()

    def _check_negatives(self) -> None:
        if self.neg_sampling is not None:
            check_negatives(self.neg_sampling, self.neg_sampling_ratio)
        elif self.neg_sampling_ratio != 1:
            raise ConfigError(
                f"data.neg_sampling_ratio={self.neg_sampling_ratio} was set without data.neg_sampling.",
                hint="set data.neg_sampling=binary or triplet; the built-in models have model.num_negatives instead.",
            )

    def settings(self) -> list[str]:
        """Return the settings of neighbours (not of negatives) that are not defaults, as on a command line."""
        return [
            f"data.{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if not field.name.startswith("neg_") and getattr(self, field.name) != field.default
        ]

    def options(self, store: Store, num_neighbors: FanOut | None, hops: int | None = None) -> SamplingOptions:
        """Return what is sampled from a graph.

        Args:
            store: the graph.
            num_neighbors: fan-out; None: all neighbours of every hop.
            hops: layers of message passing in the model; None: unknown.

        Raises:
            ConfigError: the fan-out does not suit the graph's edge types, or has fewer hops than the model has layers;
                or neither the fan-out nor the layers are known.
            DataError: the graph lacks the times or weights.
        """
        fan_out = self._fan_out(num_neighbors, hops)
        node_time, edge_time = self._times(store) if self.temporal_strategy is not None else (None, None)
        if self.weight_attr is not None:
            _check_weights(store, self.weight_attr)
        options = SamplingOptions(
            num_neighbors=fan_out,
            replace=self.replace,
            disjoint=self.disjoint,
            subgraph_type=self.subgraph_type,
            temporal=self.temporal_strategy,
            weight=self.weight_attr,
            node_time=node_time,
            edge_time=edge_time,
        )
        if isinstance(options.num_neighbors, dict) and not store.is_hetero:
            raise ConfigError(
                "data.num_neighbors was given by edge type, and the graph has one type of edges.",
                hint="set it like data.num_neighbors=[15,10].",
            )
        options.fan_out(store.edge_types)
        return options

    def _fan_out(self, given: FanOut | None, hops: int | None) -> FanOut:
        if given is None:
            if hops is None:
                raise ConfigError(
                    "data.num_neighbors=null was set, and how many hops the model looks is unknown.",
                    hint="set a number for each of its layers, such as data.num_neighbors=[15,10]; -1 draws all.",
                )
            return (-1,) * hops
        fan_out = checked_fan_out(given)
        if hops is not None:
            check_hops(fan_out, hops)
        return fan_out

    def _times(self, store: Store) -> tuple[str | None, str | None]:
        """Return the name of the node tensor, or else of the edge tensor, with the times; None for the other."""
        on_nodes = any("time" in store.node_tensors(kind) for kind in store.node_types)
        # Edges that are held out, all of a type, are nobody's neighbours.
        kinds = (kind for kind in store.edge_types if store.num_edges_of(kind))
        on_edges = any("edge_time" in store.edge_tensors(kind) for kind in kinds)
        name = self.time_attr or ("time" if on_nodes or not on_edges else "edge_time")
        if not (on_nodes if name == "time" else on_edges):
            have = "edges" if on_edges else "nodes" if on_nodes else ""
            asked = f" and data.time_attr={self.time_attr}" if self.time_attr is not None else ""
            lacks = f"its {have} alone have times" if have else "neither its nodes nor its edges have times"
            raise DataError(
                f"data.temporal_strategy={self.temporal_strategy}{asked} was set for the graph {store.path.name}, and "
                f"{lacks}.",
                hint="set data.time_attr=null."
                if have
                else "give the source times (data.time for an edge list), or set data.temporal_strategy=null.",
            )
        return ("time", None) if name == "time" else (None, "edge_time")


def check_hops(fan_out: FanOut, hops: int) -> None:
    """Raise unless a fan-out has at least ``hops`` numbers.

    Raises:
        ConfigError: the fan-out has fewer hops than the model has layers.
    """
    drawn = SamplingOptions(fan_out).num_hops
    if drawn < hops:
        raise ConfigError(
            f"data.num_neighbors={as_set(fan_out)} draws {drawn} hop{'s' * (drawn != 1)}, and the model passes "
            f"messages {hops} times.",
            hint=f"give {hops} numbers, such as data.num_neighbors={_example(hops)}, or the model fewer layers "
            "(model.num_layers).",
        )


def seed_time(store: Store, options: SamplingOptions, kind: str | EdgeType) -> str | None:
    """Return the name of the tensor with the times of seeds: ``time`` of nodes, ``edge_time`` of edges.

    Args:
        store: the graph.
        options: what is sampled.
        kind: the node type or the edge type of the seeds.

    Returns:
        The name; None if sampling ignores times.

    Raises:
        DataError: the seeds have no times.
    """
    if options.temporal is None:
        return None
    edges = not isinstance(kind, str)
    name = "edge_time" if edges else "time"
    if name in (store.edge_tensors(kind) if edges else store.node_tensors(kind)):  # type: ignore[arg-type]
        return name
    what = "edges" if edges else "nodes"
    what += "" if kind in (NODE_TYPE, EDGE_TYPE) else f" {words(kind)}"
    raise DataError(
        f"data.temporal_strategy={options.temporal} was set, which needs the times of seeds; the seeds are {what}, and "
        f"the data have no {name}.",
        hint=f"set data.temporal_strategy=null, or use a data source with {name}.",
    )


def _check_weights(store: Store, name: str) -> None:
    """Raise unless some edge type has one floating-point number for each edge under this name."""
    if not any(name in store.edge_tensors(kind) for kind in store.edge_types):
        there = sorted({tensor for kind in store.edge_types for tensor in store.edge_tensors(kind)})
        shown = [tensor for tensor in there if tensor not in ("indices", "edge_id")]
        raise DataError(
            f"data.weight_attr={name} was set, and the edges of the graph {store.path.name} have no such tensor.",
            hint=f"they have {', '.join(shown)}." if shown else "set data.weight_attr=null.",
        )
    for kind in store.edge_types:
        if name in store.edge_tensors(kind):
            weights = store.edge(name, 0, kind)
            if weights.dim() != 1 or not weights.is_floating_point():
                raise DataError(
                    f"data.weight_attr={name} was set; that tensor is {weights.dtype} with {weights.dim()} dimensions.",
                    hint="weights are one floating-point number for each edge, such as edge_weight.",
                )


def as_set(fan_out: FanOut) -> str:
    """Return a fan-out as it is written in a setting."""
    if isinstance(fan_out, Mapping):
        return "{" + ",".join(f"{words(kind)}:{as_set(counts)}" for kind, counts in fan_out.items()) + "}"
    return str(list(fan_out)).replace(" ", "")


def _example(hops: int) -> str:
    return as_set((15, 10, *[5] * hops)[:hops])
