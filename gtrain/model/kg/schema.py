"""Entity types and relations of an embedding model: those of the data, with their settings from the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gtrain.errors import ConfigError

EVERY = "*"
"""The name of an entry of ``data.relations`` that holds for every relation that no other entry names."""
_ENTITY_KEYS = ("num_partitions", "dimension", "featurized")
_RELATION_KEYS = ("name", "lhs", "rhs", "operator", "weight", "all_negs")


@dataclass(frozen=True)
class EntitySpec:
    """One entity type.

    Attributes:
        name: its name.
        first: id of its first entity, among the ids of all types.
        count: its entities.
        dimension: columns of an embedding, D.
    """

    name: str
    first: int
    count: int
    dimension: int


@dataclass(frozen=True)
class GroupSpec:
    """Relations that join the same two types by the same operator and have the same negatives.

    Attributes:
        lhs, rhs: numbers of the heads' type and of the tails' type.
        operator: its name.
        all_negs: whether all entities are negatives.
        relations: their ids.
    """

    lhs: int
    rhs: int
    operator: str
    all_negs: bool
    relations: tuple[int, ...]


@dataclass(frozen=True)
class EmbeddingSchema:
    """The entity types to embed and the relations that join them.

    Attributes:
        entities: the types in the order of their ids.
        groups: the relations.
        weights: factor of the loss of each relation's edges; None: all 1.
    """

    entities: tuple[EntitySpec, ...]
    groups: tuple[GroupSpec, ...]
    weights: tuple[float, ...] | None

    @property
    def num_relations(self) -> int:
        """R."""
        return sum(len(group.relations) for group in self.groups)


@dataclass(frozen=True)
class GraphTypes:
    """Entity types and relations of the data.

    Attributes:
        entities: number of entities by type.
        ends: types of heads and tails by relation; None: all join the first type with itself.
        names: of the relations; None: they have no names.
        num_relations: R.
    """

    entities: Mapping[str, int]
    ends: Sequence[Sequence[str]] | None
    names: Sequence[str] | None
    num_relations: int


def make_schema(
    types: GraphTypes,
    *,
    dimension: int,
    operator: str,
    all_negs: bool,
    entities: Mapping[str, Mapping[str, Any]] | None,
    relations: Sequence[Mapping[str, Any]] | None,
    weights: Sequence[float] | None,
) -> EmbeddingSchema:
    """Combine the types of the data with the settings of the configuration.

    Args:
        types: of the data.
        dimension, operator, all_negs: defaults of types and relations.
        entities: settings by type; ``dimension`` is read.
        relations: settings by ``name``, with ``operator``, ``weight`` and ``all_negs``; ``*`` names all others.
        weights: a factor for each relation, which multiplies ``weight``.

    Raises:
        ConfigError: a type or relation is not in the data, a setting is unknown, or a relation joins types of
            different dimensions.
    """
    specs = _entities(types, dimension, entities or {})
    entries = _by_relation(types, relations or [])
    numbers = {spec.name: number for number, spec in enumerate(specs)}
    groups: dict[tuple[int, int, str, bool], list[int]] = {}
    for relation in range(types.num_relations):
        entry = entries[relation] if entries else {}
        lhs, rhs = (0, 0) if types.ends is None else (numbers[end] for end in types.ends[relation])
        _check_dimensions(types, relation, specs[lhs], specs[rhs])
        key = (lhs, rhs, str(entry.get("operator") or operator), bool(_setting(entry, "all_negs", all_negs)))
        groups.setdefault(key, []).append(relation)
    group_specs = tuple(GroupSpec(*key, tuple(members)) for key, members in groups.items())
    return EmbeddingSchema(specs, group_specs, _weights(types, entries, weights))


def _entities(
    types: GraphTypes, dimension: int, entries: Mapping[str, Mapping[str, Any] | None]
) -> tuple[EntitySpec, ...]:
    for name, entry in entries.items():
        if name not in types.entities:
            raise ConfigError(
                f"data.entities names the type {name!r}, and the graph has {', '.join(types.entities)}.",
                hint="name types of the graph.",
            )
        _check_keys(f"data.entities.{name}", entry or {}, _ENTITY_KEYS)
    specs, first = [], 0
    for name, count in types.entities.items():
        columns = _setting(entries.get(name) or {}, "dimension", dimension)
        if columns < 1:
            raise ConfigError(f"data.entities.{name}.dimension={columns} was set.", hint="set 1 or more.")
        specs.append(EntitySpec(name, first, count, int(columns)))
        first += count
    return tuple(specs)


def _by_relation(types: GraphTypes, entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the entry of each relation; an empty list if no entry has a setting that a model reads."""
    for entry in entries:
        _check_keys("data.relations", entry, _RELATION_KEYS)
    if not any(
        _setting(entry, key, None) is not None for entry in entries for key in ("operator", "weight", "all_negs")
    ):
        return []
    by_name: dict[str, Mapping[str, Any]] = {}
    for entry in entries:
        name = str(entry.get("name", EVERY))
        if name in by_name:
            raise ConfigError(f"data.relations has two entries for {name!r}.", hint="merge them into one.")
        by_name[name] = entry
    if types.names is None:
        if set(by_name) - {EVERY} and len(entries) != 1:
            raise ConfigError(
                f"data.relations names {next(iter(by_name))!r}, and the relations of this graph have no names.",
                hint="give one entry without a name, for all relations.",
            )
        return [next(iter(by_name.values()))] * types.num_relations
    unknown = [name for name in by_name if name != EVERY and name not in types.names]
    if unknown:
        raise ConfigError(
            f"data.relations names {unknown[0]!r}, and the graph has no such relation.",
            hint=f"its relations are {_listed(types.names)}.",
        )
    return [by_name.get(name, by_name.get(EVERY, {})) for name in types.names]


def _weights(
    types: GraphTypes, entries: list[Mapping[str, Any]], weights: Sequence[float] | None
) -> tuple[float, ...] | None:
    if weights is not None and (len(weights) != types.num_relations or not all(float(w) >= 0 for w in weights)):
        raise ConfigError(
            f"model.relation_weight={list(weights)} was set; the graph has {types.num_relations} relations.",
            hint="give each relation a number that is 0 or more, or set model.relation_weight=null.",
        )
    factors = [float(_setting(entry, "weight", 1.0)) for entry in entries] or [1.0] * types.num_relations
    if not all(factor >= 0 for factor in factors):
        raise ConfigError(f"data.relations has the weight {min(factors)}.", hint="weights are 0 or more.")
    if weights is not None:
        factors = [float(weight) * factor for weight, factor in zip(weights, factors, strict=True)]
    if not any(factors):
        raise ConfigError("the weights of all relations are 0: nothing is left to learn.", hint="raise one of them.")
    return None if weights is None and all(factor == 1 for factor in factors) else tuple(factors)


def _check_dimensions(types: GraphTypes, relation: int, lhs: EntitySpec, rhs: EntitySpec) -> None:
    if lhs.dimension != rhs.dimension:
        name = relation if types.names is None else repr(types.names[relation])
        raise ConfigError(
            f"relation {name} joins {lhs.name} of dimension {lhs.dimension} and {rhs.name} of dimension "
            f"{rhs.dimension}: {lhs.dimension} != {rhs.dimension}, and they are compared with each other.",
            hint="give types that a relation joins the same dimension; no operator changes it.",
        )


def _check_keys(where: str, entry: Mapping[str, Any], known: Iterable[str]) -> None:
    unknown = [key for key in entry if key not in known]
    if unknown:
        raise ConfigError(f"{where} has {unknown[0]!r}.", hint=f"it takes {', '.join(known)}.")


def _setting(entry: Mapping[str, Any], key: str, default: Any) -> Any:
    return default if entry.get(key) is None else entry[key]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(list(names)[:10]) + (", ..." if len(names) > 10 else "")
