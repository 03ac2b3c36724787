"""What the machine has: cores, memory, places for files, and who starts processes. Standard library only."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gtrain.launch import launchers

SHARED_MEMORY = Path("/dev/shm")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
PINNING_VARIABLES = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")


def facts(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """All of it; sizes in bytes."""
    return {
        "host": {"name": socket.gethostname(), "system": platform.platform()},
        "cores": cores(),
        "memory": memory(),
        "shared_memory": place(SHARED_MEMORY),
        "temporary_folder": place(Path(tempfile.gettempdir())),
        "open_files": {"limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0]},
        "environment": {
            name: environ[name]
            for name in (*THREAD_VARIABLES, *PINNING_VARIABLES, "CUDA_VISIBLE_DEVICES")
            if name in environ
        },
        "cluster": launcher(environ),
    }


def cores() -> dict[str, Any]:
    """Cores of the machine, those that this process may use, and the share of them that a container's limit leaves."""
    return {"machine": os.cpu_count(), "usable": len(os.sched_getaffinity(0)), "limit": _cpu_limit()}


def memory() -> dict[str, Any]:
    """Memory of the machine, what is free for programs, and the limit of this process's container, if there is one."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
    total, available = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = _group_file("memory.max", "memory/memory.limit_in_bytes")
    bound = int(limit) if limit is not None and limit.isdigit() and int(limit) < total else None
    return {"total": total, "available": available, "limit": bound}


def place(folder: Path) -> dict[str, Any]:
    """Size of a folder's file system, what is free, and whether a file can be made there."""
    if not folder.is_dir():
        return {"path": str(folder), "total": 0, "free": 0, "writable": False}
    usage = shutil.disk_usage(folder)
    return {"path": str(folder), "total": usage.total, "free": usage.free, "writable": writable(folder)}


def writable(folder: Path) -> bool:
    """Whether a file can be made in a folder; tried, since permissions alone do not tell on every file system."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"gtrain")
            file.flush()
    except OSError:
        return False
    return True


def launcher(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Who starts the processes, and this one's place in the job if another launcher did."""
    name, rank_info = (detected := launchers.detect(environ)).name, detected.rank_info(environ)
    if rank_info is None:
        return {"launcher": name, "rank": 0, "world_size": None, "ranks_here": None}
    return {
        "launcher": name,
        "rank": rank_info.rank,
        "world_size": rank_info.size,
        "ranks_here": rank_info.local_size,
    }


def _cpu_limit() -> float | None:
    """Cores that a control group leaves, such as 1.5; None without a limit."""
    text = _group_file("cpu.max")
    if text is None or text.startswith("max"):
        return None
    quota, period = text.split()
    return int(quota) / int(period)


def _group_file(*names: str) -> str | None:
    for name in names:
        path = Path("/sys/fs/cgroup", name)
        if path.is_file():
            return path.read_text().strip()
    return None
