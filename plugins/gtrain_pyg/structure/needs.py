"""What a way of sampling reads of a store, and whether the store has it."""

from __future__ import annotations

from dataclasses import dataclass

from gtrain.errors import DataError
from gtrain.graph.sampling import Rule
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EdgeType


@dataclass(frozen=True)
class Needs:
    """What sampling reads besides the edges, and how it chooses; equal on all ranks that take part.

    Attributes:
        replace, temporal: see :class:`gtrain.graph.sampling.Rule`.
        weight, node_time, edge_time: names of tensors, see :class:`gtrain.graph.sampling.options.SamplingOptions`.
    """

    replace: bool = False
    temporal: str | None = None
    weight: str | None = None
    node_time: str | None = None
    edge_time: str | None = None

    @classmethod
    def of(cls, options: SamplingOptions) -> Needs:
        """What these options need; times that nothing asks for are left out."""
        timed = options.temporal is not None
        return cls(
            options.replace,
            options.temporal,
            options.weight,
            options.node_time if timed else None,
            options.edge_time if timed else None,
        )

    def rule(self, store: Store, kind: EdgeType) -> Rule:
        """How an edge type is sampled: one without times is sampled without them."""
        return Rule(self.replace, self.temporal if self.times(store, kind) else None)

    def weights(self, store: Store, kind: EdgeType) -> bool:
        """Whether an edge type has the weights."""
        return self.weight is not None and self.weight in store.edge_tensors(kind)

    def times(self, store: Store, kind: EdgeType) -> bool:
        """Whether an edge type has the times, or its sources have."""
        by_node = self.node_time is not None and self.node_time in store.node_tensors(kind[0])
        return by_node or (self.edge_time is not None and self.edge_time in store.edge_tensors(kind))

    def check(self, store: Store) -> None:
        """Raise unless at least one edge type has what is needed.

        Raises:
            DataError: names what there is instead.
        """
        kinds = store.edge_types
        if self.weight is not None and not any(self.weights(store, kind) for kind in kinds):
            raise _missing(store, f"data.weight_attr={self.weight}", "no edges have a tensor of that name", "edge")
        if self.temporal is None or any(self.times(store, kind) for kind in kinds):
            return
        kind, name = ("edge", self.edge_time) if self.node_time is None else ("node", self.node_time)
        whose = "edges have" if kind == "edge" else "nodes that edges start at have"
        setting = f"data.temporal_strategy={self.temporal} with the times {name!r}"
        raise _missing(store, setting, f"no {whose} a tensor of that name", kind)


def _missing(store: Store, setting: str, found: str, kind: str) -> DataError:
    if kind == "edge":
        names = {name for edge_type in store.edge_types for name in store.edge_tensors(edge_type)}
    else:
        names = {name for node_type in store.node_types for name in store.node_tensors(node_type)}
    there = ", ".join(sorted(names - {"indices", "edge_id", "orig_id"})) or "none at all"
    return DataError(
        f"{setting} was set, and {found}; the {kind} tensors are: {there}.",
        hint="choose one of them, or add such a tensor to the source data and prepare it again.",
    )
