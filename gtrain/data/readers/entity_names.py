"""The dictionaries of a knowledge graph: entities by type, and relations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gtrain.data.readers.triples import Triples
from gtrain.data.schema import DataSchema, places

Ints = NDArray[np.int64]


class EntityNames:
    """Numbers entities and relations in the order in which triples first name them, heads before tails.

    Args:
        triples: whose names are known.
        schema: which types relations join.

    Attributes:
        relations: names, a pyarrow array of strings.
        entities: the same by type.
        ends: types of the heads and of the tails of each relation.

    Raises:
        ConfigError: the schema does not have a relation.
    """

    def __init__(self, triples: Sequence[Triples], schema: DataSchema) -> None:
        heads, relations, tails = zip(*(found.columns for found in triples), strict=True)
        self.relations = _unique([chunk for column in relations for chunk in column.chunks])
        self.ends = schema.ends(self.relations.to_pylist() if schema.is_typed else [""] * len(self.relations))
        self._types, self._places = schema.types, places(schema.types, self.ends)
        self.entities: dict[str, Any] = {}
        codes = [_encode(column, self.relations) for column in relations]
        for number, name in enumerate(schema.types):
            sides = [(heads, self._places[0]), (tails, self._places[1])]
            chunks = [
                chunk
                for columns, of in sides
                for column, code in zip(columns, codes, strict=True)
                for chunk in self._those(column, of[code] == number).chunks
            ]
            self.entities[name] = _unique(chunks)

    @property
    def counts(self) -> dict[str, int]:
        """Entities of each type."""
        return {name: len(names) for name, names in self.entities.items()}

    def encode(self, triples: Triples) -> Ints:
        """Return heads, relations and tails as ids ``[3, T]``, -1 where there is no such name.

        The ids of a type come after those of the types before it.
        """
        relation = _encode(triples.columns[1], self.relations)
        found = np.full((3, len(triples)), -1, dtype=np.int64)
        found[1] = relation
        for row, side in ((0, 0), (2, 1)):
            of = np.where(relation >= 0, self._places[side][relation], -1) if len(self._types) > 1 else 0 * relation
            first = 0
            for number, name in enumerate(self._types):
                here = of == number
                ids = _encode(self._those(triples.columns[row], here), self.entities[name])
                found[row, here] = np.where(ids >= 0, ids + first, -1)
                first += len(self.entities[name])
        return found

    def _those(self, column: Any, mask: NDArray[np.bool_]) -> Any:
        return column if len(self._types) == 1 else column.filter(pa.array(mask))


def _unique(chunks: list[Any]) -> Any:
    return pc.unique(pa.chunked_array(chunks, pa.string()))


def _encode(column: Any, names: Any) -> Ints:
    """Return the position of each string in ``names``, int64; -1 where it is not there."""
    found = pc.fill_null(pc.index_in(column, value_set=names), -1)
    ids: Ints = found.to_numpy().astype(np.int64)
    return ids
