"""The memory that this process may use: that of the machine, or the limit of a control group. Light."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def meminfo(name: str, root: Path = ROOT) -> int:
    """Return an entry of ``/proc/meminfo``, such as ``MemAvailable``, in bytes."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{root / 'proc/meminfo'} has no {name}")


def memory_total(root: Path = ROOT) -> int:
    """Return the memory of the machine in bytes."""
    return meminfo("MemTotal", root)


def group_limit(root: Path = ROOT) -> int | None:
    """Return the smallest memory limit of this process's control group and the groups around it; None without a limit.

    Both versions of control groups are read. Without a limit version 2 has the word ``max``, and version 1 a number
    beyond any memory.

    Args:
        root: the folder that has ``proc`` and ``sys``.
    """
    limits = [int(text) for text in _limit_files(root) if text.isdecimal()]
    smallest = min(limits, default=None)
    return smallest if smallest is not None and smallest < memory_total(root) else None


def usable_memory(root: Path = ROOT) -> int:
    """Return the memory that the processes of a job may use on this machine, in bytes."""
    limit = group_limit(root)
    return memory_total(root) if limit is None else limit


def oom_kills(root: Path = ROOT) -> int:
    """Return how many processes the kernel has killed because memory ran out.

    Those of this process's control group are counted, or of the machine if the group has no counter.

    Args:
        root: the folder that has ``proc`` and ``sys``.
    """
    counters = [folder / name for folder, _ in _groups(root) for name in ("memory.events", "memory.oom_control")]
    for path in (*counters, root / "proc/vmstat"):
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _limit_files(root: Path) -> Iterator[str]:
    """Yield the contents of the limits of this process's groups."""
    for folder, name in _groups(root):
        top = root / "sys/fs/cgroup"
        while True:
            # In a container the group's path may be that of the host, of which only the top is mounted.
            if (folder / name).is_file():
                yield (folder / name).read_text().strip()
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent


def _groups(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folders of this process's memory groups, with the name of the file that has the limit."""
    top = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield top / path.lstrip("/"), "memory.max"
        elif "memory" in controllers.split(","):
            yield top / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
