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
from gtrain.launch.agent import describe_end, error_for
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


GREEDY = "held = bytearray(200 << 20); print('ready', flush=True); import time; time.sleep(600)"


def test_a_rank_that_the_kernel_killed_is_reported_with_what_it_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = [7]
    monkeypatch.setattr(children, "oom_kills", lambda: kills[0])
    with subprocess.Popen([sys.executable, "-c", GREEDY], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        reports, write = os.pipe()
        os.set_blocking(reports, False)
        spec = ProcessSpec(Slot(WORKER, 1, 1, 0), "task")
        child = Child(spec, process.pid, os.pidfd_open(process.pid), reports, oom_kills=7)
        os.write(write, b'{"kind": "holds", "text": "parameters and buffers 4.0 MiB, x 64.0 MiB"}\n')
        os.close(write)
        child.read_reports()
        kills[0] += 1
        process.kill()
        assert child.reap(wait=True)
        child.close()
    assert child.peak_bytes > 200 << 20
    error = error_for(child, 2, tmp_path, ("set mode=1", "start more ranks"))
    assert error.message == "rank 1 of 2 (machine 1) was killed by SIGKILL, because memory ran out."
    held = "parameters and buffers 4.0 MiB, x 64.0 MiB"
    start = (
        f"it held {child.peak_bytes / 2**30:.1f} GiB at its peak, of that {held} in its first step; all processes of"
    )
    advice = "set mode=1; or start more ranks; or see with gtrain plan which strategy needs less; the rank's log is "
    assert error.hint is not None and error.hint.startswith(start) and f"; {advice}" in error.hint
