"""Whether kernels for GPUs can be compiled here. Imports no Triton."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
import sysconfig
from pathlib import Path

_log = logging.getLogger(__name__)
_INCLUDE = ("CPATH", "C_INCLUDE_PATH")  # further folders in which C compilers search headers


@functools.cache
def has_triton() -> bool:
    """Whether Triton can compile here; else a warning says once what it lacks."""
    lacking = triton_lacks()
    if lacking is not None:
        _log.warning(
            "%s; so layers and dropout run as many operations of torch on the GPU, which takes longer", lacking
        )
    return lacking is None


def triton_lacks() -> str | None:
    """Return what Triton lacks here as a clause, such as "Triton needs a C compiler"; None: nothing.

    torch for GPUs installs Triton on Linux. To start kernels, Triton compiles a small C program with Python's headers.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler, and neither gcc nor clang is installed"
    headers = Path(sysconfig.get_paths()["include"])
    searched = [headers, *(Path(path) for name in _INCLUDE for path in os.environ.get(name, "").split(":") if path)]
    if not any((folder / "Python.h").exists() for folder in searched):
        return f"Triton needs the headers of Python, which {headers} does not have (on Debian: python3-dev)"
    return None
