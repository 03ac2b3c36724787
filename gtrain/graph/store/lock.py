"""One builder at a time: processes that want the same store wait for the one that makes it."""

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
    """Open the store at ``path``, building it first where there is none.

    Args:
        path: the store's folder.
        build: makes the store at ``path``; called by one process at a time, with the lock held.
        say: takes the messages for the user.

    Raises:
        StoreError: there is a store and it is damaged; it is neither loaded nor replaced.
    """
    if not path.exists():  # a store appears by a rename, so one that is there is complete and needs no lock
        with file_lock(path.with_name(path.name + ".lock"), say):
            if not path.exists():
                shutil.rmtree(temporary_path(path), ignore_errors=True)  # of a builder that was killed
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
    """Hold an exclusive lock on the file ``path``, which is there only while somebody holds or awaits it.

    Its folder is made, and removed again where the block fails and leaves it empty.
    """
    with made_folder(path.parent):
        descriptor = _acquire(path, say)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _acquire(path: Path, say: Callable[[str], None]) -> int:
    told = False
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)  # the last holder may have failed and tidied up
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not told:
                say(f"another process is preparing the store ({path}); waiting for it")
            told = True
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # The last holder removed the file: a lock on what it was excludes nobody, so take the new one.
        if _is_still(path, descriptor):
            return descriptor
        os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make ``folder``, and remove what was made of it if the block fails and left it empty."""
    made = [level for level in (folder, *folder.parents) if not level.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for level in made:
            with contextlib.suppress(OSError):
                level.rmdir()
        raise
