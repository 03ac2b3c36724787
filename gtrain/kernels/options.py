"""Options of compiled loops: how they are built, and what the compiler may do with floating-point numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

from numba import njit

STRICT = {"contract"}
"""Products and sums may be fused; the order of operations stays, and so do NaN and infinity."""
FAST = {"contract", "reassoc", "nsz", "arcp"}
"""Sums may be reordered as well, which vectorizes them; NaN and infinity stay what they are."""

inlined: Any = partial(njit, cache=True, nogil=True, forceinline=True, no_cfunc_wrapper=True)
"""Compiles a function into its callers.

One that is not part of its caller may be another copy of it in the process that compiles than in those that read the
cache, optimised differently: a run would then round differently from the run that it repeats.
"""
bare: Any = partial(inlined, _nrt=False)
"""The same for a function that makes no arrays, and returns one only to such functions.

It counts no references to its arguments, which takes longer than a row of a hundred numbers.
"""
BARE: Any = {"forceinline": True, "_nrt": False}
"""``jit_options`` of an ``overload`` that is compiled like that."""
