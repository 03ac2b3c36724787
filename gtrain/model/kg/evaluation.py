"""Ranking the ends of the edges of a group of relations, among the nodes of their types or among some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gtrain.model.kg.groups import RelationGroup
from gtrain.model.kg.scores import EdgeScores
from gtrain.model.kg.tables import EntityTables
from gtrain.model.kg.training import Triples
from gtrain.model.ranking import CHUNK, known_of
from gtrain.nn import Csr, select_rows

_TRANSFORMED = 1 << 20
"""Numbers of candidates that are transformed for a relation at a time: never a copy of a block."""

EntityBlocks = Callable[[], Iterator[tuple[Tensor, Tensor]]]
"""Begins to go through all entities of a type once: their ids ``[n]`` and embeddings ``[n, D]``, some at a time, in any
order."""


@dataclass(frozen=True)
class RankingQueries:
    """B edges of which one end is given.

    Attributes:
        given: ``[B, D]``, embeddings of the ends that are given.
        relation: int64 ``[B]``.
        answer: int64 ``[B]``, the other end.
        known: B rows of ids that are answers too and are left out; None leaves none out.
    """

    given: Tensor
    relation: Tensor
    answer: Tensor
    known: Csr | None

    def select(self, order: Tensor) -> RankingQueries:
        """Return some of the queries, in this order."""
        known = None if self.known is None else select_rows(self.known, order)
        return RankingQueries(self.given[order], self.relation[order], self.answer[order], known)


@dataclass(frozen=True)
class EntityCandidates:
    """What an end of an edge may be: all entities of a type.

    Attributes:
        blocks: goes through them.
        count: N.
    """

    blocks: EntityBlocks
    count: int


def rank_ends(
    scores: EdgeScores,
    candidates: tuple[EntityCandidates, EntityCandidates],
    *,
    tails: RankingQueries,
    heads: RankingQueries,
) -> list[Tensor]:
    """Return the ranks of tails and of heads among all entities of their types, float64 ``[B]`` each, 1 for the best.

    What is known is left out (the filtered setting of Bordes et al. 2013). Where others score the same as the answer,
    its rank is the mean of the places that they share. Where there are several blocks, these are gone through twice:
    the first time for the answers' own scores.

    Args:
        scores: of edges.
        candidates: for tails and for heads; the same object where they are of one type, which is gone through once.
        tails: heads are given, tails are ranked.
        heads: tails are given, heads are ranked.
    """
    sides = [_SideRanks(scores, tails, True), _SideRanks(scores, heads, False)]
    if candidates[0] is candidates[1]:
        _rank(sides, candidates[0])
    else:
        for side, some in zip(sides, candidates, strict=True):
            _rank([side], some)
    return [side.ranks() for side in sides]


def _rank(sides: list[_SideRanks], candidates: EntityCandidates) -> None:
    device = sides[0].device
    place = torch.full((candidates.count,), -1, device=device)
    for own_scores in (True, False):
        for ids, rows in candidates.blocks():
            if own_scores and len(ids) == candidates.count:
                break  # one block: the answers' scores are found on the way
            place[ids] = torch.arange(len(ids), device=device)
            here = rows.to(device)
            for side in sides:
                side.find_own(here, place) if own_scores else side.count(here, place)
            place[ids] = -1
            del rows, here  # before the next block is read


class _SideRanks:
    """The queries of one side and what has been counted for them."""

    def __init__(self, scores: EdgeScores, queries: RankingQueries, tails: bool) -> None:
        self._scores = scores
        self._static = tails and not scores.reciprocal  # transforms all candidates, once for each relation
        self.device = queries.answer.device
        self._order = queries.relation.argsort(stable=True) if self._static else self._first(len(queries.relation))
        self._queries = queries = queries.select(self._order)
        given = queries.given.unsqueeze(1)
        transform = scores.tail_queries if tails else scores.head_queries
        self._asked = transform(given, queries.relation).squeeze(1)
        self._own = torch.full_like(queries.answer, torch.nan, dtype=self._asked.dtype)
        self._found = False
        self._better = torch.zeros_like(queries.answer)
        self._equal = torch.zeros_like(self._better)

    def find_own(self, rows: Tensor, place: Tensor) -> None:
        """Note the scores of the answers that are in this block."""
        here = (place[self._queries.answer] >= 0).nonzero().flatten()
        for some in here.split(max(1, CHUNK // max(1, len(rows)))):
            scores = self._against(some, rows)
            self._own[some] = scores.gather(1, place[self._queries.answer[some]].unsqueeze(1)).squeeze(1)
        self._found = True

    def count(self, rows: Tensor, place: Tensor) -> None:
        """Count the nodes of this block that score better than each answer, and those that score the same."""
        everything = self._first(len(self._asked))
        for some in everything.split(max(1, CHUNK // max(1, len(rows)))):
            self._count(some, self._against(some, rows), place)

    def ranks(self) -> Tensor:
        """The ranks, in the order of the queries."""
        return (1 + self._better.double() + self._equal.double() / 2)[self._order.argsort()]

    def _first(self, count: int) -> Tensor:
        """The numbers from 0 to ``count - 1``."""
        return torch.arange(count, device=self.device)

    def _count(self, some: Tensor, scores: Tensor, place: Tensor) -> None:
        answer = place[self._queries.answer[some]]
        row = self._first(len(some))
        here = answer >= 0
        if not self._found:
            self._own[some] = scores[row, answer]
        own = self._own[some].unsqueeze(1)
        known = self._queries.known
        if known is not None and len(some):
            rows = slice(int(some[0]), int(some[-1]) + 1)
            of_row, ids = known_of(rows, known.offsets, known.ids)
            assert of_row is not None and ids is not None
            there = place[ids] >= 0
            scores[of_row[there], place[ids[there]]] = -torch.inf
        scores[row[here], answer[here]] = -torch.inf
        worse_or_same = scores <= own  # a score that is no number counts against the answer
        self._better[some] += (~worse_or_same).count_nonzero(1)  # sum would copy to int64
        same = (scores == own).count_nonzero(1)
        minus = own.squeeze(1) == -torch.inf  # an answer so bad that it shares its place with what was left out
        self._equal[some] += torch.where(minus, torch.zeros_like(same), same)

    def _against(self, some: Tensor, rows: Tensor) -> Tensor:
        """Scores of some queries and all nodes of a block, ``[b, n]``."""
        if not self._static:
            return self._scores.all_pairs(self._asked[some], rows)
        relations, counts = self._queries.relation[some].unique_consecutive(return_counts=True)
        scores = self._asked.new_empty(len(some), len(rows))
        each, end = max(1, _TRANSFORMED // max(1, rows.size(1))), 0
        for relation, count in zip(relations.split(1), counts.tolist(), strict=True):
            begin, end = end, end + count
            for low in range(0, len(rows), each):
                candidates = self._scores.tail_candidates(rows[None, low : low + each], relation).squeeze(0)
                scores[begin:end, low : low + each] = self._scores.all_pairs(self._asked[some[begin:end]], candidates)
        return scores


class GroupRanks:
    """Ranks edges of one group.

    Args:
        group: the group.
        tables: of all entity types.
    """

    def __init__(self, group: RelationGroup, tables: EntityTables) -> None:
        self._group, self._tables = group, tables
        self._lhs, self._rhs = group.spec.lhs, group.spec.rhs

    def ends(self, edges: Triples) -> tuple[Tensor, Tensor]:
        """Embeddings of the heads and of the tails; one lookup where they are of one type."""
        rows = self._tables.rows
        if self._lhs == self._rhs:
            heads, tails = rows[self._lhs](torch.stack([edges.head, edges.tail]))
            return heads, tails
        return rows[self._lhs](edges.head), rows[self._rhs](edges.tail)

    def among_all(self, edges: Triples, place: Tensor, known: list[Csr | None]) -> list[Tensor]:
        """Ranks of the tails and of the heads among all nodes of their types.

        Args:
            edges: by the group's own ids.
            place: ``[B]``, their places among the edges of a batch.
            known: for the edges of the batch, what else is true of tails and of heads, by the ids of all types.
        """
        heads, tails = self.ends(edges)
        lhs, rhs = self._group.ends
        sizes = {self._lhs: lhs.count, self._rhs: rhs.count}
        by_type = {end: self._candidates(end, count) for end, count in sizes.items()}
        known_tails, known_heads = (
            None if ids is None else _of_type(ids, place, end.first) for ids, end in zip(known, (rhs, lhs), strict=True)
        )
        return rank_ends(
            self._group.scores,
            (by_type[self._rhs], by_type[self._lhs]),
            tails=RankingQueries(heads, edges.relation, edges.tail, known_tails),
            heads=RankingQueries(tails, edges.relation, edges.head, known_heads),
        )

    def among_some(self, rows: tuple[Tensor, Tensor], relation: Tensor, others: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Ranks of edges' ends among those of all these edges and some others, unfiltered: of tails, then of heads.

        Args:
            rows: of the heads' table and of the tails', ``[B, D]`` each.
            relation: ``[B]``, numbers among the group's relations.
            others: rows ``[K, D]`` of both tables.
        """
        (heads, more_heads), (tails, more_tails) = (
            [self._tables.shifted(some, end) for some in (rows[side], others[side])]
            for side, end in enumerate((self._lhs, self._rhs))
        )
        first = torch.arange(len(heads), device=heads.device)
        if self._lhs == self._rhs:
            every = _listed(torch.cat([tails, heads, more_heads, more_tails]))
            candidates, second = (every, every), first + len(heads)
        else:
            candidates, second = (
                (_listed(torch.cat([tails, more_tails])), _listed(torch.cat([heads, more_heads]))),
                first,
            )
        sides = RankingQueries(heads, relation, first, None), RankingQueries(tails, relation, second, None)
        return rank_ends(self._group.scores, candidates, tails=sides[0], heads=sides[1])

    def _candidates(self, number: int, count: int) -> EntityCandidates:
        """All nodes of a type."""
        return EntityCandidates(lambda: self._tables.blocks(number), count)


def _listed(rows: Tensor) -> EntityCandidates:
    """These rows alone."""
    block = torch.arange(len(rows), device=rows.device), rows
    return EntityCandidates(lambda: iter([block]), len(rows))


def _of_type(known: Csr, place: Tensor, first: int) -> Csr:
    """What is known of some edges, by the numbers of a type's nodes."""
    found = select_rows(known, place)
    return Csr(found.ids - first, None, found.offsets)
