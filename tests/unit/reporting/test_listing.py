"""``gtrain runs``: what the list says of a run, from files as runs leave them."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from gtrain.errors import GtrainError
from gtrain.reporting import listing

START = {"event": "start", "time": 1000.0, "verb": "train", "strategy": "sar", "data": "planted", "model": "gcn",
         "overrides": [], "num_nodes": 3, "devices": 2}  # fmt: skip
SUMMARY = {"verb": "train", "strategy": "sar", "data": "planted", "model": "gcn", "world_size": 6, "config": {},
           "history": [{"epoch": 4}, {"epoch": 5}], "best": {"name": "val/acc", "value": 0.75, "epoch": 4}}  # fmt: skip
EPOCHS = [{"kind": "epoch", "time": 1010.0, "epoch": 0}, {"kind": "memory", "time": 1011.0, "rss": 1}]


def run(folder: Path, *events: dict[str, Any], summary: dict[str, Any] | None = None, rows: Any = ()) -> Path:
    """Write the folder of a run."""
    (folder / "record").mkdir(parents=True)
    (folder / "record" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if rows:
        (folder / "record" / "rank-0.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "ep'
        )
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def end(time: float, status: str, **more: Any) -> dict[str, Any]:
    """The event with which a command ended."""
    return {"event": "end", "time": time, "status": status, **more}


def test_the_states_of_runs(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run(runs / "2030-01-01" / "a", START, end(1042.0, "complete"), summary=SUMMARY)
    run(runs / "multirun" / "2030-01-01" / "b" / "0", {**START, "time": 2000.0}, rows=EPOCHS)
    first = {"event": "failed", "time": 3004.0, "message": "rank 1: no memory\nmore"}
    run(runs / "c", {**START, "time": 3000.0}, first, end(3005.0, "failed", message="other"), rows=EPOCHS)
    run(runs / "d", {**START, "time": 4000.0}, end(4001.0, "failed", message="mode=7 was set."))
    run(runs / "e", {**START, "time": 5000.0}, end(5009.5, "interrupted", message="by Ctrl-C"), rows=EPOCHS)
    outside = run(tmp_path / "outside", {**START, "verb": "test", "time": 6000.0}, end(6001.0, "complete"),
                  summary={**SUMMARY, "verb": "test", "history": [], "best": None})  # fmt: skip
    run(runs / "2030-01-01" / "a" / "race" / "sar", START, end(1020.0, "complete"))
    (runs / "index.txt").write_text(f"{outside}\n2030-01-01/a\ngone\n")
    os.utime(runs / "multirun" / "2030-01-01" / "b" / "0" / "record" / "rank-0.jsonl", (2030.0, 2030.0))
    listed = listing.list_runs(runs)
    assert [each.folder for each in listed] == ["2030-01-01/a", "multirun/2030-01-01/b/0", "c", "d", "e", str(outside)]
    states = [(each.state, each.epochs, each.seconds, each.cause) for each in listed]
    assert states == [
        ("complete", 6, 42.0, None),
        ("killed", 1, 30.0, None),
        ("failed", 1, 5.0, "rank 1: no memory\nmore"),
        ("refused", None, 1.0, "mode=7 was set."),
        ("interrupted", 1, 9.5, None),
        ("complete", None, 1.0, None),
    ]
    assert [each.ranks for each in listed] == [6] * 6
    assert (listed[0].score, listed[0].best, listed[5].verb, listed[5].best) == ("val/acc", 0.75, "test", None)


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", {**START, "time": time.time() - 50}, rows=EPOCHS)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        (listed,) = listing.list_runs(tmp_path)
    finally:
        os.close(descriptor)
    assert (listed.state, listed.epochs, listed.best) == ("running", 1, None)
    assert listed.seconds == pytest.approx(50, abs=5)


def test_runs_without_a_record_and_damaged_files(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "summary.json").write_text(json.dumps(SUMMARY))
    (tmp_path / "bad" / "record").mkdir(parents=True)
    (tmp_path / "bad" / "run.json").write_text("{")
    (tmp_path / "bad" / "summary.json").write_text("{")
    (tmp_path / "bad" / "record" / "events.jsonl").write_text("not JSON\n")
    bad, old = listing.list_runs(tmp_path)
    assert (bad.folder, bad.state, bad.seconds, bad.model) == ("bad", "killed", None, "?")
    assert (old.folder, old.state, old.seconds, old.epochs, old.best) == ("old", "complete", None, 6, 0.75)


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        start = {**START, "time": 1000.0 + number}
        run(tmp_path / str(number), start, end(1042.0, "complete"), summary={**SUMMARY, "world_size": number + 1})
    listing.main([str(tmp_path), "limit=2"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == ["folder", "data", "model", "strategy", "ranks", "epochs", "best", "val/acc", "seconds", "state"]
    assert lines[2] == ["1", "planted", "gcn", "sar", "2", "6", "0.7500", "41", "complete"]
    assert " ".join(lines[4]) == "the newest 2 of 3 runs; limit=0 shows all" and len(lines) == 5
    listing.main([str(tmp_path), "format=json"])
    assert [each["ranks"] for each in json.loads(capsys.readouterr().out)] == [1, 2, 3]
    listing.main([str(tmp_path / "0" / "record")])
    assert "has no runs" in capsys.readouterr().out
    for wrong in (["a", "b"], ["nowhere"], ["format=xml"], ["limit=-1"]):
        with pytest.raises(GtrainError) as caught:
            listing.main(wrong)
        assert caught.value.hint


def test_causes_are_cut_and_names_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listing._short("/a" * 40 + ": no such file") == "/a" * 30 + " ..."
    assert listing._short("word " * 20) == ("word " * 12).strip() + " ..."
    assert listing._short("short\nmore") == "short" and listing._short(" \n") == ""
    for number, best in enumerate(("val/f1[macro]", "val/acc")):
        summary = {**SUMMARY, "best": {**SUMMARY["best"], "name": best}}
        run(tmp_path / str(number), START, end(1042.0, "failed", message=" \n"), rows=EPOCHS, summary=summary)
        listing.main([str(tmp_path)])
        assert "val/f1[macro]" in capsys.readouterr().out
