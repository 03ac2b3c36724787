"""The figures of a test of numbers to predict, from what the recorder of two ranks writes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch_geometric.data import Data

from gtrain.callbacks.test_record import BINS, TestRecorder, _bins
from gtrain.model.outputs import NumberScores
from gtrain.record.run import RunRecord
from gtrain.reporting import scores

DEVIATION = 2.0
RESIDUALS = torch.tensor([0.05, -0.05, 0.25, 100.0, -100.0, torch.nan], dtype=torch.float64)


def figures(folder: Path) -> dict[str, Any]:
    """Record six nodes on each of two ranks, one batch each, and return the figures by name."""
    for rank in range(2):
        labels = torch.arange(6, dtype=torch.float64) + 10 * rank
        recorder = TestRecorder(folder, rank, 2)
        trainer: Any = SimpleNamespace(num_test_batches=[1])
        recorder.on_test_start(trainer, pl.LightningModule())
        batch = Data(orig_id=torch.arange(6) + 6 * rank, seeds=torch.arange(6), num_nodes=6)
        outputs = NumberScores(labels + RESIDUALS * DEVIATION, labels, DEVIATION)
        recorder.on_test_batch_end(trainer, pl.LightningModule(), outputs, batch, 0)
        recorder.on_test_end(trainer, pl.LightningModule())
    return {figure.name: figure for figure in scores.figures(RunRecord(folder), None, None)}


def test_residuals_of_all_ranks_are_counted_in_bins(tmp_path: Path) -> None:
    figure = figures(tmp_path)["residuals"]
    rows = {round(row["low"], 6): row["nodes"] for row in figure.spec["data"]["values"]}
    # Bins of a tenth of the deviation, 0.2; beyond 4 deviations, and NaN, in the outermost ones.
    assert {low: nodes for low, nodes in rows.items() if nodes} == {-8.0: 2, -0.2: 2, 0.0: 2, 0.4: 2, 7.8: 4}
    assert len(rows) == 80 and sum(rows.values()) == 12
    assert "12 test nodes; 50.0% are below 2" in figure.alt and "beyond 8" in figure.note


def test_predictions_are_drawn_against_labels(tmp_path: Path) -> None:
    figure = figures(tmp_path)["predictions"]
    line, dots = (layer["data"]["values"] for layer in figure.spec["layer"])
    # A prediction that is not finite has no place; the others of both ranks do.
    assert [(row["true"], row["predicted"]) for row in dots][:3] == [(0, 0.1), (1, 0.9), (2, 2.5)] and len(dots) == 10
    assert line == [{"x": -196.0, "y": -196.0}, {"x": 213.0, "y": 213.0}]
    assert "10 test nodes" in figure.alt


def test_the_error_by_degree_has_the_unit_of_the_labels() -> None:
    (figure,) = scores.by_degree([{"degree": 1, "score": 30.0}, {"degree": 1, "score": 50.0}], "numbers")
    (row,) = (
        figure.spec["layer"][0]["data"]["values"]
        if "data" in figure.spec["layer"][0]
        else figure.spec["data"]["values"]
    )
    assert row["score"] == 40 and row["high"] == pytest.approx(40 + 2 * 10 / 2**0.5)
    assert "absolute error" in figure.alt


def test_a_score_that_is_certain_is_in_the_last_bin() -> None:
    """The softmax of scores far apart is exactly 1, whose logit is infinite."""
    scores = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, 1e300])
    assert _bins(scores).tolist() == [BINS - 1, 0, 0, BINS // 2, BINS - 1]
