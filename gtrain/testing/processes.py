"""Run gtrain's command in tests, with a time-out that kills all of its processes and shows what each rank logged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

LOG_LINES = 40
_LAUNCHER_PREFIXES = ("SLURM_", "TORCHELASTIC_", "GTRAIN_")
_LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HYDRA_FULL_ERROR")


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what a launcher would have put there, with one thread a process.

    Args:
        extra: variables to set besides.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHER_PREFIXES) and name not in _LAUNCHER_NAMES
    }
    return environment | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict(extra or {})


LIMIT = 600.0
"""Seconds after which a test fails that waits for a state which does not come; no test that passes waits so long."""


def run(
    command: Sequence[str], *, cwd: Path, timeout: float = LIMIT, env: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Run a command in its own process group; on a time-out kill the group and fail with its output and logs.

    Args:
        command: program and arguments.
        cwd: where it runs; the last lines of every ``*.log`` below are shown on a time-out.
        timeout: seconds.
        env: variables to set besides those of :func:`clean_environment`.

    Raises:
        AssertionError: it did not end in time.
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
        shown = show(CompletedProcess(list(command), -signal.SIGKILL, out, err))
        raise AssertionError(f"not ended after {timeout:g} s, killed\n{shown}\n{logs(cwd)}") from None
    except BaseException:
        _kill_group(process)
        raise
    return CompletedProcess(list(command), process.returncode, out, err)


def gtrain(
    *args: str, cwd: Path, timeout: float = LIMIT, env: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Run ``python -m gtrain ARGS`` in ``cwd``; see :func:`run`. The exit code is the caller's to look at."""
    return run([sys.executable, "-m", "gtrain", *args], cwd=cwd, timeout=timeout, env=env)


def ok(result: CompletedProcess[str]) -> CompletedProcess[str]:
    """The same result, if the command ended with 0; else fail with all that it said."""
    assert result.returncode == 0, show(result)
    return result


def summary(run_dir: Path) -> dict[str, Any]:
    """The ``summary.json`` of a run."""
    content: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return content


def only_run(folder: Path) -> Path:
    """The one run folder below ``folder``, told by its ``summary.json``."""
    found = sorted(path.parent for path in folder.rglob("summary.json"))
    assert len(found) == 1, f"{len(found)} summaries below {folder}: {[str(path) for path in found]}"
    return found[0]


def until(condition: Callable[[], Any], folder: Path) -> Any:
    """What ``condition`` returns once it is true; fails with the logs below ``folder`` if it never is."""
    deadline = time.monotonic() + LIMIT
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {LIMIT} s\n{logs(folder)}"
        time.sleep(0.01)
    return value


def alive(pid: int) -> bool:
    """Whether the process runs; one that ended and is not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def show(result: CompletedProcess[str]) -> str:
    """A command with its exit code and both outputs, for messages."""
    return (
        f"$ {' '.join(result.args)}\nexit code {result.returncode}\n"
        f"--- stdout\n{result.stdout}\n--- stderr\n{result.stderr}"
    )


def logs(folder: Path) -> str:
    """The last lines of every log file below ``folder``."""
    texts = []
    for path in sorted(folder.rglob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:]
        texts.append("\n".join([f"--- {path}", *lines]))
    return "\n".join(texts)


def of_session(leader: int) -> list[int]:
    """Process ids of the session that a process leads or led: the command, its ranks and servers. Zombies are left out.

    Linux only: reads ``/proc``.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has ended meanwhile
            continue
        if int(session) == leader and state != "Z":
            found.append(int(path.parent.name))
    return found


def _kill_group(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Kill the process and its group, and the ranks that made groups of their own; return what they had said."""
    for pid in (*descendants(process.pid), process.pid):
        for kill in (os.killpg, os.kill):
            try:
                kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
    return process.communicate()


def descendants(pid: int) -> list[int]:
    """Process ids below ``pid``, as /proc has them now: each rank leads a process group of its own."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            direct = [int(word) for word in children.read_text().split()]
        except OSError:
            continue
        for child in direct:
            found += [child, *descendants(child)]
    return found
