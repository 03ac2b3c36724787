"""Large matrices in memory that the next matrix of equal size takes over when they are freed.

Full-batch training allocates matrices of the same few sizes in every step. The kernel clears each page before it hands
it out, which took up to a third of such a step; glibc's heap would keep the pages, but smaller tensors split its gaps,
so that memory doubled. Here a process keeps freed blocks whole.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gtrain.memory.pages import LARGE_PAGE, map_private

LEAST_BYTES = 2 * LARGE_PAGE
"""Smaller tensors come from torch."""


class _Block(NamedTuple):
    """Private memory that starts at a huge page.

    Attributes:
        nbytes: its size.
        memory: the mapping.
        start: offset of the block in the mapping.
    """

    nbytes: int
    memory: mmap.mmap
    start: int


class FreedBlocks:
    """Blocks that tensors have freed and the next tensors of the same size take over; together at most as large as the
    largest block.

    So the peak of a process hardly grows: there, all blocks are in use.

    Attributes:
        enabled: whether blocks are kept; if not, tensors come from torch.
    """

    def __init__(self) -> None:
        self.enabled = False
        self._idle: list[_Block] = []
        self._most_bytes = 0
        # Python's garbage collection may free a tensor, and so call _release, while this thread holds the lock.
        self._lock = threading.RLock()

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept now."""
        return sum(block.nbytes for block in self._idle)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, bool]:
        """Return a tensor that is not a view, and whether it is known to be zero."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not self.enabled or nbytes < LEAST_BYTES or device.type != "cpu":
            return torch.empty(tuple(shape), dtype=dtype, device=device), False
        block, is_zero = self._take(-(-nbytes // LARGE_PAGE) * LARGE_PAGE)
        array = np.frombuffer(block.memory, np.uint8, nbytes, block.start)
        # The tensor's storage refers to the array for as long as any tensor uses it.
        weakref.finalize(array, self._release, block).atexit = False
        flat = torch.frombuffer(array, dtype=dtype)
        # A view could not be a result of a custom autograd function.
        return torch.ops.aten._unsafe_view(flat, tuple(shape)), is_zero

    def clear(self) -> None:
        """Return the kept memory to the kernel."""
        with self._lock:
            self._idle.clear()
            self._most_bytes = 0

    def _take(self, nbytes: int) -> tuple[_Block, bool]:
        with self._lock:
            self._most_bytes = max(self._most_bytes, nbytes)
            for i in reversed(range(len(self._idle))):
                if self._idle[i].nbytes == nbytes:
                    return self._idle.pop(i), False
        return _Block(nbytes, *map_private(nbytes)), True

    def _release(self, block: _Block) -> None:
        with self._lock:
            if self.enabled:
                self._idle.append(block)
            while self._idle and self.idle_bytes > self._most_bytes:
                # The smallest costs the least to allocate again.
                self._idle.remove(min(self._idle, key=lambda idle: idle.nbytes))


_FREED = FreedBlocks()


def keep_large() -> None:
    """Keep the memory of large freed tensors in this process from now on."""
    _FREED.enabled = True


def free_large() -> None:
    """Return the kept memory to the kernel, and keep none from now on."""
    _FREED.enabled = False
    _FREED.clear()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor."""
    return _FREED.allocate(shape, dtype, device)[0]


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros."""
    out, is_zero = _FREED.allocate(shape, dtype, device)
    return out if is_zero else out.zero_()
