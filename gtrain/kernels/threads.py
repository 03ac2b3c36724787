"""Threads in which compiled loops run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch


def num_threads() -> int:
    """Return the number of threads that kernels use."""
    return torch.get_num_threads()


def run_in_threads(tasks: Sequence[Callable[[], None]]) -> None:
    """Run the tasks at the same time; a single one runs in the calling thread."""
    if len(tasks) < 2:
        for task in tasks:
            task()
        return
    for future in [_pool(num_threads()).submit(task) for task in tasks]:
        future.result()


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    """Python's threads: numba's do not survive a fork. Compiled loops release the interpreter's lock."""
    return ThreadPoolExecutor(count, thread_name_prefix="gtrain-kernel")


# A forked child inherits the pool object without its threads, and would wait for them forever.
os.register_at_fork(after_in_child=_pool.cache_clear)
