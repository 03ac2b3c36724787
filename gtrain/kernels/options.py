"""Compiler options of kernels: inlining and floating-point semantics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from numba import njit
from numba.extending import overload

# Never "fast" as a whole: its nnan and ninf flags would let LLVM drop checks for NaN, and diverged runs must show it.
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


def by_type(choose: Callable[..., Any], **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: declare a function of kernels whose code depends on the types of its arguments.

    The body of the declaration is its docstring alone; only kernels can call it.

    Args:
        choose: receives numba's types of the arguments, and returns the function to compile; all have the parameters of
            the declaration, and the function has its annotations too.
        options: of ``numba.extending.overload``.
    """

    def declare(declaration: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(declaration)
        def compiled_only(*arguments: Any) -> Any:
            raise NotImplementedError("compiled only")

        choose.__annotations__ = declaration.__annotations__  # numba compares them with those of the chosen function
        overload(compiled_only, **options)(choose)
        return compiled_only

    return declare
