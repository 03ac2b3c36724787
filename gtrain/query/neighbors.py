"""Nearest entities: the metric that follows from a model, and the exact search by blocked products."""

from __future__ import annotations

from torch import Tensor

from gtrain.model.kg.embedding import KGEmbedding
from gtrain.model.kg.scores import make_comparator
from gtrain.query.scoring import Blocks, best

METRICS = ("cos", "l2", "dot")
_LINEAR = ("none", "diagonal", "linear", "complex_diagonal", "rotation")
"""Operators g with g(ax) = a g(x)."""


def metric_of(model: KGEmbedding) -> str:
    """Return the metric in which near entities have near scores: ``cos`` or ``l2``.

    With inner products or cosines of linear operators, a factor of an entity's vector changes none of its rankings, so
    only directions count: ``cos``. A distance, or an operator that adds a vector, compares positions: ``l2``.
    """
    recipe = model.recipe()
    scaled = recipe.groups[0].comparator in ("dot", "cos") and all(g.operator in _LINEAR for g in recipe.groups)
    return "cos" if scaled else "l2"


def exact_neighbors(
    blocks: Blocks, queries: Tensor, k: int, metric: str, own: list[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k nearest rows of each query, see :func:`~gtrain.query.scoring.best`.

    Args:
        blocks: ids and rows of the candidates, which may have more columns than the queries.
        queries: ``[Q, D]``.
        k: how many.
        metric: ``cos``, ``l2`` (scores are minus the distance) or ``dot``.
        own: ids that are left out of each query's neighbors, such as its own; None: none.
    """
    comparator = make_comparator(metric)
    return best(blocks, lambda rows: comparator.all_pairs(queries, rows[:, : queries.size(1)]), len(queries), k, own)


def similarities(queries: Tensor, rows: Tensor, metric: str) -> Tensor:
    """Return the scores ``[Q, k]`` of queries ``[Q, D]`` and k rows of each ``[Q, k, D]``."""
    return make_comparator(metric).pairs(queries.unsqueeze(1), rows)
