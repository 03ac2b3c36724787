"""Numba's on-disk cache: the folder that compiled kernels are kept in, and a lock across processes around it.

One process compiles a kernel; the others wait and load it.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import logging
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

import numba
from numba.core import dispatcher, event
from numba.core.caching import FunctionCache

from gtrain import backends

KEPT_DAYS = 30
"""Folders of other versions of the code that nothing has compiled into for so long are removed."""
LONGEST_WAIT = 180.0
"""Seconds after which a process compiles beside the one that it waited for, which may have been stopped."""

_LOOK = 0.005  # seconds

log = logging.getLogger("gtrain")


def find_cache(home: Path | None = None) -> str | None:
    """Give numba a folder for this version of gtrain and its backends, and return it; None where the user has set one.

    From now on one process compiles a kernel and the others wait for it, see :func:`take_turns`.

    Left to itself, numba keeps compiled code beside its source, where it hides a package that is installed elsewhere
    later, and takes it for current until the file that it was made from changes, whatever becomes of the functions that
    this file calls. Where nothing can be kept, as in many containers, the folder is this process's own, or its
    agent's: it is made anew, for numba trusts what it finds there.

    Args:
        home: the user's cache folder instead of ``XDG_CACHE_HOME`` or ``~/.cache``.
    """
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


def take_turns() -> None:
    """Have functions that are compiled with ``cache=True`` from now on take turns over processes, by locked files.

    numba has each process compile for itself what it does not find, and processes that add to a function's index at the
    same time lose entries. It has no place for another cache than its own, so that one is replaced.
    """
    numbas: Any = dispatcher  # not typed
    if numbas.FunctionCache is not _Kept:
        numbas.FunctionCache = _Kept
        event.register("numba:compile", _Failures())


class Turn:
    """The lock on one function's files, which ends with the process that holds it, however that ends.

    Where files cannot be made or locked, nobody waits.
    """

    _held: set[Path] = set()  # functions that a loop makes have one file, and may call each other

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> None:
        """Wait until no other process has the turn, at most :data:`LONGEST_WAIT`."""
        if self._path in self._held:
            return
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return
        if _locked(descriptor):
            self._descriptor = descriptor
            self._held.add(self._path)
        else:
            os.close(descriptor)

    def give_back(self) -> None:
        """Let the next process have it; nothing where this one has not."""
        if self._descriptor is not None:
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open too
            os.close(self._descriptor)
            self._descriptor = None
            self._held.discard(self._path)


def _locked(descriptor: int) -> bool:
    end = time.monotonic() + LONGEST_WAIT
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(_LOOK)
        except OSError:  # a file system without locks
            return False


class _Kept(FunctionCache):
    """What has been compiled of a function. numba holds its own lock, for threads, around all that is done here.

    A turn lasts from a kernel that was not found until it is saved, or did not compile. Kernels that a kernel calls are
    compiled within its turn. Calls make no circle, and so neither do processes that wait.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self.turn = Turn(Path(self.cache_path, f"{self._impl.filename_base}.lock"))

    def load_overload(self, signature: Any, context: Any) -> Any:
        found = super().load_overload(signature, context)
        if found is not None:
            return found
        self.turn.take()
        missing = False
        try:
            found = super().load_overload(signature, context)  # by the process whose turn it was
            missing = found is None
        finally:
            if not missing:
                self.turn.give_back()
        return found

    def save_overload(self, signature: Any, compiled: Any) -> None:
        try:
            super().save_overload(signature, compiled)
        except OSError as error:  # a full disk; the kernel itself is there
            _say_once(f"compiled kernels cannot be kept in {self.cache_path}: {error.strerror or error}")
        finally:
            self.turn.give_back()


class _Failures(event.Listener):
    """Ends the turn of a process in which a kernel did not compile."""

    def on_start(self, event: Any) -> None:
        """Nothing: the turn has begun."""

    def on_end(self, event: Any) -> None:
        dispatcher = event.data["dispatcher"]
        kept = getattr(dispatcher, "_cache", None)
        if isinstance(kept, _Kept) and tuple(event.data["args"]) not in dispatcher.overloads:
            kept.turn.give_back()


@cache
def _say_once(message: str) -> None:
    log.warning(message)
