"""Matrix products of small operands in the nearest caches, computed in tiles that stay in registers.

A library spends as much time on packing a small product's operands as on multiplying. Here the operands come packed:
what a step of the sum reads of ``b`` lies side by side. Numbers are float64, float32, or *words*: uint32 of two
bfloat16 that follow one another in the sum, and whose products the instruction ``vdpbf16ps`` adds in float32.

The functions ``pack_*`` make operands from rows of numbers. Each takes the array for its result last: if its items are
words, two numbers are joined to one; else the rows are returned unchanged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import config, types
from numba.extending import intrinsic

from gtrain.kernels.options import STRICT, bare, by_type
from gtrain_pbg.kernels.numbers import store, stored

TALL = 3
"""Rows of a tile; with 7 vectors that is 21 sums, 7 vectors of ``b`` and 3 numbers of ``a`` in 32 registers."""
WIDTHS = (7, 6, 5, 4)
"""Vectors of a tile."""
BYTES = 64
"""Bytes of a vector. Where registers are smaller, the compiler uses several for each."""

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_ZERO = np.uint16(0)
_HIGH = np.uint32(16)


def has_words() -> bool:
    """Return whether this CPU multiplies words of two bfloat16, and numba compiles for it."""
    if getattr(config, "CPU_NAME", None):
        # NUMBA_CPU_NAME names another CPU to compile for.
        return "+avx512bf16" in (getattr(config, "CPU_FEATURES", None) or "")
    return bool(binding.get_host_cpu_features().get("avx512bf16"))


def padded(columns: int, itemsize: int) -> int:
    """Return the least width of an array that holds this number of columns in whole tiles."""
    lanes = BYTES // itemsize
    # Of the four widths, the one that pads least.
    return min(-(-columns // (width * lanes)) * width * lanes for width in WIDTHS)


def _tile(tall: int, wide: int) -> Any:
    """Return a function that multiplies ``tall`` rows of ``a`` by ``wide`` vectors of ``b``."""

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def tile(
        typing: Any, a: Any, at: Any, row: Any, step: Any, b: Any, begin: Any, width: Any, c: Any, end: Any, steps: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            values = list(arguments)
            for array in (0, 4, 7):  # a, b and c
                values[array] = context.make_array(signature.args[array])(context, builder, values[array]).data
            number, total = (context.get_data_type(signature.args[array].dtype) for array in (4, 7))
            _Tile(builder, tall, wide, number, total).multiply(*values)
            return context.get_dummy_value()

        index = types.intp
        return types.void(a, index, index, index, b, index, index, c, index, index), generate

    return tile


class _Tile:
    """Emits the LLVM instructions of a tile.

    Args:
        builder: of the function.
        tall, wide: rows and vectors of the tile.
        number: LLVM type of the factors.
        total: LLVM type of the sums.
    """

    def __init__(self, builder: Any, tall: int, wide: int, number: Any, total: Any) -> None:
        self.builder, self.tall, self.wide = builder, tall, wide
        self.lanes = BYTES // (8 if total == ir.DoubleType() else 4)
        self.factor, self.sum = ir.VectorType(number, self.lanes), ir.VectorType(total, self.lanes)
        self.words = number == _I32
        name = f"llvm.fmuladd.v{self.lanes}{'f64' if self.lanes == 8 else 'f32'}"
        if self.words:
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
        signature = ir.FunctionType(self.sum, [self.sum, self.factor, self.factor])  # without words, all are the same
        self.function = builder.module.globals.get(name) or ir.Function(builder.module, signature, name)

    def multiply(
        self, a: Any, at: Any, row: Any, step: Any, b: Any, begin: Any, width: Any, c: Any, end: Any, steps: Any
    ) -> None:
        """``c[end + i * width + n] = sum over k of a[at + i * row + k * step] * b[begin + k * width + n]``."""
        builder = self.builder
        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(_I64)
        # The sums are loop-carried values, so LLVM holds them in registers until the sum is complete.
        sums = [[builder.phi(self.sum) for _ in range(self.wide)] for _ in range(self.tall)]
        # One load of b serves all rows of the tile, one broadcast of a all vectors.
        vectors = [builder.load(pointer, align=4) for pointer in self._vectors(b, begin, k, width, self.factor)]
        first = builder.add(at, builder.mul(k, step))
        added = []
        for i, row_sums in enumerate(sums):
            number = self._broadcast(builder.load(self._pointer(a, first, _I64(i), row)))
            added.append([self._add_product(*pair, number) for pair in zip(row_sums, vectors, strict=True)])
        following = builder.add(k, _I64(1))
        k.add_incoming(_I64(0), before)
        k.add_incoming(following, loop)
        for row_sums, results in zip(sums, added, strict=True):
            for total, result in zip(row_sums, results, strict=True):
                total.add_incoming(ir.Constant(self.sum, None), before)
                total.add_incoming(result, loop)
        builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)
        builder.position_at_end(after)
        for i, results in enumerate(added):
            for result, pointer in zip(results, self._vectors(c, end, _I64(i), width, self.sum), strict=True):
                builder.store(result, pointer, align=4)

    def _pointer(self, data: Any, first: Any, count: Any, stride: Any) -> Any:
        return self.builder.gep(data, [self.builder.add(first, self.builder.mul(count, stride))])

    def _vectors(self, data: Any, first: Any, count: Any, stride: Any, vector: Any) -> list[Any]:
        pointer = self.builder.bitcast(self._pointer(data, first, count, stride), vector.as_pointer())
        return [self.builder.gep(pointer, [_I64(v)], source_etype=vector) for v in range(self.wide)]

    def _broadcast(self, number: Any) -> Any:
        """Return a vector whose items are all this number."""
        none = ir.Constant(self.factor, ir.Undefined)
        first = self.builder.insert_element(none, number, _I32(0))
        return self.builder.shuffle_vector(first, none, ir.Constant(ir.VectorType(_I32, self.lanes), None))

    def _add_product(self, total: Any, vector: Any, number: Any) -> Any:
        # vdpbf16ps takes the accumulator first, fmuladd last.
        order = (total, number, vector) if self.words else (number, vector, total)
        return self.builder.call(self.function, order)


def _in_tiles(wide: int) -> Any:
    """Return a product in tiles of ``wide`` vectors."""
    tall_tile, flat_tile = _tile(TALL, wide), _tile(1, wide)

    @bare
    def in_tiles(a: Any, row: int, step: int, b: Any, c: Any, rows: int, steps: int) -> None:
        width, each, whole = b.shape[1], wide * BYTES // b.itemsize, rows // TALL * TALL
        # b's columns outside, so that a strip of b stays in the cache for all rows of a.
        for begin in range(0, width, each):
            for i in range(0, whole, TALL):
                tall_tile(a, i * row, row, step, b, begin, width, c, i * width + begin, steps)
            # The rows that remain, one at a time.
            for i in range(whole, rows):
                flat_tile(a, i * row, row, step, b, begin, width, c, i * width + begin, steps)

    return in_tiles


_in_tiles_7, _in_tiles_6, _in_tiles_5, _in_tiles_4 = (_in_tiles(wide) for wide in WIDTHS)


@bare(forceinline=False)
def multiply(a: Any, strides: Any, b: Any, c: Any, rows: int, steps: int) -> None:
    """``c[i] = sum over k of a[i, k] * b[k]``, or of ``a[k, i] * b[k]``, for the first rows of ``c``.

    It is not inlined into its callers: it rounds in the same way in all of them, and takes long to compile.

    Args:
        a: contiguous.
        strides: bytes from one i to the next, and from one k to the next: ``a.strides``, or the same reversed.
        b: contiguous, of a width that :func:`padded` returns.
        c: contiguous, as wide as ``b``; float32 where factors are words.
        rows: of ``c``.
        steps: k, at least 1.
    """
    # Strides instead of two functions: the reversed strides read ``a`` transposed, in place.
    row, step = strides[0] // a.itemsize, strides[1] // a.itemsize
    vectors = b.shape[1] * b.itemsize // BYTES
    if vectors % 7 == 0:
        _in_tiles_7(a, row, step, b, c, rows, steps)
    elif vectors % 6 == 0:
        _in_tiles_6(a, row, step, b, c, rows, steps)
    elif vectors % 5 == 0:
        _in_tiles_5(a, row, step, b, c, rows, steps)
    else:
        _in_tiles_4(a, row, step, b, c, rows, steps)


@by_type(lambda count, like: _half if like.dtype is types.uint32 else _same, inline="always")
def steps_of(count: int, like: Any) -> Any:
    """Return the steps of a sum over ``count`` numbers, packed like this array."""


@by_type(
    lambda rows, count, columns, result: _pairs_of_columns if result.dtype is types.uint32 else _unpacked,
    jit_options={"forceinline": True},
)
def pack_columns(rows: Any, count: int, columns: int, result: Any) -> Any:
    """Pack the first rows as ``a`` of a product whose sum goes over columns: words are pairs of columns."""


@by_type(
    lambda rows, count, columns, result: _pairs_of_rows if result.dtype is types.uint32 else _unpacked,
    jit_options={"forceinline": True},
)
def pack_rows(rows: Any, count: int, columns: int, result: Any) -> Any:
    """Pack the first rows as ``b`` (transposed: ``a``) of a product whose sum goes over rows, in pairs of rows."""


def _half(count: int, like: Any) -> int:
    return (count + 1) // 2


def _same(count: int, like: Any) -> int:
    return count


def _unpacked(rows: Any, count: int, columns: int, result: Any) -> Any:
    return rows


def _pairs_of_columns(rows: Any, count: int, columns: int, result: Any) -> Any:
    low = result.view(np.uint16)
    for i in range(count):
        store(rows[i], low[i], columns)
        if columns % 2:
            low[i, columns] = _ZERO
    return result


def _pairs_of_rows(rows: Any, count: int, columns: int, result: Any) -> Any:
    for i in range(0, count - 1, 2):
        _join(rows[i], rows[i + 1], columns, result[i // 2])
    if count % 2:
        for d in range(columns):
            # The second number of the last pair is 0: stored() gives 16 bits, and the upper half of the word stays 0.
            result[count // 2, d] = stored(rows[count - 1, d], _ZERO)
    return result


@bare(fastmath=STRICT)
def _join(first: Any, second: Any, columns: int, result: Any) -> None:
    for d in range(columns):
        result[d] = np.uint32(stored(first[d], _ZERO)) | (np.uint32(stored(second[d], _ZERO)) << _HIGH)


@bare
def turn(rows: Any, count: int, columns: int, result: Any) -> None:
    """Transpose the first rows, whose items may be words."""
    for d in range(columns):
        for i in range(count):
            result[d, i] = rows[i, d]
