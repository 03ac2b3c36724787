"""What numba has no word for: memory by its address. Nothing is checked."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

_BYTE, _ADDRESS = ir.IntType(8), types.int64


def _copy(typingctx: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """Copy bytes from one address to another; a constant number of them becomes plain loads and stores."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _BYTE.as_pointer()
        function = builder.module.declare_intrinsic("llvm.memcpy", [pointer, pointer, ir.IntType(64)])
        places = [builder.inttoptr(argument, pointer) for argument in arguments[:2]]
        builder.call(function, [*places, arguments[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(_ADDRESS, _ADDRESS, types.int64), generate


def _load32(typingctx: Any, address: Any) -> Any:
    """The int32 at an address."""
    return types.int32(_ADDRESS), _loading(32)


def _load64(typingctx: Any, address: Any) -> Any:
    """The int64 at an address."""
    return types.int64(_ADDRESS), _loading(64)


def _loading(bits: int) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
        return builder.load(place, align=1)

    return generate


def _count_bits(typingctx: Any, word: Any) -> Any:
    """Bits that are set in a uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


copy: Any = intrinsic(_copy)
load32: Any = intrinsic(_load32)
load64: Any = intrinsic(_load64)
count_bits: Any = intrinsic(_count_bits)
