"""Stacks that a process writes to its log when it is asked for them, whatever its threads do meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import clean_environment, until

from gtrain.launch.logs import STACKS_SIGNAL

ROUNDS = 400
PROGRAM = """
import ctypes, sys, threading
from pathlib import Path
from gtrain.launch.children import stop_event
from gtrain.launch.logs import capture, watch_stacks_signal

capture(Path("rank-0.log"), terminal=False)
{watch}

def call(depth):
    if depth:
        call(depth - 1)

def run():
    while True:
        call(400)  # so deep that memory of frames is mapped and unmapped all the time

for number in range(2):
    threading.Thread(target=run, daemon=True).start()
Path("started").touch()
{main}
"""
IN_COMPILED_CODE = "while True: ctypes.CDLL(None).pause()"
IN_PYTHON = "run()"


@contextmanager
def program(folder: Path, watch: str, main: str) -> Iterator[subprocess.Popen[bytes]]:
    text = PROGRAM.format(watch=watch, main=main)
    with subprocess.Popen([sys.executable, "-c", text], cwd=folder, env=clean_environment()) as process:
        try:
            until(lambda: (folder / "started").exists() or process.poll() is not None, folder)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("watch", "main"),
    [("watch_stacks_signal()", IN_COMPILED_CODE), ("stop = stop_event()", IN_COMPILED_CODE), ("", IN_PYTHON)],
    ids=["rank", "server", "rank that prepares data"],
)
def test_a_stopped_process_that_was_asked_for_its_stacks_goes_on(tmp_path: Path, watch: str, main: str) -> None:
    """Its other threads run Python code while the stacks are written."""
    with program(tmp_path, watch, main) as process:
        log, size = tmp_path / "rank-0.log", 0
        for number in range(ROUNDS):
            for each in (signal.SIGSTOP, STACKS_SIGNAL, signal.SIGCONT):
                os.kill(process.pid, each)
            until(lambda size=size: log.stat().st_size > size or process.poll() is not None, tmp_path)
            assert process.poll() is None, f"ended with {process.poll()} after {number} rounds"
            size = log.stat().st_size
        assert "in call" in log.read_text(errors="replace")
