"""Kernels of relation operators that act on each column, or pair of columns, alone.

- ``translation``: ``y = x + a`` (TransE, Bordes et al. 2013)
- ``diagonal``: ``y = a * x`` (DistMult, Yang et al. 2015)
- ``complex_diagonal``: ``y = (a + ib) * x`` over complex numbers (ComplEx, Trouillon et al. 2016), the real parts in
  the first half of a row
- ``rotation``: the same, with ``a = cos v`` and ``b = sin v`` (RotatE, Sun et al. 2019)

Parameters have a row for each relation: a ``[R, D]``; complex_diagonal: a and b ``[R, D / 2]``. Linear operators are
matrix products; see :mod:`gtrain_pbg.step.relations`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from gtrain.kernels.options import FAST, bare, inlined
from gtrain_pbg.kernels.numbers import add, number, store

NONE, TRANSLATION, DIAGONAL, COMPLEX = 0, 1, 2, 3


class OperatorArrays(NamedTuple):
    """An operator: ``code`` (NONE, TRANSLATION, DIAGONAL or COMPLEX), parameters ``a``, ``b``, gradients by them."""

    code: int
    a: Any
    b: Any
    by_a: Any
    by_b: Any


@inlined
def transform(operator: Any, rows: Any, layout: Any, relation: Any, result: Any, low: Any, has_low: bool) -> None:
    """Transform the rows of a side's edges, each by its relation.

    Args:
        operator: :class:`OperatorArrays`.
        rows: ``[Z, D]``, a side.
        layout: its :class:`~gtrain_pbg.kernels.rows.SideLayout`.
        relation: ``[B]``.
        result: ``[B, D]``.
        low: ``[B, D]``, receives the same as bfloat16 bits if ``has_low``.
        has_low: whether ``low`` is wanted.
    """
    for e in range(relation.size):
        y, r = result[e], relation[e]
        transform_row(operator.code, rows[e + e // layout.chunk_size * layout.uniform], operator.a[r], operator.b[r], y)
        if has_low:
            store(y, low[e], low[e].size)


@bare
def transform_row(code: int, x: Any, a: Any, b: Any, y: Any) -> None:
    """Transform row ``x`` by the parameters of one relation into ``y``."""
    # Only complex_diagonal reads the halves; elsewhere they cost nothing.
    half = x.size // 2
    if code == COMPLEX:
        # (x1 + i x2)(a + ib) = (x1 a - x2 b) + i (x1 b + x2 a)
        _product(x[:half], a, y[:half])
        _subtract_product(x[half:], b, y[:half])
        _product(x[:half], b, y[half:])
        _add_product(x[half:], a, y[half:])
    elif code == DIAGONAL:
        _product(x, a, y)
    else:
        store(x, y, y.size)
        if code == TRANSLATION:
            add(a, y, y.size)


@inlined
def transform_backward(operator: Any, gradient: Any, rows: Any, layout: Any, relation: Any, by_row: Any) -> None:
    """Backward pass of :func:`transform`.

    Args:
        operator: :class:`OperatorArrays`; gradients by the parameters are added.
        gradient: ``[B, D]``, float or bfloat16 bits, by the results.
        rows, layout, relation: as of :func:`transform`.
        by_row: ``[B, D]``, receives the gradients by the rows.
    """
    a, b, by_a, by_b = operator.a, operator.b, operator.by_a, operator.by_b
    # bfloat16 is decoded once per row, so that the products below vectorise.
    wide = np.empty(by_row.shape[1], rows.dtype)
    for e in range(relation.size):
        r, row = relation[e], rows[e + e // layout.chunk_size * layout.uniform]
        _widen(gradient[e], wide)
        transform_row_backward(operator.code, wide, row, a[r], b[r], by_row[e], by_a[r], by_b[r])


@bare
def transform_row_backward(code: int, gradient: Any, x: Any, a: Any, b: Any, y: Any, by_a: Any, by_b: Any) -> None:
    """Backward pass of :func:`transform_row`: write the gradient by the row to ``y``, add those by the parameters."""
    half = x.size // 2
    if code == COMPLEX:
        # With g = u + iv: by x is g * conj(a + ib), by a + ib is g * conj(x).
        u, v = gradient[:half], gradient[half:]
        _product(u, a, y[:half])
        _add_product(v, b, y[:half])
        _product(v, a, y[half:])
        _subtract_product(u, b, y[half:])
        _add_product(u, x[:half], by_a)
        _add_product(v, x[half:], by_a)
        _add_product(v, x[:half], by_b)
        _subtract_product(u, x[half:], by_b)
    elif code == DIAGONAL:
        _product(gradient, a, y)
        _add_product(gradient, x, by_a)
    else:
        store(gradient, y, y.size)
        if code == TRANSLATION:
            add(gradient, by_a, by_a.size)


# Each loop uses few arrays: LLVM vectorizes a loop only if it can check at run time that no array overlaps another.


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


@inlined(fastmath=FAST)
def _widen(source: Any, target: Any) -> None:
    for d in range(target.size):
        target[d] = number(source[d])


@inlined(fastmath=FAST)
def _cubes(real: Any, imaginary: Any, is_complex: bool, weight: Any, by_real: Any, by_imaginary: Any) -> Any:
    """Return ``sum |v|^3`` of a row's numbers, and add ``weight * 3 |v| v`` to their gradients.

    Args:
        real: ``[D]``, the numbers, or their real parts.
        imaginary: ``[D]``, the imaginary parts; unused unless ``is_complex``.
        is_complex: whether the numbers are complex.
        weight: of the gradient.
        by_real, by_imaginary: ``[D]``, gradients.
    """
    total, three = real.dtype.type(0), real.dtype.type(3) * weight
    for d in range(real.size):
        if is_complex:
            size = math.sqrt(real[d] * real[d] + imaginary[d] * imaginary[d])
            by_real[d] += three * size * real[d]
            by_imaginary[d] += three * size * imaginary[d]
        else:
            size = abs(real[d])
            by_real[d] += three * size * real[d]
        total += size * size * size
    return total


@inlined
def n3(
    operator: Any,
    ends: Any,
    by_ends: Any,
    relation: Any,
    weight: Any,
    with_rows: bool,
    with_relation: bool,
) -> float:
    """The N3 regularizer (Lacroix et al. 2018, eq. 4): ``sum_e w[e] (|h|_3^3 + |r|_3^3 + |t|_3^3)``; add its gradients.

    Args:
        operator: :class:`OperatorArrays` of one direction; for COMPLEX, rows are complex numbers too.
        ends: heads and tails of the edges, ``[B, D]`` each.
        by_ends: ``[B, D]`` each, gradients by them.
        relation, weight: ``[B]``.
        with_rows: whether heads and tails count.
        with_relation: whether the parameters count.
    """
    is_complex = operator.code == COMPLEX
    a, b, by_a, by_b = operator.a, operator.b, operator.by_a, operator.by_b
    half, result = ends[0].shape[1] // 2, 0.0
    for e in range(relation.size):
        r, heavy = relation[e], weight[e]
        total = heavy * 0
        if with_rows:
            for end in range(2):
                x, y = ends[end][e], by_ends[end][e]
                if is_complex:
                    total += _cubes(x[:half], x[half:], True, heavy, y[:half], y[half:])
                else:
                    total += _cubes(x, x, False, heavy, y, y)
        if with_relation and is_complex:
            total += _cubes(a[r], b[r], True, heavy, by_a[r], by_b[r])
        elif with_relation:
            total += _cubes(a[r], a[r], False, heavy, by_a[r], by_a[r])
        result += heavy * total
    return result


@inlined(fastmath=FAST)
def dura(operator: Any, ends: Any, by_ends: Any, relation: Any, weight: Any) -> float:
    """The DURA regularizer (Zhang, Cai and Wang 2020) by one direction; add its gradients.

    It is ``sum_e w[e] (|x|^2 + |y|^2 + |g(x)|^2 + |g'(y)|^2) = sum_e w[e] sum_d (1 + |v_d|^2) (|x_d|^2 + |y_d|^2)``.

    Args:
        operator: :class:`OperatorArrays`, DIAGONAL or COMPLEX.
        ends: the rows x that the operator transforms, and the others y, ``[B, D]`` each.
        by_ends: ``[B, D]`` each, gradients by them.
        relation, weight: ``[B]``.
    """
    a, b, by_a, by_b = operator.a, operator.b, operator.by_a, operator.by_b
    columns, result = a.shape[1], 0.0
    for e in range(relation.size):
        r, two = relation[e], 2 * weight[e]
        x, y, by_x, by_y = ends[0][e], ends[1][e], by_ends[0][e], by_ends[1][e]
        total = two * 0
        for d in range(columns):
            factor, size = 1 + a[r, d] * a[r, d], x[d] * x[d] + y[d] * y[d]
            if operator.code == COMPLEX:
                i = columns + d
                factor += b[r, d] * b[r, d]
                size += x[i] * x[i] + y[i] * y[i]
                by_x[i] += two * factor * x[i]
                by_y[i] += two * factor * y[i]
                by_b[r, d] += two * size * b[r, d]
            by_x[d] += two * factor * x[d]
            by_y[d] += two * factor * y[d]
            by_a[r, d] += two * size * a[r, d]
            total += factor * size
        result += weight[e] * total
    return result
