"""Build a store once: a lock across processes, which wait for the process that builds the store."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from gtrain.graph.store.store import Store
from gtrain.graph.store.writer import temporary_path


def ensure_store(path: Path, build: Callable[[], Store], say: Callable[[str], None]) -> Store:
    """Open the store at ``path``; build it first if it does not exist.

    Args:
        path: the store's folder.
        build: creates the store at ``path``; called by one process at a time, with the lock held.
        say: receives messages for the user.

    Raises:
        StoreError: the store exists and is damaged; it is neither loaded nor replaced.
    """
    if not path.exists():
        # A rename creates the store, so an existing one is complete and needs no lock.
        with file_lock(path.with_name(path.name + ".lock"), say):
            if not path.exists():
                shutil.rmtree(temporary_path(path), ignore_errors=True)  # left by a builder that was killed
                try:
                    return build()
                except BaseException:
                    shutil.rmtree(temporary_path(path), ignore_errors=True)
                    raise
    store = Store.open(path)
    say(f"using the store {path}")
    return store


@contextlib.contextmanager
def file_lock(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold an exclusive lock on the file ``path``; the file exists only while a process holds or awaits the lock.

    The folder is created, and removed again if the block fails and leaves it empty.
    """
    with made_folder(path.parent):
        descriptor = _acquire(path, say)
        try:
            yield
        finally:
            # Unlinked while the lock is held: a process that opens the path afterwards makes a new file.
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _acquire(path: Path, say: Callable[[str], None]) -> int:
    waiting = False
    while True:
        # The last holder of the lock may have failed and removed the folder.
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waiting:
                say(f"another process, or another rank of this job, is preparing the store ({path}); waiting for it")
            waiting = True
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # The last holder has unlinked the file: a lock on an unlinked file excludes no process, so try again.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)


@contextlib.contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Create ``folder``, and remove the created levels again if the block fails and leaves them empty."""
    created = [level for level in (folder, *folder.parents) if not level.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for level in created:
            with contextlib.suppress(OSError):
                level.rmdir()
        raise
