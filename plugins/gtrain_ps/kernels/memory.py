"""What numba has no words for: asking for memory ahead, and an order of writes that the compiler keeps."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic


def _prefetch_row(typingctx: Any, table: Any, row: Any) -> Any:
    """Ask for the cache lines of a row of a two-dimensional, C-contiguous array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        index = context.cast(builder, args[1], signature.args[1], types.intp)
        stride, width = builder.extract_value(array.strides, 0), builder.extract_value(array.shape, 1)
        base = builder.ptrtoint(array.data, stride.type)
        start = builder.add(base, builder.mul(index, stride))
        end = builder.add(start, builder.mul(width, array.itemsize))
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, ir.IntType(32), ir.IntType(32), ir.IntType(32)])
        call = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        one, three, zero = (ir.Constant(ir.IntType(32), number) for number in (1, 3, 0))
        here = builder.block
        loop, after = builder.append_basic_block("prefetch"), builder.append_basic_block("prefetched")
        builder.branch(loop)
        builder.position_at_end(loop)
        place = builder.phi(start.type)
        place.add_incoming(start, here)
        builder.call(call, [builder.inttoptr(place, pointer), zero, three, one])
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
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, ir.IntType(32), ir.IntType(32), ir.IntType(32)])
        call = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        one, three, zero = (ir.Constant(ir.IntType(32), number) for number in (1, 3, 0))
        builder.call(call, [builder.bitcast(place, pointer), zero, three, one])
        return context.get_dummy_value()

    return types.void(array, index), generate


def _fence(typingctx: Any) -> Any:
    """Let no write below come before a write above; no instruction on x86."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("acq_rel")
        return context.get_dummy_value()

    return types.void(), generate


prefetch_row: Any = intrinsic(_prefetch_row)
prefetch_entry: Any = intrinsic(_prefetch_entry)
fence: Any = intrinsic(_fence)
