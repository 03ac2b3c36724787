"""Generated rows of sparse features whose best possible accuracy and AUC are known."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data

from gtrain.data.config import PlantedSparseConfig, PlantedSparseParameters
from gtrain.data.module import SPARSE_OUTLINE
from gtrain.data.planted.common import Floats, Ints, PlantedSource, expected_auc
from gtrain.errors import ConfigError
from gtrain.graph.store.tables import csr_tensor

ROUNDS = 20
"""Rounds after which a row's missing features are drawn uniformly: by then it may have all frequent features."""


@dataclass
class SparseModel(PlantedSparseParameters):
    """The parameters of the generator, checked; see :class:`PlantedSparseData` for their meaning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features_per_row > self.num_features // 2:
            raise ConfigError(
                f"data.features_per_row={self.features_per_row} is more than half of "
                f"data.num_features={self.num_features}",
                hint=f"set {max(1, self.num_features // 2)} or less, or raise data.num_features",
            )


class PlantedSparseData(PlantedSource[SparseModel, PlantedSparseConfig]):
    """Rows of a wide sparse matrix with binary labels from a logistic model.

    Each row has ``features_per_row`` distinct features. The feature of frequency rank r (from 1) is drawn in proportion
    to ``r ** -zipf_exponent`` (Zipf's law); ranks are assigned to features at random, so that frequent ones are spread
    over all ids. The value of a feature is 1, or standard normal with ``binary=false``. Weights are standard normal,
    scaled so that the logits ``x @ w`` of these rows have the standard deviation ``signal``; the bias is set so that
    the mean probability of label 1 is ``positive_rate``. The label of a row is drawn with its probability.

    Rows are stored as graph nodes without edges, ``x`` as a CSR tensor.

    **The best possible scores.** With p the true probability of label 1: ``best_acc`` is the mean over rows of
    ``max(p, 1 - p)``; ``best_auc`` the expected area under the ROC curve of ranking by p, over all pairs of rows;
    ``best_log_loss`` the mean entropy of a label in nats. A trained model has to estimate ``num_features`` weights, and
    comes near only with many rows for each feature. Scores on n test rows vary by about ``sqrt(a (1 - a) / n)``.

    Its settings are those of :class:`~gtrain.data.config.PlantedSparseConfig`.
    """

    name = "planted_sparse"
    outline = SPARSE_OUTLINE
    sparse_rows = True

    def read(self) -> Data:
        """Generate the rows."""
        data, probability = generate(self.model, self.seed)
        self._facts = best_scores(probability)
        return data


def generate(model: SparseModel, seed: int) -> tuple[Data, Floats]:
    """Draw rows and labels from the model, and return them with the true probability of label 1 of each row."""
    rng = np.random.default_rng(seed)
    features = draw_features(model, rng)
    values = np.ones(features.shape, np.float32) if model.binary else rng.standard_normal(features.shape, np.float32)
    probability = _probability(model, features, values, rng)
    labels = (rng.random(model.num_rows) < probability).astype(np.int64)
    data = Data(
        x=_csr(features, values, model.num_features),
        y=torch.from_numpy(labels),
        edge_index=torch.empty(2, 0, dtype=torch.int64),
        num_nodes=model.num_rows,
    )
    return data, probability


def best_scores(probability: Floats) -> dict[str, float]:
    """Return ``best_acc``, ``best_auc`` and ``best_log_loss`` (nats) of rows with these probabilities of label 1."""
    other = 1 - probability
    # Avoids log(0): where p rounds to 0 or 1, the entropy is 0.
    clipped = np.clip(probability, 1e-15, 1 - 1e-15)
    entropy = -(probability * np.log(clipped) + other * np.log1p(-clipped))
    return {
        "best_acc": float(np.maximum(probability, other).mean()),
        "best_auc": expected_auc(probability, probability, other),
        "best_log_loss": float(entropy.mean()),
    }


def draw_features(model: SparseModel, rng: np.random.Generator) -> Ints:
    """Return the features of each row, different and ascending, ``[num_rows, features_per_row]``."""
    frequency = np.arange(1, model.num_features + 1, dtype=np.float64) ** -model.zipf_exponent
    total = np.cumsum(frequency)
    ids = rng.permutation(model.num_features)

    def draw(shape: int | tuple[int, int]) -> Ints:
        rank = np.searchsorted(total, rng.random(shape) * total[-1], side="right")
        # Rounding may move a draw past the end.
        return ids[np.minimum(rank, model.num_features - 1)]

    rows = np.sort(draw((model.num_rows, model.features_per_row)), axis=1)
    unfinished, rounds = np.arange(model.num_rows), 0
    while True:
        part = rows[unfinished]
        row, column = np.nonzero(part[:, 1:] == part[:, :-1])
        if not row.size:
            return rows
        part[row, column] = draw(row.size) if rounds < ROUNDS else rng.integers(0, model.num_features, row.size)
        touched = np.unique(row)
        unfinished = unfinished[touched]
        rows[unfinished] = np.sort(part[touched], axis=1)
        rounds += 1


def _probability(model: SparseModel, features: Ints, values: NDArray[np.float32], rng: np.random.Generator) -> Floats:
    """Return the true probability of label 1 of each row, ``[num_rows]``."""
    weights = rng.standard_normal(model.num_features)
    logits = np.einsum("ij,ij->i", weights[features], values, dtype=np.float64)
    spread = float(logits.std())
    logits = (logits - logits.mean()) * (model.signal / spread if spread > 0 else 0.0)
    return _sigmoid(logits + _bias(logits, model.positive_rate))


def _bias(logits: Floats, rate: float) -> float:
    """Return the bias at which the mean probability is ``rate``, by bisection: the mean rises with the bias."""
    centre = math.log(rate / (1 - rate))
    low, high = centre - float(logits.max()), centre - float(logits.min())
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(logits + middle).mean() < rate else (low, middle)
    return (low + high) / 2


def _sigmoid(logits: Floats) -> Floats:
    return 0.5 * (1 + np.tanh(logits / 2))  # does not overflow


def _csr(features: Ints, values: NDArray[np.float32], num_features: int) -> Tensor:
    num_rows, width = features.shape
    starts = torch.arange(0, num_rows * width + 1, width)
    return csr_tensor(
        starts, torch.from_numpy(features.ravel()), torch.from_numpy(values.ravel()), (num_rows, num_features)
    )
