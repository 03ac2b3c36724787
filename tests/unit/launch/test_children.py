"""What the agent prints of what its processes report."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import until

from gtrain.launch import children
from gtrain.launch.agent import describe_end
from gtrain.launch.children import Child, ProcessSpec
from gtrain.launch.environment import SAY_SECONDS
from gtrain.launch.slot import WORKER, Slot


def test_a_second_wait_for_the_same_rank_is_reported_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several ranks report one wait within moments, and the earliest report of the next comes after SAY_SECONDS."""
    now = [100.0]
    monkeypatch.setattr(children.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(children, "_waiting_printed", {})
    for at in (100.0, 101.0, 100.0 + SAY_SECONDS):
        now[0] = at
        children._print_waiting("rank 1 (machine 1)", 10.0, "")
    assert capsys.readouterr().err.count("gtrain: waiting for rank 1 (machine 1), 10 s") == 2


STUCK = (
    "import sys, pathlib; from gtrain.launch.logs import capture; capture(pathlib.Path(sys.argv[1]), terminal=True); "
    "print('ready'); sys.stdin.read()"
)


def test_a_process_that_others_wait_for_writes_its_stacks_to_its_log_and_is_killed_if_it_is_silent(
    tmp_path: Path,
) -> None:
    log = tmp_path / "rank-1.log"
    command = [sys.executable, "-c", STUCK, str(log)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        until(lambda: log.exists() and "ready" in log.read_text(), tmp_path)

        def life(age: float) -> Child:
            spec = ProcessSpec(Slot(WORKER, 1, 1, 0), "task")
            return Child(spec, process.pid, os.pidfd_open(process.pid), os.dup(0), started_at=time.monotonic() - age)

        old, young = life(100.0), life(0.0)
        young.handle_complaint(60.0, silent=True)  # a complaint of its former life
        old.handle_complaint(29.0, silent=False)
        for seconds in (31.0, 61.0, 91.0):
            old.handle_complaint(seconds, silent=False)
        until(lambda: "<module>" in log.read_text(), tmp_path)
        assert log.read_text().count("most recent call first") == 1
        assert young.status is None and not young.reap()
        old.handle_complaint(60.0, silent=True)
        assert old.reap(wait=True)
        assert describe_end(old, 3) == "rank 1 of 3 (machine 1) sent no heartbeat for 60 s and was killed"
        assert process.stderr is not None and process.stderr.read() == b""
        for child in (old, young):
            child.close()
