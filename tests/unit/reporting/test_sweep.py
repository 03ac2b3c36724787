"""The table at the end of a sweep, from files as its jobs leave them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from unit.reporting.test_listing import START, SUMMARY, end, run

from gtrain.reporting import sweep


def job(folder: Path, *overrides: str, best: float | None = None) -> None:
    """A job that ended: complete with a best score, else refused before ranks started."""
    reporter = f"+callbacks.trial={{number:{folder.name}}}"
    start = {**START, "overrides": ["data=planted", "trainer.max_epochs=6", reporter, *overrides]}
    summary = None if best is None else {**SUMMARY, "best": {"name": "val/acc", "value": best, "epoch": 4}}
    run(folder, start, end(1042.0, "failed" if best is None else "complete"), summary=summary)


def test_settings_that_differ_and_the_best_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (0, 2, 10):
        job(tmp_path / str(number), f"model.lr=0.{number}1", *["seed=7"] * (number == 2), best=0.5 + number / 100)
    job(tmp_path / "1", "model.lr=x")
    sweep.show(tmp_path)
    with open(tmp_path / "sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["job"], row["model.lr"], row["seed"], row["best"], row["state"]) for row in rows] == [
        ("0", "0.01", "-", "0.5", "complete"),
        ("1", "x", "-", "", "refused"),
        ("2", "0.21", "7", "0.52", "complete"),
        ("10", "0.101", "-", "0.6", "complete"),
    ]
    said = capsys.readouterr().out
    assert "best val/acc" in said and "0.6000" in said and "trainer.max_epochs" not in said and "data" not in rows[0]
    assert "callbacks.trial" not in rows[0], "what a search adds to a job is no setting"
