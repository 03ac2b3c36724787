"""gtrain.data.planted.sparse: the generator, and the scores that nothing can beat."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

from gtrain.data.planted.common import expected_auc
from gtrain.data.planted.sparse import PlantedSparseData, SparseModel, best_scores, generate
from gtrain.errors import ConfigError


@pytest.mark.parametrize(
    "model",
    [
        SparseModel(),
        SparseModel(num_rows=500, num_features=40, zipf_exponent=3.0),  # half of the columns, a few of them frequent
        SparseModel(num_rows=300, num_features=2, features_per_row=1, binary=False),
    ],
)
def test_rows_are_what_was_asked_for(model: SparseModel) -> None:
    data, probability = generate(model, seed=1)
    x = data.x
    assert x.layout == torch.sparse_csr and x.shape == (model.num_rows, model.num_features)
    assert x.crow_indices().diff().unique().tolist() == [model.features_per_row]
    columns = x.col_indices().reshape(model.num_rows, -1)
    assert (columns.diff(dim=1) > 0).all() and columns.min() >= 0 and columns.max() < model.num_features
    assert (x.values() == 1).all() == model.binary
    assert data.edge_index.shape == (2, 0) and set(data.y.tolist()) == {0, 1}
    assert probability.mean() == pytest.approx(0.3, abs=1e-9)
    logits = np.log(probability / (1 - probability))
    assert logits.std() == pytest.approx(2.0, abs=1e-6)


def test_frequencies_follow_zipf() -> None:
    model = SparseModel(num_rows=40000, num_features=500, features_per_row=1, zipf_exponent=1.0)
    counts = np.sort(generate(model, seed=0)[0].x.col_indices().bincount(minlength=500).numpy())[::-1]
    expected = 40000 / np.arange(1, 501) / (1 / np.arange(1, 501)).sum()
    assert np.abs(counts[:20] - expected[:20]).max() < 5 * math.sqrt(expected[0])
    assert counts[:10].sum() / 40000 == pytest.approx(expected[:10].sum() / 40000, abs=0.01)


def test_seeded() -> None:
    model = SparseModel(num_rows=300)
    (one, p), (again, q), (other, _) = (generate(model, seed) for seed in (4, 4, 5))
    assert torch.equal(one.x.col_indices(), again.x.col_indices()) and torch.equal(one.y, again.y) and (p == q).all()
    assert not torch.equal(one.x.col_indices(), other.x.col_indices())


def test_scores_of_the_true_probabilities() -> None:
    """Ranking by the truth scores best_auc; so does guessing the likelier label best_acc."""
    data, probability = generate(SparseModel(num_rows=40000), seed=2)
    best, y = best_scores(probability), data.y.numpy()
    assert roc_auc_score(y, probability) == pytest.approx(best["best_auc"], abs=0.01)
    assert ((probability > 0.5) == y).mean() == pytest.approx(best["best_acc"], abs=0.01)
    assert log_loss(y, probability) == pytest.approx(best["best_log_loss"], abs=0.01)


def test_auc_against_all_pairs() -> None:
    rng = np.random.default_rng(0)
    score = rng.integers(0, 6, 40).astype(float)  # many ties
    positive, negative = rng.random(40), rng.random(40)
    wins = (score[:, None] > score) + 0.5 * (score[:, None] == score)
    expected = (positive[:, None] * negative * wins).sum() / (positive.sum() * negative.sum())
    assert expected_auc(score, positive, negative) == pytest.approx(expected, abs=1e-12)


def test_a_logistic_regression_comes_near_and_not_above() -> None:
    data, probability = generate(SparseModel(num_rows=30000, num_features=300), seed=3)
    x = data.x.to_dense().numpy()
    y = data.y.numpy()
    fitted = LogisticRegression(C=1.0, max_iter=300).fit(x[:20000], y[:20000])
    reached = roc_auc_score(y[20000:], fitted.predict_proba(x[20000:])[:, 1])
    best = best_scores(probability)["best_auc"]
    assert best - 0.015 < reached < best + 0.015


def test_without_signal_nothing_is_learned() -> None:
    best = best_scores(generate(SparseModel(num_rows=1000, signal=0.0), seed=0)[1])
    assert best["best_auc"] == pytest.approx(0.5, abs=1e-12) and best["best_acc"] == pytest.approx(0.7, abs=1e-9)


def test_the_store(tmp_path: Path) -> None:
    module = PlantedSparseData(num_rows=500, num_parts=2, store=str(tmp_path))
    module.prepare_data()
    store, facts = module.open_store(), module.facts
    x = store.node("x", 1)
    assert x.layout == torch.sparse_csr and x.shape[1] == 1000 and store.num_edges == 0
    assert facts["num_classes"] == 2 and facts["num_features"] == 1000 and facts["sparse_features"] is True
    assert 0.5 < facts["best_acc"] < facts["best_auc"] < 1 and facts["split"]["sizes"]["train"] == 300


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_rows": 1}, "data.num_rows=1 was set; it must be at least 2"),
        ({"features_per_row": 501}, "features_per_row=501 is more than half of data.num_features=1000"),
        ({"positive_rate": 1.0}, "positive_rate=1.0 was set; it must be a number above 0 and below 1"),
        ({"zipf_exponent": -0.5}, "zipf_exponent=-0.5 was set; it must be at least 0"),
        ({"signal": math.nan}, "signal=nan was set; it must be at least 0, and finite"),
        ({"split": "public"}, "generated rows have no masks"),
    ],
)
def test_impossible_rows(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlantedSparseData(**options)  # type: ignore[arg-type]
