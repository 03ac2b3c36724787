"""Resources of the machine: cores, memory, folders, and the launcher. Standard library only."""

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
from gtrain.memory.limits import group_limit, meminfo, memory_total
from gtrain.plan.machine import cpu_limit

SHARED_MEMORY = Path("/dev/shm")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
PINNING_VARIABLES = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")


def facts(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return all facts of the machine; sizes in bytes."""
    return {
        "host": {"name": socket.gethostname(), "system": platform.platform()},
        "cores": cores(),
        "memory": memory(),
        "shared_memory": folder_state(SHARED_MEMORY),
        "temporary_folder": folder_state(Path(tempfile.gettempdir())),
        "current_folder": folder_state(Path.cwd()),
        "open_files": {"limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0]},
        "environment": {
            name: environ[name]
            for name in (*THREAD_VARIABLES, *PINNING_VARIABLES, "CUDA_VISIBLE_DEVICES")
            if name in environ
        },
        "cluster": launcher(environ),
    }


def cores() -> dict[str, Any]:
    """Return the cores of the machine, those usable by this process, and the limit of its container."""
    return {"machine": os.cpu_count(), "usable": len(os.sched_getaffinity(0)), "limit": cpu_limit()}


def memory() -> dict[str, Any]:
    """Return the memory of the machine, the memory available to programs, and the limit of the container, if any."""
    return {"total": memory_total(), "available": meminfo("MemAvailable"), "limit": group_limit()}


def folder_state(folder: Path) -> dict[str, Any]:
    """Return size and free bytes of a folder's file system, and whether a file can be created in the folder."""
    if not folder.is_dir():
        return {"path": str(folder), "total": 0, "free": 0, "writable": False}
    usage = shutil.disk_usage(folder)
    return {"path": str(folder), "total": usage.total, "free": usage.free, "writable": writable(folder)}


def writable(folder: Path) -> bool:
    """Return whether a file can be created in a folder, by creating one: permissions alone do not tell."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"gtrain")
            file.flush()
    except OSError:
        return False
    return True


def launcher(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the launcher, and this process's rank and the job's size if it is an external one."""
    detected = launchers.detect(environ)
    info = detected.rank_info(environ)
    rank, size, local_size = (0, None, None) if info is None else (info.rank, info.size, info.local_size)
    return {"launcher": detected.name, "rank": rank, "world_size": size, "ranks_here": local_size}


def _group_file(*names: str) -> str | None:
    """Return the content of the first of these files of the control group that exists; None if none does."""
    for name in names:
        path = Path("/sys/fs/cgroup", name)
        if path.is_file():
            return path.read_text().strip()
    return None
