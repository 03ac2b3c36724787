"""From scores to the loss and to its gradient by them, in place, row by row: a row fits into the nearest cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gtrain.kernels.exponential import exp_of_negative
from gtrain.kernels.options import FAST, STRICT, bare, inlined
from gtrain_pbg.kernels.numbers import exponentials, largest, scaled, store, total
from gtrain_pbg.kernels.rounding import keep

RANKING, LOGISTIC, SOFTMAX = 0, 1, 2
INNER, SQUARED, ROOT = 0, 1, 2  # dot and cos; squared_l2; l2
DIAGONAL, LISTED, APART = 0, 1, 2  # where the true answer's column is: that of the row, as listed, nowhere
TINY = 1e-30  # least squared distance, as in gtrain.model.kg.comparators
_RUN = 64  # factors between 1 and 2 whose product is finite


@inlined(fastmath=STRICT)
def loss_and_gradient(
    scores: Any,
    row_factor: Any,
    column_factor: Any,
    result: Any,
    result_scale: Any,
    dither: Any,
    first: int,
    step: int,
    answer: Any,
    listed: Any,
    apart: Any,
    apart_gradient: Any,
    own: Any,
    own_gradient: Any,
    has_own: bool,
    weight: Any,
    loss: int,
    margin: float,
    kind: int,
    biased: bool,
    row_norm: Any,
    column_norm: Any,
    row_bias: Any,
    column_bias: Any,
    row_sum: Any,
    column_sum: Any,
    row_bias_gradient: Any,
    column_bias_gradient: Any,
    work: Any,
    distance: Any,
) -> float:
    """From inner products to the gradient of the loss by them; return the weighted loss.

    Queries are numbered through: row i of chunk g is query ``first + g * step + i``.

    Args:
        scores: ``[G, n, K]`` inner products of queries and candidates, float, bfloat16 bits or integers.
        row_factor: ``[n]``, and
        column_factor: ``[K]``, by which integers are multiplied.
        result: ``[G, n, K]``, receives the gradient; may be ``scores``, if those are no integers. If it is int8, it
            has no gradients by answers: these are apart.
        result_scale: ``[n]``, receives by what rows of 8 bits are to be multiplied.
        dither: for 8 bits; see ``kernels.rounding``.
        first: query of the first row.
        step: queries from the first row of a chunk to that of the next.
        answer: one of DIAGONAL, LISTED, APART.
        listed: by query, the column of the answer; for DIAGONAL the same is ``listed[0] + i``.
        apart: by query, the score of the answer where it is no column.
        apart_gradient: by query, receives the gradient by that, or by the product for it.
        own: by query, the score of one more false answer; minus infinity: there is none.
        own_gradient: by query, receives the gradient by that.
        has_own: whether there is ``own``.
        weight: by query.
        loss: one of RANKING, LOGISTIC, SOFTMAX.
        margin: of the ranking loss.
        kind: one of INNER, SQUARED, ROOT.
        biased: whether biases are added.
        row_norm, row_bias: by query: squared norm (not for INNER) and bias (only if biased).
        column_norm, column_bias: ``[G, K]``, the same of the candidates.
        row_sum, column_sum: receives (columns: adds) the sums of the result, which distances need; not for INNER.
        row_bias_gradient, column_bias_gradient: the same of the gradient by the scores; only if biased.
        work, distance: ``[K + 1]``, scratch; their dtype is that of the computation.
    """
    groups, rows, columns = scores.shape
    rounded = result.itemsize == 1
    lost = 0.0
    for g in range(groups):
        for i in range(rows):
            query = first + g * step + i
            _load(scores[g, i], row_factor, i, column_factor, work, columns)
            if kind != INNER:
                _distances(work, row_norm[query], column_norm[g], kind, columns)
                if kind == ROOT:
                    store(work, distance, columns)
            if biased:
                _add(work, row_bias[query], column_bias[g], columns)
            place = listed[0] + i if answer == DIAGONAL else listed[query] if answer == LISTED else -1
            true = work[place] if place >= 0 else apart[query]
            heavy, every, absent = weight[query], columns, 0
            if has_own:
                work[columns] = own[query]
                every, absent = columns + 1, 1 if own[query] == -np.inf else 0
            value, by_true = row_loss(loss, work, every, absent, place, true, heavy, margin)
            if has_own:
                own_gradient[query] = work[columns]
            lost += heavy * value
            if place >= 0:
                work[place] = by_true
            else:
                apart_gradient[query] = by_true
            if biased:
                row_bias_gradient[query] = total(work, columns) + (by_true if place < 0 else by_true * 0)
                _accumulate(work, column_bias_gradient[g], columns)
            if kind != INNER:
                _by_product(work, distance, kind, columns)
                row_sum[query] = total(work, columns)
                _accumulate(work, column_sum[g], columns)
            if rounded and place >= 0:
                apart_gradient[query] = work[place]
                work[place] = 0
            result_scale[i] = keep(work, columns, dither, i, result[g, i])
    return lost


@bare
def row_loss(
    loss: int, work: Any, columns: int, absent: int, place: int, true: Any, weight: Any, margin: float
) -> tuple[Any, Any]:
    """The loss of a query's scores, and the gradient by them, in place, but for that by the answer's.

    Args:
        loss: one of RANKING, LOGISTIC, SOFTMAX.
        work: scores.
        columns: how many.
        absent: how many of them are minus infinity.
        place: column of the answer; -1: it is none of them.
        true: the answer's score.
        weight: of the gradient.
        margin: of the ranking loss.

    Returns:
        The loss, and the gradient by the answer's score.
    """
    if loss == SOFTMAX:
        return _softmax(work, columns, place, true, weight)
    if loss == LOGISTIC:
        return _logistic(work, columns, absent, place, true, weight)
    return _ranking(work, columns, place, true, weight, margin)


@inlined(fastmath=STRICT)
def _load(row: Any, row_factor: Any, i: int, column_factor: Any, work: Any, columns: int) -> None:
    for k in range(columns):
        work[k] = scaled(row[k], row_factor, i, column_factor, k)


@inlined
def _accumulate(source: Any, target: Any, columns: int) -> None:
    for k in range(columns):
        target[k] += source[k]


@bare
def _add(work: Any, row: Any, column: Any, columns: int) -> None:
    for k in range(columns):
        work[k] += row + column[k]


@inlined
def _distances(work: Any, row: Any, column: Any, kind: int, columns: int) -> None:
    """Minus the distances, or squared ones, of inner products."""
    two, tiny = work.dtype.type(2), work.dtype.type(TINY)
    if kind == SQUARED:
        for k in range(columns):
            work[k] = two * work[k] - row - column[k]
    else:
        for k in range(columns):
            squared = row + column[k] - two * work[k]
            work[k] = -math.sqrt(squared if squared > tiny else tiny)


@inlined
def _by_product(work: Any, distance: Any, kind: int, columns: int) -> None:
    """The gradient by scores to what multiplies ``candidate - query`` in the gradient by the query.

    Where a distance was raised to the least one, it does not depend on the rows.
    """
    zero, two, least = work.dtype.type(0), work.dtype.type(2), work.dtype.type(math.sqrt(TINY) * 1.0001)
    if kind == SQUARED:
        for k in range(columns):
            work[k] *= two
    else:
        for k in range(columns):
            d = -distance[k]
            work[k] = work[k] / d if d > least else zero


@bare(fastmath=STRICT)
def _softmax(work: Any, columns: int, place: int, true: Any, weight: Any) -> Any:
    """The cross-entropy of picking the true answer, and the gradient by its score."""
    top = largest(work, columns)
    if place < 0 and true > top:
        top = true
    among = exponentials(work, top, columns)
    own = exp_of_negative(true - top)
    if place < 0:
        among += own
    scale = weight / among
    for k in range(columns):
        work[k] *= scale
    return math.log(among) + top - true, own * scale - weight


@bare(fastmath=STRICT)
def _logistic(work: Any, columns: int, absent: int, place: int, true: Any, weight: Any) -> Any:
    """The logistic loss of the true answer plus the mean one of the false, of which some are minus infinity."""
    count = columns - absent - (1 if place >= 0 else 0)
    share = weight / work.dtype.type(max(count, 1))
    one, zero = work.dtype.type(1), work.dtype.type(0)
    false = 0.0
    if place >= 0:
        work[place] = work.dtype.type(-np.inf)
    for begin in range(0, columns, _RUN):
        end = min(begin + _RUN, columns)
        product, linear = one, zero
        for k in range(begin, end):  # softplus(x) = max(x, 0) + log(1 + exp(-|x|)): one logarithm of many factors
            x = work[k]
            small = exp_of_negative(-abs(x))
            linear += x if x > zero else zero
            product *= one + small
            work[k] = share * ((one if x > zero else small) / (one + small))
        false += linear + math.log(product)
    small = exp_of_negative(-abs(true))
    value = max(-true, zero) + math.log1p(small) + false / max(count, 1)
    return value, -weight * ((small if true > zero else one) / (one + small))


@bare(fastmath=FAST)
def _ranking(work: Any, columns: int, place: int, true: Any, weight: Any, margin: float) -> Any:
    """The sum over false answers of ``max(0, margin - true + false)``."""
    zero = work.dtype.type(0)
    least = work.dtype.type(true - work.dtype.type(margin))
    if place >= 0:
        work[place] = least  # counts for nothing
    value, violations = zero, zero
    for k in range(columns):
        excess = work[k] - least
        hit = not excess <= zero  # what is no number counts, and shows
        value += excess if hit else zero
        violations += work.dtype.type(1) if hit else zero
        work[k] = weight if hit else zero
    return value, -weight * violations
