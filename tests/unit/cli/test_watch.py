"""``gtrain watch``, of a folder that a test writes as a run does."""

from __future__ import annotations

import fcntl
import io
import json
import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from gtrain.errors import GtrainError
from gtrain.record import events
from gtrain.record.run import RunRecord
from gtrain.reporting import watch

PARTS = {"computing": 0.5, "sending": 0.1, "waiting": 0.3, "reading": 0.1}


def write_run(folder: Path, epochs: int) -> None:
    """Write the record of a run with two ranks that has trained some of 8 epochs, one each 60 s."""
    record = events.record_folder(folder)
    record.mkdir(parents=True)
    now = time.time()
    choices = {"strategy": "sar", "data": "planted", "model": "gcn"}
    events.append(folder, "start", verb="train", **choices)
    for rank in range(2):
        rows = [{"kind": "process", "time": now}, {"kind": "fit", "time": now, "first_epoch": 0, "max_epochs": 8}]
        rows.append({"kind": "memory", "time": now, "anonymous": (rank + 1) * 2**20})
        for epoch in range(epochs):
            row = {"kind": "epoch", "time": now + 60.0 * (epoch + 1 - epochs), "epoch": epoch, "bytes_sent": 3 * 2**20}
            rows.append({**row, "seconds": 1.0, **PARTS, "metrics": {"train/loss": 2.0 - epoch / 4}})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (record / f"rank-{rank}.jsonl").write_text(f'{lines}{{"kind": "epo')  # the last line is being written


def shown(run: RunRecord) -> str:
    """What the page says on a terminal of 80 columns."""
    console = Console(file=io.StringIO(), width=80)
    console.print(watch.page(run, 80))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_in_progress_is_shown_with_its_time_left(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    text = shown(RunRecord(tmp_path))
    assert "running" in text and "epoch 3/8" in text
    assert "5:00 left" in text, "five epochs of a minute"
    assert "train/loss" in text and "█▅▁" in text and "best 1.5000" in text
    line = next(line.split() for line in text.splitlines() if "rank 1" in line)
    assert line == ["rank", "1", "3", "1", "50%", "10%", "30%", "10%", "3.00", "2", "2"]
    os.close(lock)
    assert RunRecord(tmp_path).status == "killed", "nobody holds the lock, and the record has no end"
    assert "left" not in shown(RunRecord(tmp_path))


def test_a_run_that_its_launcher_restarted_has_not_ended(tmp_path: Path) -> None:
    """After SIGTERM the first attempt has recorded its end; the second one started in a new folder."""
    run, new = tmp_path / "run", tmp_path / "new"
    write_run(run, 3)
    events.append(run, "end", status="interrupted", message="ended by SIGTERM")
    write_run(new, 0)
    events.resumes(run, new, 1, "restarting the job from its last checkpoint")
    assert not events.record_folder(new).exists()
    lock = os.open(run, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert RunRecord(run).status == "running" and RunRecord(run).end == {}
    os.close(lock)
    events.append(run, "end", status="complete")
    assert RunRecord(run).status == "complete"


def test_a_folder_that_is_used_again_keeps_no_results(tmp_path: Path) -> None:
    summary, other = tmp_path / "summary.json", tmp_path / "metrics.csv"
    summary.write_text('{"best": {"name": "val/acc", "value": 0.9}}')
    other.write_text("loss")
    with events.recording(lambda: tmp_path, "predict"):
        assert summary.exists()
    with pytest.raises(ArithmeticError), events.recording(lambda: tmp_path, "train"):
        assert RunRecord(tmp_path).summary is None and other.exists()
        raise ArithmeticError
    assert RunRecord(tmp_path).summary is None and RunRecord(tmp_path).end["status"] == "failed"
    summary.write_text("{}")
    events.resumes(tmp_path, tmp_path, 1, "restarting the job from its last checkpoint")
    assert summary.exists()


def test_names_with_brackets_and_the_mode_of_the_checkpoint(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    rows = (events.record_folder(tmp_path) / "rank-0.jsonl").read_text().replace("train/loss", "val/gap[/macro]")
    (events.record_folder(tmp_path) / "rank-0.jsonl").write_text(rows)
    assert "val/gap[/macro]" in shown(RunRecord(tmp_path)) and "best 2.0000" in shown(RunRecord(tmp_path))
    (events.record_folder(tmp_path) / "events.jsonl").unlink()
    events.append(tmp_path, "start", verb="train", checkpoint={"monitor": "val/gap[/macro]", "direction": "min"})
    assert "best 1.5000" in shown(RunRecord(tmp_path))


def test_a_run_that_failed_is_shown_with_its_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, 1)
    events.append(tmp_path, "failed", process="rank 1", message="rank 1 of 2 was killed by SIGKILL")
    events.append(tmp_path, "end", status="failed", message="rank 1 of 2 was killed by SIGKILL.", hint=None)
    assert RunRecord(tmp_path).status == "failed" and RunRecord(tmp_path).cause["process"] == "rank 1"
    watch.main([str(tmp_path)])
    assert "rank 1 of 2 was killed by SIGKILL." in capsys.readouterr().out
    with pytest.raises(GtrainError, match="is not a folder"):
        watch.main([str(tmp_path / "none")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(GtrainError, match="are folders of a run"):
        watch.main([str(tmp_path / "empty")])


def test_sparkline() -> None:
    assert watch.sparkline([0.0, 7.0, 3.0, 1.0], 10) == "▁█▄▂"
    assert watch.sparkline([1.0, 3.0, 5.0, 7.0], 2) == "▁█"
    assert watch.sparkline([2.0, 2.0], 5) == "▁▁"
