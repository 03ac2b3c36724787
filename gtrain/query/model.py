"""``TrainedModel``: questions to a trained knowledge-graph model, with names in and names out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gtrain.errors import ConfigError
from gtrain.model.kg.schema import EntitySpec
from gtrain.query.index import NeighborIndex
from gtrain.query.known import known_answers
from gtrain.query.names import entity_vocabularies, relation_vocabulary, unknown
from gtrain.query.neighbors import METRICS, exact_neighbors, metric_of, similarities
from gtrain.query.opening import OpenedRun, open_run
from gtrain.query.questions import Question
from gtrain.query.scoring import GroupScores


@dataclass(frozen=True)
class Answer:
    """An entity and its score; higher scores are better.

    Attributes:
        name: of the entity, or its number if the data has no names.
        score: of the edge, or the similarity of a neighbor (for ``l2`` minus the distance).
    """

    name: str
    score: float


@dataclass(frozen=True)
class _Query:
    """A question with one given end.

    Attributes:
        relation: its name; None: the only one.
        number: of the relation.
        given_type, answer_type: entity types.
        given: id of the given end within its type.
        tails: whether tails are the answers.
    """

    relation: str | None
    number: int
    given_type: str
    given: int
    answer_type: str
    tails: bool


class TrainedModel:
    """A trained model of ``model=kg``, of any strategy, opened from the folder of its run.

    It needs the folder of the run and the store of the graph, which has the names; the source data are not read.

        >>> model = TrainedModel.open("runs/first")  # doctest: +SKIP
        >>> model.answers("Marie Curie", "field of work", None, k=3)  # doctest: +SKIP
        [Answer(name='physics', score=7.31), Answer(name='chemistry', score=6.9), Answer(name='radium', score=4.02)]

    Args:
        opened: the model and its store, see :meth:`open`.

    Attributes:
        metric: ``cos`` or ``l2``, in which :meth:`neighbors` measures unless told otherwise.
    """

    def __init__(self, opened: OpenedRun) -> None:
        self._opened = opened
        model, store = opened.model, opened.store
        self._types = entity_vocabularies(store)
        self._relations = relation_vocabulary(store, model.schema.num_relations)
        self.metric = metric_of(model)

    @classmethod
    def open(
        cls,
        run: str | Path,
        *,
        ckpt_path: str | None = None,
        store: str | Path | None = None,
        memory: int | None = None,
    ) -> TrainedModel:
        """Open the model of a run.

        Args:
            run: the folder of the run, or ``last``.
            ckpt_path: ``best``, ``last`` or the folder of a checkpoint; None: the best one.
            store: the folder of the store; None: where the run had it.
            memory: bytes of embeddings that are read into memory; None: half of what is available. Larger tables are
                read from the checkpoint for each question.

        Raises:
            GtrainError: this is not a run of ``model=kg``, or its checkpoint or store is missing or damaged.
        """
        return cls(open_run(run, ckpt_path, store, memory))

    @property
    def entity_types(self) -> list[str]:
        """Names of the entity types."""
        return list(self._types)

    def answers(
        self, head: str | None, relation: str | None, tail: str | None, *, k: int = 10, filtered: bool = False
    ) -> list[Answer]:
        """Return the best answers for the end that is None, the best first.

        Args:
            head, tail: names; one of them is None.
            relation: its name; None in a graph without relations.
            k: how many answers, if there are as many.
            filtered: whether edges of the data, those that are held out included, are left out.

        Raises:
            ConfigError: a name is unknown, k is below 1, or not exactly one end is None.
        """
        if (head is None) == (tail is None):
            raise ConfigError(
                "a head and a tail were given, or none of them; one is asked for.", hint="give None for that one."
            )
        _check_count(k)
        query = self._query(head, relation, tail)
        return self._best(query, k, self._known([query])[query] if filtered else None)

    def score(self, head: str, relation: str | None, tail: str) -> tuple[float, float]:
        """Return the scores of an edge: of the tail for the head, and of the head for the tail.

        They differ with ``model.reciprocal``, which has parameters for each direction.

        Raises:
            ConfigError: a name is unknown.
        """
        number, group, local = self._relation(relation)
        heads, tails = (self._types[self._end(number, side)].encode([name]) for side, name in enumerate((head, tail)))
        to_tail, to_head = group.pairs(heads, torch.tensor([local]), tails)
        return float(to_tail), float(to_head)

    def ask(
        self, question: str | Question, *, k: int = 10, filtered: bool = False
    ) -> list[Answer] | tuple[float, float]:
        """Answer a question in text, such as ``HEAD,RELATION,?``: :meth:`answers`, or :meth:`score` of an edge."""
        return next(self.ask_many([question], k=k, filtered=filtered))

    def ask_many(
        self, questions: Iterable[str | Question], *, k: int = 10, filtered: bool = False
    ) -> Iterator[list[Answer] | tuple[float, float]]:
        """Yield the answer to each question, see :meth:`ask`. The edges of the data are read once for all of them.

        Raises:
            ConfigError: with the first answer, if a question is malformed or a name is unknown.
        """
        _check_count(k)
        parsed = [Question.parse(question) if isinstance(question, str) else question for question in questions]
        queries = [None if _is_edge(asked) else self._query(asked.head, asked.relation, asked.tail) for asked in parsed]
        known = self._known([query for query in queries if query is not None]) if filtered else {}
        for asked, query in zip(parsed, queries, strict=True):
            if query is None:
                yield self.score(str(asked.head), asked.relation, str(asked.tail))
            else:
                yield self._best(query, k, known.get(query))

    def neighbors(
        self,
        names: Sequence[str],
        *,
        k: int = 10,
        entity_type: str | None = None,
        metric: str | None = None,
        index: NeighborIndex | None = None,
    ) -> list[list[Answer]]:
        """Return the nearest entities of each entity, the nearest first, without itself.

        Args:
            names: of entities of one type.
            k: how many, if there are as many.
            entity_type: their type; None: the one that has all the names.
            metric: ``cos``, ``l2`` or ``dot``; None: that of ``index``, or :attr:`metric`.
            index: an approximate index, from :meth:`build_index` or :meth:`load_index`; None: exact.

        Raises:
            ConfigError: a name or type is unknown, or the index has another type or metric.
        """
        _check_count(k)
        entity_type = self.type_of(names, entity_type)
        ids = self._types[entity_type].encode(names)
        queries = self._vectors(entity_type, ids)
        own = [number.view(1) for number in ids]
        if index is None:
            measure = metric or self.metric
            if measure not in METRICS:
                raise ConfigError(f"metric={measure} was set.", hint=f"the metrics are {', '.join(METRICS)}.")
            nearest, scores = exact_neighbors(self._blocks(entity_type), queries, k, measure, own)
            nearest = torch.where(scores.isneginf(), -1, nearest)
        else:
            index.check(f"{self._opened.fingerprint} {entity_type}", metric)
            measure, nearest = index.metric, index.search(queries, k + 1)
            # An entity's own row is the nearest one, but an approximate search may miss it.
            order = (nearest == ids.unsqueeze(1)).int().argsort(dim=1, stable=True)[:, :k]
            nearest = nearest.gather(1, order)
            nearest = torch.where(nearest == ids.unsqueeze(1), -1, nearest)
        # From the rows themselves: sums of squares lose digits in blocked products, and an index may quantize.
        vectors = self._vectors(entity_type, nearest.clamp(min=0).flatten()).view(*nearest.shape, -1)
        scores = torch.where(nearest < 0, -torch.inf, similarities(queries, vectors, measure))
        order = scores.argsort(dim=1, descending=True, stable=True)
        return self._answers(entity_type, nearest.gather(1, order), scores.gather(1, order))

    def build_index(
        self, path: str | Path | None = None, *, entity_type: str | None = None, metric: str | None = None
    ) -> NeighborIndex:
        """Build an approximate index of the entities of a type, and save it.

        Args:
            path: the file to write; None: it is kept in memory.
            entity_type: None: the only type.
            metric: ``cos``, ``l2`` or ``dot``; None: :attr:`metric`.

        Raises:
            ConfigError: the package is not installed, or the graph has several types and none is given.
        """
        entity_type = self.type_of([], entity_type)
        spec = self._spec(entity_type)
        return NeighborIndex.build(
            lambda: self._blocks(entity_type),
            (spec.count, spec.dimension),
            metric=metric or self.metric,
            source=f"{self._opened.fingerprint} {entity_type}",
            path=None if path is None else Path(path),
        )

    def load_index(self, path: str | Path, *, entity_type: str | None = None) -> NeighborIndex:
        """Load an index that :meth:`build_index` saved.

        Raises:
            ConfigError: it is of another checkpoint or type, or the package is not installed.
        """
        entity_type = self.type_of([], entity_type)
        return NeighborIndex.load(Path(path), f"{self._opened.fingerprint} {entity_type}")

    def type_of(self, names: Sequence[str], entity_type: str | None = None) -> str:
        """Return the entity type that has all these names.

        Args:
            names: of entities.
            entity_type: the type, which must exist; None: it follows from the names.

        Raises:
            ConfigError: none or several have them, or the given one does not exist.
        """
        if entity_type is not None:
            if entity_type not in self._types:
                raise ConfigError(
                    f"type={entity_type} was set; the graph has no such entity type.",
                    hint=f"its types are {', '.join(self._types)}.",
                )
            return entity_type
        having = {kind: each.find(names) >= 0 for kind, each in self._types.items()}
        for place, name in enumerate(names):
            if not any(known[place] for known in having.values()):
                raise unknown(name, list(self._types.values()))
        every = [kind for kind, known in having.items() if bool(known.all())]
        if len(every) != 1:
            what = f"{', '.join(names)} were given" if names else "no type was given"
            are = f"{', '.join(every)} have entities of these names" if every else "no type has all of them"
            raise ConfigError(f"{what}; {are}.", hint=f"set type to one of {', '.join(self._types)}.")
        return every[0]

    # ------------------------------------------------------------------------------------------------- inside

    def _query(self, head: str | None, relation: str | None, tail: str | None) -> _Query:
        """Return the numbers of a question with one given end."""
        number, _, _ = self._relation(relation)
        tails = tail is None
        ends = [self._end(number, side) for side in (0, 1)]
        given_type, answer_type = ends if tails else ends[::-1]
        given = int(self._types[given_type].encode([str(head if tails else tail)]))
        return _Query(relation, number, given_type, given, answer_type, tails)

    def _known(self, queries: Sequence[_Query]) -> dict[_Query, Tensor]:
        """Return the answers in the data by question, ids within their type; one pass for each direction."""
        known: dict[_Query, Tensor] = {}
        for tails in (True, False):
            some = [query for query in dict.fromkeys(queries) if query.tails == tails]
            if not some:
                continue
            # The store's ids count through all types.
            given = torch.tensor([query.given + self._first(query.given_type) for query in some])
            relation = torch.tensor([query.number for query in some])
            every = known_answers(self._opened.store, given, relation, tails)
            known |= {q: ids - self._first(q.answer_type) for q, ids in zip(some, every, strict=True)}
        return known

    def _best(self, query: _Query, k: int, left_out: Tensor | None) -> list[Answer]:
        _, group, local = self._relation(query.relation)
        known = None if left_out is None else [left_out]
        ids, scores = group.answers(torch.tensor([query.given]), local, k, known, tails=query.tails)
        return self._answers(query.answer_type, ids, scores)[0]

    def _relation(self, name: str | None) -> tuple[int, GroupScores, int]:
        """Return the number of a relation, the scores of its group, and its number in the group."""
        if name is None:
            if self._relations.count != 1:
                raise ConfigError(
                    f"a question has no relation, and the graph has {self._relations.count} of them.",
                    hint="ask 'HEAD,RELATION,?', '?,RELATION,TAIL' or 'HEAD,RELATION,TAIL'.",
                )
            number = 0
        else:
            number = int(self._relations.encode([name]))
        groups = self._opened.model.schema.groups
        group = next(place for place, spec in enumerate(groups) if number in spec.relations)
        return number, GroupScores(self._opened.model, group), groups[group].relations.index(number)

    def _end(self, relation: int, side: int) -> str:
        """Return the entity type of the heads (``side`` 0) or tails (1) of a relation."""
        schema = self._opened.model.schema
        group = next(spec for spec in schema.groups if relation in spec.relations)
        return schema.entities[(group.lhs, group.rhs)[side]].name

    def _position(self, entity_type: str) -> int:
        return list(self._types).index(entity_type)

    def _spec(self, entity_type: str) -> EntitySpec:
        return self._opened.model.schema.entities[self._position(entity_type)]

    def _first(self, entity_type: str) -> int:
        return self._spec(entity_type).first

    def _blocks(self, entity_type: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ids and vectors ``[n, D]`` of all entities of a type, without biases."""
        columns = self._spec(entity_type).dimension
        for ids, rows in self._opened.model.entities.blocks(self._position(entity_type)):
            yield ids, rows[:, :columns]

    def _vectors(self, entity_type: str, ids: Tensor) -> Tensor:
        rows = self._opened.model.entities.rows[self._position(entity_type)](ids)
        return rows[:, : self._spec(entity_type).dimension]

    def _answers(self, entity_type: str, ids: Tensor, scores: Tensor) -> list[list[Answer]]:
        """Name the answers of each query; those of score minus infinity were left out."""
        answers = []
        for some, of in zip(ids, scores, strict=True):
            kept = of > -torch.inf
            named = self._types[entity_type].decode(some[kept].tolist())
            answers.append([Answer(*pair) for pair in zip(named, of[kept].tolist(), strict=True)])
        return answers


def _is_edge(question: Question) -> bool:
    return question.head is not None and question.tail is not None


def _check_count(k: int) -> None:
    if k < 1:
        raise ConfigError(f"k={k} was set; it is the number of answers.", hint="set 1 or more.")
