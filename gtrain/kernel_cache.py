"""Cross-process lock around numba's on-disk cache: one process compiles a kernel, the others wait and load it.

Also the folder of the cache, one per version of the code.
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
from gtrain.files import user_cache

MAX_AGE_DAYS = 30
"""Days after which the cache folder of another version of the code, if unused, is removed."""
LOCK_TIMEOUT = 180.0
"""Seconds after which a waiting process compiles too, since the lock's holder may have been stopped."""

_POLL_INTERVAL = 0.005  # seconds

log = logging.getLogger("gtrain")


def find_cache(home: Path | None = None) -> str | None:
    """Set numba's cache folder for this version of gtrain and its backends, and install the lock around the cache.

    numba's default, files beside the source, hides a package that is installed elsewhere later, and considers a cached
    kernel valid until its source file changes, even if functions that it calls in other files change. If the user's
    cache folder is not writable, as in many containers, a temporary folder of this process (or its agent) is used.

    Args:
        home: the user's cache folder; None means ``XDG_CACHE_HOME`` or ``~/.cache``.

    Returns:
        The folder; None if the user has set ``NUMBA_CACHE_DIR``.
    """
    install_lock()
    config: Any = numba.config  # its attributes are set at run time, unknown to type checkers
    if config.CACHE_DIR:
        return None
    folder = cache_folder(home)
    config.CACHE_DIR = folder
    return folder


@cache
def cache_folder(home: Path | None) -> str:
    """Return the cache folder, or a temporary one; cached, so that forked processes share it."""
    folder = user_cache_folder(home)
    if folder is None:
        folder = tempfile.mkdtemp(prefix="gtrain-kernels-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def user_cache_folder(home: Path | None = None) -> str | None:
    """Return the folder below the user's cache folder, created if missing; None if it is not writable and private."""
    try:
        kernels = (user_cache() if home is None else home / "gtrain") / "kernels"
        folder = kernels / version_of(_packages())
        if not folder.exists():
            folder.mkdir(parents=True, mode=0o700, exist_ok=True)  # ranks start at the same time
            _remove_old(kernels)
        entry = folder.stat()
        private = entry.st_uid == os.geteuid() and not entry.st_mode & 0o022  # numba unpickles the files in it
        return str(folder) if private and os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        return None


def version_of(packages: Iterable[Path]) -> str:
    """Return a hash of the paths and contents of the packages' Python files, so that each branch has its kernels."""
    digest = hashlib.blake2b(digest_size=8)
    for package in packages:
        for path in sorted(os.path.join(folder, name) for folder, _, names in os.walk(package) for name in names):
            if path.endswith(".py"):
                with open(path, "rb", buffering=0) as file:
                    text = file.read()
                digest.update(f"{path}\0{len(text)}\0".encode())
                digest.update(text)
    return digest.hexdigest()


def _packages() -> list[Path]:
    names = {point.module.partition(".")[0] for point in backends.installed().values()}
    specs = [find_spec(name) for name in sorted({"gtrain", *names})]
    return [Path(folder) for spec in specs if spec is not None for folder in spec.submodule_search_locations or ()]


def _remove_old(kernels: Path) -> None:
    for folder in kernels.iterdir():
        with suppress(FileNotFoundError):  # another process may remove it too
            newest = max(path.stat().st_mtime for path in [folder, *folder.iterdir()])
            if newest < time.time() - MAX_AGE_DAYS * 86400:
                shutil.rmtree(folder, ignore_errors=True)


def install_lock() -> None:
    """Replace numba's function cache by :class:`_LockedCache`, for functions compiled with ``cache=True`` from now on.

    Without a lock, each process compiles the kernels that it does not find, and processes that update a function's
    index at the same time lose entries. numba has no public hook for another cache.
    """
    module: Any = dispatcher  # numba is not typed
    if module.FunctionCache is not _LockedCache:
        module.FunctionCache = _LockedCache
        event.register("numba:compile", _FailureListener())


class CacheLock:
    """File lock on the cache of one function; the operating system releases it when the holder's process ends.

    If the file cannot be created or locked, processes do not wait.
    """

    _held: set[Path] = set()  # functions defined in a loop share one file, and may call each other

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Wait for the lock, at most :data:`LOCK_TIMEOUT` seconds."""
        if self._path in self._held:
            return
        with suppress(OSError):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            if _locked(descriptor):
                self._descriptor = descriptor
                self._held.add(self._path)
            else:
                os.close(descriptor)

    def release(self) -> None:
        """Release the lock, if this process holds it."""
        if self._descriptor is not None:
            with suppress(OSError):
                # Closing is not enough: a forked child has the file open.
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None
            self._held.discard(self._path)


def _locked(descriptor: int) -> bool:
    deadline = time.monotonic() + LOCK_TIMEOUT
    while time.monotonic() <= deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_POLL_INTERVAL)
        except OSError:  # a file system without locks
            break
    return False


class _LockedCache(FunctionCache):
    """numba's cache of one function, locked from a cache miss until the kernel is saved or fails to compile.

    numba holds its compiler lock, for threads, around all methods. Kernels that a kernel calls are compiled while its
    lock is held; calls have no cycle, so processes cannot deadlock.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self.lock = CacheLock(Path(self.cache_path, f"{self._impl.filename_base}.lock"))

    def load_overload(self, signature: Any, context: Any) -> Any:
        kernel = super().load_overload(signature, context)
        if kernel is not None:
            return kernel
        self.lock.acquire()
        missing = False
        try:
            # The lock's last holder may have saved it.
            kernel = super().load_overload(signature, context)
            missing = kernel is None
        finally:
            if not missing:
                self.lock.release()
        return kernel

    def save_overload(self, signature: Any, compiled: Any) -> None:
        try:
            super().save_overload(signature, compiled)
        except OSError as error:
            # For example a full disk; the kernel works without the cache.
            _warn_once(f"compiled kernels cannot be saved in {self.cache_path}: {error.strerror or error}")
        finally:
            self.lock.release()


class _FailureListener(event.Listener):
    """Releases the lock if a kernel fails to compile."""

    def on_start(self, event: Any) -> None:
        """Do nothing: :meth:`_LockedCache.load_overload` has acquired the lock."""

    def on_end(self, event: Any) -> None:
        dispatcher = event.data["dispatcher"]
        cache = getattr(dispatcher, "_cache", None)
        if isinstance(cache, _LockedCache) and tuple(event.data["args"]) not in dispatcher.overloads:
            cache.lock.release()


@cache
def _warn_once(message: str) -> None:
    log.warning(message)
