"""Memory that the C library holds of what was freed."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Give freed memory back to the kernel, such as that of what was needed to set up only.

    Only once: from batch to batch memory is used again. C libraries other than glibc have no such function.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
