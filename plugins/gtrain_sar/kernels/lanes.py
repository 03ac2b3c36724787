"""Vectors of 64 bytes for compiled loops: 16 of float32, 8 of float64, whatever the machine's registers hold.

LLVM vectorises a loop over two arrays only if it can prove that they do not overlap, so these kernels use vectors
explicitly. Arrays are passed as pointers to their first item, because numba counts references to an array in every
call. Positions are not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from gtrain.kernels.memory import emit_prefetch

_intrinsic: Any = intrinsic  # its type does not know that callers omit the typing context
_BYTES = 64
_INDEX = ir.IntType(32)


class Lanes(types.Type):  # type: ignore[misc]
    """The type of a vector of numbers."""

    def __init__(self, dtype: Any) -> None:
        self.dtype, self.count = dtype, _BYTES * 8 // dtype.bitwidth
        super().__init__(name=f"Lanes({dtype})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        super().__init__(manager, lanes, ir.VectorType(manager.lookup(lanes.dtype).get_value_type(), lanes.count))


def _pointer_at(builder: Any, item: Any, pointer: Any, position: Any) -> Any:
    """Address of an item behind a pointer, as a pointer to ``item``."""
    return builder.bitcast(builder.gep(pointer, [position]), item.as_pointer())


def _splat(builder: Any, value: Any, count: int) -> Any:
    vector = ir.VectorType(value.type, count)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _INDEX(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_INDEX, count), [0] * count))


def _first_lanes(builder: Any, number: Any, count: int) -> Any:
    """Return a mask of the first ``number`` of ``count`` lanes."""
    lanes = ir.Constant(ir.VectorType(number.type, count), list(range(count)))
    return builder.icmp_signed("<", lanes, _splat(builder, number, count))


def _declare(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Declare an intrinsic function of LLVM; llvmlite's ``declare_intrinsic`` does not support vectors."""
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def _suffix(vector: Any) -> str:
    return f"v{vector.count}{vector.element.intrinsic_name}"


@_intrinsic
def data(typingctx: Any, array: Any) -> Any:
    """Pointer to the first item of an array, which must outlive it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_array(array)(context, builder, arguments[0]).data

    return types.CPointer(array.dtype)(array), generate


@_intrinsic
def lane_count(typingctx: Any, pointer: Any) -> Any:
    """Lanes of a vector, a constant."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(context.get_value_type(types.intp), Lanes(pointer.dtype).count)

    return types.intp(pointer), generate


@_intrinsic
def load(typingctx: Any, pointer: Any, position: Any) -> Any:
    """The lanes from an item on."""
    lanes = Lanes(pointer.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = context.get_value_type(lanes)
        address = _pointer_at(builder, vector, *arguments)
        return builder.load(address, align=pointer.dtype.bitwidth // 8)

    return lanes(pointer, types.intp), generate


@_intrinsic
def load_some(typingctx: Any, pointer: Any, position: Any, number: Any) -> Any:
    """The first ``number`` lanes from an item on; the others are 0."""
    lanes = Lanes(pointer.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = context.get_value_type(lanes)
        address = _pointer_at(builder, vector, *arguments[:2])
        mask = _first_lanes(builder, arguments[2], lanes.count)
        inputs = [address.type, _INDEX, mask.type, vector]
        function = _declare(builder, f"llvm.masked.load.{_suffix(vector)}.p0", vector, inputs)
        return builder.call(function, [address, _INDEX(pointer.dtype.bitwidth // 8), mask, ir.Constant(vector, None)])

    return lanes(pointer, types.intp, types.intp), generate


@_intrinsic
def store(typingctx: Any, pointer: Any, position: Any, value: Any) -> Any:
    """Store lanes from an item on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _pointer_at(builder, arguments[2].type, *arguments[:2])
        builder.store(arguments[2], address, align=pointer.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(pointer, types.intp, value), generate


@_intrinsic
def store_some(typingctx: Any, pointer: Any, position: Any, value: Any, number: Any) -> Any:
    """Store the first ``number`` lanes from an item on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = arguments[2].type
        address = _pointer_at(builder, vector, *arguments[:2])
        mask = _first_lanes(builder, arguments[3], value.count)
        inputs = [vector, address.type, _INDEX, mask.type]
        function = _declare(builder, f"llvm.masked.store.{_suffix(vector)}.p0", ir.VoidType(), inputs)
        builder.call(function, [arguments[2], address, _INDEX(pointer.dtype.bitwidth // 8), mask])
        return context.get_dummy_value()

    return types.void(pointer, types.intp, value, types.intp), generate


@_intrinsic
def fill(typingctx: Any, pointer: Any, value: Any) -> Any:
    """Lanes of a pointer's type that all hold a number."""
    lanes = Lanes(pointer.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _splat(builder, arguments[1], lanes.count)

    return lanes(pointer, pointer.dtype), generate


@_intrinsic
def multiply_add(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once where the machine can."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = arguments[0].type
        return builder.call(_declare(builder, f"llvm.fmuladd.{_suffix(vector)}", vector, [vector] * 3), arguments)

    return a(a, a, a), generate


def _binary(operation: str) -> Callable[..., Any]:
    def typed(typingctx: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, operation)(*arguments)

        return a(a, a), generate

    return typed


@_intrinsic
def total(typingctx: Any, a: Any) -> Any:
    """The sum of the lanes, in any order."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (lanes,) = arguments
        item = lanes.type.element
        function = _declare(builder, f"llvm.vector.reduce.fadd.{_suffix(lanes.type)}", item, [item, lanes.type])
        return builder.call(function, [ir.Constant(item, 0.0), lanes], fastmath=("reassoc",))

    return a.dtype(a), generate


@_intrinsic
def prefetch(typingctx: Any, pointer: Any, position: Any) -> Any:
    """Prefetch the cache line of an item."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_prefetch(builder, builder.gep(arguments[0], [arguments[1]]))
        return context.get_dummy_value()

    return types.void(pointer, types.intp), generate


plus = _intrinsic(_binary("fadd"))
times = _intrinsic(_binary("fmul"))
