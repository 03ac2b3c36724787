"""Memory in large pages, as far as the kernel gives them: a row read at random then costs no walk through page tables.

The processor knows where some thousand pages are; with 4 KiB each that is a small part of a block, and nearly every row
has to be looked for first. Nothing of the system's settings is changed, and where there are no large pages all is the
same but slower.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
_LEAST = 2 * LARGE_PAGE
"""Smaller tensors are left in small pages."""
_MADV_COLLAPSE = 25  # since Linux 6.1; unlike MADV_HUGEPAGE it makes large pages of shared memory now, by any settings
_MAP_NORESERVE, _MAP_FIXED = 0x4000, 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def aligned(offset: int, nbytes: int) -> int:
    """Where in a file a tensor of so many bytes may begin, at or behind an offset that is a multiple of the page."""
    return -(-offset // LARGE_PAGE) * LARGE_PAGE if nbytes >= _LEAST else offset


def private(nbytes: int) -> tuple[mmap.mmap, int]:
    """Map memory of this process: zeros until it is written to, not on disk, not shared with forked children.

    From the size of a large page on it starts at a multiple of that, and asks for large pages.

    Returns:
        The mapping, which must be kept as long as the memory is used, and where in it the memory starts.
    """
    large = nbytes >= LARGE_PAGE
    memory = mmap.mmap(-1, nbytes + LARGE_PAGE * large, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not large:
        return memory, 0
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -address_of(memory) % LARGE_PAGE


def address_of(memory: mmap.mmap) -> int:
    """The address of a mapping's first byte."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def own(nbytes: int) -> Tensor:
    """Memory of this process, zeros, uint8 ``[nbytes]``."""
    if nbytes < _LEAST:
        return torch.zeros(nbytes, dtype=torch.uint8)
    memory, start = private(nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start)


def shared(descriptor: int, offset: int, nbytes: int) -> Tensor:
    """A piece of a file in memory, uint8 ``[nbytes]``, above 0; it stays mapped until the process ends.

    Args:
        descriptor: the file, at least so long.
        offset: see :func:`aligned`.
        nbytes: of the piece.
    """
    if nbytes < _LEAST:
        return torch.frombuffer(mmap.mmap(descriptor, nbytes, offset=offset), dtype=torch.uint8)
    nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    room = _libc.mmap(None, nbytes + LARGE_PAGE, 0, nothing, -1, 0)  # addresses, so that one of them is aligned
    begin = -(-room // LARGE_PAGE) * LARGE_PAGE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(begin, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor, offset) != begin:
        raise OSError(ctypes.get_errno(), "no memory could be mapped")
    memory = torch.frombuffer((ctypes.c_char * nbytes).from_address(begin), dtype=torch.uint8)
    memory[::LARGE_PAGE] |= 0  # what is to become a large page has to have a small one
    _libc.madvise(begin, nbytes // LARGE_PAGE * LARGE_PAGE, _MADV_COLLAPSE)
    return memory
