"""Tune when glibc's heap returns freed memory to the kernel. No effect with other C libraries."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_MEBIBYTE = 1 << 20


def give_back_freed() -> None:
    """Return allocations of 1 MiB or more to the kernel as soon as they are freed, from now on in this process.

    By default glibc raises this threshold to the largest freed allocation, up to 32 MiB, and retains smaller tensors in
    a heap whose gaps do not fit the next layer's tensors: a sixth of a rank's memory in full-batch training.
    """
    _set_thresholds(_MEBIBYTE, 2 * _MEBIBYTE)


def keep_freed(mebibytes: int = 32) -> None:
    """Retain freed allocations below this size for the next step, from now on in this process.

    Otherwise glibc may return them to the kernel after every step, and the next step faults in their pages again: a
    fault costs more than the kernel that fills the page.
    """
    _set_thresholds(mebibytes * _MEBIBYTE, 2 * mebibytes * _MEBIBYTE)


def trim_heap() -> None:
    """Return freed memory to the kernel now, for example after the set-up."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set_thresholds(mmap: int, trim: int) -> None:
    # Setting either threshold also ends glibc's adjustment of both.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, mmap)
        mallopt(_TRIM_THRESHOLD, trim)
