"""The figures and files of pages, from records as runs leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gtrain.record.run import RunRecord
from gtrain.record.score_counts import ScoreCounts
from gtrain.reporting import comparison, figures, page, run_page, scores, style, watch

PARTS = {"computing": 0.5, "sending": 0.1, "waiting": 0.3, "reading": 0.1}


def write(folder: Path, rows: dict[str, list[dict[str, Any]]], *events: dict[str, Any]) -> RunRecord:
    """Write the record of a run: the rows of each process, and events after the start."""
    (folder / "record").mkdir(parents=True)
    start = {"event": "start", "time": 0.0, "verb": "train", "strategy": "sar", "data": "planted", "model": "gcn"}
    lines = "".join(json.dumps(event) + "\n" for event in (start, *events))
    (folder / "record/events.jsonl").write_text(lines)
    for name, each in rows.items():
        (folder / f"record/{name}.jsonl").write_text("".join(json.dumps({"time": 1.0, **row}) + "\n" for row in each))
    return RunRecord(folder)


def epochs(count: int, every: int, *names: str) -> list[dict[str, Any]]:
    """Rows of epochs; the second and later metrics are measured in each ``every``-th one."""
    return [
        {"kind": "epoch", "epoch": epoch, "seconds": 1.0, "bytes_sent": 0, **PARTS,
         "metrics": {name: epoch / count for name in (names if epoch % every == 0 else names[:1])}}
        for epoch in range(count)
    ]  # fmt: skip


def values(figure: style.Figure) -> list[dict[str, Any]]:
    """The rows of a figure of one layer."""
    rows: list[dict[str, Any]] = figure.spec["data"]["values"]
    return rows


def test_curves_keep_the_epochs_that_were_validated(tmp_path: Path) -> None:
    run = write(tmp_path, {"rank-0": epochs(1200, 7, "train/loss", "val/acc")})
    made = {figure.name: values(figure) for figure in figures.curves(run)}
    assert [row["epoch"] for row in made["score-by-epoch"]] == list(range(1, 1201, 7))
    assert len(made["loss-by-epoch"]) == 400
    compared = {figure.name: values(figure) for figure in comparison._curves([run], ["run"])}
    assert len(compared["score-by-epoch"]) == 150


def test_metrics_without_a_slash_are_shown(tmp_path: Path) -> None:
    run = write(tmp_path, {"rank-0": epochs(4, 1, "train_loss", "val_loss", "val_acc", "acc")})
    made = {figure.name: {row["metric"] for row in values(figure)} for figure in figures.curves(run)}
    assert made["loss-by-epoch"] == {"train_loss", "val_loss"} and made["score-by-epoch"] == {"val_acc", "acc"}
    assert [row["name"] for row in run_page.result_rows(run)] == ["train_loss", "val_loss", "val_acc", "acc"]
    assert {figure.name for figure in comparison._curves([run], ["run"])} >= {"loss-by-epoch", "score-by-seconds"}
    console = watch.Console(width=80, file=None)
    with console.capture() as said:
        console.print(watch.page(run))
    assert "val_acc" in said.get() and "train_loss" in said.get()
    run.start["checkpoint"] = {"monitor": "val_acc", "direction": "min"}
    assert run.direction_of("test_acc") == "min" and run.direction_of("test_f1") is None


def test_the_memory_of_many_processes_is_bounded(tmp_path: Path) -> None:
    rows = {
        f"rank-{rank}": [{"kind": "memory", "anonymous": (rank + 1) << 20, "device": 0, "time": float(time)}
                         for time in range(3)]
        for rank in range(50)
    }  # fmt: skip
    (figure,) = figures.memory(write(tmp_path, rows))
    assert {row["process"] for row in values(figure)} == {f"rank {rank}" for rank in range(30, 50)}
    assert "rank 49 has the most, 50 MiB" in figure.alt and "20 of 50 processes" in figure.note
    # The second ten are dashed, and no colour repeats.
    encoding = figure.spec["encoding"]
    assert len(set(encoding["color"]["scale"]["range"])) == 20
    assert encoding["strokeDash"]["scale"]["range"].count([6, 3]) == 10


def test_all_other_series_are_grey() -> None:
    encoding = style.colour("label", [*map(str, range(20)), style.OTHER]).to_dict()
    assert encoding["scale"]["range"][-1] == style.NEUTRAL and style.NEUTRAL not in style.COLOURS
    assert len(set(encoding["scale"]["range"])) == 21 and style.dashes("label", "abc") == {}


def test_labels_of_large_bins() -> None:
    labels = [scores._rank_label(number) for number in range(48)]
    assert labels[:3] == ["1", "2-3", "4-7"] and labels[12:15] == ["4096-8191", "8192-<16.4k", "16.4k-<32.8k"]
    assert labels[19:21] == ["524k-<1.05M", "1.05M-<2.1M"] and not any("e+" in label for label in labels)


def test_equal_predictions_have_no_correlation(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    test = {"task": "numbers", "counts": {}, "scored": {"true": [1.0, 2.0, 3.0], "predicted": [2.0, 2.0, 2.0]}}
    run = write(tmp_path, {})
    (tmp_path / "record/test-rank-0.json").write_text(json.dumps(test))
    (figure,) = scores.figures(run, None, None)
    assert figure.alt.endswith("all predictions are equal.") and not recwarn.list


def test_a_name_cannot_end_or_hide_the_script(tmp_path: Path) -> None:
    figure = style.Figure("loss", "Loss", "", {"values": ["<!--<script", "</script>"]})
    values: dict[str, Any] = {"title": "t", "folders": [], "rows": [], "metrics": [], "best": {}, "failures": []}
    page.write_page(tmp_path / "page.html", "comparison.html.j2", [figure], **values, sections=[])
    text = (tmp_path / "page.html").read_text()
    inside = text.partition('id="figures">')[2].partition("</script>")[0]
    assert "<" not in inside and json.loads(inside) == {"loss": figure.spec}


def test_files_of_an_earlier_report_are_deleted(tmp_path: Path) -> None:
    for name in ("roc.svg", "memory.png", "mine.svg", "loss-by-epoch.svg"):
        (tmp_path / name).touch()
    chart = {"mark": "bar", "data": {"values": []}}
    page.write_files(tmp_path, [style.Figure("loss-by-epoch", "", "", chart)], "svg")
    assert {path.name for path in tmp_path.iterdir()} == {"mine.svg", "loss-by-epoch.svg"}
    assert (tmp_path / "loss-by-epoch.svg").stat().st_size


def test_the_names_of_all_figures_are_known() -> None:
    source = "".join(path.read_text() for path in Path(page.__file__).parent.glob("*.py"))
    assert "timeline" in page.FIGURES and all(f'"{name}"' in source for name in page.FIGURES if "-by-" not in name)


@pytest.mark.parametrize(("shift", "scale"), [(0.0, 1.0), (1e4, 1e3), (1.0, 1e-6), (0.0, 1e30)])
def test_the_area_is_that_of_the_scores(shift: float, scale: float) -> None:
    """However large or close together they are, on two ranks."""
    random = np.random.default_rng(0)
    parts = []
    for _ in range(2):
        positive = (shift + scale * (random.normal(size=20_000) + 1)).astype(np.float32)
        negative = (shift + scale * random.normal(size=20_000)).astype(np.float32)
        counts = ScoreCounts(4096)
        for half in range(2):
            counts.add(positive[half::2], positive=True)
            counts.add(negative[half::2], positive=False)
        assert len(counts.bins) <= 4096
        parts.append((counts, positive, negative))
    stored = [ScoreCounts.of(json.loads(json.dumps(each.as_dict())), 1 << 17) for each, _, _ in parts]
    total = scores._merged(stored)
    positive, negative = (np.concatenate([part[number] for part in parts]) for number in (1, 2))
    below = np.searchsorted(np.sort(negative), positive, "left") + np.searchsorted(np.sort(negative), positive, "right")
    exact = below.sum() / 2 / len(positive) / len(negative)
    hits = np.cumsum(np.concatenate([[0], total.positive[::-1]])) / len(positive)
    alarms = np.cumsum(np.concatenate([[0], total.negative[::-1]])) / len(negative)
    assert total.counts.sum() == 80_000 and np.trapezoid(hits, alarms) == pytest.approx(exact, abs=1e-3)


def test_the_first_cause_is_of_the_last_attempt(tmp_path: Path) -> None:
    broken = {"kind": "failure", "type": "E", "message": "m", "hint": None, "echo": False}
    rows = {
        "rank-0": [{"kind": "process", "attempt": 0}, broken, {"kind": "process", "attempt": 1}],
        "rank-1": [{"kind": "process", "attempt": 0}, {"kind": "process", "attempt": 1}, {**broken, "time": 9.0}],
        "rank-2": [{"kind": "process", "attempt": 0}, broken],
    }
    events = (
        {"event": "failed", "time": 2.0, "process": "rank 0", "message": "earlier"},
        {"event": "job restarted", "time": 3.0, "message": "again"},
        {"event": "end", "time": 9.0, "status": "failed", "message": "why"},
    )
    run = write(tmp_path, rows, *events)
    assert run.cause == {} and run.status == "failed"
    failure = run_page.find_failure(run)
    assert failure is not None and failure.process == "rank 1"


def test_the_history_of_the_summary_counts_if_it_is_longer(tmp_path: Path) -> None:
    run = write(tmp_path, {"rank-0": epochs(3, 1, "train/loss")[2:]})
    (tmp_path / "summary.json").write_text(json.dumps({"history": [{"epoch": number} for number in range(3)]}))
    assert [row["epoch"] for row in run.history] == [0, 1, 2]
