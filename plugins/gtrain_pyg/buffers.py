"""Reusable memory for batches, since touching fresh pages costs more than filling them.

Memory is divided into *blocks*. An array over a block refers to a :class:`_BlockOwner`, and so does everything that can
reach the memory: views and slices of the array, memory views, tensors made from it and their views, storages that
autograd has saved, messages in transit. When the last reference is dropped, in any thread, the block is free for the
next array. Nothing is returned explicitly, and a batch that is still referenced is never overwritten. Blocks that stay
unused are returned to the system.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from gtrain.memory.pages import address_of, map_private
from gtrain_pyg.peers import Array

log = logging.getLogger(__name__)

SMALL_BYTES = 32 << 10
"""numpy allocates smaller arrays itself: malloc reuses their memory."""
_SIZES_PER_OCTAVE = 4  # sizes of blocks from one power of 2 to the next
_LARGER_SIZES = 2  # a free block of up to this many sizes larger is taken
_SWEEP_INTERVAL = 256  # arrays between two sweeps: those of some six batches

Memory = tuple[Any, int]
"""An object that keeps memory allocated, and the memory's address."""


def private_memory(nbytes: int) -> Memory:
    """Allocate anonymous memory of this process."""
    memory, start = map_private(nbytes)
    return memory, address_of(memory) + start


def pinned_memory(nbytes: int) -> Memory:
    """Allocate page-locked memory, which a GPU reads while the CPU goes on; ordinary memory if none is left."""
    try:
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        log.warning("no page-locked memory of %d bytes (%s): copies to the GPU will take longer", nbytes, error)
        return private_memory(nbytes)
    return memory, memory.data_ptr()


class BufferPool:
    """Allocates uninitialised arrays and tensors whose memory is reused once unreferenced. Threads may share a pool.

    Args:
        allocate: allocates the memory of a block.

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

    def __init__(self, allocate: Callable[[int], Memory] = private_memory) -> None:
        self._allocate = allocate
        self._free: dict[int, deque[_Block]] = {}
        self._fewest: dict[int, int] = {}  # by size, the minimum of free blocks since the last sweep
        self._allocations = 0

    def take(self, shape: int | Sequence[int], dtype: DTypeLike = np.int64) -> Array:
        """Return a writable array in C order, aligned to at least 16 bytes."""
        dtype = np.dtype(dtype)
        lengths = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = dtype.itemsize * math.prod(lengths)
        if nbytes < SMALL_BYTES:
            return np.empty(lengths, dtype)
        owner = _BlockOwner(self._block(_size(nbytes)), self._free)
        owner.__array_interface__ = {
            "version": 3,
            "shape": lengths,
            "typestr": dtype.str,
            "data": (owner.block.address, False),
        }
        return np.asarray(owner)

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
        """Return the bytes of unused blocks."""
        return sum(block.size for blocks in self._free.values() for block in tuple(blocks))

    def trim(self) -> None:
        """Free unused blocks, for example after a phase of larger batches."""
        for blocks in tuple(self._free.values()):
            blocks.clear()

    def _block(self, size: int) -> _Block:
        """Return a free block of this size or slightly larger, or a new one.

        Takes no lock: ``append``, ``pop`` and ``popleft`` of a deque are atomic, and counts may be approximate.
        """
        self._allocations += 1
        if self._allocations % _SWEEP_INTERVAL == 0:
            self._sweep()
        larger = size
        for _ in range(_LARGER_SIZES + 1):
            try:
                block = self._free[larger].pop()
            except (KeyError, IndexError):
                larger = _size(larger + 1)
            else:
                self._fewest[larger] = min(self._fewest.get(larger, 0), len(self._free[larger]))
                return block
        self._free.setdefault(size, deque())
        self._fewest[size] = 0
        return _Block(size, *self._allocate(size))

    def _sweep(self) -> None:
        """Free the blocks that stayed unused since the last sweep, such as those of unusually large batches."""
        for size, blocks in tuple(self._free.items()):
            with contextlib.suppress(IndexError):
                for _ in range(self._fewest.get(size, 0)):
                    blocks.popleft()
            self._fewest[size] = len(blocks)


class _Block:
    """Memory of one array at a time."""

    __slots__ = ("_memory", "address", "size")

    def __init__(self, size: int, memory: Any, address: int) -> None:
        self.size, self._memory, self.address = size, memory, address


class _BlockOwner:
    """The owner of a block's memory, which numpy stores as the ``base`` of an array and of all views of it.

    Its destructor frees the block. The array itself cannot do this: the base of its views is not the array.
    """

    __slots__ = ("__array_interface__", "_free", "block")

    def __init__(self, block: _Block, free: dict[int, deque[_Block]]) -> None:
        self.block, self._free = block, free
        self.__array_interface__: dict[str, Any] = {}

    def __del__(self) -> None:
        """Return the block to the pool. Takes no lock: a destructor may run in any thread, at any point."""
        self._free[self.block.size].append(self.block)


def _size(nbytes: int) -> int:
    """Return the size of the blocks for ``nbytes`` bytes: a multiple of 1/4 of a power of 2."""
    step = (1 << (nbytes - 1).bit_length()) // (2 * _SIZES_PER_OCTAVE)
    return -(-nbytes // step) * step
