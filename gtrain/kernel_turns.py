"""Of the processes that want the same kernel, one compiles it; the others wait, and read what it has kept."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from numba.core import dispatcher, event
from numba.core.caching import FunctionCache

LONGEST_WAIT = 180.0
"""Seconds after which a process compiles beside the one that it waited for, which may have been stopped."""

_LOOK = 0.005  # seconds

log = logging.getLogger("gtrain")


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
