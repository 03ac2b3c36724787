"""Names of entities and relations, and their ids."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gtrain.errors import ConfigError
from gtrain.graph.store import Store
from gtrain.graph.store.entities import EntityType, entity_types
from gtrain.graph.store.names import JOINT, Names

_COMPARED = 100_000
"""Names that are compared with an unknown one."""


@dataclass(frozen=True)
class Vocabulary:
    """The names of one entity type, or of the relations; without names in the data their numbers are the names.

    Attributes:
        kind: what messages call one of them.
        count: how many there are, n.
        names: by id; None: their numbers, from 0.
    """

    kind: str
    count: int
    names: Names | None

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the names of ids; columns of a key are separated by tabs."""
        numbers = list(ids)
        if self.names is None:
            return [str(number) for number in numbers]
        return [name.replace(JOINT, "\t") for name in self.names.decode(numbers)]

    def find(self, texts: Sequence[str]) -> Tensor:
        """Return the ids of names, int64 ``[k]``; -1 for unknown ones."""
        if self.names is not None:
            return self.names.encode([text.replace("\t", JOINT) for text in texts])
        numbers = [int(text) if text.isdecimal() else -1 for text in texts]
        return torch.tensor([number if number < self.count else -1 for number in numbers], dtype=torch.int64)

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return the ids of names, int64 ``[k]``.

        Raises:
            ConfigError: a name is unknown.
        """
        ids = self.find(texts)
        for text, number in zip(texts, ids.tolist(), strict=True):
            if number < 0:
                raise unknown(text, [self])
        return ids


def unknown(text: str, vocabularies: Sequence[Vocabulary]) -> ConfigError:
    """Return the error for a name that none of the vocabularies has."""
    kinds = " or ".join(vocabulary.kind for vocabulary in vocabularies)
    return ConfigError(f"{text!r} was given; the data has no {kinds} of this name.", hint=_hint(text, vocabularies))


def _hint(text: str, vocabularies: Sequence[Vocabulary]) -> str:
    if all(vocabulary.names is None for vocabulary in vocabularies):
        return f"the data has no names: give a number from 0 to {vocabularies[0].count - 1}."
    known = [name for each in vocabularies for name in each.decode(range(min(each.count, _COMPARED)))]
    close = difflib.get_close_matches(text, known, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"names are those of the data, such as {known[0]!r}."


def entity_vocabularies(store: Store) -> dict[str, Vocabulary]:
    """Return the names of the entities of each type, in the order of the types."""

    def vocabulary(entity: EntityType) -> Vocabulary:
        kind = "entity" if entity.name == "node" else entity.name
        return Vocabulary(kind, entity.count, store.names(entity.name))

    return {entity.name: vocabulary(entity) for entity in entity_types(store)}


def relation_vocabulary(store: Store, count: int) -> Vocabulary:
    """Return the names of the relations."""
    return Vocabulary("relation", count, store.names("relation"))
