"""Entity types and relations of a graph: ``data.entities`` and ``data.relations``, as PyTorch-BigGraph defines them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.errors import ConfigError

WILDCARD = "*"
"""The name of the entry that applies to every relation without an entry."""
SINGLE_TYPE = "node"
"""The entity type of a graph without types."""

Entries = Sequence[Mapping[str, Any]]
RelationEnds = Sequence[tuple[str, str]]
"""The types of the heads and of the tails, for each relation."""


class DataSchema:
    """The entity types of a graph, and the types that each relation joins.

    The schema ignores the keys of an entry that only a model reads (``dimension``, ``operator``, ``weight``,
    ``all_negs``).

    Args:
        entities: settings by type: ``num_partitions``, either 1 or the store's number of parts (None), and
            ``featurized``, the file of an entity's features; None: the types are those that ``relations`` names.
        relations: each with ``name``, ``lhs`` (the type of its heads) and ``rhs`` (of its tails). The entry ``*``, or
            one without a name, applies to every relation without an entry. None, or entries without ``lhs`` and
            ``rhs``: the graph has one type.

    Attributes:
        types: names of the types, in the order of their ids; :data:`SINGLE_TYPE` alone in a graph without types.

    Raises:
        ConfigError: an entry is incomplete, or names an unknown type.
    """

    def __init__(self, entities: Mapping[str, Mapping[str, Any] | None] | None, relations: Entries | None) -> None:
        self._entities = {str(name): dict(entry or {}) for name, entry in (entities or {}).items()}
        self._ends: dict[str, tuple[str, str]] = {}
        for entry in relations or []:
            lhs, rhs = entry.get("lhs"), entry.get("rhs")
            if (lhs is None) != (rhs is None) or (lhs is None and len(self._entities) > 1):
                raise ConfigError(
                    f"data.relations: {dict(entry)} has no {'lhs' if lhs is None else 'rhs'}.",
                    hint="give each relation the entity types that it joins: {name: N, lhs: TYPE, rhs: TYPE}.",
                )
            if lhs is not None:
                self._ends[str(entry.get("name") or WILDCARD)] = str(lhs), str(rhs)
        named = list(dict.fromkeys(end for ends in self._ends.values() for end in ends))
        unknown = [name for name in named if self._entities and name not in self._entities]
        if unknown:
            raise ConfigError(
                f"data.relations names the type {unknown[0]!r}; the types of data.entities are "
                f"{', '.join(self._entities)}.",
                hint=f"add {unknown[0]}: {{}} to data.entities.",
            )
        check_type_names((*self._entities, *named))
        self.types: tuple[str, ...] = tuple(self._entities or named) or (SINGLE_TYPE,)

    @property
    def has_settings(self) -> bool:
        """Whether any type or relation has settings, which refer to names that only the data contains."""
        return bool(self._entities or self._ends)

    @property
    def is_typed(self) -> bool:
        """Whether the relations join entity types."""
        return bool(self._ends)

    def identity(self) -> dict[str, Any]:
        """Return what a store depends on, JSON-serialisable; empty in a graph without types."""
        if not self.is_typed:
            return {}
        return {"types": list(self.types), "ends": self._ends, "together": self.unpartitioned}

    @property
    def unpartitioned(self) -> list[str]:
        """The types that are never partitioned."""
        entries = self._entities.items()
        return [name for name, entry in entries if entry.get("num_partitions") == 1 or entry.get("featurized")]

    @property
    def featurized(self) -> dict[str, Any]:
        """The file of features of each featurized type."""
        return {name: entry["featurized"] for name, entry in self._entities.items() if entry.get("featurized")}

    def check_partitions(self, num_parts: int, key: str = "data.num_parts") -> None:
        """Check ``num_partitions`` of each type against the store.

        Args:
            num_parts: parts of the store.
            key: the setting that gives ``num_parts``.

        Raises:
            ConfigError: a type's number is neither 1 nor ``num_parts``.
        """
        for name, entry in self._entities.items():
            partitions = entry.get("num_partitions")
            setting = f"data.entities.{name}.num_partitions"
            if entry.get("featurized") and partitions not in (None, 1):
                raise ConfigError(
                    f"{setting}={partitions} was set, but featurized types are not partitioned.",
                    hint="remove num_partitions.",
                )
            if partitions not in (None, 1, num_parts):
                raise ConfigError(
                    f"{setting}={partitions} was set, and the tables have {num_parts} partitions: "
                    f"{partitions} is neither 1 nor {num_parts}.",
                    hint=f"set {key}={partitions}, or remove {setting}.",
                )

    def relation_ends(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """Return the types that each of the relations ``names`` joins.

        Raises:
            ConfigError: a relation has no entry.
        """
        if not self.is_typed:
            return [(SINGLE_TYPE, SINGLE_TYPE)] * len(names)
        for name in names:
            if name not in self._ends and WILDCARD not in self._ends:
                raise ConfigError(
                    f"the data has the relation {name!r}; the relations of data.relations are {', '.join(self._ends)}.",
                    hint="add an entry for it, or {name: '*', lhs: TYPE, rhs: TYPE} for all others.",
                )
        return [self._ends.get(name) or self._ends[WILDCARD] for name in names]

    def only_ends(self) -> tuple[str, str]:
        """Return the types that every edge joins, for edges without relations.

        Raises:
            ConfigError: the schema does not have exactly one entry.
        """
        if len(self._ends) != 1:
            raise ConfigError(
                f"data.relations has {len(self._ends)} entries, and the edges have no relations.",
                hint="set data.relation to the column of relations, or give one entry.",
            )
        return next(iter(self._ends.values()))

    def facts(self, counts: Mapping[str, int], ends: RelationEnds) -> dict[str, Any]:
        """Return the store's facts about types; empty in a graph without types.

        Args:
            counts: number of entities by type.
            ends: the types that each relation joins.
        """
        if not self.is_typed:
            return {}
        return {
            "entity_types": {name: int(counts[name]) for name in self.types},
            "relation_ends": [list(pair) for pair in ends],
            "unpartitioned": self.unpartitioned,
        }


def check_type_names(names: Iterable[str]) -> None:
    """Refuse the name of a node type that the store cannot save.

    Raises:
        ConfigError: a type is called ``relation``.
    """
    if "relation" in names:
        raise ConfigError(
            "the entity type name 'relation' is reserved: the store saves the names of relations under it.",
            hint="rename the type.",
        )


def type_numbers(types: Sequence[str], ends: RelationEnds) -> NDArray[np.int64]:
    """Return the positions in ``types`` of each relation's head type and tail type, ``[2, R]``."""
    number = {name: position for position, name in enumerate(types)}
    return np.array([[number[end] for end in pair] for pair in ends], dtype=np.int64).reshape(-1, 2).T


def move_unpartitioned(assignment: Tensor, facts: Mapping[str, Any]) -> Tensor:
    """Return an assignment of nodes to parts with all unpartitioned types in part 0.

    Args:
        assignment: the part of each node, ``[N]``.
        facts: of the graph.
    """
    if not facts.get("unpartitioned"):
        return assignment
    moved, first = assignment.clone(), 0
    for name, count in facts["entity_types"].items():
        if name in facts["unpartitioned"]:
            moved[first : first + count] = 0
        first += count
    return torch.as_tensor(moved)
