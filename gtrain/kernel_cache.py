"""Where compiled kernels are kept between runs, on machines where their usual places cannot be written to."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any


def find_cache(package: Path = Path(__file__).parent, home: Path | None = None) -> str | None:
    """Give numba a folder of this process's own where it could keep nothing otherwise, and return it.

    Numba keeps compiled code beside its source or below the user's cache folder. Where both are read-only, as in many
    containers, it refuses to compile what asks to be kept. Such a process compiles for itself. The folder is made anew,
    for numba trusts what it finds there.
    """
    import numba

    config: Any = numba.config  # its settings are read from the environment, and so not known to type checkers

    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") if home is None else home
    if config.CACHE_DIR or _writable(package) or _writable(home):
        return None
    folder = tempfile.mkdtemp(prefix="gtrain-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config.CACHE_DIR = folder
    return folder


def _writable(folder: Path) -> bool:
    """Whether something can be made in a folder, or it itself where it is not there."""
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK)
