"""Memory for batches that is used again and again, since fresh pages cost more than filling them.

Memory comes in *blocks*. An array over a block keeps a *lease*, and everything that can reach the memory keeps the
lease: views and slices of the array, memory views, tensors made of it and their views, storages that autograd has
saved, messages under way. When the last of them is gone, in whatever thread, the block is free for the next array. So
nothing has to be given back, and a batch that somebody still holds is never overwritten. Blocks that were not needed
for some time go back to the system.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from gtrain.memory.pages import address_of, private

Array = NDArray[Any]

SMALL_BYTES = 32 << 10
"""Smaller arrays are numpy's own: malloc has their memory at hand."""
_STEPS = 4  # sizes of blocks from one power of 2 to the next
_NEAR = 2  # how many sizes larger a free block may be that is taken
_SWEEP = 256  # arrays between two looks at what nobody uses: those of some six batches


class BufferPool:
    """Hands out arrays and tensors, not initialised, whose memory returns by itself; threads may share a pool.

    Example:
        >>> pool = BufferPool()
        >>> first = pool.take((1000, 100), np.float32)
        >>> address = first.ctypes.data
        >>> second = pool.tensor((1000, 100), torch.float32)  # the first is alive: other memory
        >>> second.data_ptr() == address
        False
        >>> del first
        >>> pool.take((900, 100), np.float32).ctypes.data == address
        True
    """

    def __init__(self) -> None:
        self._free: dict[int, deque[_Block]] = {}
        self._fewest: dict[int, int] = {}  # free blocks of a size at any time since the last sweep
        self._taken = 0

    def take(self, shape: int | Sequence[int], dtype: DTypeLike = np.int64) -> Array:
        """Return a writable array in C order, aligned to at least 16 bytes."""
        kind = np.dtype(dtype)
        lengths = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = kind.itemsize * math.prod(lengths)
        if nbytes < SMALL_BYTES:
            return np.empty(lengths, kind)
        lease = _Lease(self._block(_size(nbytes)), self._free)
        lease.__array_interface__ = {
            "version": 3,
            "shape": lengths,
            "typestr": kind.str,
            "data": (lease.block.address, False),
        }
        return np.asarray(lease)

    def tensor(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a contiguous tensor of any plain dtype."""
        lengths = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(lengths) * dtype.itemsize
        if nbytes < SMALL_BYTES:
            return torch.empty(lengths, dtype=dtype)
        memory = self.take(nbytes, np.uint8)
        return torch.from_numpy(memory).view(dtype).view(lengths)

    @property
    def free_bytes(self) -> int:
        """Bytes of the blocks that nobody uses."""
        return sum(block.size for blocks in self._free.values() for block in tuple(blocks))

    def trim(self) -> None:
        """Give the blocks that nobody uses back to the system, such as those of larger batches than are to come."""
        for blocks in tuple(self._free.values()):
            blocks.clear()

    def _block(self, size: int) -> _Block:
        """A free block of this size or a little larger, else a new one. A deque's ends are safe between threads."""
        self._taken += 1  # more or less, where threads meet
        if self._taken % _SWEEP == 0:
            self._sweep()
        larger = size
        for _ in range(_NEAR + 1):
            try:
                block = self._free[larger].pop()
            except (KeyError, IndexError):
                larger = _size(larger + 1)
            else:
                self._fewest[larger] = min(self._fewest.get(larger, 0), len(self._free[larger]))
                return block
        self._free.setdefault(size, deque())
        self._fewest[size] = 0
        return _Block(size)

    def _sweep(self) -> None:
        """Give back the blocks that were free all the time since the last sweep, such as those of the first batches."""
        for size, blocks in tuple(self._free.items()):
            with contextlib.suppress(IndexError):
                for _ in range(self._fewest.get(size, 0)):
                    blocks.popleft()
            self._fewest[size] = len(blocks)


class _Block:
    """A piece of memory of this process."""

    __slots__ = ("_memory", "address", "size")

    def __init__(self, size: int) -> None:
        self._memory, start = private(size)
        self.size = size
        self.address = address_of(self._memory) + start


class _Lease:
    """The use of a block. numpy takes it for the owner of an array's memory, and of all views of the array.

    (An array cannot be the owner: numpy has a view of it point past it, at what owns its memory.)
    """

    __slots__ = ("__array_interface__", "_free", "block")

    def __init__(self, block: _Block, free: dict[int, deque[_Block]]) -> None:
        self.block, self._free = block, free
        self.__array_interface__: dict[str, Any] = {}

    def __del__(self) -> None:
        """Nobody can reach the memory any more. No lock here: this may run inside of anything, in any thread."""
        self._free[self.block.size].append(self.block)


def _size(nbytes: int) -> int:
    """The size of the blocks that hold so many bytes: a multiple of 1/4 of a power of 2."""
    step = (1 << (nbytes - 1).bit_length()) // (2 * _STEPS)
    return -(-nbytes // step) * step
