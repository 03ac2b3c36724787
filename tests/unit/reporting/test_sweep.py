"""The table at the end of a sweep, from files as its jobs leave them."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from rich.console import Console
from unit.reporting.test_listing import START, SUMMARY, end, run

from gtrain.record.run import find_runs
from gtrain.reporting import comparison, sweep


def job(folder: Path, *overrides: str, best: float | None = None, name: str = "val/acc", **said: str) -> None:
    """A job that ended: complete with a best score, else refused before ranks started."""
    reporter = f"+callbacks.trial={{number:{folder.name}}}"
    start = {**START, "overrides": ["data=planted", "trainer.max_epochs=6", reporter, *overrides]}
    summary = None if best is None else {**SUMMARY, "best": {"name": name, "value": best, "epoch": 4, **said}}
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


def test_settings_are_text_and_whole_numbers_keep_their_digits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, columns in enumerate(("[src,dst]", "[/data/a.csv]")):
        settings = (f"data.columns={columns}", f"seed={1234567890 + number}", f"model.lr=0.123456{number}")
        job(tmp_path / "[0]" / str(number), *settings, best=0.5, name="val/f1[macro]")
    sweep.show(tmp_path / "[0]")
    said = capsys.readouterr().out
    assert "[src,dst]" in said and "[/data/a.csv]" in said and "best val/f1[macro]" in said and "[0]/sweep.csv" in said
    assert "1234567890" in said and "1234567891" in said and said.count("0.1235") == 2


@pytest.mark.parametrize(("said", "best"), [({"direction": "min"}, 2.0), ({"direction": "max"}, 9.0), ({}, 9.0)])
def test_the_mode_of_the_checkpoint_says_which_score_is_the_best(
    said: dict[str, str], best: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = []
    for number, value in enumerate((9.0, 2.0)):
        job(tmp_path / str(number), f"seed={number}", best=value, name="val/surprise", **said)
        values.append({"metrics": {"test/surprise": value, "test/acc": value}})
    shown: list[str] = []
    monkeypatch.setattr(sweep, "table_console", lambda: Console(width=100, force_terminal=True, file=io.StringIO()))
    monkeypatch.setattr(Console, "print", lambda self, table, **_: shown.append(table))
    sweep.show(tmp_path)
    (column,) = [column for column in shown[0].columns if "best" in str(column.header)]  # type: ignore[attr-defined]
    assert [str(cell) for cell in column.cells if cell.style == "bold"] == [f"{best:.4f}"]
    runs = find_runs([tmp_path])
    assert comparison._best(runs, values, "test/surprise") == best and comparison._best(runs, values, "test/acc") == 9


def test_runs_with_equal_settings_and_folder_names_keep_their_names(tmp_path: Path) -> None:
    for folder in ("a/out", "b/out", "c/0", "c/1"):
        job(tmp_path / folder, *["seed=7"] * (folder[0] == "c"), best=0.5)
    a, b, c0, c1 = (find_runs([tmp_path / folder])[0] for folder in ("a/out", "b/out", "c/0", "c/1"))
    assert comparison.run_names([a, b]) == [str(a.path), str(b.path)]
    assert comparison.run_names([a, b, c0, c1]) == [str(a.path), str(b.path), "seed=7 (c/0)", "seed=7 (c/1)"]
    assert comparison.run_names([a, a]) == [str(a.path), f"{a.path} #2"]
    assert comparison.run_names([a, c0]) == ["out", "seed=7"]
