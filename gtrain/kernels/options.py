"""Compiler options of kernels: inlining and floating-point semantics."""

from __future__ import annotations

from functools import partial
from typing import Any

from numba import njit

STRICT = {"contract"}
"""fastmath flags: allow fused multiply-add; preserve the order of operations, NaN and infinity."""
FAST = {"contract", "reassoc", "nsz", "arcp"}
"""fastmath flags: also allow sums to be reordered, so that they vectorize; preserve NaN and infinity."""

inlined: Any = partial(njit, cache=True, nogil=True, forceinline=True, no_cfunc_wrapper=True)
"""Decorator: compile a function into its callers.

A function that is not inlined may be optimised differently in the process that compiles it than in processes that load
it from the cache; a repeated run would then round differently.
"""
bare: Any = partial(inlined, _nrt=False)
"""Decorator: like :data:`inlined`, without reference counting, which costs more than a row of a hundred numbers.

Only for functions that allocate no array and return arrays only to other ``bare`` functions.
"""
BARE: Any = {"forceinline": True, "_nrt": False}
"""``jit_options`` of an ``overload`` that is compiled like :data:`bare`."""
