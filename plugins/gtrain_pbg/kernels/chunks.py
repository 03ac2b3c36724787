"""A batch trained chunk by chunk: all that a chunk of tens of edges needs stays in the nearest caches.

Of a chunk, only the gradients of its rows of tables go to memory, added to those of other chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gtrain.kernels.memory import prefetch_row
from gtrain.kernels.options import STRICT, bare
from gtrain_pbg.kernels.factors import along, down, steps_of, turn
from gtrain_pbg.kernels.numbers import store
from gtrain_pbg.kernels.operators import transform_back_row, transform_row
from gtrain_pbg.kernels.scores import row_loss
from gtrain_pbg.kernels.tiles import multiply
from gtrain_pbg.kernels.updates import apply

AHEAD = 8
"""Rows that are asked for before they are changed."""


class GradientSums(NamedTuple):
    """Gradients by rows of a table, added up over a batch.

    Attributes:
        slot: int32 ``[n]``, the sum of each row of the table; -1: it has none.
        row: int64 ``[S]``, the row of each sum.
        count: int64 ``[1]``, how many there are.
        gradient: ``[S, W]``, the sums.
    """

    slot: Any
    row: Any
    count: Any
    gradient: Any


class Endpoint(NamedTuple):
    """Heads or tails of a batch, and what is computed of a chunk of them.

    A chunk has K rows: those of the ends of its m edges, and those of the u nodes that were drawn.

    Attributes:
        table: ``[n, D]``.
        ids: ``[B]``, rows of the table.
        drawn: ``[C * u]``, the same.
        sums: receives gradients.
        replaced: whether they are replaced by others, which makes them candidates.
        rows: ``[K, W]``, a chunk's; zero behind column D.
        gradient: ``[K, W]``, by rows as candidates.
        own: ``[m, W]``, by rows of edges as queries.
    """

    table: Any
    ids: Any
    drawn: Any
    sums: GradientSums
    replaced: bool
    rows: Any
    gradient: Any
    own: Any


class OperatorArrays(NamedTuple):
    """The operator that queries of one direction are transformed by; as in :mod:`gtrain_pbg.kernels.operators`."""

    kind: int
    a: Any
    b: Any
    by_a: Any
    by_b: Any


class LossSettings(NamedTuple):
    """The loss, its margin, and each edge's weight ``[B]``."""

    kind: int
    margin: float
    weight: Any


class Scratch(NamedTuple):
    """What is computed of a chunk in one direction; all that are not factors are as wide as products are.

    Attributes:
        query: ``[m, W]``, transformed.
        score: ``[m, V]``, and the gradient by it; V is K in whole tiles.
        by_query: ``[m, W]``.
        query_along, query_down, candidate_along, candidate_turned, candidate_down, score_along, score_down: factors of
            products, words or numbers; of the latter, only ``candidate_turned`` ``[D, V]`` is used.
    """

    query: Any
    score: Any
    by_query: Any
    query_along: Any
    query_down: Any
    candidate_along: Any
    candidate_turned: Any
    candidate_down: Any
    score_along: Any
    score_down: Any


@bare
def train_chunks(ends: Any, operators: Any, relation: Any, places: int, uniform: int, loss: Any, scratch: Any) -> float:
    """Compute the loss of a batch and its gradients.

    Args:
        ends: :class:`Endpoint`, of heads and of tails.
        operators: :class:`OperatorArrays` of queries that are heads and of those that are tails.
        relation: int64 ``[B]``.
        places: m; the last chunk may have fewer.
        uniform: u.
        loss: :class:`LossSettings`.
        scratch: :class:`Scratch`.

    Returns:
        The weighted loss.
    """
    lost, edges = 0.0, relation.size
    for begin in range(0, edges, places):
        m, drawn = min(places, edges - begin), begin // places * uniform
        for end in ends:
            _fetch(end.table, end.ids[begin : begin + m], end.rows, 0)
            _fetch(end.table, end.drawn[drawn : drawn + uniform], end.rows, m)
            _ask_for(end.table, end.ids[begin + m : begin + m + places])
            _ask_for(end.table, end.drawn[drawn + uniform : drawn + 2 * uniform])
            _ask_for_sums(end.sums, end.ids[begin : begin + m])
            _ask_for_sums(end.sums, end.drawn[drawn : drawn + uniform])
        for given in range(2):
            end, other = ends[given], ends[1 - given]
            if other.replaced:
                lost += _train(end, other, operators[given], relation, begin, m, m + uniform, loss, scratch)
            else:
                end.own[:m] = 0
                other.gradient[: m + uniform] = 0
        for end in ends:
            _give(end, begin, m, drawn, uniform)
    return lost


@bare
def _fetch(table: Any, ids: Any, rows: Any, first: int) -> None:
    columns = table.shape[1]
    for i in range(ids.size):
        store(table[ids[i]], rows[first + i], columns)


@bare
def _ask_for(table: Any, ids: Any) -> None:
    for i in range(ids.size):
        prefetch_row(table, ids[i], table.shape[1])


@bare
def _ask_for_sums(sums: Any, ids: Any) -> None:
    for i in range(ids.size):
        slot = sums.slot[ids[i]]
        if slot >= 0:
            prefetch_row(sums.gradient, slot, sums.gradient.shape[1])


@bare(inline="always")
def _train(
    end: Any, other: Any, operator: Any, relation: Any, begin: int, m: int, count: int, loss: Any, scratch: Any
) -> float:
    """Compare the ends of a chunk's edges with the rows of the other side."""
    columns, query, score, candidate = end.table.shape[1], scratch.query, scratch.score, other.rows
    kind, a, b, by_a, by_b = operator
    for i in range(m):
        r = relation[begin + i]
        transform_row(kind, end.rows[i, :columns], a[r], b[r], query[i, :columns])
    by_column = along(candidate, count, columns, scratch.candidate_along)
    turn(by_column, count, steps_of(columns, by_column), scratch.candidate_turned)
    factor = along(query, m, columns, scratch.query_along)
    multiply(factor, factor.strides, scratch.candidate_turned, score, m, steps_of(columns, factor))
    lost = _losses(score, m, count, begin, loss)
    factor = along(score, m, count, scratch.score_along)
    by_row = down(candidate, count, columns, scratch.candidate_down)
    multiply(factor, factor.strides, by_row, scratch.by_query, m, steps_of(count, factor))
    factor = down(score, m, count, scratch.score_down)
    by_row = down(query, m, columns, scratch.query_down)
    multiply(factor, factor.strides[::-1], by_row, other.gradient, count, steps_of(m, factor))
    for i in range(m):
        r, row = relation[begin + i], end.rows[i, :columns]
        transform_back_row(kind, scratch.by_query[i, :columns], row, a[r], b[r], end.own[i, :columns], by_a[r], by_b[r])
    return lost


@bare
def _losses(score: Any, m: int, count: int, begin: int, loss: Any) -> float:
    """The weighted loss of a chunk, and the gradient by its scores, in place; the answer of edge i is column i."""
    lost = 0.0
    for i in range(m):
        row, weight = score[i], loss.weight[begin + i]
        value, by_true = row_loss(loss.kind, row, count, 0, i, row[i], weight, loss.margin)
        row[i] = by_true
        lost += weight * value
    return lost


@bare
def _give(end: Any, begin: int, m: int, drawn: int, uniform: int) -> None:
    """Add the gradients by a chunk's rows to the sums."""
    columns = end.table.shape[1]
    for i in range(m):
        _add(end.own[i], end.gradient[i], columns)
        _give_row(end.sums, end.ids[begin + i], end.gradient[i], columns)
    for k in range(uniform):
        _give_row(end.sums, end.drawn[drawn + k], end.gradient[m + k], columns)


@bare
def _give_row(sums: Any, row: int, gradient: Any, columns: int) -> None:
    slot = sums.slot[row]
    if slot >= 0:
        _add(gradient, sums.gradient[slot], columns)
        return
    slot = sums.count[0]
    sums.count[0] += 1
    sums.slot[row], sums.row[slot] = slot, row
    store(gradient, sums.gradient[slot], columns)


@bare
def apply_sums(sums: Any, table: Any, state: Any, kind: int, lr: float, eps: float, decay: float) -> None:
    """Change the rows that have a sum, and forget the sums."""
    columns = table.shape[1]
    for t in range(sums.count[0]):
        row = sums.row[t]
        sums.slot[row] = -1
        if t + AHEAD < sums.count[0]:
            prefetch_row(table, sums.row[t + AHEAD], columns)
        apply(kind, table[row], state[row], sums.gradient[t, :columns], lr, eps, decay)
    sums.count[0] = 0


@bare(fastmath=STRICT)
def _add(source: Any, target: Any, columns: int) -> None:
    for d in range(columns):
        target[d] += source[d]
