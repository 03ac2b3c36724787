"""Memory in huge pages of 2 MiB, if the kernel provides them, so that random row reads rarely miss the TLB.

The TLB has some thousand entries; with pages of 4 KiB it covers a small part of a table, and nearly every row read
walks the page tables. System settings are not changed; without huge pages everything works, but slower.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
"""Bytes of a huge page."""
_MIN_BYTES = 2 * LARGE_PAGE
"""Smaller tensors are not aligned to huge pages: the padding would outweigh the gain."""
# Linux 6.1; unlike MADV_HUGEPAGE it acts at once, on shared memory, whatever the system's settings.
_MADV_COLLAPSE = 25
_MAP_NORESERVE, _MAP_FIXED = 0x4000, 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def aligned(offset: int, nbytes: int) -> int:
    """Return the first offset >= ``offset``, a multiple of the page size, where a tensor of ``nbytes`` may start."""
    return -(-offset // LARGE_PAGE) * LARGE_PAGE if nbytes >= _MIN_BYTES else offset


def map_private(nbytes: int) -> tuple[mmap.mmap, int]:
    """Map anonymous, private memory, initially zero; ``nbytes`` of a huge page or more are aligned to huge pages.

    Returns:
        The mapping, which must outlive the use of the memory, and the offset of the memory in it.
    """
    large = nbytes >= LARGE_PAGE
    # One huge page more than needed, so that an aligned start lies within the mapping.
    memory = mmap.mmap(-1, nbytes + LARGE_PAGE * large, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not large:
        return memory, 0
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -address_of(memory) % LARGE_PAGE


def address_of(memory: mmap.mmap) -> int:
    """Return the address of a mapping's first byte."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def zeros(nbytes: int) -> Tensor:
    """Return private memory of zeros, uint8 ``[nbytes]``."""
    if nbytes < _MIN_BYTES:
        return torch.zeros(nbytes, dtype=torch.uint8)
    memory, start = map_private(nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start)


def map_shared(descriptor: int, offset: int, nbytes: int) -> Tensor:
    """Map a range of a memory file, shared between processes, uint8 ``[nbytes]``; mapped until the process ends.

    Args:
        descriptor: the file, at least ``offset + nbytes`` long.
        offset: offset of the range; see :func:`aligned`.
        nbytes: length of the range, above 0.

    Raises:
        OSError: the range cannot be mapped.
    """
    if nbytes < _MIN_BYTES:
        return torch.frombuffer(mmap.mmap(descriptor, nbytes, offset=offset), dtype=torch.uint8)
    reserve = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    # Reserve a range that is large enough to contain an aligned address.
    reserved = _libc.mmap(None, nbytes + LARGE_PAGE, 0, reserve, -1, 0)
    address = -(-reserved // LARGE_PAGE) * LARGE_PAGE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    # MAP_FIXED replaces a part of the reserved range only; nothing else can have been mapped there meanwhile.
    if _libc.mmap(address, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor, offset) != address:
        raise OSError(ctypes.get_errno(), "the memory cannot be mapped")
    memory = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
    # MADV_COLLAPSE needs at least one resident small page in each huge page.
    memory[::LARGE_PAGE] |= 0
    _libc.madvise(address, nbytes // LARGE_PAGE * LARGE_PAGE, _MADV_COLLAPSE)
    return memory
