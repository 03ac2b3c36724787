"""Products of small matrices in the nearest caches, computed in tiles that stay in registers.

A library spends as much time on arranging a small product's operands as on multiplying. Here they come arranged: what
a step of the sum reads of ``b`` lies side by side. There are three kinds of numbers: float64, float32, and words
(uint32) of two bfloat16 which follow one another in the sum, and whose products are added in float32.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import config, types
from numba.extending import intrinsic

from gtrain.kernels.options import bare

TALL = 3
"""Rows of a tile; with 7 vectors there are 21 sums, 7 vectors of ``b`` and 3 numbers of ``a`` in 32 registers."""
WIDTHS = (7, 6, 5, 4)
"""Vectors of a tile."""
BYTES = 64
"""Of a vector. Where registers are smaller, the compiler takes several for each."""

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def has_words() -> bool:
    """Whether this CPU multiplies words of two bfloat16, and numba compiles for it."""
    if getattr(config, "CPU_NAME", None):  # NUMBA_CPU_NAME: another CPU than this one
        return "+avx512bf16" in (getattr(config, "CPU_FEATURES", None) or "")
    return bool(binding.get_host_cpu_features().get("avx512bf16"))


def padded(columns: int, itemsize: int) -> int:
    """The least width of an array that has room for so many columns in whole tiles."""
    lanes = BYTES // itemsize
    return min(-(-columns // (width * lanes)) * width * lanes for width in WIDTHS)


def _tile(tall: int, wide: int) -> Any:
    """A function that multiplies some rows of ``a`` by some vectors of ``b``."""

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def tile(
        typing: Any, a: Any, at: Any, row: Any, step: Any, b: Any, begin: Any, width: Any, c: Any, end: Any, steps: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kinds, given = signature.args, list(arguments)
            for place in (0, 4, 7):
                given[place] = context.make_array(kinds[place])(context, builder, given[place]).data
            number, total = (context.get_data_type(kinds[place].dtype) for place in (4, 7))
            _Tile(builder, tall, wide, number, total).multiply(*given)
            return context.get_dummy_value()

        place = types.intp
        return types.void(a, place, place, place, b, place, place, c, place, place), generate

    return tile


class _Tile:
    """Writes the instructions of a tile.

    Args:
        builder: where they go.
        tall, wide: its rows and vectors.
        number: type of the factors.
        total: type of the sums.
    """

    def __init__(self, builder: Any, tall: int, wide: int, number: Any, total: Any) -> None:
        self.builder, self.tall, self.wide = builder, tall, wide
        self.lanes = BYTES // (8 if total == ir.DoubleType() else 4)
        self.factor, self.sum = ir.VectorType(number, self.lanes), ir.VectorType(total, self.lanes)
        self.words = number == _I32
        name = f"llvm.fmuladd.v{self.lanes}{'f64' if self.lanes == 8 else 'f32'}"
        if self.words:
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
        known = builder.module.globals.get(name)
        kind = ir.FunctionType(self.sum, [self.sum, self.factor, self.factor])  # where not words, all are the same
        self.function = known or ir.Function(builder.module, kind, name)

    def multiply(
        self, a: Any, at: Any, row: Any, step: Any, b: Any, begin: Any, width: Any, c: Any, end: Any, steps: Any
    ) -> None:
        """``c[end + i * width + n] = sum over k of a[at + i * row + k * step] * b[begin + k * width + n]``."""
        builder = self.builder
        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(_I64)
        sums = [[builder.phi(self.sum) for _ in range(self.wide)] for _ in range(self.tall)]
        vectors = [builder.load(place, align=4) for place in self._vectors(b, begin, k, width, self.factor)]
        first = builder.add(at, builder.mul(k, step))
        found = []
        for i, own in enumerate(sums):
            number = self._spread(builder.load(self._place(a, first, _I64(i), row)))
            found.append([self._add_product(*pair, number) for pair in zip(own, vectors, strict=True)])
        following = builder.add(k, _I64(1))
        k.add_incoming(_I64(0), before)
        k.add_incoming(following, loop)
        for own, results in zip(sums, found, strict=True):
            for total, result in zip(own, results, strict=True):
                total.add_incoming(ir.Constant(self.sum, None), before)
                total.add_incoming(result, loop)
        builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)
        builder.position_at_end(after)
        for i, results in enumerate(found):
            for result, place in zip(results, self._vectors(c, end, _I64(i), width, self.sum), strict=True):
                builder.store(result, place, align=4)

    def _place(self, data: Any, first: Any, count: Any, stride: Any) -> Any:
        return self.builder.gep(data, [self.builder.add(first, self.builder.mul(count, stride))])

    def _vectors(self, data: Any, first: Any, count: Any, stride: Any, kind: Any) -> list[Any]:
        place = self.builder.bitcast(self._place(data, first, count, stride), kind.as_pointer())
        return [self.builder.gep(place, [_I64(v)], source_etype=kind) for v in range(self.wide)]

    def _spread(self, number: Any) -> Any:
        """A vector of the same number."""
        none = ir.Constant(self.factor, ir.Undefined)
        first = self.builder.insert_element(none, number, _I32(0))
        return self.builder.shuffle_vector(first, none, ir.Constant(ir.VectorType(_I32, self.lanes), None))

    def _add_product(self, total: Any, vector: Any, number: Any) -> Any:
        order = (total, number, vector) if self.words else (number, vector, total)
        return self.builder.call(self.function, order)


def _in_tiles(wide: int) -> Any:
    """A product in tiles of so many vectors."""
    tall_tile, flat_tile = _tile(TALL, wide), _tile(1, wide)

    @bare
    def in_tiles(a: Any, row: int, step: int, b: Any, c: Any, rows: int, steps: int) -> None:
        width, each, whole = b.shape[1], wide * BYTES // b.itemsize, rows // TALL * TALL
        for begin in range(0, width, each):
            for i in range(0, whole, TALL):
                tall_tile(a, i * row, row, step, b, begin, width, c, i * width + begin, steps)
            for i in range(whole, rows):
                flat_tile(a, i * row, row, step, b, begin, width, c, i * width + begin, steps)

    return in_tiles


_in_tiles_7, _in_tiles_6, _in_tiles_5, _in_tiles_4 = (_in_tiles(wide) for wide in WIDTHS)


@bare(forceinline=False)
def multiply(a: Any, strides: Any, b: Any, c: Any, rows: int, steps: int) -> None:
    """Let the first rows of ``c`` be the sum over k of ``a[i, k] * b[k]``, or of ``a[k, i] * b[k]``.

    It is no part of its callers: it rounds in one way, whatever they make of it, and takes long to compile.

    Args:
        a: contiguous.
        strides: bytes from one i to the next, and from one k: those of ``a``, or the same in reverse.
        b: contiguous, as wide as ``padded`` says.
        c: contiguous, as wide as ``b``; float32 where factors are words.
        rows: of ``c``.
        steps: of the sum, at least 1.
    """
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
