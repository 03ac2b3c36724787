"""The loss, the metrics and the predictions of a node regressor."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from torch import Tensor, nn
from torch_geometric.data import Data

from gtrain.errors import ConfigError, DataError
from gtrain.model.classification import default_score
from gtrain.model.regression import NodeRegressor
from gtrain.model.regression_metrics import regression_metrics
from gtrain.record.scores import better, lower_is_better

MEAN, DEVIATION = 1e4, 50.0


class Outputs(nn.Module):
    """Returns what it was given: outputs are then known."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def batch(seeds: int = 20) -> Data:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(50, 1, generator=generator)
    y = MEAN + DEVIATION * (z[:, 0] + 0.3 * torch.randn(50, generator=generator))
    y[seeds:] = math.nan  # nodes without a label are no seeds
    return Data(x=z, y=y, edge_index=torch.zeros(2, 0, dtype=torch.int64), seeds=torch.arange(seeds))


def module(**settings: Any) -> NodeRegressor:
    made = NodeRegressor(Outputs(), MEAN, DEVIATION, **settings)
    made.log = made.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(("loss", "function"), [("l1", F.l1_loss), ("l2", F.mse_loss), ("huber", F.huber_loss)])
def test_the_loss_is_the_mean_over_the_seeds_of_standardised_errors(loss: str, function: Any) -> None:
    b = batch()
    out = module(loss=loss).training_step(b, 0)
    assert out["weight"] == 20
    torch.testing.assert_close(out["loss"], function(b.x[:20, 0], (b.y[:20] - MEAN) / DEVIATION))


def test_metrics_are_in_the_unit_of_the_labels() -> None:
    made, b = module(), batch()
    for seeds in (b.seeds[:3], b.seeds[3:], b.seeds[:0]):  # in batches, one of them empty
        b.seeds = seeds
        made.validation_step(b, 0)
    truth, guess = b.y[:20].double().numpy(), MEAN + DEVIATION * b.x[:20, 0].double().numpy()
    found = {name: float(value) for name, value in made.val_scores.compute().items()}
    errors = guess - truth
    expected = {
        "val/mae": np.abs(errors).mean(),
        "val/rmse": np.sqrt((errors**2).mean()),
        "val/r2": 1 - (errors**2).sum() / ((truth - truth.mean()) ** 2).sum(),
    }
    assert found == pytest.approx(expected, rel=1e-12)
    by_sklearn = (mean_absolute_error, root_mean_squared_error, r2_score)
    assert [found[name] for name in expected] == pytest.approx([score(truth, guess) for score in by_sklearn], rel=1e-9)


def test_sums_of_ranks_make_one_metric() -> None:
    """Each state is a sum, so that any division of the rows gives the same figures."""
    generator = torch.Generator().manual_seed(1)
    errors, labels = torch.randn(2, 99, dtype=torch.float64, generator=generator)
    whole, parts = regression_metrics("val/"), [regression_metrics("val/") for _ in range(3)]
    whole.update(errors, labels)
    for part, rows in zip(parts, torch.arange(99).tensor_split([10, 11]), strict=True):
        part.update(errors[rows], labels[rows])
    for name, metric in whole.items(keep_base=True):
        assert [*metric._reductions.values()] == [torch.sum] or "sum" in str(metric._reductions["sums"])
        torch.testing.assert_close(sum(part[name].sums for part in parts), metric.sums, rtol=1e-13, atol=1e-12)


def test_undefined_metrics() -> None:
    metrics = regression_metrics("")
    metrics.update(torch.ones(0), torch.ones(0))
    assert all(math.isnan(float(value)) for value in metrics.compute().values())
    metrics.update(torch.ones(3), torch.full((3,), 0.1))
    assert metrics["mae"].compute() == 1 and math.isnan(float(metrics["r2"].compute()))


def test_bfloat16_does_not_round_sums_or_labels() -> None:
    made, b = module(), batch()
    b.x = b.x.bfloat16()
    out = made.bfloat16().training_step(b, 0)
    made.to(torch.bfloat16).validation_step(b, 0)
    errors = b.x[:20, 0].double() * DEVIATION + MEAN - b.y[:20].double()
    assert out["loss"].dtype == torch.float32
    assert float(made.val_scores["mae"].compute()) == pytest.approx(float(errors.abs().mean()), rel=1e-12)


def test_predictions_are_in_the_unit_of_the_labels() -> None:
    b = batch()
    torch.testing.assert_close(module().predict_step(b, 0), MEAN + DEVIATION * b.x[:20].double())


def test_the_score_is_the_mean_absolute_error() -> None:
    assert default_score(module(), {"label_scale": {"mean": 0.0, "deviation": 1.0}}) == "val/mae"
    lower = {"val/mae": True, "val/rmse": True, "val/loss": True, "val/mean_rank": True, "val/r2": False}
    lower |= {"val/mse": True, "val/error": True, "val/perplexity": True}
    assert {name: lower_is_better(name) for name in (*lower, "val/acc")} == {**lower, "val/acc": False}
    assert better("val/mae", [3.0, 1.0, 2.0]) == 1 and better("val/auc", [0.3, 0.1]) == 0.3
    assert better("val/mae", [3.0, 1.0], "max") == 3 and better("val/auc", [0.3, 0.1], "min") == 0.1
    assert better("val/mae", [3.0, 1.0], "auto") == 1


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="(?s)model.regression_loss=l3 was set.*l1, l2, huber"):
        module(loss="l3")
    b = batch()
    del b.y
    with pytest.raises(DataError, match="no labels to learn from"):
        module().training_step(b, 0)
