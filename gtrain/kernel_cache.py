"""Where compiled kernels are kept between runs."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gtrain import backends

KEPT_DAYS = 30
"""Folders of other versions of the code that nothing has compiled into for so long are removed."""


def find_cache(home: Path | None = None) -> str | None:
    """Give numba a folder for this version of gtrain and its backends, and return it; None where the user has set one.

    Processes that want the same kernel take turns from now on (:mod:`gtrain.kernel_turns`).

    Left to itself, numba keeps compiled code beside its source, where it hides a package that is installed elsewhere
    later, and takes it for current until the file that it was made from changes, whatever becomes of the functions that
    this file calls. Where nothing can be kept, as in many containers, the folder is this process's own, or its
    agent's: it is made anew, for numba trusts what it finds there.

    Args:
        home: the user's cache folder instead of ``XDG_CACHE_HOME`` or ``~/.cache``.
    """
    import numba

    from gtrain.kernel_turns import take_turns

    take_turns()
    config: Any = numba.config  # its settings are read from the environment, and so not known to type checkers
    if config.CACHE_DIR:
        return None
    folder = place(home)
    config.CACHE_DIR = folder
    return folder


@cache
def place(home: Path | None) -> str:
    """The folder, found once: processes that are forked from here on have it too, also where nothing can be kept."""
    return kept(home) or _own()


def kept(home: Path | None = None) -> str | None:
    """The folder below the user's cache folder, made where it is not there; None where nothing can be written."""
    try:
        home = home or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        kernels = home / "gtrain" / "kernels"
        folder = kernels / version_of(_packages())
        if not folder.exists():
            folder.mkdir(parents=True, mode=0o700, exist_ok=True)  # ranks begin at the same time
            _forget(kernels)
        entry = folder.stat()
        mine = entry.st_uid == os.geteuid() and not entry.st_mode & 0o022  # numba unpickles what it finds there
        return str(folder) if mine and os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):  # the user has no home
        return None


def version_of(packages: Iterable[Path]) -> str:
    """Name a state of some packages' Python files by places and contents: a branch come back to has its kernels."""
    digest = hashlib.blake2b(digest_size=8)
    for package in packages:
        for path in sorted(os.path.join(folder, name) for folder, _, names in os.walk(package) for name in names):
            if path.endswith(".py"):
                with open(path, "rb", buffering=0) as file:
                    text = file.read()
                digest.update(f"{path}\0{len(text)}\0".encode())
                digest.update(text)
    return digest.hexdigest()


def _own() -> str:
    folder = tempfile.mkdtemp(prefix="gtrain-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _packages() -> list[Path]:
    names = {point.module.partition(".")[0] for point in backends.installed().values()}
    found = [find_spec(name) for name in sorted({"gtrain", *names})]
    return [Path(place) for spec in found if spec is not None for place in spec.submodule_search_locations or ()]


def _forget(kernels: Path) -> None:
    for folder in kernels.iterdir():
        with suppress(FileNotFoundError):  # another process removes it too
            newest = max(path.stat().st_mtime for path in [folder, *folder.iterdir()])
            if newest < time.time() - KEPT_DAYS * 86400:
                shutil.rmtree(folder, ignore_errors=True)
