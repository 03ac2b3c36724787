"""Memory intrinsics that numba lacks: prefetching, unaligned loads, copies by address, a fence. Nothing is checked.

A prefetch does not block and accepts any address. Data for the next access goes into the L1 cache. ``prefetch_row``
prefetches into L2, since L1 is too small for many whole rows; ``prefetch_next_row`` into L1, for the few next rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import extending, types

# An ``@intrinsic`` function returns a numba signature and a function that emits LLVM instructions for a call.
intrinsic: Any = extending.intrinsic  # its type is that of the function that it generates code for
_LINE = 64  # bytes
_POINTER, _WORD = ir.IntType(8).as_pointer(), ir.IntType(32)
_L1, _L2 = _WORD(3), _WORD(2)  # LLVM's locality levels
_READ, _DATA = _WORD(0), _WORD(1)


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Prefetch the cache line at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_prefetch(builder, builder.inttoptr(arguments[0], _POINTER))
        return context.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def prefetch_entry(typingctx: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of an entry of a one-dimensional array; the index must not be negative."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        emit_prefetch(builder, builder.gep(data, [context.cast(builder, arguments[1], signature.args[1], types.intp)]))
        return context.get_dummy_value()

    return types.void(array, index), generate


def _row_into(cache: Any) -> Callable[..., Any]:
    """Prefetch all cache lines of a row of a two-dimensional array with contiguous rows.

    The trip count depends only on ``width``, so LLVM unrolls the loop if the width is a constant.
    """

    def typed(typingctx: Any, table: Any, row: Any, width: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array = context.make_array(table)(context, builder, arguments[0])
            index = context.cast(builder, arguments[1], row, types.intp)
            count = context.cast(builder, arguments[2], width, types.intp)
            start = builder.add(
                builder.ptrtoint(array.data, count.type), builder.mul(index, builder.extract_value(array.strides, 0))
            )
            nbytes = builder.mul(count, count.type(table.dtype.bitwidth // 8))
            entry = builder.block
            loop, after = builder.append_basic_block("prefetch"), builder.append_basic_block("prefetched")
            builder.branch(loop)
            builder.position_at_end(loop)
            # A do-while loop over lines: every row has at least one.
            offset = builder.phi(count.type)
            offset.add_incoming(count.type(0), entry)
            emit_prefetch(builder, builder.inttoptr(builder.add(start, offset), _POINTER), cache)
            following = builder.add(offset, count.type(_LINE))
            offset.add_incoming(following, loop)
            builder.cbranch(builder.icmp_signed("<", following, nbytes), loop, after)
            builder.position_at_end(after)
            # A row may start in the middle of a line.
            last = builder.add(start, builder.sub(nbytes, count.type(1)))
            emit_prefetch(builder, builder.inttoptr(last, _POINTER), cache)
            return context.get_dummy_value()

        return types.void(table, row, width), generate

    return typed


def emit_prefetch(builder: Any, pointer: Any, cache: Any = _L1) -> None:
    """Emit the instruction that prefetches the cache line at an LLVM pointer for reading."""
    signature = ir.FunctionType(ir.VoidType(), [_POINTER, _WORD, _WORD, _WORD])
    function = builder.module.declare_intrinsic("llvm.prefetch", [_POINTER], signature)
    builder.call(function, [builder.bitcast(pointer, _POINTER), _READ, cache, _DATA])


@intrinsic
def load_word(typingctx: Any, array: Any, position: Any) -> Any:
    """Read eight bytes of a uint8 array, at any position, as one little-endian uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        # Without align=1 LLVM may assume an aligned address and emit an instruction that faults on others.
        return _unaligned(builder, builder.gep(data, [arguments[1]]), 64)

    return types.uint64(array, types.intp), generate


def _load_at(result: Any) -> Callable[..., Any]:
    """Read an integer at an address."""

    def typed(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return _unaligned(builder, builder.inttoptr(arguments[0], _POINTER), result.bitwidth)

        return result(types.int64), generate

    return typed


def _unaligned(builder: Any, pointer: Any, bits: int) -> Any:
    return builder.load(builder.bitcast(pointer, ir.IntType(bits).as_pointer()), align=1)


@intrinsic
def copy(typingctx: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """Copy bytes from one address to another; LLVM turns a constant number into plain loads and stores."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = builder.module.declare_intrinsic("llvm.memcpy", [_POINTER, _POINTER, ir.IntType(64)])
        pointers = [builder.inttoptr(argument, _POINTER) for argument in arguments[:2]]
        builder.call(function, [*pointers, arguments[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def count_bits(typingctx: Any, word: Any) -> Any:
    """Count the bits that are set in a uint64."""

    return types.int64(types.uint64), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


@intrinsic
def fence(typingctx: Any) -> Any:
    """Prevent the compiler from moving memory accesses across this point; emits no instruction on x86."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # x86 orders stores among themselves, so a fence against the compiler suffices there; other processors get a
        # barrier.
        builder.fence("acq_rel")
        return context.get_dummy_value()

    return types.void(), generate


prefetch_row: Any = intrinsic(_row_into(_L2))
prefetch_next_row: Any = intrinsic(_row_into(_L1))
load32: Any = intrinsic(_load_at(types.int32))
load64: Any = intrinsic(_load_at(types.int64))
