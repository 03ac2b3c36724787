"""The best answers to questions: candidates of a block are scored at a time, and the best ones kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gtrain.model.candidate_ranks import CHUNK
from gtrain.model.kg.embedding import KGEmbedding
from gtrain.model.kg.scores import EdgeScores
from gtrain.model.kg.training import RelationGroup

Blocks = Iterator[tuple[Tensor, Tensor]]
"""Ids ``[n]`` and rows ``[n, D]`` of all candidates, a block at a time."""
ScoreBlock = Callable[[Tensor], Tensor]
"""Scores of Q queries and the rows ``[n, D]`` of a block, ``[Q, n]``."""


def best(
    blocks: Blocks, score: ScoreBlock, queries: int, k: int, left_out: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k best candidates of each query, the best first; equal scores in the order of their ids.

    Of candidates whose scores equal the k-th best, any may be returned.

    Args:
        blocks: the candidates.
        score: of the queries and a block.
        queries: Q.
        k: how many; fewer if there are fewer candidates.
        left_out: ids of each query that are not returned; None: none.

    Returns:
        ids int64 ``[Q, k]`` and scores ``[Q, k]``; minus infinity where a query has no more candidates.
    """
    ids, scores = torch.empty(queries, 0, dtype=torch.int64), torch.empty(queries, 0)
    for all_ids, all_rows in blocks:
        # Neither the scores of a step nor a copy of its rows is larger than CHUNK numbers.
        step = max(1, CHUNK // max(queries, all_rows.size(1), 1))
        for block_ids, rows in zip(all_ids.split(step), all_rows.split(step), strict=True):
            block = score(rows)
            for number, out in enumerate(left_out or ()):
                block[number, torch.isin(block_ids, out)] = -torch.inf
            # Fewer candidates are left before they are copied and sorted.
            block, chosen = block.topk(min(k, block.size(1)), dim=1)
            ids = torch.cat([ids, block_ids[chosen]], dim=1)
            scores = torch.cat([scores.to(block), block], dim=1)
            by_id = ids.argsort(dim=1)
            ids, scores = ids.gather(1, by_id), scores.gather(1, by_id)
            order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
            ids, scores = ids.gather(1, order), scores.gather(1, order)
    return ids, scores


class GroupScores:
    """Scores of edges of one group of relations, as in validation.

    Args:
        model: with its parameters.
        number: of the group.
    """

    def __init__(self, model: KGEmbedding, number: int) -> None:
        group = model.groups[number]
        assert isinstance(group, RelationGroup)
        self._entities, self._scores, self._spec = model.entities, group.scores, group.spec

    def pairs(self, heads: Tensor, relation: Tensor, tails: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of edges, ``[B]`` each: to find the tail, and to find the head.

        Args:
            heads, tails: ids within their types, ``[B]``.
            relation: numbers within the group, ``[B]``.
        """
        head_rows = self._entities.rows[self._spec.lhs](heads).unsqueeze(1)
        tail_rows = self._entities.rows[self._spec.rhs](tails).unsqueeze(1)
        scores: EdgeScores = self._scores
        to_tails = scores.of_edges(head_rows.squeeze(1), relation, tail_rows.squeeze(1))
        to_heads = scores.pairs(scores.head_queries(tail_rows, relation), head_rows).squeeze(1)
        return to_tails, to_heads

    def answers(
        self, given: Tensor, relation: int, k: int, left_out: Sequence[Tensor] | None, *, tails: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the best tails of heads with a relation, or the best heads of tails: see :func:`best`.

        Args:
            given: ids of the given ends within their type, ``[Q]``.
            relation: number within the group.
            k: how many answers.
            left_out: answers that are left out, by ids within their type; None: none.
            tails: whether tails are the answers.
        """
        spec, scores = self._spec, self._scores
        given_type, answer_type = (spec.lhs, spec.rhs) if tails else (spec.rhs, spec.lhs)
        of = torch.tensor([relation])
        rows = self._entities.rows[given_type](given).unsqueeze(0)
        queries = (scores.tail_queries if tails else scores.head_queries)(rows, of).squeeze(0)

        def score(block: Tensor) -> Tensor:
            candidates = scores.tail_candidates(block.unsqueeze(0), of).squeeze(0) if tails else block
            return scores.all_pairs(queries, candidates)

        return best(self._entities.blocks(answer_type), score, len(given), k, left_out)
