"""Shared code of the generated sources: base class, checks of parameters, power laws, best possible scores."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, ClassVar, Generic, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from gtrain.data.module import GraphDataModule, S
from gtrain.graph.store.files import chunks, row_bytes
from gtrain.settings import part

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


Model = TypeVar("Model")


class PlantedSource(GraphDataModule[S], Generic[Model, S]):
    """Base of the sources that draw a graph from a model with a known best possible score.

    A source inherits from ``PlantedSource[ITS_MODEL, ITS_CONFIG]``, whose first argument is a dataclass of the
    generator's parameters; all of them are settings of the source.

    Attributes:
        model: the parameters; they validate themselves.
    """

    model_type: ClassVar[type]
    model: Model

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.model_type = get_args(cls.__orig_bases__[0])[0]  # type: ignore[attr-defined]

    def __init__(self, settings: S | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        self.model = part(self.model_type, self.settings)

    def identity(self) -> dict[str, Any]:
        """Return the generator's parameters and its seed."""
        return {**asdict(self.model), "seed": self.seed}  # type: ignore[call-overload]

    def numbering(self) -> dict[str, Any]:
        """Return the generator's parameters, which determine the nodes."""
        return {"data": self.name, **self.identity()}


def power_law(count: int, exponent: float, rng: np.random.Generator) -> Floats:
    """Draw weights ``[count]`` from a power law, capped at ``sqrt(count) / 2`` times their mean.

    The cap keeps a single node from outweighing its class.
    """
    weights = (1 - rng.random(count)) ** (-1 / (exponent - 1))
    return np.minimum(weights, weights.mean() * math.sqrt(count) / 2)


def expected_accuracy(evidence: Floats, label_noise: float) -> float:
    """Return the mean over nodes of the largest posterior of a label.

    Args:
        evidence: log-probability of each class of each node, up to a constant per node.
        label_noise: share of the labels that are replaced by another class, drawn uniformly.

    Shapes:
        evidence ``[N, k]``.
    """
    others = evidence.shape[1] - 1
    posterior = np.exp(evidence - evidence.max(axis=1, keepdims=True))
    posterior /= posterior.sum(axis=1, keepdims=True)
    return float(((1 - label_noise) * posterior + label_noise * (1 - posterior) / others).max(axis=1).mean())


def log_odds(homophily: float, num_classes: int) -> float:
    """Return the evidence of one neighbour for its class, against one other class, as log-odds."""
    same = float(np.clip(homophily, 1e-12, 1 - 1e-12))  # avoids 0 * log 0
    return math.log(same) - math.log((1 - same) / (num_classes - 1))


def expected_auc(score: Floats, positive: Floats, negative: Floats) -> float:
    """Return the expected area under the ROC curve of items with uncertain labels, ranked by ``score``.

    Args:
        score: score of each item; ties count one half.
        positive: probability, or expected number, of positives at the item.
        negative: probability, or expected number, of negatives at the item.

    Shapes:
        all ``[n]``.
    """
    _, rank = np.unique(score, return_inverse=True)
    above = np.bincount(rank, weights=positive)
    below = np.bincount(rank, weights=negative)
    under = np.cumsum(below) - below
    return float((above * (under + below / 2)).sum() / (above.sum() * below.sum()))


def class_features(
    classes: Ints, num_classes: int, num_features: int, signal: float, rng: np.random.Generator
) -> tuple[NDArray[np.float32], Floats]:
    """Draw ``signal * mean[class] + N(0, I)`` with random unit vectors as means.

    Returns:
        The features, and their log-likelihood under each class, up to a constant per node.

    Shapes:
        classes ``[N]``; the features ``[N, F]``, the log-likelihood ``[N, k]``.
    """
    means = rng.standard_normal((num_classes, num_features), dtype=np.float32)
    means *= signal / np.linalg.norm(means, axis=1, keepdims=True)
    x = rng.standard_normal((classes.size, num_features), dtype=np.float32)
    for rows in chunks(0, len(x), row_bytes(x)):
        x[rows] += means[classes[rows]]
    # |x - m|^2 = |x|^2 - 2 x.m + |m|^2; the first and the last term are equal for all classes.
    return x, (x @ means.T).astype(np.float64)


def noisy_labels(classes: Ints, num_classes: int, label_noise: float, rng: np.random.Generator) -> Ints:
    """Return the classes as labels; a share ``label_noise`` is replaced by another class, drawn uniformly."""
    wrong = rng.random(classes.size) < label_noise
    shift = rng.integers(1, num_classes, classes.size)
    return np.where(wrong, (classes + shift) % num_classes, classes)
