"""Run gtrain's command in tests, with a time-out that kills all of its processes and shows what each rank logged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

LOG_LINES = 40
_LAUNCHER_PREFIXES = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMIX_", "PMI_", "MPI_LOCAL", "GTRAIN_")
_LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HYDRA_FULL_ERROR")


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without a launcher's variables, with one OpenMP thread per process.

    Args:
        extra: further variables.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHER_PREFIXES) and name not in _LAUNCHER_NAMES
    }
    return environment | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict(extra or {})


LIMIT = 600.0
"""Time limit in seconds of each command and of each wait for a condition; passing tests stay far below it."""


def run(
    command: Sequence[str], *, cwd: Path, timeout: float = LIMIT, env: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Run a command in a new session; on a time-out, kill its processes and fail with its output and logs.

    Args:
        command: program and arguments.
        cwd: working folder. On a time-out the message contains the last lines of every ``*.log`` in it.
        timeout: seconds.
        env: variables in addition to those of :func:`clean_environment`.

    Raises:
        AssertionError: the command did not end in time.
    """
    process = subprocess.Popen(
        list(command),
        cwd=cwd,
        env=clean_environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        out, err = _kill_group(process)
        output = show(CompletedProcess(list(command), -signal.SIGKILL, out, err))
        raise AssertionError(f"killed after {timeout:g} s\n{output}\n{logs(cwd)}") from None
    except BaseException:
        _kill_group(process)
        raise
    return CompletedProcess(list(command), process.returncode, out, err)


def gtrain(
    *args: str, cwd: Path, timeout: float = LIMIT, env: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Run ``python -m gtrain ARGS`` in ``cwd``; see :func:`run`. The caller checks the exit code."""
    return run([sys.executable, "-m", "gtrain", *args], cwd=cwd, timeout=timeout, env=env)


def ok(result: CompletedProcess[str]) -> CompletedProcess[str]:
    """Return the result of a command; fail with its output if the exit code is not 0."""
    assert result.returncode == 0, show(result)
    return result


def summary(run_dir: Path) -> dict[str, Any]:
    """Return the ``summary.json`` of a run."""
    return json.loads((run_dir / "summary.json").read_text())


def only_run(folder: Path) -> Path:
    """Return the only folder below ``folder`` that contains a ``summary.json``."""
    runs = sorted(path.parent for path in folder.rglob("summary.json"))
    assert len(runs) == 1, f"{len(runs)} summaries below {folder}: {[str(path) for path in runs]}"
    return runs[0]


def until(condition: Callable[[], Any], folder: Path) -> Any:
    """Wait until ``condition`` returns a true value, and return it; on a time-out, fail with the logs in ``folder``."""
    deadline = time.monotonic() + LIMIT
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {LIMIT} s\n{logs(folder)}"
        time.sleep(0.01)
    return value


def alive(pid: int) -> bool:
    """Return whether a process is running; zombies are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def show(result: CompletedProcess[str]) -> str:
    """Return a command with its exit code and output, for messages."""
    return (
        f"$ {' '.join(result.args)}\nexit code {result.returncode}\n"
        f"--- stdout\n{result.stdout}\n--- stderr\n{result.stderr}"
    )


def logs(folder: Path) -> str:
    """Return the last lines of every log file below ``folder``."""
    texts = []
    for path in sorted(folder.rglob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:]
        texts.append("\n".join([f"--- {path}", *lines]))
    return "\n".join(texts)


def of_session(leader: int) -> list[int]:
    """Return the ids of a session's processes without zombies: a command, its ranks and servers. Reads ``/proc``.

    Args:
        leader: process id of the session's leader, which may have ended.
    """
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # the process has ended
            continue
        if int(session) == leader and state != "Z":
            members.append(int(path.parent.name))
    return members


def _kill_group(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Kill a process, its descendants and their process groups; return its output."""
    for pid in (*descendants(process.pid), process.pid):
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
    return process.communicate()


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's children, and of theirs, from ``/proc``; ranks are in different process groups."""
    pids: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, path.read_text().split()):
                pids += [child, *descendants(child)]
    return pids
