"""``hydra/launcher=side_by_side``: jobs of a sweep that run at the same time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import forked
import pytest
from helpers import (
    LIMIT,
    REPO,
    clean_environment,
    descendants,
    gtrain,
    has_logged,
    ok,
    only_run,
    rest_exhaustive,
    show,
    summary,
    until,
)

ASSETS = REPO / "tests" / "assets"
SMALL = ("strategy=single", "data.num_nodes=300", "data.num_edges=2000", "trainer.max_epochs=2")
SWEEP = ("--multirun", "hydra/launcher=side_by_side", "hydra.sweep.dir=sweep")


def meeting(folder: Path, jobs: int) -> tuple[str, ...]:
    callback = f"+callbacks.meeting={{_target_:meeting.Meeting,folder:{folder}/meeting,jobs:{jobs}}}"
    return (callback, "allow_targets=[meeting]")


@pytest.mark.slow
def test_jobs_meet_and_have_the_results_of_single_jobs(tmp_path: Path) -> None:
    path = {"PYTHONPATH": str(ASSETS)}
    done = ok(gtrain(*SWEEP, *SMALL, *meeting(tmp_path, 2), "seed=3,4", cwd=tmp_path, env=path))
    assert "epoch 2/2" not in done.stdout, "a job prints into the file of its folder"
    for number, seed in enumerate((3, 4)):
        assert "epoch 2/2" in (tmp_path / "sweep" / str(number) / "terminal.log").read_text()
        ok(forked.gtrain(*SMALL, f"seed={seed}", f"hydra.run.dir=alone/{seed}", cwd=tmp_path))
        mine, alone = summary(tmp_path / "sweep" / str(number)), summary(tmp_path / "alone" / str(seed))
        assert mine["metrics"] == alone["metrics"] and mine["history"] == alone["history"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_hydras_own_launchers(launcher: str, tmp_path: Path) -> None:
    """Jobs of two ranks in processes that joblib or submitit starts."""
    package = launcher.partition("_")[0]
    pytest.importorskip(f"hydra_plugins.hydra_{package}_launcher", reason=f"hydra-{package}-launcher is not installed")
    settings = ("strategy=sar", "trainer.num_nodes=2", *SMALL[1:])
    sweep = ("--multirun", f"hydra/launcher={launcher}", "hydra.sweep.dir=sweep", "seed=3,4")
    assert "table as CSV" in ok(gtrain(*sweep, *settings, cwd=tmp_path)).stdout
    ok(forked.gtrain(*settings, "seed=4", "hydra.run.dir=alone", cwd=tmp_path))
    assert summary(tmp_path / "sweep" / "1")["metrics"] == summary(tmp_path / "alone")["metrics"]
    assert summary(tmp_path / "sweep" / "0")["metrics"] != summary(tmp_path / "alone")["metrics"]


@pytest.mark.slow
def test_a_job_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    done = gtrain(*SWEEP, *SMALL, "model.hidden_channels=-1,8", cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr, show(done)
    assert "model.hidden_channels=-1 was set" in done.stderr
    assert f"the job's output is in {tmp_path}/sweep/0/terminal.log" in done.stderr, show(done)
    assert only_run(tmp_path / "sweep") == tmp_path / "sweep" / "1"
    done = gtrain(*SWEEP, *SMALL, "seed=1,2", "hydra.launcher.jobs=0", cwd=tmp_path)
    assert done.returncode == 1 and "hydra.launcher.jobs=0 was set" in done.stderr, show(done)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), rest_exhaustive([(signal.SIGTERM, 143), (signal.SIGINT, 130)], (signal.SIGTERM, 143))
)
def test_a_signal_ends_all_jobs(number: int, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gtrain", *SWEEP, *SMALL, "trainer.max_epochs=100000", "seed=1,2"]
    # A shell starts background commands, such as the tests themselves, with SIGINT ignored, which is inherited.
    accept_interrupts = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    job = subprocess.Popen(
        command, cwd=tmp_path, env=clean_environment(), stderr=subprocess.PIPE, text=True, preexec_fn=accept_interrupts
    )
    try:
        until(lambda: all(has_logged(tmp_path / "sweep" / name) for name in "01"), tmp_path)
        processes = descendants(job.pid)
        assert len(processes) >= 4
        job.send_signal(number)
        _, errors = job.communicate(timeout=LIMIT)
    finally:
        job.kill()
    assert job.returncode == code and "Traceback" not in errors, errors
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in processes), tmp_path)
    for name in "01":
        assert "to resume after epoch" in (tmp_path / "sweep" / name / "terminal.log").read_text()
