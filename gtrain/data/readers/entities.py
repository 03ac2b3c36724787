"""Number the entities of a knowledge graph by type, and read their bags of features."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.data.module import file_stamp
from gtrain.data.readers.files import Ints, find_file
from gtrain.data.readers.triples import Triples
from gtrain.data.schema import DataSchema, type_numbers
from gtrain.errors import DataError
from gtrain.graph.store.entities import feature_kind
from gtrain.graph.store.tables import csr_tensor


class EntityNames:
    """Numbers entities and relations in the order in which triples first name them, heads before tails.

    Args:
        triples: the triples whose names get numbers.
        schema: the types that relations join.

    Attributes:
        relations: names of the relations, a pyarrow array of strings.
        entities: names of the entities by type, likewise.
        ends: types of the heads and of the tails of each relation.

    Raises:
        ConfigError: the schema lacks a relation.
    """

    def __init__(self, triples: Sequence[Triples], schema: DataSchema) -> None:
        heads, relations, tails = zip(*(file.columns for file in triples), strict=True)
        self.relations = _unique(relations)
        self.ends = schema.relation_ends(self.relations.to_pylist() if schema.is_typed else [""] * len(self.relations))
        self._types, self._type_numbers = schema.types, type_numbers(schema.types, self.ends)
        codes = [_encode(column, self.relations) for column in relations]
        self.entities: dict[str, Any] = {
            name: _unique(
                self._select(column, types[code] == number)
                for columns, types in zip((heads, tails), self._type_numbers, strict=True)
                for column, code in zip(columns, codes, strict=True)
            )
            for number, name in enumerate(schema.types)
        }

    @property
    def counts(self) -> dict[str, int]:
        """Number of entities of each type."""
        return {name: len(names) for name, names in self.entities.items()}

    def encode(self, triples: Triples) -> Ints:
        """Return heads, relations and tails as ids ``[3, T]``, -1 for unknown names.

        The ids of a type follow those of the preceding types.
        """
        relation = _encode(triples.columns[1], self.relations)
        ids = np.full((3, len(triples)), -1, dtype=np.int64)
        ids[1] = relation
        for row, numbers in zip((0, 2), self._type_numbers, strict=True):
            types = np.where(relation >= 0, numbers[relation], -1) if len(self._types) > 1 else 0 * relation
            first = 0
            for number, names in enumerate(self.entities.values()):
                chosen = types == number
                codes = _encode(self._select(triples.columns[row], chosen), names)
                ids[row, chosen] = np.where(codes >= 0, codes + first, -1)
                first += len(names)
        return ids

    def _select(self, column: Any, mask: NDArray[np.bool_]) -> Any:
        return column if len(self._types) == 1 else column.filter(pa.array(mask))


def _unique(columns: Iterable[Any]) -> Any:
    return pc.unique(pa.chunked_array([chunk for column in columns for chunk in column.chunks], pa.string()))


def _encode(column: Any, names: Any) -> Ints:
    """Return the position of each string in ``names``, int64; -1 for unknown strings."""
    return pc.fill_null(pc.index_in(column, value_set=names), -1).to_numpy().astype(np.int64)


class EntityFeatures:
    """The bags of features of one featurized type.

    Each line of the file has the name of an entity and its features, which are any strings, separated by tabs. Lines of
    entities that the graph lacks are ignored.

    Args:
        key: the option that names the file, for messages.
        name: the file, as it is or below ``root``.
        root: folder of raw files.
        entities: names of the type's entities.

    Attributes:
        features: names of the features, in the order in which the graph's entities first have them.
        bags: features of each entity, in the order of ``entities``.

    Raises:
        DataError: names the file and the malformed line, or an entity without a line.
    """

    def __init__(self, key: str, name: str, root: Path, entities: Sequence[str]) -> None:
        path = find_file(key, name, root)
        lines = _read_lines(path)
        missing = [entity for entity in entities if entity not in lines]
        if missing:
            raise DataError(
                f"{path}: {len(missing)} of {len(entities)} entities have no line, such as {missing[0]!r}",
                hint="give each entity of the type a line with its features",
            )
        number: dict[str, int] = {}
        self.bags = [[number.setdefault(word, len(number)) for word in lines[entity]] for entity in entities]
        self.features = list(number)


def _read_lines(path: Path) -> dict[str, list[str]]:
    features_of: dict[str, list[str]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        entity, *features = line.split("\t")
        if not line:
            continue
        if not features or "" in features or entity in features_of:
            fault = "has an empty feature" if features else "has no features"
            fault = "occurs twice" if entity in features_of else fault
            raise DataError(
                f"{path}, line {number}: {entity!r} {fault}",
                hint="write in each line an entity and its features, separated by tabs",
            )
        features_of[entity] = features
    return features_of


def _feature_files(schema: DataSchema) -> Iterable[tuple[str, str, str]]:
    """Yield each featurized type, the option that names its file of features, and the file."""
    for name, file in schema.featurized.items():
        yield name, f"data.entities.{name}.featurized", str(file)


def read_features(
    schema: DataSchema, root: Path, counts: Mapping[str, int], names_of: Callable[[str], Sequence[str]]
) -> tuple[dict[str, Tensor], dict[str, list[str]], dict[str, Any]]:
    """Read the features of each featurized type.

    Args:
        schema: names the files.
        root: folder of raw files.
        counts: number of entities by type.
        names_of: returns the names of a type's entities.

    Returns:
        The node tensor ``bag``, see :func:`bag_tensor`; the names of the features, by the node type under which a store
        saves them; and the fact ``features``, their number by type. All are empty without featurized types.
    """
    features = {name: EntityFeatures(key, file, root, names_of(name)) for name, key, file in _feature_files(schema)}
    if not features:
        return {}, {}, {}
    sizes = {name: len(entry.features) for name, entry in features.items()}
    names = {feature_kind(name): entry.features for name, entry in features.items()}
    return {"bag": bag_tensor(counts, features, max(sizes.values()))}, names, {"features": sizes}


def feature_stamps(schema: DataSchema, root: Path) -> dict[str, Any]:
    """Return the stamps of the files of features; empty without featurized types."""
    stamps = {name: file_stamp(find_file(key, file, root)) for name, key, file in _feature_files(schema)}
    return {"features": stamps} if stamps else {}


def bag_tensor(counts: Mapping[str, int], features: Mapping[str, Any], num_features: int) -> Tensor:
    """Return the node tensor ``bag``, ``torch.sparse_csr``: one row per entity, type after type.

    Args:
        counts: number of entities by type.
        features: objects with the ``bags`` of each featurized type: the feature ids of each entity.
        num_features: the largest number of features of a type.
    """
    by_type = [features[name].bags if name in features else [()] * count for name, count in counts.items()]
    bags = list(itertools.chain.from_iterable(by_type))
    pointer = torch.tensor([0, *map(len, bags)]).cumsum(0)
    ids = torch.from_numpy(np.fromiter(itertools.chain.from_iterable(bags), np.int64))
    return csr_tensor(pointer, ids, torch.ones(len(ids)), (len(bags), num_features))
