"""Relation operators that act on each column (or pair of columns) alone, forward and backward.

``translation``: x + a. ``diagonal``: a * x. ``complex_diagonal``: (a + ib) * x over complex numbers, the real parts in
the first half of a row. Parameters have a row for each relation. Linear operators are products of matrices; see
:mod:`gtrain_pbg.step.relations`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gtrain.kernels.options import FAST, bare, inlined
from gtrain_pbg.kernels.numbers import number, store

NONE, TRANSLATION, DIAGONAL, COMPLEX = 0, 1, 2, 3


@inlined
def transform(
    kind: int, rows: Any, places: int, uniform: int, relation: Any, a: Any, b: Any, result: Any, low: Any, has_low: bool
) -> None:
    """Transform the rows of a side's edges, each by its relation.

    Args:
        kind: one of TRANSLATION, DIAGONAL, COMPLEX.
        rows: ``[Z, D]``, a side.
        places, uniform: how it is laid out.
        relation: ``[B]``.
        a: ``[R, D]`` (COMPLEX: ``[R, D / 2]``).
        b: ``[R, D / 2]`` for COMPLEX.
        result: ``[B, D]``.
        low: the same as bfloat16 bits, if there is such.
        has_low: whether there is.
    """
    for e in range(relation.size):
        y, r = result[e], relation[e]
        transform_row(kind, rows[e + e // places * uniform], a[r], b[r], y)
        if has_low:
            store(y, low[e], low[e].size)


@bare
def transform_row(kind: int, x: Any, a: Any, b: Any, y: Any) -> None:
    """Transform row ``x`` by these parameters into ``y``."""
    half = x.size // 2
    if kind == COMPLEX:
        _product(x[:half], a, y[:half])
        _subtract_product(x[half:], b, y[:half])
        _product(x[:half], b, y[half:])
        _add_product(x[half:], a, y[half:])
    elif kind == DIAGONAL:
        _product(x, a, y)
    else:
        store(x, y, y.size)
        if kind == TRANSLATION:
            _add(a, y)


@inlined
def transform_back(
    kind: int,
    gradient: Any,
    rows: Any,
    places: int,
    uniform: int,
    relation: Any,
    a: Any,
    b: Any,
    by_row: Any,
    by_a: Any,
    by_b: Any,
) -> None:
    """Gradients of :func:`transform`: by the rows ``[B, D]`` (written), and by the parameters (added)."""
    wide = np.empty(by_row.shape[1], rows.dtype)
    for e in range(relation.size):
        r = relation[e]
        _widen(gradient[e], wide)
        transform_back_row(kind, wide, rows[e + e // places * uniform], a[r], b[r], by_row[e], by_a[r], by_b[r])


@bare
def transform_back_row(kind: int, gradient: Any, x: Any, a: Any, b: Any, y: Any, by_a: Any, by_b: Any) -> None:
    """Gradients of :func:`transform_row`: by the row (written to ``y``), and by the parameters (added)."""
    half = x.size // 2
    if kind == COMPLEX:
        u, v = gradient[:half], gradient[half:]
        _product(u, a, y[:half])
        _add_product(v, b, y[:half])
        _product(v, a, y[half:])
        _subtract_product(u, b, y[half:])
        _add_product(u, x[:half], by_a)
        _add_product(v, x[half:], by_a)
        _add_product(v, x[:half], by_b)
        _subtract_product(u, x[half:], by_b)
    elif kind == DIAGONAL:
        _product(gradient, a, y)
        _add_product(gradient, x, by_a)
    else:
        store(gradient, y, y.size)
        if kind == TRANSLATION:
            _add(gradient, by_a)


# Loops over few arrays each: LLVM makes vectors only where it can check that none overlaps another.


@bare(fastmath=FAST)
def _product(first: Any, second: Any, result: Any) -> None:
    for d in range(result.size):
        result[d] = first[d] * second[d]


@bare(fastmath=FAST)
def _add_product(first: Any, second: Any, result: Any) -> None:
    for d in range(result.size):
        result[d] += first[d] * second[d]


@bare(fastmath=FAST)
def _subtract_product(first: Any, second: Any, result: Any) -> None:
    for d in range(result.size):
        result[d] -= first[d] * second[d]


@bare(fastmath=FAST)
def _add(more: Any, result: Any) -> None:
    for d in range(result.size):
        result[d] += more[d]


@inlined(fastmath=FAST)
def _widen(source: Any, target: Any) -> None:
    for d in range(target.size):
        target[d] = number(source[d])


@inlined(fastmath=FAST)
def cubes(values: Any, more: Any, complex_numbers: bool, weight: Any, by_value: Any, by_more: Any) -> Any:
    """Sum of the cubed absolute values of a row's numbers, and the weighted gradient by them (added).

    Args:
        values: ``[D]``, or the real parts.
        more: the imaginary parts, if the numbers are complex.
        complex_numbers: whether they are.
        weight: of the gradient.
        by_value, by_more: receive it.
    """
    found, three = values.dtype.type(0), values.dtype.type(3) * weight
    for d in range(values.size):
        if complex_numbers:
            size = math.sqrt(values[d] * values[d] + more[d] * more[d])
            by_value[d] += three * size * values[d]
            by_more[d] += three * size * more[d]
        else:
            size = abs(values[d])
            by_value[d] += three * size * values[d]
        found += size * size * size
    return found


@inlined
def regularize(
    complex_numbers: bool,
    heads: Any,
    tails: Any,
    places: int,
    uniform: int,
    relation: Any,
    weight: Any,
    a: Any,
    b: Any,
    by_head: Any,
    by_tail: Any,
    by_a: Any,
    by_b: Any,
    with_rows: bool,
    with_relation: bool,
) -> float:
    """The N3 norms of edges, weighted and summed, and their gradients (added).

    Args:
        complex_numbers: whether rows and parameters are complex numbers.
        heads, tails: ``[Z, D]``, both sides.
        places, uniform: how they are laid out.
        relation, weight: ``[B]``.
        a, b: parameters of one direction.
        by_head, by_tail: ``[B, D]``, gradients by rows.
        by_a, by_b: gradients by parameters.
        with_rows: whether heads and tails count.
        with_relation: whether the parameters count.
    """
    half, found = heads.shape[1] // 2, 0.0
    for e in range(relation.size):
        z, r, heavy = e + e // places * uniform, relation[e], weight[e]
        total = heavy * 0
        if with_rows and complex_numbers:
            for rows, gradient in ((heads, by_head), (tails, by_tail)):
                x, y = rows[z], gradient[e]
                total += cubes(x[:half], x[half:], True, heavy, y[:half], y[half:])
        elif with_rows:
            total += cubes(heads[z], heads[z], False, heavy, by_head[e], by_head[e])
            total += cubes(tails[z], tails[z], False, heavy, by_tail[e], by_tail[e])
        if with_relation:
            total += cubes(
                a[r],
                b[r] if complex_numbers else a[r],
                complex_numbers,
                heavy,
                by_a[r],
                by_b[r] if complex_numbers else by_a[r],
            )
        found += heavy * total
    return found
