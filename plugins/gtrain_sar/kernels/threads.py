"""Which tensors compiled loops take, and how the rows of a block are dealt to threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from gtrain_sar.edges import Compressed

_SPAN_EDGES = 1 << 13  # fewer edges are not worth another thread
_SPANS_A_THREAD = 4  # so that threads that finish early have something to take over

Span = tuple[int, int]


def compiled(inputs: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> bool:
    """Whether compiled loops take these: on the CPU, one dtype of float32 and float64, outputs contiguous."""
    tensors = [*outputs, *(t for t in inputs if t is not None)]
    dtype = outputs[0].dtype
    alike = all(t.dtype == dtype and t.device.type == "cpu" for t in tensors)
    return alike and dtype in (torch.float32, torch.float64) and all(t.is_contiguous() for t in outputs)


def array(tensor: Tensor) -> np.ndarray:
    """A tensor as numpy's; a copy only where it is not contiguous."""
    return tensor.detach().contiguous().numpy()


def arrays(block: Compressed) -> tuple[np.ndarray, ...]:
    """Rows, ptr, columns and edges of a block."""
    return tuple(array(part) for part in block)


def threads() -> int:
    """Threads that kernels use."""
    return torch.get_num_threads()


def spans(block: Compressed, most: int) -> list[Span]:
    """At most ``most`` ranges of rows with about equally many edges, none of them empty."""
    ptr = array(block.ptr)
    pieces = min(most, int(ptr[-1]) // _SPAN_EDGES)
    if pieces < 2:
        return [(0, len(ptr) - 1)] if len(ptr) > 1 else []
    cuts = np.searchsorted(ptr, np.linspace(0, ptr[-1], pieces + 1)[1:-1])
    bounds = [0, *np.unique(cuts).tolist(), len(ptr) - 1]
    return [(low, high) for low, high in zip(bounds[:-1], bounds[1:], strict=True) if low < high]


def over_rows(block: Compressed, work: Callable[[int, int], None]) -> None:
    """Do ``work(first, last)`` for all rows of a block, which must not depend on each other, in all threads."""
    count = threads()
    together(spans(block, count * _SPANS_A_THREAD if count > 1 else 1), work)


def together(ranges: Sequence[Span], work: Callable[[int, int], None]) -> None:
    """Do ``work`` for each range; one range is done here, without any thread."""
    if len(ranges) < 2:
        for low, high in ranges:
            work(low, high)
        return
    done = [_pool(threads()).submit(work, low, high) for low, high in ranges]
    for future in done:
        future.result()


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    """Python's threads, not numba's, which do not survive a fork; compiled loops give up the interpreter's lock."""
    return ThreadPoolExecutor(count, thread_name_prefix="gtrain-sar")


os.register_at_fork(after_in_child=_pool.cache_clear)
