"""Brings the record of processes on other machines to rank 0, whose disk they may not see."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from gtrain.launch import slot as slots
from gtrain.record.events import EVENTS, FOLDER, PROFILE, identity, record_folder

if TYPE_CHECKING:
    from gtrain.strategy.base import GraphStrategy

_EVENTS = f"{FOLDER}/{EVENTS}"
Files = dict[str, bytes]
"""Contents of files, by path relative to the run's folder."""


def collect_record(strategy: GraphStrategy, run_dir: Path) -> None:
    """Copy to rank 0's folder what other machines wrote into theirs; all ranks call this at the end of a run.

    Machines that share the folder send nothing.

    Args:
        strategy: its group has the ranks; its servers are asked by rank 0.
        run_dir: the run's folder, whose path is the same on all machines.
    """
    group, job = strategy.group, slots.current()
    # First, while every machine still has its servers.
    for received in strategy.servers.records(identity(run_dir)) if strategy.is_global_zero else ():
        _write(run_dir, received)
    first = group.broadcast_object(identity(run_dir))
    files = own_files(run_dir, f"rank {strategy.global_rank}", first)
    if job is not None:
        files |= own_events(job.log_dir.parent, f"rank {strategy.global_rank}", first)
    # One rank after the other, so that rank 0 holds the files of one.
    for source, sends in enumerate(group.all_gather_object(bool(files))):
        if sends:
            received = group.broadcast_object(files, source)
            if strategy.is_global_zero:
                _write(run_dir, received)


def own_files(run_dir: Path, label: str, first: str) -> Files:
    """Return what a process wrote to the record and the profile of a run; empty if rank 0 sees the folder.

    Args:
        run_dir: the folder of the run on this machine.
        label: of the process: ``rank 2``, ``parameter 0``.
        first: the :func:`identity` of rank 0's folder.
    """
    if identity(run_dir) == first:
        return {}
    name = label.replace(" ", "-")
    patterns = (f"{FOLDER}/{name}.jsonl", f"{FOLDER}/*-{name}.*", f"{PROFILE}/spans-{name}.json")
    paths = [path for pattern in patterns for path in run_dir.glob(pattern)]
    # The name that torch's traces have had since the first release.
    paths += run_dir.glob(f"{PROFILE}/trace-{name.replace('-', '')}.json")
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in paths if path.stat().st_size}


def own_events(agent_dir: Path, label: str, first: str) -> Files:
    """Return the events of a process that the agent of its machine recorded; empty if rank 0 sees them.

    Args:
        agent_dir: the folder into which the agent writes.
        label: of the process.
        first: the :func:`identity` of rank 0's folder.
    """
    if identity(agent_dir) == first:
        return {}
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (record_folder(agent_dir) / EVENTS).read_text().splitlines(keepends=True)
    own = "".join(line for line in lines if json.loads(line).get("process") == label)
    return {_EVENTS: own.encode()} if own else {}


def _write(run_dir: Path, files: Files) -> None:
    """Write the files of a process, whose events are appended to those of the job."""
    for name, content in files.items():
        path = run_dir / name
        if path.parent not in (run_dir / FOLDER, run_dir / PROFILE):  # no process of this release names another folder
            continue
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab" if name == _EVENTS else "wb") as file:
                file.write(content)
