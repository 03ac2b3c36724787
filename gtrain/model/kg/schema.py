"""Entity types and relations of a model of embeddings: what the data has, with what the configuration says of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gtrain.errors import ConfigError

EVERY = "*"
"""The name of an entry that speaks of all relations without one of their own."""
_OF_ENTITIES = ("num_partitions", "dimension", "featurized")
_OF_RELATIONS = ("name", "lhs", "rhs", "operator", "weight", "all_negs")


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
    """Relations that join the same two types by the same operator and have the same kind of negatives.

    Attributes:
        lhs, rhs: places of the heads' type and of the tails' type.
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
    """What is embedded and what joins it.

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
    """What the data has.

    Attributes:
        entities: number of entities by type.
        ends: types of heads and tails by relation; None: all join the first type with itself.
        names: of the relations; None: they have none.
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
    """Put together what the data has and what the configuration says.

    Args:
        types: what the data has.
        dimension, operator, all_negs: of types and relations that say nothing else.
        entities: settings by type; ``dimension`` is read.
        relations: settings by ``name``, with ``operator``, ``weight`` and ``all_negs``; ``*`` names all others.
        weights: a factor for each relation, which multiplies ``weight``.

    Raises:
        ConfigError: a type or relation is not in the data, a setting is unknown, or a relation joins types of
            different dimensions.
    """
    specs = _entities(types, dimension, entities or {})
    said = _by_relation(types, relations or [])
    place = {spec.name: number for number, spec in enumerate(specs)}
    groups: dict[tuple[int, int, str, bool], list[int]] = {}
    for relation in range(types.num_relations):
        entry = said[relation] if said else {}
        lhs, rhs = (0, 0) if types.ends is None else (place[end] for end in types.ends[relation])
        _check_dimensions(types, relation, specs[lhs], specs[rhs])
        key = (lhs, rhs, str(entry.get("operator") or operator), bool(_given(entry, "all_negs", all_negs)))
        groups.setdefault(key, []).append(relation)
    found = tuple(GroupSpec(*key, tuple(members)) for key, members in groups.items())
    return EmbeddingSchema(specs, found, _weights(types, said, weights))


def _entities(types: GraphTypes, dimension: int, said: Mapping[str, Mapping[str, Any]]) -> tuple[EntitySpec, ...]:
    for name, entry in said.items():
        if name not in types.entities:
            raise ConfigError(
                f"data.entities names the type {name!r}, and the graph has {', '.join(types.entities)}.",
                hint="name types of the graph.",
            )
        _check_keys(f"data.entities.{name}", entry, _OF_ENTITIES)
    found, first = [], 0
    for name, count in types.entities.items():
        own = (said.get(name) or {}).get("dimension") or dimension
        if own < 1:
            raise ConfigError(f"data.entities.{name}.dimension={own} was set.", hint="set 1 or more.")
        found.append(EntitySpec(name, first, count, int(own)))
        first += count
    return tuple(found)


def _by_relation(types: GraphTypes, said: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The entry of each relation; an empty list where nothing is said that a model reads."""
    for entry in said:
        _check_keys("data.relations", entry, _OF_RELATIONS)
    if not any(_given(entry, key, None) is not None for entry in said for key in ("operator", "weight", "all_negs")):
        return []
    by_name: dict[str, Mapping[str, Any]] = {}
    for entry in said:
        name = str(entry.get("name", EVERY))
        if name in by_name:
            raise ConfigError(f"data.relations has two entries for {name!r}.", hint="make one of them.")
        by_name[name] = entry
    if types.names is None:
        if set(by_name) - {EVERY} and len(said) != 1:
            raise ConfigError(
                f"data.relations names {next(iter(by_name))!r}, and the relations of this graph have no names.",
                hint="give one entry without a name, for all of them.",
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
    types: GraphTypes, said: list[Mapping[str, Any]], weights: Sequence[float] | None
) -> tuple[float, ...] | None:
    if weights is not None and (len(weights) != types.num_relations or not all(float(w) >= 0 for w in weights)):
        raise ConfigError(
            f"model.relation_weight={list(weights)} was set; the graph has {types.num_relations} relations.",
            hint="give each relation a number that is 0 or more, or set model.relation_weight=null.",
        )
    own = [float(_given(entry, "weight", 1.0)) for entry in said] or [1.0] * types.num_relations
    if not all(weight >= 0 for weight in own):
        raise ConfigError(f"data.relations has the weight {min(own)}.", hint="weights are 0 or more.")
    if weights is None and all(weight == 1 for weight in own):
        return None
    factors = [1.0] * len(own) if weights is None else [float(weight) for weight in weights]
    found = tuple(factor * weight for factor, weight in zip(factors, own, strict=True))
    if not any(found):
        raise ConfigError("the weights of all relations are 0: nothing is left to learn.", hint="raise one of them.")
    return found


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


def _given(entry: Mapping[str, Any], key: str, default: Any) -> Any:
    found = entry.get(key)
    return default if found is None else found


def _listed(names: Sequence[str]) -> str:
    return ", ".join(list(names)[:10]) + (", ..." if len(names) > 10 else "")
