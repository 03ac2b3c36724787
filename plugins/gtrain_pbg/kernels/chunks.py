"""Fused training of small chunks: everything that a chunk of tens of edges needs stays in the nearest caches.

Only the gradients of a chunk's rows go to memory, added to those of other chunks. With Q the queries (the given
endpoints, transformed by their relations), C the candidates and S = Q C' the scores, G the gradient of the loss by S::

    by queries: G C        by candidates: G' Q

The answer of edge i is candidate i, and the other m - 1 edges' endpoints and u drawn nodes are its negatives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gtrain.kernels.memory import prefetch_row
from gtrain.kernels.options import bare
from gtrain_pbg.kernels.numbers import add, store
from gtrain_pbg.kernels.operators import transform_row, transform_row_backward
from gtrain_pbg.kernels.scores import row_loss
from gtrain_pbg.kernels.tiles import multiply, pack_columns, pack_rows, steps_of, turn
from gtrain_pbg.kernels.updates import take_slot


class Endpoint(NamedTuple):
    """Heads or tails of a batch, and buffers for one chunk of them.

    A chunk has K rows: the endpoints of its m edges, and the u drawn nodes.

    Attributes:
        table: ``[n, D]``.
        ids: ``[B]``, rows of the table.
        drawn: ``[C * u]``, rows of the table.
        sums: :class:`~gtrain_pbg.kernels.updates.GradientSums`, receives gradients.
        replaced: whether these endpoints are replaced by negatives, which makes them candidates.
        rows: ``[K, W]``, a chunk's rows, zero behind column D.
        gradient: ``[K, W]``, by rows as candidates.
        own: ``[m, W]``, by the edges' rows as queries.
    """

    table: Any
    ids: Any
    drawn: Any
    sums: Any
    replaced: bool
    rows: Any
    gradient: Any
    own: Any


class ChunkLoss(NamedTuple):
    """The loss (``loss`` and ``margin`` as in ``kernels.scores``), and the weight of each edge ``[B]``."""

    loss: int
    margin: float
    weight: Any


class Scratch(NamedTuple):
    """Buffers for one chunk in one direction; W is D, and V is K, padded to whole tiles.

    Attributes:
        query: ``[m, W]``, transformed.
        score: ``[m, V]``, scores, then the gradient by them.
        by_query: ``[m, W]``.
        query_along, query_down, candidate_along, candidate_turned, candidate_down, score_along, score_down: operands of
            :func:`~gtrain_pbg.kernels.tiles.multiply` packed as words; without words only ``candidate_turned``
            ``[D, V]`` is used.
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
def train_chunks(ends: Any, operators: Any, relation: Any, layout: Any, loss: Any, scratch: Any) -> float:
    """Compute the loss of a batch and its gradients.

    Args:
        ends: :class:`Endpoint` of heads and of tails.
        operators: :class:`~gtrain_pbg.kernels.operators.OperatorArrays` for queries that are heads, and for tails.
        relation: int64 ``[B]``.
        layout: :class:`~gtrain_pbg.kernels.rows.SideLayout`; the last chunk may have fewer edges.
        loss: :class:`ChunkLoss`.
        scratch: :class:`Scratch`.

    Returns:
        The weighted loss.
    """
    chunk_size, uniform, edges = layout
    lost = 0.0
    for begin in range(0, edges, chunk_size):
        m, drawn = min(chunk_size, edges - begin), begin // chunk_size * uniform
        for end in ends:
            # while this chunk is computed, memory delivers the next chunk's rows and this one's sums
            _fetch(end.table, end.ids[begin : begin + m], end.rows, 0)
            _fetch(end.table, end.drawn[drawn : drawn + uniform], end.rows, m)
            _prefetch(end.table, end.ids[begin + m : begin + m + chunk_size])
            _prefetch(end.table, end.drawn[drawn + uniform : drawn + 2 * uniform])
            _prefetch_sums(end.sums, end.ids[begin : begin + m])
            _prefetch_sums(end.sums, end.drawn[drawn : drawn + uniform])
        # Direction 0: heads are the queries and tails the candidates; direction 1: the reverse.
        for given in range(2):
            end, other = ends[given], ends[1 - given]
            if other.replaced:
                lost += _train(end, other, operators[given], relation, begin, m, m + uniform, loss, scratch)
            else:
                # This direction is not trained; the sums below add these buffers nevertheless.
                end.own[:m] = 0
                other.gradient[: m + uniform] = 0
        for end in ends:
            _add_gradients(end, begin, m, drawn, uniform)
    return lost


@bare
def _fetch(table: Any, ids: Any, rows: Any, first: int) -> None:
    columns = table.shape[1]
    for i in range(ids.size):
        store(table[ids[i]], rows[first + i], columns)


@bare
def _prefetch(table: Any, ids: Any) -> None:
    for i in range(ids.size):
        prefetch_row(table, ids[i], table.shape[1])


@bare
def _prefetch_sums(sums: Any, ids: Any) -> None:
    for i in range(ids.size):
        slot = sums.slot[ids[i]]
        if slot >= 0:
            prefetch_row(sums.gradient, slot, sums.gradient.shape[1])


@bare(inline="always")
def _train(
    end: Any, other: Any, operator: Any, relation: Any, begin: int, m: int, count: int, loss: Any, scratch: Any
) -> float:
    """Compare the endpoints of a chunk's edges with the rows of the other side, forward and backward."""
    columns, query, score, candidate = end.table.shape[1], scratch.query, scratch.score, other.rows
    code, a, b, by_a, by_b = operator
    for i in range(m):
        r = relation[begin + i]
        transform_row(code, end.rows[i, :columns], a[r], b[r], query[i, :columns])
    # S = Q C': the sum goes over columns
    by_column = pack_columns(candidate, count, columns, scratch.candidate_along)
    turn(by_column, count, steps_of(columns, by_column), scratch.candidate_turned)
    factor = pack_columns(query, m, columns, scratch.query_along)
    multiply(factor, factor.strides, scratch.candidate_turned, score, m, steps_of(columns, factor))
    lost = _losses(score, m, count, begin, loss)
    # G C: the sum goes over candidates
    factor = pack_columns(score, m, count, scratch.score_along)
    by_row = pack_rows(candidate, count, columns, scratch.candidate_down)
    multiply(factor, factor.strides, by_row, scratch.by_query, m, steps_of(count, factor))
    # G' Q: the sum goes over edges
    factor = pack_rows(score, m, count, scratch.score_down)
    by_row = pack_rows(query, m, columns, scratch.query_down)
    multiply(factor, factor.strides[::-1], by_row, other.gradient, count, steps_of(m, factor))
    for i in range(m):
        r, row = relation[begin + i], end.rows[i, :columns]
        transform_row_backward(
            code, scratch.by_query[i, :columns], row, a[r], b[r], end.own[i, :columns], by_a[r], by_b[r]
        )
    return lost


@bare
def _losses(score: Any, m: int, count: int, begin: int, loss: Any) -> float:
    """Return the weighted loss of a chunk; replace its scores by the gradient. The answer of edge i is column i."""
    lost = 0.0
    for i in range(m):
        row, weight = score[i], loss.weight[begin + i]
        value, by_true = row_loss(loss, row, count, 0, i, row[i], weight)
        # row_loss leaves the answer's column to its caller.
        row[i] = by_true
        lost += weight * value
    return lost


@bare
def _add_gradients(end: Any, begin: int, m: int, drawn: int, uniform: int) -> None:
    """Add the gradients by a chunk's rows to the sums."""
    columns = end.table.shape[1]
    for i in range(m):
        add(end.own[i], end.gradient[i], columns)
        # A row's gradients as a query and as a candidate are added before it is written once.
        _add_row(end.sums, end.ids[begin + i], end.gradient[i], columns)
    for k in range(uniform):
        _add_row(end.sums, end.drawn[drawn + k], end.gradient[m + k], columns)


@bare
def _add_row(sums: Any, row: int, gradient: Any, columns: int) -> None:
    slot = sums.slot[row]
    if slot >= 0:
        add(gradient, sums.gradient[slot], columns)
    else:
        # The first gradient is stored, not added: the slot need not be zeroed.
        store(gradient, sums.gradient[take_slot(sums, row)], columns)
