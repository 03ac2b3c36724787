"""Features of the entities of a type: for each a bag of strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtrain.data.module import file_stamp
from gtrain.data.readers.files import find_file
from gtrain.data.schema import DataSchema
from gtrain.errors import DataError
from gtrain.graph.store.entities import feature_kind
from gtrain.graph.store.tables import csr_tensor


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
