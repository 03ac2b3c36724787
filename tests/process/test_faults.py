"""What a killed run leaves, and that it can go on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from forked import Program, gtrain
from helpers import alive, ok, summary, until

ARGUMENTS = [
    "trainer.num_nodes=4",
    "trainer.max_epochs=12",
    "data.num_nodes=4000",
    "data.num_edges=80000",
    "model.dropout=0.5",
]


def start(*arguments: str, cwd: Path) -> Program:
    return Program("-m", "gtrain", *arguments, cwd=cwd)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_of(pid: int) -> bytes:
    """The command line of a process; that of a fork is its parent's."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def checkpoint_epoch(run_dir: Path) -> int:
    try:
        return int(json.loads((run_dir / "checkpoints" / "last.ckpt" / "manifest.json").read_text())["epoch"])
    except (OSError, ValueError):
        return -1


def test_a_killed_rank_is_named_and_the_run_goes_on_to_the_same_end(tmp_path: Path) -> None:
    # the undisturbed run is kept apart, so that ckpt_path=last cannot find it
    ok(gtrain(*ARGUMENTS, "hydra.run.dir=undisturbed", "paths.runs=other", cwd=tmp_path))
    job = start(*ARGUMENTS, "hydra.run.dir=killed", cwd=tmp_path)
    until(lambda: checkpoint_epoch(tmp_path / "killed") >= 3, tmp_path)
    ranks = children(job.pid)
    assert len(ranks) == 4 and {command_of(rank) for rank in ranks} == {
        command_of(job.pid)
    }  # forks: they import nothing
    os.kill(ranks[2], signal.SIGKILL)
    done = job.end()
    assert done.returncode == 1
    assert "rank 2 of 4 (machine 2) was killed by SIGKILL (signal 9)" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not any(map(alive, ranks))
    assert not (tmp_path / "killed" / "summary.json").exists()

    ok(gtrain(*ARGUMENTS, "hydra.run.dir=resumed", "ckpt_path=last", cwd=tmp_path))
    whole, rest = summary(tmp_path / "undisturbed"), summary(tmp_path / "resumed")
    assert 0 < len(rest["history"]) < len(whole["history"]) == 12
    by_epoch = {epoch["epoch"]: epoch for epoch in whole["history"]}
    for epoch in rest["history"]:  # dropout included: every rank's random numbers went on
        assert epoch["train/loss"] == pytest.approx(by_epoch[epoch["epoch"]]["train/loss"], rel=1e-6)
    assert rest["metrics"]["test/loss"] == pytest.approx(whole["metrics"]["test/loss"], rel=1e-6)  # of the same best
    assert rest["history"][-1]["val/loss"] == pytest.approx(whole["history"][-1]["val/loss"], rel=1e-6)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_ending_the_command_ends_every_rank(tmp_path: Path, number: signal.Signals, code: int) -> None:
    job = start(*ARGUMENTS, "trainer.max_epochs=10000", "hydra.run.dir=run", cwd=tmp_path)
    until(lambda: checkpoint_epoch(tmp_path / "run") >= 0, tmp_path)
    ranks = children(job.pid)
    os.kill(job.pid, number)
    assert job.end().returncode == code
    until(lambda: not any(map(alive, ranks)), tmp_path)


def test_a_killed_builder_leaves_no_store_and_the_next_run_makes_it(tmp_path: Path) -> None:
    job = start("partition", "data.num_nodes=20000", "data.num_edges=800000", cwd=tmp_path)
    stores = tmp_path / "data" / "stores"
    until(lambda: stores.exists() and any(path.is_dir() for path in stores.iterdir()), tmp_path)
    for pid in children(job.pid):
        os.kill(pid, signal.SIGKILL)
    job.end()
    assert not list(stores.glob("*/manifest.json"))
    ok(gtrain("partition", "data.num_nodes=20000", "data.num_edges=800000", cwd=tmp_path))
    assert len(list(stores.glob("*/manifest.json"))) == 1
    assert len([path for path in stores.iterdir() if path.is_dir()]) == 1
