"""Asking the processor for memory ahead of its use, from compiled kernels."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_BYTE, _WORD = ir.IntType(8), ir.IntType(32)


def _prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at an address that will be read, without waiting for it; any address will do."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _BYTE.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _WORD, _WORD, _WORD])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        builder.call(function, [builder.inttoptr(arguments[0], pointer), _WORD(0), _WORD(3), _WORD(1)])
        return context.get_dummy_value()

    return types.void(types.intp), generate


prefetch: Any = intrinsic(_prefetch)
