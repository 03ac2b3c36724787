"""Loops over the numbers of one row of a tensor, the inner loops of the kernels, by vectors of 64 bytes.

A vector has 16 numbers of float32 or 8 of float64, whatever the machine's registers hold. LLVM vectorises a loop over
two arrays only if it can prove that they do not overlap, so these kernels use vectors explicitly. Arrays are passed as
pointers to their first item, because numba counts references to an array in every call; ``to``, ``at`` and ``start``
are positions in them. Positions are not checked.

numba has no bfloat16: such rows come as uint16, the upper half of a float32. They are loaded as lanes of float32, and
rounded to the nearest, ties to even, when they are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from gtrain.kernels.memory import emit_prefetch
from gtrain.kernels.options import inlined

_intrinsic: Any = intrinsic  # its type does not know that callers omit the typing context
_BYTES = 64
_INDEX = ir.IntType(32)

_PREFETCH_EDGES = 8  # how far ahead rows are prefetched


class Lanes(types.Type):  # type: ignore[misc]
    """The type of a vector of numbers."""

    def __init__(self, dtype: Any) -> None:
        self.dtype, self.count = dtype, _BYTES * 8 // dtype.bitwidth
        super().__init__(name=f"Lanes({dtype})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        super().__init__(manager, lanes, ir.VectorType(manager.lookup(lanes.dtype).get_value_type(), lanes.count))


def _lanes_of(dtype: Any) -> Lanes:
    """The lanes that numbers of a dtype are loaded as."""
    return Lanes(types.float32 if dtype == types.uint16 else dtype)


def _in_memory(context: Any, pointer: Any, lanes: Lanes) -> Any:
    """The vector that a pointer's lanes are in memory."""
    item = context.get_value_type(pointer.dtype)
    return ir.VectorType(item, lanes.count)


def _widen(builder: Any, vector: Any, loaded: Any) -> Any:
    """Convert a loaded vector to lanes ``vector``: the upper halves of float32 to float32."""
    if loaded.type == vector:
        return loaded
    words = ir.VectorType(_INDEX, vector.count)
    high = builder.shl(builder.zext(loaded, words), ir.Constant(words, [16] * vector.count))
    return builder.bitcast(high, vector)


def _narrow(builder: Any, stored: Any, lanes: Any) -> Any:
    """Convert lanes to the vector ``stored`` of memory: float32 to its upper half, to nearest, ties to even."""
    if lanes.type == stored:
        return lanes
    count = stored.count
    words = ir.VectorType(_INDEX, count)

    def constant(value: int) -> Any:
        return ir.Constant(words, [value] * count)

    bits = builder.bitcast(lanes, words)
    upper = builder.lshr(bits, constant(16))
    odd = builder.and_(upper, constant(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, constant(0x7FFF))), constant(16))
    # Rounding could turn a NaN into infinity; a quiet NaN keeps its upper half.
    is_nan = builder.fcmp_unordered("uno", lanes, lanes)
    return builder.trunc(builder.select(is_nan, builder.or_(upper, constant(0x40)), rounded), stored)


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
    # A module may declare a name only once.
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def _suffix(vector: Any) -> str:
    return f"v{vector.count}{vector.element.intrinsic_name}"


@_intrinsic
def data(typingctx: Any, array: Any) -> Any:
    """Pointer to the first item of an array, which must outlive it: numba frees one after its last use by name."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_array(array)(context, builder, arguments[0]).data

    return types.CPointer(array.dtype)(array), generate


@_intrinsic
def lane_count(typingctx: Any, pointer: Any) -> Any:
    """Lanes of a vector, a constant."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(context.get_value_type(types.intp), _lanes_of(pointer.dtype).count)

    return types.intp(pointer), generate


@_intrinsic
def line_count(typingctx: Any, pointer: Any) -> Any:
    """Numbers of a cache line, a constant."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(context.get_value_type(types.intp), _BYTES * 8 // pointer.dtype.bitwidth)

    return types.intp(pointer), generate


@_intrinsic
def load(typingctx: Any, pointer: Any, position: Any) -> Any:
    """The lanes from an item on."""
    lanes = _lanes_of(pointer.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _pointer_at(builder, _in_memory(context, pointer, lanes), *arguments)
        # The alignment of an item, not of a vector: rows start anywhere.
        loaded = builder.load(address, align=pointer.dtype.bitwidth // 8)
        return _widen(builder, context.get_value_type(lanes), loaded)

    return lanes(pointer, types.intp), generate


@_intrinsic
def load_some(typingctx: Any, pointer: Any, position: Any, number: Any) -> Any:
    """The first ``number`` lanes from an item on; the others are 0."""
    lanes = _lanes_of(pointer.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = _in_memory(context, pointer, lanes)
        address = _pointer_at(builder, vector, *arguments[:2])
        mask = _first_lanes(builder, arguments[2], lanes.count)
        inputs = [address.type, _INDEX, mask.type, vector]
        # A masked load does not touch memory behind the row, which may not be mapped.
        function = _declare(builder, f"llvm.masked.load.{_suffix(vector)}.p0", vector, inputs)
        zeros = ir.Constant(vector, None)
        loaded = builder.call(function, [address, _INDEX(pointer.dtype.bitwidth // 8), mask, zeros])
        return _widen(builder, context.get_value_type(lanes), loaded)

    return lanes(pointer, types.intp, types.intp), generate


@_intrinsic
def store(typingctx: Any, pointer: Any, position: Any, value: Any) -> Any:
    """Store lanes from an item on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = _in_memory(context, pointer, value)
        address = _pointer_at(builder, vector, *arguments[:2])
        builder.store(_narrow(builder, vector, arguments[2]), address, align=pointer.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(pointer, types.intp, value), generate


@_intrinsic
def store_some(typingctx: Any, pointer: Any, position: Any, value: Any, number: Any) -> Any:
    """Store the first ``number`` lanes from an item on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = _in_memory(context, pointer, value)
        address = _pointer_at(builder, vector, *arguments[:2])
        mask = _first_lanes(builder, arguments[3], value.count)
        inputs = [vector, address.type, _INDEX, mask.type]
        function = _declare(builder, f"llvm.masked.store.{_suffix(vector)}.p0", ir.VoidType(), inputs)
        item = _narrow(builder, vector, arguments[2])
        builder.call(function, [item, address, _INDEX(pointer.dtype.bitwidth // 8), mask])
        return context.get_dummy_value()

    return types.void(pointer, types.intp, value, types.intp), generate


@_intrinsic
def fill(typingctx: Any, pointer: Any, value: Any) -> Any:
    """Lanes of a pointer's type that all hold a number."""
    lanes = _lanes_of(pointer.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _splat(builder, arguments[1], lanes.count)

    return lanes(pointer, lanes.dtype), generate


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
        # Without reassoc the sum would be sequential, lane after lane.
        return builder.call(function, [ir.Constant(item, 0.0), lanes], fastmath=("reassoc",))

    return a.dtype(a), generate


@_intrinsic
def prefetch(typingctx: Any, pointer: Any, position: Any) -> Any:
    """Prefetch the cache line of an item."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_prefetch(builder, builder.gep(arguments[0], [arguments[1]]))
        return context.get_dummy_value()

    return types.void(pointer, types.intp), generate


@_intrinsic
def choose_positive(typingctx: Any, x: Any, a: Any, b: Any) -> Any:
    """The lanes of ``a`` where ``x > 0``, else those of ``b``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes, *choices = arguments
        return builder.select(builder.fcmp_ordered(">", lanes, ir.Constant(lanes.type, None)), *choices)

    return x(x, x, x), generate


plus = _intrinsic(_binary("fadd"))
times = _intrinsic(_binary("fmul"))


@inlined()
def prefetch_row(x: Any, columns: Any, e: int, end: int, width: int) -> None:
    """Prefetch the row of ``x`` that a later edge reads, if that edge lies before ``end``."""
    if e + _PREFETCH_EDGES < end:
        start = columns[e + _PREFETCH_EDGES] * width
        for c in range(0, width, line_count(x)):
            prefetch(x, start + c)


@inlined()
def copy(out: Any, to: int, x: Any, start: int, count: int) -> None:
    """``out[to:] = x[start:]`` of ``count`` numbers, converted."""
    step = lane_count(x)
    rest = count % step
    for c in range(0, count - rest, step):
        store(out, to + c, load(x, start + c))
    if rest:
        store_some(out, to + count - rest, load_some(x, start + count - rest, rest), rest)


@inlined()
def add(out: Any, to: int, x: Any, start: int, count: int) -> None:
    """``out[to:] += x[start:]`` of ``count`` numbers."""
    step = lane_count(x)
    rest = count % step
    for c in range(0, count - rest, step):
        store(out, to + c, plus(load(out, to + c), load(x, start + c)))
    if rest:
        c = count - rest
        store_some(out, to + c, plus(load_some(out, to + c, rest), load_some(x, start + c, rest)), rest)


@inlined()
def add_scaled(out: Any, to: int, x: Any, start: int, factor: Any, count: int) -> None:
    """``out[to:] += factor * x[start:]`` of ``count`` numbers."""
    step = lane_count(x)
    rest, f = count % step, fill(x, factor)
    for c in range(0, count - rest, step):
        store(out, to + c, multiply_add(f, load(x, start + c), load(out, to + c)))
    if rest:
        c = count - rest
        store_some(out, to + c, multiply_add(f, load_some(x, start + c, rest), load_some(out, to + c, rest)), rest)


@inlined()
def scale_by(out: Any, to: int, factor: Any, count: int) -> None:
    """``out[to:] *= factor`` of ``count`` numbers."""
    step = lane_count(out)
    rest, f = count % step, fill(out, factor)
    for c in range(0, count - rest, step):
        store(out, to + c, times(f, load(out, to + c)))
    if rest:
        store_some(out, to + count - rest, times(f, load_some(out, to + count - rest, rest)), rest)


@inlined()
def dot(a: Any, at: int, b: Any, start: int, count: int) -> Any:
    """Inner product of ``count`` numbers of each."""
    step = lane_count(a)
    rest, sums = count % step, fill(a, 0)
    for c in range(0, count - rest, step):
        sums = multiply_add(load(a, at + c), load(b, start + c), sums)
    if rest:
        c = count - rest
        sums = multiply_add(load_some(a, at + c, rest), load_some(b, start + c, rest), sums)
    return total(sums)


@inlined()
def dot_and_add_scaled(out: Any, b: Any, at: int, a: Any, start: int, factor: Any, count: int) -> Any:
    """``out[at:] += factor * a[start:]``; returns the inner product of ``a[start:]`` and ``b[at:]``."""
    step = lane_count(a)
    rest, sums, f = count % step, fill(a, 0), fill(a, factor)
    for c in range(0, count - rest, step):
        row = load(a, start + c)
        sums = multiply_add(row, load(b, at + c), sums)
        store(out, at + c, multiply_add(f, row, load(out, at + c)))
    if rest:
        c = count - rest
        row = load_some(a, start + c, rest)
        sums = multiply_add(row, load_some(b, at + c, rest), sums)
        store_some(out, at + c, multiply_add(f, row, load_some(out, at + c, rest)), rest)
    return total(sums)


@inlined()
def leaky_dot(weight: Any, w: int, a: Any, at: int, b: Any, start: int, slope: Any, count: int) -> Any:
    """Inner product of ``weight[w:]`` and ``leaky_relu(a[at:] + b[start:])``, of ``count`` numbers."""
    step = lane_count(a)
    rest, sums, f = count % step, fill(a, 0), fill(a, slope)
    for c in range(0, count - rest, step):
        z = plus(load(a, at + c), load(b, start + c))
        sums = multiply_add(load(weight, w + c), choose_positive(z, z, times(f, z)), sums)
    if rest:
        c = count - rest
        z = plus(load_some(a, at + c, rest), load_some(b, start + c, rest))
        sums = multiply_add(load_some(weight, w + c, rest), choose_positive(z, z, times(f, z)), sums)
    return total(sums)


@inlined()
def add_leaky(out: Any, to: int, a: Any, at: int, b: Any, start: int, factor: Any, slope: Any, count: int) -> None:
    """``out[to:] += factor * leaky_relu(a[at:] + b[start:])`` of ``count`` numbers."""
    step = lane_count(a)
    rest, positive, negative = count % step, fill(a, factor), fill(a, factor * slope)
    for c in range(0, count - rest, step):
        z = plus(load(a, at + c), load(b, start + c))
        store(out, to + c, multiply_add(choose_positive(z, positive, negative), z, load(out, to + c)))
    if rest:
        c = count - rest
        z = plus(load_some(a, at + c, rest), load_some(b, start + c, rest))
        chosen = choose_positive(z, positive, negative)
        store_some(out, to + c, multiply_add(chosen, z, load_some(out, to + c, rest)), rest)


@inlined()
def add_leaky_slopes(
    out: Any, to: int, weight: Any, w: int, a: Any, at: int, b: Any, start: int, factor: Any, slope: Any, count: int
) -> None:
    """``out[to:] += factor * weight[w:] * leaky_relu'(a[at:] + b[start:])``; the derivative at 0 is the slope."""
    step = lane_count(a)
    rest, positive, negative = count % step, fill(a, factor), fill(a, factor * slope)
    for c in range(0, count - rest, step):
        chosen = choose_positive(plus(load(a, at + c), load(b, start + c)), positive, negative)
        store(out, to + c, multiply_add(chosen, load(weight, w + c), load(out, to + c)))
    if rest:
        c = count - rest
        z = plus(load_some(a, at + c, rest), load_some(b, start + c, rest))
        chosen = choose_positive(z, positive, negative)
        store_some(
            out, to + c, multiply_add(chosen, load_some(weight, w + c, rest), load_some(out, to + c, rest)), rest
        )
