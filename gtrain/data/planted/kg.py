"""A generated knowledge graph whose best possible filtered MRR is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data

from gtrain.data.config import PlantedKGConfig, PlantedKGParameters
from gtrain.data.module import TRIPLES_OUTLINE
from gtrain.data.planted.common import Floats, Ints, PlantedSource
from gtrain.data.schema import DataSchema
from gtrain.errors import ConfigError

HITS = (1, 3, 10)


@dataclass
class KGModel(PlantedKGParameters):
    """The parameters of the generator, checked; see :class:`PlantedKGData` for their meaning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_positions > self.num_entities // self.num_types:
            each = "" if self.num_types == 1 else f" / data.num_types={self.num_types}"
            raise ConfigError(
                f"data.num_positions={self.num_positions} is more than data.num_entities={self.num_entities}{each}",
                hint="lower data.num_positions, or raise data.num_entities",
            )
        if self.num_relations > self.num_positions:
            raise ConfigError(
                f"data.num_relations={self.num_relations}, and a ring of data.num_positions={self.num_positions} has "
                f"{self.num_positions} different shifts",
                hint="lower data.num_relations, or raise data.num_positions",
            )
        self._check_room()

    @property
    def counts(self) -> tuple[int, int]:
        """Triples that a rule allows, and triples that none does."""
        outside = round(self.noise * self.num_triples)
        return self.num_triples - outside, outside

    @property
    def types(self) -> Ints:
        """The type of each entity, ``[num_entities]``, ascending."""
        return np.arange(self.num_entities) * self.num_types // self.num_entities

    def ends(self, relations: Ints) -> tuple[Ints, Ints]:
        """Return the types of heads and tails of relations: relation r joins type r to type r + 1, modulo the types."""
        return relations % self.num_types, (relations + 1) % self.num_types

    def _check_room(self) -> None:
        """Raise unless the allowed triples suffice for all shifts, and are likelier than the others."""
        allowed, outside = self.counts
        each = self.num_entities // self.num_types
        small = each // self.num_positions
        room = self.num_relations * each * small  # at least; the sizes may be one more
        rest = self.num_relations * each * (each - small - 1)
        settings = f"data.num_triples={self.num_triples} with data.noise={self.noise:g}"
        if allowed > room:
            raise ConfigError(
                f"{settings} asks for {allowed} triples that rules allow, and {self.num_relations} relations x "
                f"{each} entities x {small} entities at a position are {room}",
                hint="lower data.num_triples or data.num_positions, or raise data.num_relations or data.num_entities",
            )
        if outside and outside / max(rest, 1) >= allowed / room:
            raise ConfigError(
                f"{settings} makes a triple that no rule allows as likely as one that a rule allows",
                hint="lower data.noise",
            )


class PlantedKGData(PlantedSource[KGModel, PlantedKGConfig]):
    """Triples (head, relation, tail) that follow rules: entities have positions on a ring, and relations are shifts.

    Each entity has one of ``num_positions`` positions; all positions have equally many entities. Relation r allows the
    triple (h, r, t) if ``position[t] = position[h] + shift[r]``, modulo ``num_positions``; the shifts are distinct. Of
    the allowed triples ``(1 - noise) * num_triples`` are drawn without replacement, and of all others
    ``noise * num_triples``. The triples are divided among train, val and test at random. Shifts commute, so that models
    with translations, rotations or complex diagonal operators can express all of them; a relation is the inverse of
    another only by chance.

    **The best possible scores** (facts ``best_mrr``, ``best_hits@1``, ``best_hits@3``, ``best_hits@10``) are those of a
    scorer that knows the positions, the shifts, and all triples except the one to rank. Filtered ranking of the tails
    of (h, r, ?) leaves out all other known tails; u + 1 allowed tails remain, the answer and u that are not in the
    data. The scorer ranks these first. They are equally likely, because the triples are uniform draws, so no order
    among them is better than another. The rank of an allowed triple is therefore uniform over 1 .. u + 1, and its
    expected reciprocal rank is ``H(u + 1) / (u + 1)`` with the harmonic numbers H. A triple that is not allowed has a
    uniform rank behind the u allowed tails that are not in the data. The same holds for heads. ``best_mrr`` is the mean
    over both sides of the test triples. It is exact for this graph, except for the order of equally likely answers,
    which changes the score on n ranks by about ``0.4 / sqrt(n)``. It is 1 if all allowed triples are drawn and
    ``noise`` is 0.

    Its settings are those of :class:`~gtrain.data.config.PlantedKGConfig`.
    """

    name = "planted_kg"

    def __init__(self, settings: PlantedKGConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        if self.model.num_types > 1:
            self.schema = self._make_schema(self.settings.entities or {})

    @property
    def outline(self) -> dict[str, Any] | None:  # type: ignore[override]
        """Triples without features; settings that name types or relations need the names."""
        return None if self.schema.has_settings else TRIPLES_OUTLINE

    def identity(self) -> dict[str, Any]:
        """Return the generator's parameters, its seed and the entity types."""
        return {**super().identity(), **self.schema.identity()}

    def read(self) -> Data:
        """Generate the triples."""
        graph, model = generate(self.model, self.seed), self.model
        self._facts = {"num_relations": model.num_relations, **best_scores(graph)}
        entities = [f"entity_{entity}" for entity in range(model.num_entities)]
        self._names = {"relation": [f"shift_{shift}" for shift in graph.shifts.tolist()]}
        if not self.schema.is_typed:
            self._names = {"node": entities, **self._names}
            return as_data(graph)
        counts = dict(zip(self.schema.types, np.bincount(model.types).tolist(), strict=True))
        for name, first in zip(counts, np.cumsum([0, *counts.values()]).tolist(), strict=False):
            self._names = {**self._names, name: entities[first : first + counts[name]]}
        ends = np.stack(model.ends(np.arange(model.num_relations))).T.tolist()
        self._facts |= self.schema.facts(counts, [(_type_name(lhs), _type_name(rhs)) for lhs, rhs in ends])
        return as_data(graph)

    def _make_schema(self, entities: Mapping[str, Any]) -> DataSchema:
        names = [_type_name(number) for number in range(self.model.num_types)]
        unknown = [name for name in entities if name not in names]
        if unknown:
            raise ConfigError(f"data.entities has {unknown[0]!r}.", hint=f"the types are {', '.join(names)}.")
        every = {name: entities.get(name) for name in names}
        return DataSchema(every, [{"lhs": names[0], "rhs": names[-1]}])


def _type_name(number: int) -> str:
    return f"type_{number}"


@dataclass(frozen=True)
class KGGraph:
    """Generated triples with what they were made from.

    Attributes:
        heads, relations, tails: ``[T]``; the first ``num_test`` are for test, the next ``num_test`` for val.
        positions: ``[num_entities]``.
        shifts: ``[num_relations]``.
        num_test: triples that test.
        num_positions: length of the ring.
        types: of the entities, ``[num_entities]``.
        num_types: entity types.
    """

    heads: Ints
    relations: Ints
    tails: Ints
    positions: Ints
    shifts: Ints
    num_test: int
    num_positions: int
    types: Ints
    num_types: int

    @property
    def allowed(self) -> NDArray[np.bool_]:
        """Whether a rule allows each triple, ``[T]``."""
        return (self.positions[self.heads] + self.shifts[self.relations]) % self.num_positions == self.positions[
            self.tails
        ]


def generate(model: KGModel, seed: int) -> KGGraph:
    """Draw triples from the model."""
    rng = np.random.default_rng(seed)
    positions = np.concatenate(
        [rng.permutation(np.arange(count) % model.num_positions) for count in np.bincount(model.types)]
    )
    shifts = rng.permutation(model.num_positions)[: model.num_relations]
    allowed, outside = model.counts
    triples = np.concatenate(
        [_allowed(model, positions, shifts, allowed, rng), _outside(model, positions, shifts, outside, rng)], axis=1
    )
    heads, relations, tails = triples[:, rng.permutation(triples.shape[1])]
    num_test = max(1, int(model.held_out * model.num_triples))
    rest = (model.num_positions, model.types, model.num_types)
    return KGGraph(heads, relations, tails, positions, shifts, num_test, *rest)


def as_data(graph: KGGraph) -> Data:
    """Return the triples as a graph with held-out edges."""
    edges = torch.from_numpy(np.stack([graph.heads, graph.tails]))
    types = torch.from_numpy(graph.relations)
    data = Data(num_nodes=graph.positions.size)
    first = 0
    for prefix, last in (("test_", graph.num_test), ("val_", 2 * graph.num_test), ("", types.numel())):
        data[f"{prefix}edge_index"] = edges[:, first:last].contiguous()
        data[f"{prefix}edge_type"] = types[first:last].clone()
        first = last
    return data


def best_scores(graph: KGGraph) -> dict[str, float]:
    """Return the best possible filtered MRR and hits on the test triples, heads and tails ranked alike."""
    ring = graph.num_positions
    sizes = np.bincount(graph.types * ring + graph.positions, minlength=graph.num_types * ring)
    each = np.bincount(graph.types)
    sides = []
    for known, answer, sign in ((graph.heads, graph.tails, 1), (graph.tails, graph.heads, -1)):
        query = graph.relations * graph.positions.size + known
        position = (graph.positions[known] + sign * graph.shifts[graph.relations]) % ring
        types = graph.types[answer]
        sides.append(_query_scores(query, sizes[types * ring + position], graph.allowed, each[types], graph.num_test))
    both = np.concatenate(sides, axis=1).mean(axis=1)
    return dict(zip(("best_mrr", *(f"best_hits@{k}" for k in HITS)), both.tolist(), strict=True))


def _query_scores(query: Ints, size: Ints, allowed: NDArray[np.bool_], candidates: Ints, num_test: int) -> Floats:
    """Return expected reciprocal rank and hits of the first ``num_test`` triples, ``[1 + len(HITS), num_test]``.

    Args:
        query: number of the (entity, relation) query that each triple answers, ``[T]``.
        size: number of answers that a rule allows, ``[T]``.
        allowed: whether a rule allows the triple, ``[T]``.
        candidates: number of entities of the answer's type, ``[T]``.
        num_test: triples to score.
    """
    _, group = np.unique(query, return_inverse=True)
    true = np.bincount(group)[group[:num_test]]
    true_allowed = np.bincount(group, weights=allowed).astype(np.int64)[group[:num_test]]
    # Allowed answers that are not triples of the graph.
    unknown = size[:num_test] - true_allowed
    remaining = candidates[:num_test] - (true - 1)
    inside = allowed[:num_test]
    # The rank is uniform on first + 1 .. last.
    first = np.where(inside, 0, unknown)
    last = np.where(inside, unknown + 1, remaining)
    harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, int(candidates.max()) + 1))])
    rows = [harmonic[last] - harmonic[first]]
    rows += [np.clip(k - first, 0, last - first) for k in HITS]
    return np.stack(rows) / (last - first)


def _allowed(model: KGModel, positions: Ints, shifts: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Draw different triples that rules allow, ``[3, count]``."""
    cell = model.types * model.num_positions + positions
    order = np.argsort(cell, kind="stable")  # entities by type and position
    sizes = np.bincount(cell, minlength=model.num_types * model.num_positions)
    starts = np.cumsum(sizes) - sizes
    lhs, rhs = (end[:, None] for end in model.ends(np.arange(model.num_relations)))
    target = rhs * model.num_positions + (positions + shifts[:, None]) % model.num_positions  # [relations, entities]
    room = np.where(model.types == lhs, sizes[target], 0).ravel()
    ends = np.cumsum(room)
    picked = rng.choice(int(ends[-1]), count, replace=False, shuffle=False)
    query = np.searchsorted(ends, picked, side="right")
    tails = order[starts[target.ravel()[query]] + picked - (ends - room)[query]]
    return np.stack([query % model.num_entities, query // model.num_entities, tails])


def _outside(model: KGModel, positions: Ints, shifts: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Draw different triples that no rule allows, ``[3, count]``."""
    n = model.num_entities
    keys = np.empty(0, dtype=np.int64)
    while missing := count - keys.size:
        drawn = rng.integers(0, model.num_relations * n * n, 2 * missing + 16)
        relations, heads, tails = drawn // (n * n), drawn // n % n, drawn % n
        apart = (positions[heads] + shifts[relations]) % model.num_positions != positions[tails]
        lhs, rhs = model.ends(relations)
        apart &= (model.types[heads] == lhs) & (model.types[tails] == rhs)
        fresh = np.setdiff1d(drawn[apart], keys)
        keys = np.concatenate([keys, rng.permutation(fresh)[:missing]])
    return np.stack([keys // n % n, keys // (n * n), keys % n])
