"""Vectors of 64 bytes for compiled loops: 16 of float32, 8 of float64, whatever the machine's registers hold.

LLVM makes no vectors of loops over rows by itself where it cannot tell that two arrays do not overlap. Arrays are
passed on as pointers to their first item, for numba counts references to arrays with every call. Nothing is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from gtrain.kernels.memory import emit_prefetch

_BYTES = 64
_INDEX = ir.IntType(32)


class Lanes(types.Type):  # type: ignore[misc]
    """The type of a vector of numbers."""

    def __init__(self, dtype: Any) -> None:
        self.dtype, self.count = dtype, _BYTES * 8 // dtype.bitwidth
        super().__init__(name=f"Lanes({dtype})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Lanes) -> None:
        super().__init__(manager, kind, ir.VectorType(manager.lookup(kind.dtype).get_value_type(), kind.count))


def _place(builder: Any, item: Any, pointer: Any, position: Any) -> Any:
    """Pointer to what begins at an item behind a pointer."""
    return builder.bitcast(builder.gep(pointer, [position]), item.as_pointer())


def _splat(builder: Any, value: Any, count: int) -> Any:
    kind = ir.VectorType(value.type, count)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _INDEX(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_INDEX, count), [0] * count))


def _below(builder: Any, number: Any, count: int) -> Any:
    """Mask of the first ``number`` of ``count`` lanes."""
    lanes = ir.Constant(ir.VectorType(number.type, count), list(range(count)))
    return builder.icmp_signed("<", lanes, _splat(builder, number, count))


def _declare(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """One of LLVM's intrinsic functions; llvmlite's own way knows no vectors."""
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def _suffix(vector: Any) -> str:
    return f"v{vector.count}{vector.element.intrinsic_name}"


def _data(typingctx: Any, array: Any) -> Any:
    """Pointer to the first item of an array, which must outlive it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_array(array)(context, builder, arguments[0]).data

    return types.CPointer(array.dtype)(array), generate


def _lane_count(typingctx: Any, pointer: Any) -> Any:
    """Lanes of a vector, a constant."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(context.get_value_type(types.intp), Lanes(pointer.dtype).count)

    return types.intp(pointer), generate


def _load(typingctx: Any, pointer: Any, position: Any) -> Any:
    """The lanes that begin at an item."""
    kind = Lanes(pointer.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = context.get_value_type(kind)
        place = _place(builder, vector, *arguments)
        return builder.load(place, align=pointer.dtype.bitwidth // 8)

    return kind(pointer, types.intp), generate


def _load_some(typingctx: Any, pointer: Any, position: Any, number: Any) -> Any:
    """The first ``number`` of the lanes that begin at an item, and zeros."""
    kind = Lanes(pointer.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = context.get_value_type(kind)
        place = _place(builder, vector, *arguments[:2])
        mask = _below(builder, arguments[2], kind.count)
        inputs = [place.type, _INDEX, mask.type, vector]
        function = _declare(builder, f"llvm.masked.load.{_suffix(vector)}.p0", vector, inputs)
        return builder.call(function, [place, _INDEX(pointer.dtype.bitwidth // 8), mask, ir.Constant(vector, None)])

    return kind(pointer, types.intp, types.intp), generate


def _store(typingctx: Any, pointer: Any, position: Any, value: Any) -> Any:
    """Store lanes from an item on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(builder, arguments[2].type, *arguments[:2])
        builder.store(arguments[2], place, align=pointer.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(pointer, types.intp, value), generate


def _store_some(typingctx: Any, pointer: Any, position: Any, value: Any, number: Any) -> Any:
    """Store the first ``number`` lanes from an item on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = arguments[2].type
        place = _place(builder, vector, *arguments[:2])
        mask = _below(builder, arguments[3], value.count)
        inputs = [vector, place.type, _INDEX, mask.type]
        function = _declare(builder, f"llvm.masked.store.{_suffix(vector)}.p0", ir.VoidType(), inputs)
        builder.call(function, [arguments[2], place, _INDEX(pointer.dtype.bitwidth // 8), mask])
        return context.get_dummy_value()

    return types.void(pointer, types.intp, value, types.intp), generate


def _fill(typingctx: Any, pointer: Any, value: Any) -> Any:
    """Lanes of a pointer's type that all hold a number."""
    kind = Lanes(pointer.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _splat(builder, arguments[1], kind.count)

    return kind(pointer, pointer.dtype), generate


def _multiply_add(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once where the machine can."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = arguments[0].type
        return builder.call(_declare(builder, f"llvm.fmuladd.{_suffix(kind)}", kind, [kind] * 3), arguments)

    return a(a, a, a), generate


def _binary(operation: str) -> Callable[..., Any]:
    def typed(typingctx: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, operation)(*arguments)

        return a(a, a), generate

    return typed


def _total(typingctx: Any, a: Any) -> Any:
    """The sum of the lanes, in any order."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (lanes,) = arguments
        item = lanes.type.element
        function = _declare(builder, f"llvm.vector.reduce.fadd.{_suffix(lanes.type)}", item, [item, lanes.type])
        return builder.call(function, [ir.Constant(item, 0.0), lanes], fastmath=("reassoc",))

    return a.dtype(a), generate


def _prefetch(typingctx: Any, pointer: Any, position: Any) -> Any:
    """Ask for the cache line of an item, without waiting for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_prefetch(builder, builder.gep(arguments[0], [arguments[1]]))
        return context.get_dummy_value()

    return types.void(pointer, types.intp), generate


data: Any = intrinsic(_data)
lane_count: Any = intrinsic(_lane_count)
load: Any = intrinsic(_load)
load_some: Any = intrinsic(_load_some)
store: Any = intrinsic(_store)
store_some: Any = intrinsic(_store_some)
fill: Any = intrinsic(_fill)
multiply_add: Any = intrinsic(_multiply_add)
plus: Any = intrinsic(_binary("fadd"))
times: Any = intrinsic(_binary("fmul"))
total: Any = intrinsic(_total)
prefetch: Any = intrinsic(_prefetch)
