"""The figures of a test of numbers to predict, by what the recorder of two ranks writes; numbers without a place."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import altair as alt
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from gtrain.callbacks.test_record import TestRecorder
from gtrain.model.outputs import NumberScores
from gtrain.record.run import RunRecord
from gtrain.record.score_counts import ScoreCounts
from gtrain.reporting import projection, scores
from gtrain.reporting.style import make_figure

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


def test_scores_that_are_not_finite_have_no_place_among_degrees() -> None:
    scored = [{"degree": 1, "score": float("nan")}, {"degree": 2, "score": 1.0}, {"degree": 2, "score": float("inf")}]
    (figure,) = scores.by_degree(scored, "numbers")
    assert "2-3: 1." in figure.alt and "A sample of 1" in figure.note
    assert scores.by_degree(scored[:1], "numbers") == []


def test_a_figure_has_no_number_that_json_lacks() -> None:
    rows = [{"x": 1.0, "y": number} for number in (2.0, float("nan"), float("-inf"))]
    chart = alt.Chart(alt.Data(values=rows)).mark_line().encode(x="x:Q", y="y:Q")
    figure = make_figure("loss", "Loss", "", chart)
    assert [row["y"] for row in figure.spec["data"]["values"]] == [2.0, None, None]
    json.dumps(figure.spec, allow_nan=False)


def drawn(path: Path, values: Any) -> tuple[list[dict[str, Any]], str]:
    """The points of the picture of a sample, and what is said of them."""
    np.savez(path, id=np.arange(len(values)), values=np.asarray(values, np.float32))
    (figure,) = projection.picture([path], lambda ids: [str(number) for number in ids], None, "the embeddings")
    return figure.spec["data"]["values"], figure.alt


def test_rows_that_are_not_finite_are_not_in_the_picture(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(20, 4))
    values[3, 1], values[7, 0] = np.inf, np.nan
    points, said = drawn(tmp_path / "hidden.npz", values)
    assert [point["name"] for point in points] == [str(number) for number in range(20) if number not in (3, 7)]
    assert "18 nodes" in said and max(abs(point["x"]) for point in points) <= 1


@pytest.mark.parametrize(
    "values",
    [np.arange(50.0)[:, None], np.zeros((50, 8)), np.arange(50.0)[:, None] * np.ones(8)],
    ids=["one column", "equal rows", "one line"],
)
def test_rows_of_one_dimension_are_a_line(values: Any, tmp_path: Path) -> None:
    points, said = drawn(tmp_path / "hidden.npz", values)
    assert len(points) == 50 and {point["y"] for point in points} == {0.0}
    assert said.endswith("by the first two principal components.")


def test_points_that_are_not_finite_are_drawn_by_principal_components(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projection, "project", lambda rows: (np.full((len(rows), 2), np.nan), "another method"))
    points, said = drawn(tmp_path / "hidden.npz", np.random.default_rng(0).normal(size=(20, 4)))
    assert "principal components" in said and all(np.isfinite([point["x"], point["y"]]).all() for point in points)


def test_a_sample_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    good, cut, empty = (tmp_path / f"hidden-rank-{rank}.npz" for rank in range(3))
    drawn(good, np.eye(5))
    cut.write_bytes(good.read_bytes()[:300])
    empty.touch()
    names = lambda ids: [str(number) for number in ids]  # noqa: E731
    (figure,) = projection.picture([cut, good, empty], names, None, "the embeddings")
    assert "5 nodes" in figure.alt
    assert projection.picture([cut, empty], names, None, "the embeddings") == []


def test_a_sample_is_written_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, path = TestRecorder(tmp_path, 0, 1), tmp_path / "hidden-rank-0.npz"
    recorder._hidden = [(torch.arange(3), torch.eye(3), None)]
    recorder._write_hidden(path)
    assert np.load(path)["values"].shape == (3, 3) and [*tmp_path.iterdir()] == [path]

    def killed(file: Any, **columns: Any) -> None:
        Path(file if isinstance(file, Path) else file.name).write_bytes(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", killed)
    with pytest.raises(KeyboardInterrupt):
        recorder._write_hidden(path)
    assert np.load(path)["values"].shape == (3, 3)


def test_a_score_that_is_certain_is_above_all_others() -> None:
    """The softmax of scores far apart is exactly 1, whose logit is infinite."""
    counts = ScoreCounts(100)
    counts.add(np.asarray([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e30], np.float32), positive=True)
    assert counts.positive.tolist() == [2, 2, 1, 1] and not counts.negative.any()
