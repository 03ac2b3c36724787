"""Memory that compiled loops ask for before they need it: it answers while something else is computed.

Nothing waits for it, and any address will do. What is needed at once goes into the first cache. Many whole rows go into
the second one, for the first has no room for them; a few that come next are quicker in the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_LINE = 64  # bytes
_POINTER, _WORD = ir.IntType(8).as_pointer(), ir.IntType(32)
_FIRST, _SECOND = _WORD(3), _WORD(2)  # caches, as LLVM's localities
_READ, _DATA = _WORD(0), _WORD(1)


def _prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _ask(builder, builder.inttoptr(arguments[0], _POINTER), _FIRST)
        return context.get_dummy_value()

    return types.void(types.intp), generate


def _prefetch_entry(typingctx: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of an entry of a one-dimensional array; the index is not below 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.gep(data, [context.cast(builder, arguments[1], signature.args[1], types.intp)])
        _ask(builder, builder.bitcast(place, _POINTER), _FIRST)
        return context.get_dummy_value()

    return types.void(array, index), generate


def _row_into(cache: Any) -> Callable[..., Any]:
    """Ask for all cache lines of a row of a two-dimensional array whose rows are contiguous.

    The loop is of ``width`` alone, so a compiler that knows the width leaves no loop.
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
            here = builder.block
            loop, after = builder.append_basic_block("prefetch"), builder.append_basic_block("prefetched")
            builder.branch(loop)
            builder.position_at_end(loop)
            offset = builder.phi(count.type)
            offset.add_incoming(count.type(0), here)
            _ask(builder, builder.inttoptr(builder.add(start, offset), _POINTER), cache)
            following = builder.add(offset, count.type(_LINE))
            offset.add_incoming(following, loop)
            builder.cbranch(builder.icmp_signed("<", following, nbytes), loop, after)
            builder.position_at_end(after)
            last = builder.add(start, builder.sub(nbytes, count.type(1)))  # a row need not begin where a line does
            _ask(builder, builder.inttoptr(last, _POINTER), cache)
            return context.get_dummy_value()

        return types.void(table, row, width), generate

    return typed


def _ask(builder: Any, place: Any, cache: Any) -> None:
    """Ask for the cache line at a pointer, to be read."""
    kind = ir.FunctionType(ir.VoidType(), [_POINTER, _WORD, _WORD, _WORD])
    builder.call(builder.module.declare_intrinsic("llvm.prefetch", [_POINTER], kind), [place, _READ, cache, _DATA])


prefetch: Any = intrinsic(_prefetch)
prefetch_entry: Any = intrinsic(_prefetch_entry)
prefetch_row: Any = intrinsic(_row_into(_SECOND))
prefetch_next_row: Any = intrinsic(_row_into(_FIRST))
