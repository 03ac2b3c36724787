"""Rows of tables that are asked for before they are needed: the memory answers while something else is computed."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gtrain_pbg.kernels.numbers import bare

_LINE = 64  # bytes
_READ, _SECOND_CACHE, _DATA = 0, 2, 1


def _ask_for_line(typing: Any, row: Any, place: Any) -> Any:
    """Ask for the line of memory with this number of a row."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        line = builder.gep(data, [arguments[1]])
        kind = ir.IntType(32)
        function = builder.module.globals.get("llvm.prefetch.p0") or ir.Function(
            builder.module, ir.FunctionType(ir.VoidType(), [line.type, kind, kind, kind]), "llvm.prefetch.p0"
        )
        builder.call(function, [line, kind(_READ), kind(_SECOND_CACHE), kind(_DATA)])
        return context.get_dummy_value()

    return types.void(row, types.intp), generate


_ask: Any = intrinsic(_ask_for_line)


@bare
def ask(row: Any) -> None:
    """Ask for a row; nothing waits for it."""
    for d in range(0, row.size, _LINE // row.itemsize):
        _ask(row, d)
    _ask(row, row.size - 1)
