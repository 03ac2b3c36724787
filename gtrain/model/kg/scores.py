"""Scores of edges from embeddings: relation operators, a comparator and biases put together."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gtrain.model.kg.comparators import make_comparator
from gtrain.model.kg.operators import make_operator


class EdgeScores(nn.Module):
    """Scores edges, and candidates for the end of an edge that is not given.

    A query is the end that is given, with a relation; candidates are what may be at the other end. Static relations
    transform tails, whichever end is the query. Reciprocal ones transform the query, with parameters for each
    direction, so that one set of candidates serves queries of any relation.

    Args:
        num_relations: R.
        dimension: columns of an embedding, D.
        operator: see :mod:`gtrain.model.kg.operators`.
        comparator: see :mod:`gtrain.model.kg.comparators`.
        reciprocal: whether each direction has parameters of its own.
        bias: whether rows have one more column, the bias.
        init_scale: of relation parameters, see :func:`~gtrain.model.kg.operators.make_operator`.

    Shapes:
        rows are ``[G, n, D]``, or ``[G, n, D + 1]`` with the bias last: G groups, each with one relation ``[G]``.
    """

    def __init__(
        self,
        num_relations: int,
        dimension: int,
        operator: str,
        comparator: str,
        reciprocal: bool,
        bias: bool,
        init_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.dimension, self.reciprocal, self.bias = dimension, reciprocal, bias
        self.comparator = make_comparator(comparator)
        self.forwards = make_operator(operator, num_relations, dimension, init_scale)
        self.backwards = make_operator(operator, num_relations, dimension, init_scale) if reciprocal else None

    def tail_queries(self, heads: Tensor, relation: Tensor) -> Tensor:
        """Heads, ready to be compared with tails."""
        return self._transformed(self.forwards, heads, relation) if self.reciprocal else heads

    def head_queries(self, tails: Tensor, relation: Tensor) -> Tensor:
        """Tails, ready to be compared with heads."""
        return self._transformed(self.backwards or self.forwards, tails, relation)

    def tail_candidates(self, tails: Tensor, relation: Tensor) -> Tensor:
        """Tails, ready to be compared with heads that are queries."""
        return tails if self.reciprocal else self._transformed(self.forwards, tails, relation)

    def pairs(self, queries: Tensor, candidates: Tensor) -> Tensor:
        """Scores of pairs of rows ``[..., D]``: ``[...]``."""
        d = self.dimension
        scores = self.comparator.pairs(queries[..., :d], candidates[..., :d])
        return scores + queries[..., d] + candidates[..., d] if self.bias else scores

    def all_pairs(self, queries: Tensor, candidates: Tensor) -> Tensor:
        """Scores of all pairs of ``[..., m, D]`` and ``[..., n, D]``: ``[..., m, n]``."""
        d = self.dimension
        scores = self.comparator.all_pairs(queries[..., :d], candidates[..., :d])
        if not self.bias:
            return scores
        return scores + queries[..., d].unsqueeze(-1) + candidates[..., d].unsqueeze(-2)

    def of_edges(self, heads: Tensor, relation: Tensor, tails: Tensor) -> Tensor:
        """Scores of finding the tails: heads and tails ``[B, D]``, relation ``[B]``, scores ``[B]``."""
        queries = self.tail_queries(heads.unsqueeze(1), relation)
        return self.pairs(queries, self.tail_candidates(tails.unsqueeze(1), relation)).squeeze(1)

    def cubes(self, heads: Tensor, relation: Tensor, tails: Tensor) -> Tensor:
        """The N3 norm of each edge: cubed absolute values of its embeddings and relation parameters, summed, ``[B]``.

        Shapes:
            heads and tails ``[B, D]``, relation ``[B]``.
        """
        d = self.dimension
        parts = [self.forwards.magnitudes(rows[:, :d]) for rows in (heads, tails)]
        for operator in (self.forwards, self.backwards):
            found = None if operator is None else operator.relation_magnitudes(relation)
            parts += [] if found is None else [found]
        total = parts[0].pow(3).sum(-1)
        for part in parts[1:]:
            total = total + part.pow(3).sum(-1)
        return total

    def _transformed(self, operator: nn.Module, rows: Tensor, relation: Tensor) -> Tensor:
        """The bias stays as it is."""
        changed: Tensor = operator(rows[..., : self.dimension], relation)
        return torch.cat([changed, rows[..., self.dimension :]], dim=-1) if self.bias else changed
