"""Kernels from inner products to the loss and to its gradient by them, in place, one query's row of scores at a time.

A row of scores fits into the nearest cache, so each pass over it (scores, loss, gradient, rounding) costs little. The
losses are those of PyTorch-BigGraph (Lerer et al. 2019, section 3). With s+ the score of the true edge and s- the
scores of its negatives:

- RANKING: ``sum max(0, margin - s+ + s-)``
- LOGISTIC: ``softplus(-s+) + mean softplus(s-)``
- SOFTMAX: ``log(sum over s+ and s- of exp) - s+``
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from gtrain.kernels.exponential import exp_of_negative
from gtrain.kernels.options import FAST, STRICT, bare, inlined
from gtrain_pbg.kernels.numbers import add, exponentials, largest, scaled, store, total
from gtrain_pbg.kernels.rounding import write_row

RANKING, LOGISTIC, SOFTMAX = 0, 1, 2
INNER, SQUARED, ROOT = 0, 1, 2  # dot and cos; squared_l2; l2
DIAGONAL, LISTED, APART = 0, 1, 2  # the column of a row's answer: the row's number, a listed one, none
TINY = 1e-30  # least squared distance, as in gtrain.model.kg.scores
_RUN = 64  # factors between 1 and 2 whose product is finite


class ScoreBlock(NamedTuple):
    """Inner products of n queries and K candidates in each of G chunks, and where the gradient by them goes.

    Attributes:
        scores: ``[G, n, K]``, float, bfloat16 bits or int32.
        row_factor: ``[n]``, and
        column_factor: ``[K]``: int32 scores stand for ``scores * row_factor * column_factor``.
        gradient: ``[G, n, K]``, receives the gradient; may be ``scores`` unless these are integers. In int8 it omits
            the gradients by the answers, which go to :attr:`QueryArrays.by_apart`.
        gradient_scale: ``[n]``, receives the scales of int8 rows.
        dither: for int8; see :mod:`gtrain_pbg.kernels.rounding`.
    """

    scores: Any
    row_factor: Any
    column_factor: Any
    gradient: Any
    gradient_scale: Any
    dither: Any


class BlockQueries(NamedTuple):
    """The queries of a block's rows: row i of chunk g is query ``first + g * step + i``.

    Attributes:
        first: query of the first row.
        step: queries from the first row of a chunk to that of the next.
        column: for DIAGONAL, the column of the first row's answer.
    """

    first: int
    step: int
    column: int


class QueryArrays(NamedTuple):
    """What belongs to a query, ``[B]`` each.

    Attributes:
        norm: squared norms; not for INNER.
        bias: biases; only if biased.
        sums: receives the sums of the gradient's rows (see ``kernels.rows.distances_backward``); not for INNER.
        by_bias: receives the gradient by the bias; only if biased.
        apart: score of the answer where it has no column.
        by_apart: receives the gradient by that score, or by its inner product.
        own: score of one more negative, the query's own endpoint; minus infinity where it does not count.
        by_own: receives the gradient by that.
        answer: int64, the column of the answer, for LISTED.
        weight: of the loss.
    """

    norm: Any
    bias: Any
    sums: Any
    by_bias: Any
    apart: Any
    by_apart: Any
    own: Any
    by_own: Any
    answer: Any
    weight: Any


class CandidateArrays(NamedTuple):
    """What belongs to a candidate, ``[G, K]`` each, as in :class:`QueryArrays`; adds to ``sums`` and ``by_bias``."""

    norm: Any
    bias: Any
    sums: Any
    by_bias: Any


class LossSettings(NamedTuple):
    """The loss: RANKING, LOGISTIC or SOFTMAX; its margin; INNER, SQUARED or ROOT; whether biases are added; DIAGONAL,
    LISTED or APART; whether queries have one more negative, :attr:`QueryArrays.own`."""

    loss: int
    margin: float
    comparator: int
    biased: bool
    answer: int
    has_own: bool


@inlined(fastmath=STRICT)
def loss_and_gradient(
    block: Any, numbers: Any, queries: Any, candidates: Any, settings: Any, work: Any, distance: Any
) -> float:
    """Replace inner products by the gradient of the loss by them, and return the weighted loss.

    Passes per row: decode the products to ``work``; turn them into distances and add biases; loss and gradient by the
    scores, in place; gradient by the inner products; encode. Sums over rows and columns are taken while the row is in
    the cache.

    Args:
        block: :class:`ScoreBlock`.
        numbers: :class:`BlockQueries`.
        queries: :class:`QueryArrays`.
        candidates: :class:`CandidateArrays`.
        settings: :class:`LossSettings`.
        work, distance: ``[K + 1]``, scratch; their dtype is that of the computation.
    """
    groups, rows, columns = block.scores.shape
    kind, biased, has_own = settings.comparator, settings.biased, settings.has_own
    quantized = block.gradient.itemsize == 1
    lost = 0.0
    for g in range(groups):
        for i in range(rows):
            query = numbers.first + g * numbers.step + i
            _load(block.scores[g, i], block.row_factor, i, block.column_factor, work, columns)
            if kind != INNER:
                _distances(work, queries.norm[query], candidates.norm[g], kind, columns)
                # The gradient of a root needs the distances, which the loss overwrites.
                if kind == ROOT:
                    store(work, distance, columns)
            if biased:
                _add_biases(work, queries.bias[query], candidates.bias[g], columns)
            answer = -1
            if settings.answer == DIAGONAL:
                answer = numbers.column + i
            elif settings.answer == LISTED:
                answer = queries.answer[query]
            # Read before row_loss overwrites the scores.
            true = work[answer] if answer >= 0 else queries.apart[query]
            weight, count, absent = queries.weight[query], columns, 0
            if has_own:
                work[columns] = queries.own[query]
                count, absent = columns + 1, 1 if queries.own[query] == -np.inf else 0
            value, by_true = row_loss(settings, work, count, absent, answer, true, weight)
            if has_own:
                queries.by_own[query] = work[columns]
            lost += weight * value
            if answer >= 0:
                work[answer] = by_true
            else:
                queries.by_apart[query] = by_true
            if biased:
                # The score is the product plus both biases, so each bias receives the sum of the gradients by its
                # scores.
                queries.by_bias[query] = total(work, columns) + (by_true if answer < 0 else by_true * 0)
                add(work, candidates.by_bias[g], columns)
            if kind != INNER:
                _by_product(work, distance, kind, columns)
                queries.sums[query] = total(work, columns)
                add(work, candidates.sums[g], columns)
            if quantized and answer >= 0:
                # The gradient by the answer is a thousand times as large as the others: it would take all 8 bits.
                queries.by_apart[query] = work[answer]
                work[answer] = 0
            block.gradient_scale[i] = write_row(work, columns, block.dither, i, block.gradient[g, i])
    return lost


@bare
def row_loss(
    settings: Any, work: Any, columns: int, absent: int, answer: int, true: Any, weight: Any
) -> tuple[Any, Any]:
    """Compute the loss of a query's scores; replace the scores by the gradient, except at the answer's column.

    Args:
        settings: has ``loss`` (RANKING, LOGISTIC or SOFTMAX) and ``margin`` of the ranking loss.
        work: scores.
        columns: number of scores.
        absent: how many of them are minus infinity.
        answer: column of the answer; -1: it has none.
        true: the answer's score.
        weight: of the gradient.

    Returns:
        The loss, and the gradient by the answer's score.
    """
    if settings.loss == SOFTMAX:
        return _softmax(work, columns, answer, true, weight)
    if settings.loss == LOGISTIC:
        return _logistic(work, columns, absent, answer, true, weight)
    return _ranking(work, columns, answer, true, weight, settings.margin)


@inlined(fastmath=STRICT)
def _load(row: Any, row_factor: Any, i: int, column_factor: Any, work: Any, columns: int) -> None:
    for k in range(columns):
        work[k] = scaled(row[k], row_factor, i, column_factor, k)


@bare
def _add_biases(work: Any, row: Any, column: Any, columns: int) -> None:
    for k in range(columns):
        work[k] += row + column[k]


@inlined
def _distances(work: Any, row: Any, column: Any, kind: int, columns: int) -> None:
    """Replace inner products p by minus distances: ``|q - c|^2 = |q|^2 + |c|^2 - 2 p``, or its root."""
    two, tiny = work.dtype.type(2), work.dtype.type(TINY)
    if kind == SQUARED:
        for k in range(columns):
            work[k] = two * work[k] - row - column[k]
    else:
        for k in range(columns):
            # Rounding may make it negative for equal rows.
            squared = row + column[k] - two * work[k]
            work[k] = -math.sqrt(squared if squared > tiny else tiny)


@inlined
def _by_product(work: Any, distance: Any, kind: int, columns: int) -> None:
    """Replace gradients g by scores by the factors of ``candidate - query`` in the gradient by the query.

    ``2 g`` for squared distances and ``g / distance`` for distances; 0 where the distance was raised to the least one,
    because it does not depend on the rows there.
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
def _softmax(work: Any, columns: int, answer: int, true: Any, weight: Any) -> Any:
    """SOFTMAX: the gradient by a score is its probability, less 1 for the answer; the maximum is subtracted first."""
    # exp(score - top) is at most 1: no overflow, and the sum is at least 1.
    top = largest(work, columns)
    if answer < 0 and true > top:
        top = true
    among = exponentials(work, top, columns)
    own = exp_of_negative(true - top)
    if answer < 0:
        among += own
    scale = weight / among
    for k in range(columns):
        work[k] *= scale
    # log(sum exp) - s+ = log(among) + top - true.
    return math.log(among) + top - true, own * scale - weight


@bare(fastmath=STRICT)
def _logistic(work: Any, columns: int, absent: int, answer: int, true: Any, weight: Any) -> Any:
    """LOGISTIC: the gradient by a negative's score x is ``sigmoid(x) / count``."""
    count = columns - absent - (1 if answer >= 0 else 0)
    share = weight / work.dtype.type(max(count, 1))
    one, zero = work.dtype.type(1), work.dtype.type(0)
    total = 0.0
    if answer >= 0:
        # The answer is not a negative; softplus(-inf) is 0, so the loop needs no test.
        work[answer] = work.dtype.type(-np.inf)
    for begin in range(0, columns, _RUN):
        end = min(begin + _RUN, columns)
        product, linear = one, zero
        # softplus(x) = max(x, 0) + log(1 + exp(-|x|)): one logarithm of many factors.
        for k in range(begin, end):
            x = work[k]
            small = exp_of_negative(-abs(x))
            linear += x if x > zero else zero
            product *= one + small
            work[k] = share * ((one if x > zero else small) / (one + small))
        total += linear + math.log(product)
    small = exp_of_negative(-abs(true))
    value = max(-true, zero) + math.log1p(small) + total / max(count, 1)
    return value, -weight * ((small if true > zero else one) / (one + small))


@bare(fastmath=FAST)
def _ranking(work: Any, columns: int, answer: int, true: Any, weight: Any, margin: float) -> Any:
    """RANKING: the gradient by the score of a negative that violates the margin is 1; by s+ it is minus their count."""
    zero = work.dtype.type(0)
    # A negative violates the margin if it exceeds s+ - margin.
    least = work.dtype.type(true - work.dtype.type(margin))
    if answer >= 0:
        work[answer] = least  # does not violate the margin
    value, violations = zero, zero
    for k in range(columns):
        excess = work[k] - least
        # NaN counts as a violation, so that the loss shows it.
        hit = not excess <= zero
        value += excess if hit else zero
        violations += work.dtype.type(1) if hit else zero
        work[k] = weight if hit else zero
    return value, -weight * violations
