"""What numba has no words for: asking for memory ahead, and an order of writes that the compiler keeps."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

_POINTER, _WORD = ir.IntType(8).as_pointer(), ir.IntType(32)


def _prefetch_row(typingctx: Any, table: Any, row: Any) -> Any:
    """Ask for the cache lines of a row of a two-dimensional, C-contiguous array, to be kept in the second cache.

    The first one has room for a few rows under way only, and who asks for more stands still.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        index = context.cast(builder, args[1], signature.args[1], types.intp)
        stride, width = builder.extract_value(array.strides, 0), builder.extract_value(array.shape, 1)
        base = builder.ptrtoint(array.data, stride.type)
        start = builder.add(base, builder.mul(index, stride))
        end = builder.add(start, builder.mul(width, array.itemsize))
        here = builder.block
        loop, after = builder.append_basic_block("prefetch"), builder.append_basic_block("prefetched")
        builder.branch(loop)
        builder.position_at_end(loop)
        place = builder.phi(start.type)
        place.add_incoming(start, here)
        _ask(builder, builder.inttoptr(place, _POINTER), 2)
        following = builder.add(place, ir.Constant(start.type, 64))
        place.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, end), loop, after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(table, row), generate


def _prefetch_entry(typingctx: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of an entry of a one-dimensional array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, args[0])
        place = builder.gep(made.data, [context.cast(builder, args[1], signature.args[1], types.intp)])
        _ask(builder, builder.bitcast(place, _POINTER), 1)
        return context.get_dummy_value()

    return types.void(array, index), generate


def _ask(builder: Any, place: Any, cache: int) -> None:
    """Ask for the cache line at a pointer, to be read, and kept in the first, second or third cache."""
    kind = ir.FunctionType(ir.VoidType(), [_POINTER, _WORD, _WORD, _WORD])
    function = builder.module.declare_intrinsic("llvm.prefetch", [_POINTER], kind)
    builder.call(function, [place, _WORD(0), _WORD(4 - cache), _WORD(1)])


def _fence(typingctx: Any) -> Any:
    """Let no write below come before a write above; no instruction on x86."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("acq_rel")
        return context.get_dummy_value()

    return types.void(), generate


prefetch_row: Any = intrinsic(_prefetch_row)
prefetch_entry: Any = intrinsic(_prefetch_entry)
fence: Any = intrinsic(_fence)
