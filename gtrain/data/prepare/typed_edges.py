"""Entity types of an edge list: renumber the ids of the files so that each type's ids are consecutive."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gtrain.data.ingest.columns import Column
from gtrain.data.schema import DataSchema, RelationEnds, type_numbers

if TYPE_CHECKING:
    from gtrain.data.ingest.edge_list import EdgeList

Ints = NDArray[np.int64]
SIDES = ("source", "target")


class TypedEdges:
    """Renumbers the ends of an edge list, a block of edges at a time.

    If ids are names, a type has the entities that its relations name, in the order of their ids in the list. If ids are
    integers, it has all from 0 to the largest.

    Args:
        edges: the list; its columns of ends are replaced.
        schema: which types relations join.
        folder: folder of large columns.

    Attributes:
        counts: entities by type.
        ends: types of heads and tails by relation.
        names: names of the entities by type; empty if ids are integers.
    """

    def __init__(self, edges: EdgeList, schema: DataSchema, folder: Path) -> None:
        self._types = schema.types
        self.ends = self._ends_of(edges, schema)
        self._type_numbers = type_numbers(schema.types, self.ends)
        self._relations = edges.columns.get("edge_type")
        new_ids = self._new_ids(edges)
        self.counts = {name: int(ids.max(initial=-1)) + 1 for name, ids in zip(self._types, new_ids, strict=True)}
        self.names: Mapping[str, Any] = {}
        if edges.names is not None:
            held = (pa.array(np.flatnonzero(ids >= 0)) for ids in new_ids)
            self.names = {name: edges.names.take(ids) for name, ids in zip(self._types, held, strict=True)}
        firsts = np.cumsum([0, *self.counts.values()])
        for side, name in enumerate(SIDES):
            column = Column(folder, np.int32)
            for ids, kind in self._blocks(edges.columns[name], side):
                renumbered = np.empty(len(ids), dtype=np.int64)
                for number, numbering in enumerate(new_ids):
                    here = kind == number
                    renumbered[here] = numbering[ids[here]] + firsts[number]
                column.append(renumbered)
            edges.columns[name] = column

    @property
    def num_nodes(self) -> int:
        """Entities of all types."""
        return sum(self.counts.values())

    def names_of(self, name: str) -> list[str]:
        """Return the names of a type's entities; if ids are integers, the ids as text."""
        return self.names[name].to_pylist() if self.names else [str(entity) for entity in range(self.counts[name])]

    @staticmethod
    def _ends_of(edges: EdgeList, schema: DataSchema) -> RelationEnds:
        if "edge_type" not in edges.columns:
            return [schema.only_ends()]
        if edges.relations is not None:
            return schema.relation_ends(edges.relations.to_pylist())
        largest = max((int(block.max()) for block in edges.columns["edge_type"].chunks() if block.size), default=-1)
        return schema.relation_ends([str(relation) for relation in range(largest + 1)])

    def _new_ids(self, edges: EdgeList) -> list[Ints]:
        """Return for each type the new id, within the type, of each id of the source; -1 for ids of other types."""
        present = np.zeros((len(self._types), edges.num_nodes), dtype=np.bool_)
        for side, name in enumerate(SIDES):
            for ids, kind in self._blocks(edges.columns[name], side):
                present[kind, ids] = True
        if edges.names is None:
            # Ids are the integers themselves, up to the largest of the type.
            for row in present:
                row[: int(np.flatnonzero(row)[-1]) + 1 if row.any() else 0] = True
        return [np.where(row, np.cumsum(row) - 1, -1) for row in present]

    def _blocks(self, column: Column, side: int) -> Any:
        """Yield, a block of edges at a time, the ids at one side of the edges and the numbers of their types."""
        kinds = self._type_numbers[side]
        if self._relations is None:
            return ((ids, np.full(len(ids), kinds[0])) for ids in column.chunks())
        pairs = zip(column.chunks(), self._relations.chunks(), strict=True)
        return ((ids, kinds[relation]) for ids, relation in pairs)
