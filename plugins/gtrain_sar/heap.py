"""How the C library keeps memory that tensors gave back."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_MEBIBYTE = 1 << 20


def give_back_freed() -> None:
    """Have memory of a mebibyte or more go back to the kernel as soon as it is freed, from now on, in this process.

    glibc raises that bound to what was freed last, up to 32 MiB, and then keeps smaller tensors' memory in a heap whose
    holes the next layer's tensors do not fit: a sixth of a rank's memory in full-batch training. Other C libraries
    have no such function or ignore it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _MEBIBYTE)
        mallopt(_TRIM_THRESHOLD, 2 * _MEBIBYTE)
