"""How the C library keeps memory that was freed. Libraries other than glibc have no such functions, or ignore them."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_MEBIBYTE = 1 << 20


def give_back_freed() -> None:
    """Have memory of a mebibyte or more go back to the kernel as soon as it is freed, from now on, in this process.

    glibc raises that bound to what was freed last, up to 32 MiB, and then keeps smaller tensors' memory in a heap whose
    holes the next layer's tensors do not fit: a sixth of a rank's memory in full-batch training.
    """
    _set_thresholds(_MEBIBYTE, 2 * _MEBIBYTE)


def keep_freed() -> None:
    """Have memory below 32 MiB be kept for the next step, from now on, in this process.

    glibc may give it back to the kernel after every step, which then has to clear hundreds of pages for the next one.
    """
    _set_thresholds(32 * _MEBIBYTE, 64 * _MEBIBYTE)


def trim_heap() -> None:
    """Give freed memory back to the kernel now, such as that of what was needed to set up only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set_thresholds(mmap: int, trim: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, mmap)
        mallopt(_TRIM_THRESHOLD, trim)
