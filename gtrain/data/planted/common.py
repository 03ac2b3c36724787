"""Shared code of the generated sources: base class, checks of parameters, power laws, best possible scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gtrain.data.config import DataConfig
from gtrain.data.module import GraphDataModule
from gtrain.errors import ConfigError
from gtrain.graph.store.files import chunks, row_bytes
from gtrain.settings import part

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class PlantedSource(GraphDataModule):
    """Base of the sources that draw a graph from a model with a known best possible score.

    Attributes:
        model_type: dataclass of the generator's parameters, all of them settings of the source; validates itself.
        model: the parameters.
        no_masks: the reason why ``data.split=public`` is rejected, and the split to set instead.
    """

    model_type: ClassVar[type]
    model: Any
    no_masks: ClassVar[tuple[str, str]] = ("a planted graph has no masks", "random")

    def __init__(self, settings: DataConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        self.model = part(self.model_type, self.settings)
        self._facts: dict[str, Any] = {}
        self.check_split()

    def check_split(self) -> None:
        """Raise ConfigError for a split that the generator does not support."""
        if self.split.kind == "public":
            reason, instead = self.no_masks
            raise ConfigError(f"data.split=public, and {reason}", hint=f"set data.split={instead}")

    def identity(self) -> dict[str, Any]:
        """Return the generator's parameters and its seed."""
        return {**asdict(self.model), "seed": self.seed}

    def numbering(self) -> dict[str, Any]:
        """Return the generator's parameters, which determine the nodes."""
        return {"data": self.name, **self.identity()}

    def extra_facts(self) -> dict[str, Any]:
        """Return the best possible scores, which :meth:`read` computes."""
        return dict(self._facts)


def check_least(model: object, least: Mapping[str, int]) -> None:
    """Raise ConfigError if an attribute is below its smallest allowed value."""
    for key, limit in least.items():
        if not getattr(model, key) >= limit:
            raise ConfigError(f"data.{key}={getattr(model, key)} is too small", hint=f"set {limit} or more")


def check_finite(model: object, least: Mapping[str, float]) -> None:
    """Raise ConfigError if an attribute is not finite, or below its smallest allowed value."""
    for key, limit in least.items():
        value = getattr(model, key)
        if not (math.isfinite(value) and value >= limit):
            raise ConfigError(f"data.{key}={value} is out of range", hint=f"set a number from {limit:g}")


def check_shares(model: object, *keys: str) -> None:
    """Raise ConfigError if an attribute is not a probability."""
    for key in keys:
        if not 0 <= getattr(model, key) <= 1:
            raise ConfigError(f"data.{key}={getattr(model, key)} is not a probability", hint="set 0 to 1")


def check_exponent(model: Any) -> None:
    """Raise ConfigError if ``degree_exponent`` gives a power law without a finite mean."""
    if not 2 < model.degree_exponent < math.inf:
        raise ConfigError(
            f"data.degree_exponent={model.degree_exponent:g} has no finite mean degree", hint="set more than 2"
        )


def power_law(count: int, exponent: float, rng: np.random.Generator) -> Floats:
    """Draw weights ``[count]`` from a power law, capped at ``sqrt(count) / 2`` times their mean.

    The cap keeps a single node from outweighing its class.
    """
    weights = (1 - rng.random(count)) ** (-1 / (exponent - 1))
    capped: Floats = np.minimum(weights, weights.mean() * math.sqrt(count) / 2)
    return capped


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
    labels: Ints = np.where(wrong, (classes + shift) % num_classes, classes)
    return labels
