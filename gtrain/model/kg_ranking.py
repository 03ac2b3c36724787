"""Ranking the ends of edges among all nodes by their embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gtrain.model.edge_scores import EdgeScores
from gtrain.model.ranking import ranks
from gtrain.nn import Csr, select_rows


@dataclass(frozen=True)
class Queries:
    """B edges of which one end is given.

    Attributes:
        given: int64 ``[B]``, the end that is given.
        relation: int64 ``[B]``.
        answer: int64 ``[B]``, the other end.
        known: B rows of ids that are answers too and are left out; None leaves none out.
    """

    given: Tensor
    relation: Tensor
    answer: Tensor
    known: Csr | None

    def select(self, order: Tensor) -> Queries:
        """Return some of the queries, in this order."""
        known = None if self.known is None else select_rows(self.known, order)
        return Queries(self.given[order], self.relation[order], self.answer[order], known)


def rank_tails(scores: EdgeScores, table: Tensor, queries: Queries) -> Tensor:
    """Return the rank of each tail among all nodes, float64 ``[B]``; heads are given.

    Args:
        scores: of edges.
        table: embeddings of all nodes, ``[N, D]``.
        queries: what to rank.
    """
    if scores.reciprocal:

        def score(rows: slice) -> Tensor:
            heads = table[queries.given[rows]].unsqueeze(1)
            return scores.all_pairs(scores.tail_queries(heads, queries.relation[rows]).squeeze(1), table)

        return _ranks(score, queries, len(table))
    order = queries.relation.argsort(stable=True)  # static relations transform all tails, once for each relation
    by_relation = queries.select(order)

    def score_by_relation(rows: slice) -> Tensor:
        found, counts = by_relation.relation[rows].unique_consecutive(return_counts=True)
        heads = table[by_relation.given[rows]].split(counts.tolist())
        tails = (scores.tail_candidates(table.unsqueeze(0), one).squeeze(0) for one in found.split(1))
        return torch.cat([scores.all_pairs(*pair) for pair in zip(heads, tails, strict=True)])

    return _ranks(score_by_relation, by_relation, len(table))[order.argsort()]


def rank_heads(scores: EdgeScores, table: Tensor, queries: Queries) -> Tensor:
    """Return the rank of each head among all nodes, float64 ``[B]``; tails are given. As :func:`rank_tails`."""

    def score(rows: slice) -> Tensor:
        tails = table[queries.given[rows]].unsqueeze(1)
        return scores.all_pairs(scores.head_queries(tails, queries.relation[rows]).squeeze(1), table)

    return _ranks(score, queries, len(table))


def _ranks(score: Callable[[slice], Tensor], queries: Queries, candidates: int) -> Tensor:
    pointer, known = (None, None) if queries.known is None else (queries.known.offsets, queries.known.ids)
    return ranks(score, queries.answer, pointer, known, candidates)
