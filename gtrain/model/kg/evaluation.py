"""Ranks of the ends of edges among the nodes of their types, or among some of them, such as a sample for each edge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gtrain.model.candidate_ranks import CHUNK, Tiles, known_of, left_out, queries_at_once, rank
from gtrain.model.kg.scores import EdgeScores
from gtrain.model.kg.tables import EntityTables
from gtrain.model.kg.training import RelationGroup, Triples
from gtrain.nn import Csr, select_rows

_TRANSFORMED = 1 << 20
"""Numbers of candidates transformed for a relation at a time, so that a block is never copied whole."""
_PAIRED = 1 << 20
"""Numbers of queries, or of candidates, that are copied to compare pairs."""

EntityBlocks = Callable[[], Iterator[tuple[Tensor, Tensor]]]
"""Iterates over all entities of a type, in any order: ids ``[n]`` and embeddings ``[n, D]`` of a block at a time."""


@dataclass(frozen=True)
class RankingQueries:
    """B edges with one end given.

    Attributes:
        given: ``[B, D]``, embeddings of the given ends.
        relation: int64 ``[B]``.
        answer: int64 ``[B]``, the other end.
        known: B rows of ids that are known answers and are left out; None: none.
        sampled: int64 ``[B, K]``, the only candidates of each query beside its answer; None: all entities.
    """

    given: Tensor
    relation: Tensor
    answer: Tensor
    known: Csr | None
    sampled: Tensor | None = None

    def select(self, order: Tensor) -> RankingQueries:
        """Return some of the queries, in this order."""
        known = None if self.known is None else select_rows(self.known, order)
        sampled = None if self.sampled is None else self.sampled[order]
        return RankingQueries(self.given[order], self.relation[order], self.answer[order], known, sampled)


@dataclass(frozen=True)
class EntityCandidates:
    """The candidates for an end of an edge: all entities of a type.

    Attributes:
        blocks: iterates over them.
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
    """Return the ranks of tails and of heads among their candidates, float64 ``[B]`` each, 1 for the best.

    Known answers are left out (the filtered setting of Bordes et al. 2013). Ties with the answer count half. Several
    blocks are read twice: the first pass computes the scores of the answers, the second counts better candidates.

    Args:
        scores: of edges.
        candidates: for tails and for heads; the same object if they are of one type, which is then read once.
        tails: heads are given, tails are ranked.
        heads: tails are given, heads are ranked.
    """
    sides = [
        (_SideRanks if queries.sampled is None else _SampledRanks)(scores, queries, of_tails)
        for queries, of_tails in ((tails, True), (heads, False))
    ]
    if candidates[0] is candidates[1]:
        _rank(sides, candidates[0])
    else:
        for side, entities in zip(sides, candidates, strict=True):
            _rank([side], entities)
    return [side.ranks() for side in sides]


def _rank(sides: list[_SideRanks], candidates: EntityCandidates) -> None:
    device = sides[0].device
    column = torch.full((candidates.count,), -1, device=device)  # of each entity in the current block
    for first_pass in (True, False):
        for ids, rows in candidates.blocks():
            if first_pass and len(ids) == candidates.count:
                # A single block: the second pass computes the answers' scores itself.
                break
            column[ids] = torch.arange(len(ids), device=device)
            block = rows.to(device)
            for side in sides:
                side.score_answers(block, column) if first_pass else side.count(block, column)
            column[ids] = -1
            # Frees the block before the next one is read.
            del rows, block


class _SideRanks:
    """The queries of one side, the scores of their answers, and counts of better and equal candidates.

    Scores are numbers in the order of the scores, see :meth:`~gtrain.model.kg.scores.EdgeScores.in_order`.
    """

    def __init__(self, scores: EdgeScores, queries: RankingQueries, tails: bool) -> None:
        self._scores = scores
        self.device = queries.answer.device
        given = queries.given.unsqueeze(1)
        moved = (scores.tail_queries_of_rows if tails else scores.head_queries)(given, queries.relation)
        # Otherwise the operator transforms all candidates, once per relation.
        self._by_relation = moved is None
        self._order = queries.relation.argsort(stable=True) if moved is None else self._first(len(queries.relation))
        self._queries = queries = queries.select(self._order)
        self._transformed = queries.given if moved is None else moved.squeeze(1)
        self._answer_scores = torch.full_like(queries.answer, torch.nan, dtype=self._transformed.dtype)
        self._has_scores = False
        self._better = torch.zeros_like(queries.answer)
        self._equal = torch.zeros_like(self._better)

    def score_answers(self, rows: Tensor, column: Tensor) -> None:
        """Store the scores of the answers that are in this block."""
        present = (column[self._queries.answer] >= 0).nonzero().flatten()
        for part in present.split(queries_at_once(len(rows), self.device)):
            self._answer_scores[part] = self._tiles(part, rows).of(column[self._queries.answer[part]])
        self._has_scores = True

    def count(self, rows: Tensor, column: Tensor) -> None:
        """Count the nodes of this block that score better than each answer, and those that score the same."""
        for part in self._first(len(self._transformed)).split(queries_at_once(len(rows), self.device)):
            tiles = self._tiles(part, rows)
            if not self._has_scores:  # the block has all nodes
                self._answer_scores[part] = tiles.of(column[self._queries.answer[part]])
            better, equal = tiles.compare(self._answer_scores[part], self._left_out(part, column))
            self._better[part] += better
            self._equal[part] += equal

    def ranks(self) -> Tensor:
        """Return the ranks, in the order of the queries."""
        return rank(self._better, self._equal)[self._order.argsort()]

    def _first(self, count: int) -> Tensor:
        """Return the numbers from 0 to ``count - 1``."""
        return torch.arange(count, device=self.device)

    def _tiles(self, part: Tensor, rows: Tensor) -> Tiles:
        return Tiles(lambda chosen: self._score(part, rows[chosen]), len(rows), self.device)

    def _left_out(self, part: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """Return the answers and known answers of some queries that are in a block, by their columns."""
        query, ids = left_out(self._queries.answer[part], *self._known(part))
        in_block = column[ids] >= 0
        return query[in_block], column[ids[in_block]]

    def _known(self, part: Tensor) -> tuple[Tensor | None, Tensor | None]:
        known = self._queries.known
        if known is None or not len(part):
            return None, None
        return known_of(slice(int(part[0]), int(part[-1]) + 1), known.offsets, known.ids)

    def _score(self, part: Tensor, rows: Tensor) -> Tensor:
        """Return numbers ``[b, n]`` that order all nodes of a block as the scores of some queries do."""
        if not self._by_relation:
            return self._scores.in_order(self._transformed[part], rows)
        relations, counts = self._queries.relation[part].unique_consecutive(return_counts=True)
        scores = self._transformed.new_empty(len(part), len(rows))
        each, end = max(1, _TRANSFORMED // max(1, rows.size(1))), 0
        for relation, count in zip(relations.split(1), counts.tolist(), strict=True):
            begin, end = end, end + count
            for low in range(0, len(rows), each):
                candidates = self._scores.tail_candidates(rows[None, low : low + each], relation).squeeze(0)
                scores[begin:end, low : low + each] = self._scores.in_order(
                    self._transformed[part[begin:end]], candidates
                )
        return scores


class _SampledRanks(_SideRanks):
    """The same with a few candidates per query: pairs are compared, so that the cost does not grow with the entities.

    Answers are scored as their candidates are, in pairs, so that equal rows tie.
    """

    def __init__(self, scores: EdgeScores, queries: RankingQueries, tails: bool) -> None:
        super().__init__(scores, queries, tails)
        assert self._queries.sampled is not None
        self._sampled = self._queries.sampled
        self._counted = self._sampled != self._queries.answer.unsqueeze(1)  # (B, K)
        if self._queries.known is not None:
            self._counted &= ~_is_known(self._sampled, self._queries.known)

    def score_answers(self, rows: Tensor, column: Tensor) -> None:
        present = (column[self._queries.answer] >= 0).nonzero().flatten()
        self._answer_scores[present] = self._of_pairs(present, rows, column[self._queries.answer[present]])
        self._has_scores = True

    def count(self, rows: Tensor, column: Tensor) -> None:
        if not self._has_scores:
            self.score_answers(rows, column)
        for part in self._first(len(self._sampled)).split(max(1, CHUNK // max(1, self._sampled.size(1)))):
            columns = column[self._sampled[part]]
            query, place = ((columns >= 0) & self._counted[part]).nonzero().unbind(1)
            scores, true = self._of_pairs(part[query], rows, columns[query, place]), self._answer_scores[part[query]]
            self._better.index_add_(0, part[query], (~(scores <= true)).long())  # NaN counts against the answer
            self._equal.index_add_(0, part[query], (scores == true).long())

    def _of_pairs(self, query: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the scores of queries and rows of a block, pair by pair."""
        each = max(1, _PAIRED // max(1, rows.size(1)))
        scores = [rows.new_empty(0)]
        for chosen, column in zip(query.split(each), columns.split(each), strict=True):
            candidates = rows[column]
            if self._by_relation:
                relation = self._queries.relation[chosen]
                candidates = self._scores.tail_candidates(candidates.unsqueeze(1), relation).squeeze(1)
            scores.append(self._scores.pairs(self._transformed[chosen], candidates))
        return torch.cat(scores)


def _is_known(sampled: Tensor, known: Csr) -> Tensor:
    """Return which candidates ``[B, K]`` are among their query's known answers."""
    queries = torch.arange(len(sampled), device=sampled.device)
    of_known = torch.repeat_interleave(queries, known.offsets.diff())
    count = 1 + max(int(ids.max()) if ids.numel() else 0 for ids in (sampled, known.ids))
    return torch.isin(queries.unsqueeze(1) * count + sampled, of_known * count + known.ids)


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
        """Return the embeddings of the heads and of the tails, with one lookup if they are of one type."""
        rows = self._tables.rows
        if self._lhs == self._rhs:
            heads, tails = rows[self._lhs](torch.stack([edges.head, edges.tail]))
            return heads, tails
        return rows[self._lhs](edges.head), rows[self._rhs](edges.tail)

    def among_all(
        self,
        edges: Triples,
        positions: Tensor,
        known: list[Csr | None],
        sampled: tuple[Tensor, Tensor] | None = None,
    ) -> list[Tensor]:
        """Return the ranks of the tails and of the heads among all nodes of their types, or among some.

        Args:
            edges: by the group's ids.
            positions: ``[B]``, their positions among the edges of a batch.
            known: for the edges of the batch, known tails and known heads, by the ids of all types.
            sampled: for these edges, the candidates of tails and of heads by the ids of their types, ``[B, K]`` each;
                None: all nodes.
        """
        tail_sample, head_sample = (None, None) if sampled is None else sampled
        heads, tails = self.ends(edges)
        lhs, rhs = self._group.ends
        sizes = {self._lhs: lhs.count, self._rhs: rhs.count}
        by_type = {end: self._candidates(end, count) for end, count in sizes.items()}
        known_tails, known_heads = (
            None if ids is None else _of_type(ids, positions, end.first)
            for ids, end in zip(known, (rhs, lhs), strict=True)
        )
        return rank_ends(
            self._group.scores,
            (by_type[self._rhs], by_type[self._lhs]),
            tails=RankingQueries(heads, edges.relation, edges.tail, known_tails, tail_sample),
            heads=RankingQueries(tails, edges.relation, edges.head, known_heads, head_sample),
        )

    def among_some(self, rows: tuple[Tensor, Tensor], relation: Tensor, others: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Return the unfiltered ranks of edges' ends among those of all these edges and others: tails, then heads.

        Args:
            rows: of the heads' table and of the tails', ``[B, D]`` each.
            relation: ``[B]``, numbers among the group's relations.
            others: rows ``[K, D]`` of both tables.
        """
        (heads, more_heads), (tails, more_tails) = (
            [self._tables.shifted(block, end) for block in (rows[side], others[side])]
            for side, end in enumerate((self._lhs, self._rhs))
        )
        first = torch.arange(len(heads), device=heads.device)
        if self._lhs == self._rhs:
            both = _as_candidates(torch.cat([tails, heads, more_heads, more_tails]))
            candidates, second = (both, both), first + len(heads)
        else:
            candidates = _as_candidates(torch.cat([tails, more_tails])), _as_candidates(torch.cat([heads, more_heads]))
            second = first
        tail_queries, head_queries = (
            RankingQueries(heads, relation, first, None),
            RankingQueries(tails, relation, second, None),
        )
        return rank_ends(self._group.scores, candidates, tails=tail_queries, heads=head_queries)

    def _candidates(self, number: int, count: int) -> EntityCandidates:
        """Return all nodes of a type."""
        return EntityCandidates(lambda: self._tables.blocks(number), count)


def _as_candidates(rows: Tensor) -> EntityCandidates:
    """Return these rows as the only candidates."""
    block = torch.arange(len(rows), device=rows.device), rows
    return EntityCandidates(lambda: iter([block]), len(rows))


def _of_type(known: Csr, positions: Tensor, first: int) -> Csr:
    """Return the known ends of the edges at these positions, by ids within a type."""
    selected = select_rows(known, positions)
    return Csr(selected.ids - first, None, selected.offsets)
