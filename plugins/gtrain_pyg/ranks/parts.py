"""Owners of nodes and edges: P + 1 offsets per type, instead of an array of all nodes or edges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.errors import ConfigError
from gtrain.graph.owners import owner_of
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EdgeType, edge_key

Array = NDArray[Any]
NodeOrEdgeType = str | EdgeType


@dataclass(frozen=True)
class PartBook:
    """The ranges of the parts of a store, in the two id spaces that identify a batch's nodes and edges.

    A *global id* is a node's number in the store; part p owns ``offsets[type][p] .. offsets[type][p+1]-1``. A *global
    edge position* is an edge's index in the columns of all parts laid end to end; part p has
    ``edge_offsets[type][p] .. edge_offsets[type][p+1]-1``, the edges that point at its nodes.

    Attributes:
        num_parts: P.
        offsets: by node type, int64 ``[P + 1]``.
        edge_offsets: by edge type, int64 ``[P + 1]``.
    """

    num_parts: int
    offsets: dict[str, Array]
    edge_offsets: dict[EdgeType, Array]

    @classmethod
    def of(cls, store: Store) -> PartBook:
        """Read the offsets of a store's manifest."""
        nodes, counts = store.manifest.node_types, store.manifest.partition.edges_by_type
        return cls(
            store.num_parts,
            {name: np.array(spec.offsets, np.int64) for name, spec in nodes.items()},
            {t: np.concatenate([[0], np.cumsum(counts[edge_key(t)], dtype=np.int64)]) for t in store.edge_types},
        )

    def check_world(self, world: int) -> None:
        """Raise unless there is one part per rank.

        Raises:
            ConfigError: the store was made for another number of ranks.
        """
        if world != self.num_parts:
            raise ConfigError(
                f"The store has {self.num_parts} parts, and the job has {world} ranks.",
                hint=f"set data.num_parts={world} (or null for one part per rank), or start {self.num_parts} ranks.",
            )

    @property
    def all_offsets(self) -> dict[NodeOrEdgeType, Array]:
        """Return the offsets of all node types and edge types."""
        offsets: dict[NodeOrEdgeType, Array] = dict(self.offsets.items())
        offsets.update(self.edge_offsets.items())
        return offsets

    def range(self, graph_type: NodeOrEdgeType, part: int) -> tuple[int, int]:
        """Return the first id of a part, and the first after it."""
        starts = self.all_offsets[graph_type]
        return int(starts[part]), int(starts[part + 1])

    def count(self, graph_type: NodeOrEdgeType) -> int:
        """Return the nodes, or edges, of a type over all parts."""
        return int(self.all_offsets[graph_type][-1])

    def owner(self, graph_type: NodeOrEdgeType, ids: Any) -> Array:
        """Return the part of each global id, or global edge position: int64, of the same shape."""
        return owner_of(ids, self.all_offsets[graph_type])
