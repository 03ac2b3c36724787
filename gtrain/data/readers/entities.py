"""Entity types of a knowledge graph in files: dictionaries of names, and bags of features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.data.module import file_stamp
from gtrain.data.readers.files import find_file
from gtrain.data.readers.triples import Triples
from gtrain.data.schema import DataSchema, places
from gtrain.errors import DataError
from gtrain.graph.store.entities import feature_kind
from gtrain.graph.store.tables import csr_tensor

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


class EntityFeatures:
    """The bags of one featurized type, read from a file.

    Each line is the name of an entity and its features, separated by tabs; features are any strings. Lines of entities
    that the graph does not have are left out.

    Args:
        key: the option that names the file, for messages.
        name: the file, as it is or below ``root``.
        root: folder of raw files.
        entities: names of the type's entities.

    Attributes:
        features: names, in the order in which entities of the graph first have them.
        bags: features of each entity, in the order of ``entities``.

    Raises:
        DataError: names the file and the line that is malformed, or an entity without a line.
    """

    def __init__(self, key: str, name: str, root: Path, entities: Sequence[str]) -> None:
        self.path = find_file(key, name, root)
        lines = self._lines()
        missing = [entity for entity in entities if entity not in lines]
        if missing:
            raise DataError(
                f"{self.path}: {len(missing)} of {len(entities)} entities have no line, such as {missing[0]!r}",
                hint="give each entity of the type a line with its features",
            )
        number: dict[str, int] = {}
        self.bags = [[number.setdefault(word, len(number)) for word in lines[entity]] for entity in entities]
        self.features = list(number)

    def _lines(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for at, line in enumerate(self.path.read_text(encoding="utf-8-sig").split("\n"), start=1):
            entity, *features = line.split("\t")
            if not line:
                continue
            if not features or "" in features or entity in found:
                reason = "comes twice" if entity in found else "has no features" if not features else "has an empty one"
                raise DataError(
                    f"{self.path}, line {at}: {entity!r} {reason}",
                    hint="write in each line an entity and its features, separated by tabs",
                )
            found[entity] = features
        return found


def read_features(schema: DataSchema, root: Path, entities: Mapping[str, Sequence[str]]) -> dict[str, EntityFeatures]:
    """Read the features of the featurized types.

    Args:
        schema: names their files.
        root: folder of raw files.
        entities: names of the entities by type.
    """
    return {
        name: EntityFeatures(_key(name), str(file), root, entities[name]) for name, file in schema.featurized.items()
    }


def stamps_of_features(schema: DataSchema, root: Path) -> dict[str, Any]:
    """Return what a store depends on; empty where no type is featurized."""
    found = {name: file_stamp(find_file(_key(name), str(file), root)) for name, file in schema.featurized.items()}
    return {"features": found} if found else {}


def facts_of_features(found: Mapping[str, EntityFeatures]) -> dict[str, Any]:
    """Return how many features each featurized type has; empty where there is none."""
    return {"features": {name: len(features.features) for name, features in found.items()}} if found else {}


def names_of_features(found: Mapping[str, EntityFeatures]) -> dict[str, list[str]]:
    """Return the features' names, by what a store calls them."""
    return {feature_kind(name): features.features for name, features in found.items()}


def _key(name: str) -> str:
    return f"data.entities.{name}.featurized"


def bag_rows(counts: Mapping[str, int], found: Mapping[str, EntityFeatures]) -> Tensor:
    """Return the node tensor ``bag``, ``torch.sparse_csr``: a row for each entity of all types, one after the other.

    Args:
        counts: entities by type.
        found: features of the featurized types.
    """
    bags: list[list[int]] = []
    for name, count in counts.items():
        bags += found[name].bags if name in found else [[]] * count
    pointer = torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0)
    ids = torch.tensor([feature for bag in bags for feature in bag], dtype=torch.int64)
    columns = max(len(features.features) for features in found.values())
    return csr_tensor(pointer, ids, torch.ones(len(ids)), (len(bags), columns))
