"""What the built-in models return from a test step, for callbacks that summarise a test."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ClassScores:
    """Scores of the S seeds of a test batch.

    Attributes:
        scores: logits ``[S, C]``.
        labels: int64 ``[S]``, or 0/1 ``[S, C]`` if a seed may carry several labels.
        multilabel: whether it may.
    """

    scores: Tensor
    labels: Tensor
    multilabel: bool


@dataclass(frozen=True)
class NumberScores:
    """Predicted numbers of the S seeds of a test batch, in the unit of the labels.

    Attributes:
        predicted: float64 ``[S]``.
        labels: float64 ``[S]``.
        deviation: standard deviation of the training labels.
    """

    predicted: Tensor
    labels: Tensor
    deviation: float


@dataclass(frozen=True)
class EdgeScores:
    """Scores and ranks of the B edges of a test batch.

    Attributes:
        true: scores of the edges, ``[B]``.
        negative: scores of false edges, ``[B]``.
        tail_ranks: rank of each edge's target among all candidates, float64 ``[B]``, from 1.
        head_ranks: the same for its source.
        relation: int64 ``[B]``; None if edges have no relations.
        embedding: embeddings of the first sources, ``[b, D]`` with b <= B; None if the model has none to offer.
    """

    true: Tensor
    negative: Tensor
    tail_ranks: Tensor
    head_ranks: Tensor
    relation: Tensor | None
    embedding: Tensor | None = None
