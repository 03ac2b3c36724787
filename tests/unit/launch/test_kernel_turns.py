"""gtrain.kernel_cache: one process compiles, the others read; nobody waits for good, or fails for want of disk."""

from __future__ import annotations

import errno
import fcntl
import importlib
import logging
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numba
import pytest
from helpers import LIMIT
from numba.core.caching import IndexDataCacheFile

from gtrain import kernel_cache

KERNEL = """
from numba import njit

@njit(cache=True)
def inner(n):
    return n + 1

@njit(cache=True)
def outer(n):
    return inner(n) * 2

def made(called, number):
    @njit(cache=True)
    def kernel(n):
        return called(n) + number
    return kernel

chain = made(made(inner, 10), 100)

@njit(cache=True)
def wrong(n):
    return n.nothing
"""
fork = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    kernel_cache.install_lock()
    kernel_cache._warn_once.cache_clear()
    (tmp_path / "turns_of_kernels.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(tmp_path)


def load() -> Any:
    """The kernels, as a process that has just begun sees them."""
    sys.modules.pop("turns_of_kernels", None)
    return importlib.import_module("turns_of_kernels")


def lock_of(kernel: Any) -> Path:
    return kernel._cache.lock._path


def misses(*kernels: Any) -> int:
    return sum(sum(kernel.stats.cache_misses.values()) for kernel in kernels)


def test_one_of_many_processes_compiles() -> None:
    begin, results = fork.Barrier(4), fork.Queue()

    def use() -> None:
        module = load()
        begin.wait(LIMIT)
        results.put((module.outer(3), misses(module.outer, module.inner)))

    children = [fork.Process(target=use) for _ in range(4)]
    for child in children:
        child.start()
    found = [results.get(timeout=LIMIT) for _ in children]
    for child in children:
        child.join(LIMIT)
    assert [value for value, _ in found] == [8] * 4
    assert sorted(number for _, number in found) == [0, 0, 0, 2], "one compiled both"


def test_a_turn_ends_with_the_process_that_has_it() -> None:
    kernel = load().inner
    begun = fork.Event()

    def hold() -> None:
        lock = kernel_cache.CacheLock(lock_of(kernel))
        lock.acquire()
        begun.set()
        signal.pause()

    child = fork.Process(target=hold)
    child.start()
    assert begun.wait(LIMIT)
    taken = os.open(lock_of(kernel), os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(taken, fcntl.LOCK_EX | fcntl.LOCK_NB)
    child.kill()
    assert kernel(1) == 2 and misses(kernel) == 1
    fcntl.flock(taken, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back
    os.close(taken)
    child.join(LIMIT)


def test_a_process_that_was_stopped_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "LOCK_TIMEOUT", 0.05)
    kernel = load().inner
    other = os.open(lock_of(kernel), os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert kernel(1) == 2 and misses(kernel) == 1
    os.close(other)
    assert load().inner(1) == 2, "it was kept all the same"


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", refuse)
    kernel = load().inner
    assert kernel(1) == 2 and misses(kernel) == 1


def test_a_lock_that_cannot_be_made() -> None:
    kernel = load().inner
    lock_of(kernel).mkdir()
    assert kernel(1) == 2 and misses(kernel) == 1


def test_a_full_disk_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(IndexDataCacheFile, "save", refuse)
    module = load()
    with caplog.at_level(logging.WARNING, "gtrain"):
        assert module.outer(1) == 4
    assert [record.message.partition(" in ")[0] for record in caplog.records] == ["compiled kernels cannot be saved"]
    assert "No space left on device" in caplog.text
    assert not kernel_cache.CacheLock._held


def test_a_kernel_that_does_not_compile_gives_its_turn_back() -> None:
    kernel = load().wrong
    with pytest.raises(numba.TypingError):
        kernel(1)
    assert lock_of(kernel).exists() and not kernel_cache.CacheLock._held


def test_kernels_that_a_loop_makes_call_each_other() -> None:
    module = load()
    assert module.chain(1) == 112 and not kernel_cache.CacheLock._held
