"""Which part owns a node or an edge: P + 1 offsets of each type, and no array of all nodes or edges."""

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
Kind = str | EdgeType
"""A node type or an edge type."""


@dataclass(frozen=True)
class PartBook:
    """Where the parts of a store begin, in the two id spaces that a batch names nodes and edges by.

    A *global id* is a node's number in the store; part p owns ``offsets[type][p] .. offsets[type][p+1]-1``. A *global
    edge position* is an edge's place in the parts' columns laid end to end; part p has
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
        """Read the offsets of a store's manifest; nothing else is opened."""
        nodes, counts = store.manifest.node_types, store.manifest.partition.edges_by_type
        return cls(
            store.num_parts,
            {name: np.array(spec.offsets, np.int64) for name, spec in nodes.items()},
            {
                kind: np.concatenate([[0], np.cumsum(counts[edge_key(kind)], dtype=np.int64)])
                for kind in store.edge_types
            },
        )

    def check_world(self, world: int) -> None:
        """Raise unless there is one part for each rank.

        Raises:
            ConfigError: the store was made for another number of ranks.
        """
        if world != self.num_parts:
            raise ConfigError(
                f"The store has {self.num_parts} parts, and the job has {world} ranks.",
                hint=f"set data.num_parts={world} (or null: as many as there are ranks), or start {self.num_parts} "
                "ranks.",
            )

    def range(self, kind: Kind, part: int) -> tuple[int, int]:
        """The first id of a part, and the first after it."""
        starts = self._starts(kind)
        return int(starts[part]), int(starts[part + 1])

    def count(self, kind: Kind) -> int:
        """Nodes, or edges, of a type over all parts."""
        return int(self._starts(kind)[-1])

    def owner(self, kind: Kind, ids: Any) -> Array:
        """The part of each global id, or global edge position: int64, of the same shape."""
        return owner_of(ids, self._starts(kind))

    def _starts(self, kind: Kind) -> Array:
        return self.offsets[kind] if isinstance(kind, str) else self.edge_offsets[kind]
