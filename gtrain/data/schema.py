"""Entity types and relations, as PyTorch-BigGraph's configuration says them: ``data.entities``, ``data.relations``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.errors import ConfigError

EVERY = "*"
"""The name of an entry that speaks of all relations without one of their own."""
ONE_TYPE = "node"

Entries = Sequence[Mapping[str, Any]]
Ends = Sequence[tuple[str, str]]


class DataSchema:
    """Which types of entities a graph has, and which of them each relation joins.

    The keys of an entry that a model reads (``dimension``, ``operator``, ``weight``, ``all_negs``) do not matter here.

    Args:
        entities: settings by type: ``num_partitions``, 1 or as many as the store has parts (None), and ``featurized``,
            what an entity's features are read from; None: the types are those that relations name.
        relations: each with ``name``, ``lhs`` (the type of its heads) and ``rhs`` (of its tails); ``*``, or no name, is
            all relations without an entry of their own. None, or entries without ``lhs`` and ``rhs``: one type.

    Attributes:
        types: names of the types, in the order of their ids; :data:`ONE_TYPE` alone where there are none.

    Raises:
        ConfigError: an entry lacks something, or names a type that there is not.
    """

    def __init__(self, entities: Mapping[str, Mapping[str, Any] | None] | None, relations: Entries | None) -> None:
        self._entities = {str(name): dict(entry or {}) for name, entry in (entities or {}).items()}
        self._ends: dict[str, tuple[str, str]] = {}
        for entry in relations or []:
            lhs, rhs = entry.get("lhs"), entry.get("rhs")
            if (lhs is None) != (rhs is None) or (lhs is None and len(self._entities) > 1):
                raise ConfigError(
                    f"data.relations: {dict(entry)} has no {'lhs' if lhs is None else 'rhs'}.",
                    hint="say which entity types a relation joins: {name: N, lhs: TYPE, rhs: TYPE}.",
                )
            if lhs is not None:
                self._ends[str(entry.get("name") or EVERY)] = str(lhs), str(rhs)
        named = list(dict.fromkeys(end for ends in self._ends.values() for end in ends))
        unknown = [name for name in named if self._entities and name not in self._entities]
        if unknown:
            raise ConfigError(
                f"data.relations joins the type {unknown[0]!r}, and data.entities has {', '.join(self._entities)}.",
                hint=f"add {unknown[0]}: {{}} to data.entities.",
            )
        if "relation" in (*self._entities, *named):
            raise ConfigError("an entity type is called relation.", hint="names of relations are kept so; rename it.")
        self.types: tuple[str, ...] = tuple(self._entities or named) or (ONE_TYPE,)

    @property
    def says_more(self) -> bool:
        """Whether anything is said of types or relations, by names that only the data tell."""
        return bool(self._entities or self._ends)

    @property
    def is_typed(self) -> bool:
        """Whether anything is said of types."""
        return bool(self._ends)

    def identity(self) -> dict[str, Any]:
        """Return what a store depends on, JSON; empty where there are no types."""
        if not self.is_typed:
            return {}
        return {"types": list(self.types), "ends": self._ends, "together": self.unpartitioned}

    @property
    def unpartitioned(self) -> list[str]:
        """The types that are never cut."""
        entries = self._entities.items()
        return [name for name, entry in entries if entry.get("num_partitions") == 1 or entry.get("featurized")]

    @property
    def featurized(self) -> dict[str, Any]:
        """What the features of featurized types are read from."""
        return {name: entry["featurized"] for name, entry in self._entities.items() if entry.get("featurized")}

    def check_partitions(self, num_parts: int, key: str = "data.num_parts") -> None:
        """Check the types' numbers of partitions against that of the store.

        Args:
            num_parts: of the store.
            key: the setting that it comes from.

        Raises:
            ConfigError: one is neither 1 nor that.
        """
        for name, entry in self._entities.items():
            own = entry.get("num_partitions")
            if entry.get("featurized") and own not in (None, 1):
                raise ConfigError(
                    f"data.entities.{name}.num_partitions={own} was set, and the type is featurized.",
                    hint="features are not cut: leave num_partitions out.",
                )
            if own not in (None, 1, num_parts):
                raise ConfigError(
                    f"data.entities.{name}.num_partitions={own} was set, and the tables are cut into {num_parts}: "
                    f"{own} is neither 1 nor {num_parts}.",
                    hint=f"set {key}={own}, or leave data.entities.{name}.num_partitions out.",
                )

    def ends(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """Return the types that each relation joins.

        Args:
            names: of the relations.

        Raises:
            ConfigError: a relation has no entry.
        """
        if not self.is_typed:
            return [(ONE_TYPE, ONE_TYPE)] * len(names)
        rest = self._ends.get(EVERY)
        found = []
        for name in names:
            ends = self._ends.get(name, rest)
            if ends is None:
                raise ConfigError(
                    f"the data has the relation {name!r}, and data.relations has {', '.join(self._ends)}.",
                    hint="give it an entry, or add {name: '*', lhs: TYPE, rhs: TYPE} for all others.",
                )
            found.append(ends)
        return found

    def one(self) -> tuple[str, str]:
        """Return what all edges join, where they have no relation.

        Raises:
            ConfigError: there is more than one entry.
        """
        if len(self._ends) != 1:
            raise ConfigError(
                f"data.relations has {len(self._ends)} entries, and the edges have no relations.",
                hint="name the column of relations (data.relation), or give one entry.",
            )
        return next(iter(self._ends.values()))

    def facts(self, counts: Mapping[str, int], ends: Ends) -> dict[str, Any]:
        """Return facts of the store; none where there are no types.

        Args:
            counts: entities of each type.
            ends: of each relation.
        """
        if not self.is_typed:
            return {}
        ordered = {name: int(counts[name]) for name in self.types}
        return {
            "entity_types": ordered,
            "relation_ends": [list(pair) for pair in ends],
            "unpartitioned": self.unpartitioned,
        }


def places(types: Sequence[str], ends: Ends) -> NDArray[np.int64]:
    """Return the number of the heads' and of the tails' type of each relation, ``[2, R]``."""
    number = {name: place for place, name in enumerate(types)}
    return np.array([[number[end] for end in pair] for pair in ends], dtype=np.int64).reshape(-1, 2).T


def kept_together(assignment: Tensor, facts: Mapping[str, Any]) -> Tensor:
    """Return the part of each node, those of types that are not cut in part 0.

    Args:
        assignment: the part of each node, ``[N]``.
        facts: of the graph.
    """
    if not facts.get("unpartitioned"):
        return assignment
    found, first = assignment.clone(), 0
    for name, count in facts["entity_types"].items():
        if name in facts["unpartitioned"]:
            found[first : first + count] = 0
        first += count
    return torch.as_tensor(found)
