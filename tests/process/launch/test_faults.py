"""What a killed run leaves, and that it can go on."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked import Program, gtrain
from helpers import LIMIT, alive, clean_environment, descendants, ok, summary, until

ARGUMENTS = [
    "trainer.num_nodes=4",
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


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_run_goes_on_to_the_same_end(tmp_path: Path) -> None:
    job = start(*ARGUMENTS, "trainer.max_epochs=10000", "hydra.run.dir=killed", cwd=tmp_path)
    until(lambda: checkpoint_epoch(tmp_path / "killed") >= 3, tmp_path)
    ranks = children(job.pid)
    assert len(ranks) == 4 and {command_of(rank) for rank in ranks} == {
        command_of(job.pid)
    }  # forks: they import nothing
    os.kill(ranks[2], signal.SIGKILL)
    done = job.end()
    assert done.returncode == 1
    assert "rank 2 of 4 (machine 2) was killed by SIGKILL" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not any(map(alive, ranks))
    assert not (tmp_path / "killed" / "summary.json").exists()

    number = checkpoint_epoch(tmp_path / "killed") + 4
    epochs = f"trainer.max_epochs={number}"
    ok(gtrain(*ARGUMENTS, epochs, "hydra.run.dir=resumed", "ckpt_path=last", cwd=tmp_path))
    ok(gtrain(*ARGUMENTS, epochs, "hydra.run.dir=undisturbed", cwd=tmp_path))
    whole, rest = summary(tmp_path / "undisturbed"), summary(tmp_path / "resumed")
    assert 0 < len(rest["history"]) < len(whole["history"]) == number
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


TINY = ("data.num_nodes=300", "data.num_edges=2000")
STOPS_BEFORE_THE_MANIFEST = """
import signal
from pathlib import Path
from gtrain.cli import main
from gtrain.graph.store import writer

def stop(*_):
    Path("stopped").touch()
    while True: signal.pause()

writer.measure = stop
main()
"""


def test_a_killed_builder_leaves_no_store_and_the_next_run_makes_it(tmp_path: Path) -> None:
    program = tmp_path / "stops.py"
    program.write_text(STOPS_BEFORE_THE_MANIFEST)
    job = Program(str(program), "partition", *TINY, cwd=tmp_path)
    until((tmp_path / "stopped").exists, tmp_path)
    stores = tmp_path / "data" / "stores"
    assert list(stores.glob("*/part-0"))
    for pid in children(job.pid):
        os.kill(pid, signal.SIGKILL)
    assert job.end().returncode == 1
    assert not list(stores.glob("*/manifest.json"))
    ok(gtrain("partition", *TINY, cwd=tmp_path))
    assert len(list(stores.glob("*/manifest.json"))) == 1
    assert len([path for path in stores.iterdir() if path.is_dir()]) == 1


def test_a_disk_that_is_full_when_a_checkpoint_is_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", run]).returncode:
        pytest.skip("mounting a small file system takes root, and the right to mount")
    try:
        done = gtrain("strategy=sar", "hydra.run.dir=run", "trainer.max_epochs=3", *TINY, cwd=tmp_path)
    finally:
        subprocess.run(["umount", "-l", run], check=True)
    assert done.returncode == 1 and "inline_container" not in done.stderr and "Traceback" not in done.stderr
    assert f"{run}/checkpoints/best.ckpt.part/trainer.pt cannot be written: no space left on device." in done.stderr
    assert "HINT: free space on that disk" in done.stderr


FALLS_ONCE = """
import os, signal
from pathlib import Path
import lightning.pytorch as pl

if not Path("fallen").exists():  # of all processes, that of the checks imports this first
    Path("fallen").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.{number})

class Idle(pl.Callback):
    pass
"""


@pytest.mark.parametrize("number", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.slow)])
def test_a_job_starts_without_checks_whose_process_is_killed(number: str, tmp_path: Path) -> None:
    """And says so; a process of checks that is stopped is waited for, which the terminal says too."""
    (tmp_path / "mine.py").write_text(FALLS_ONCE.format(number=number))
    job = start(*TINY, "+callbacks.idle._target_=mine.Idle", "trainer.max_epochs=1", cwd=tmp_path)
    if number == "SIGSTOP":
        until(lambda: "gtrain: waiting for the preflight checks, 10 s" in job.errors(), tmp_path)
        os.kill(int((tmp_path / "fallen").read_text()), signal.SIGCONT)
    done = ok(job.end())
    line = "gtrain: the process of the preflight checks was killed by SIGKILL; the job starts without them"
    assert (line in done.stderr.splitlines()) == (number == "SIGKILL")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["SIGTERM", "SIGINT", "killed rank"])
def test_the_last_line_says_how_to_resume(fault: str, tmp_path: Path) -> None:
    setting = ["strategy=sar", "hydra.run.dir=run", *TINY]
    command = [sys.executable, "-m", "gtrain", *setting, "trainer.max_epochs=100000"]
    with open(tmp_path / "said", "w") as said:  # both outputs in their order
        # a shell starts background commands, such as the tests themselves, with SIGINT ignored, which is inherited
        accept_interrupts = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        job = subprocess.Popen(
            command, cwd=tmp_path, env=clean_environment(), stdout=said, stderr=said, preexec_fn=accept_interrupts
        )
        try:
            until(lambda: (tmp_path / "run" / "checkpoints" / "last.ckpt" / "manifest.json").exists(), tmp_path)
            if fault == "killed rank":
                os.kill(descendants(job.pid)[-1], signal.SIGKILL)
            else:
                job.send_signal(getattr(signal, fault))
            code = job.wait(LIMIT)
        finally:
            job.kill()
            job.wait()
    lines = (tmp_path / "said").read_text().splitlines()
    assert code == {"killed rank": 1, "SIGTERM": 143, "SIGINT": 130}[fault]
    assert re.fullmatch(r"(gtrain: )?to resume after epoch \d+, run the same command with ckpt_path=last", lines[-1]), (
        lines
    )
    first = {"killed rank": "was killed by SIGKILL", "SIGTERM": "ended by SIGTERM", "SIGINT": "interrupted"}[fault]
    at = next(number for number, line in enumerate(lines) if first in line)
    assert not any(line.startswith("epoch ") for line in lines[at:]), "no progress after the end"
    epoch = int(lines[-1].partition("epoch ")[2].partition(",")[0])
    ok(gtrain(*setting, f"trainer.max_epochs={epoch + 1}", "ckpt_path=last", cwd=tmp_path))
    assert summary(tmp_path / "run")["history"][-1]["epoch"] >= epoch


@pytest.mark.slow
def test_torchrun_that_is_ended_says_how_to_resume(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "gtrain"]
    command = [*torchrun, "strategy=sar", "hydra.run.dir=run", *TINY, "trainer.max_epochs=100000"]
    job = subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: (tmp_path / "run" / "checkpoints" / "last.ckpt" / "manifest.json").exists(), tmp_path)
        job.terminate()
        said = job.communicate(timeout=LIMIT)[1]
    finally:
        job.kill()
        job.wait()
    assert len(re.findall(r"gtrain: to resume after epoch \d+, run the same command with ckpt_path=last", said)) == 1
