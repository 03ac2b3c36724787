"""How the C library keeps memory that was freed."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LARGEST, _KEPT = 32 << 20, 64 << 20


def keep_freed() -> None:
    """Have the memory of products and gradients be kept for the next step, from now on, in this process.

    glibc gives them back to the kernel after every step, which then has to clear hundreds of pages for the next one.
    Other C libraries have no such function or ignore it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _KEPT)
