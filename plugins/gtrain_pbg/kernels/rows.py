"""Kernels over the rows of a batch: fetch them from tables, prepare them for comparators, and the backward passes.

A *side* of a batch (heads or tails) is an array of rows ``[Z, D]``. Each chunk of m edges contributes the m endpoints
of its edges and then u nodes drawn uniformly; the last chunk may have fewer edges. Edge e has row ``e + e // m * u``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from gtrain.kernels.options import FAST, STRICT, inlined
from gtrain_pbg.kernels.numbers import add, number, store, stored


class SideLayout(NamedTuple):
    """How a side's rows are ordered: ``chunk_size`` (m), ``uniform`` (u) and ``edges`` (B), see the module."""

    chunk_size: int
    uniform: int
    edges: int


class FetchedRows(NamedTuple):
    """Where fetched rows are written.

    Attributes:
        rows: ``[Z, D]``.
        bias: ``[Z]``, the last column of the table; written if ``has_bias``.
        low: ``[Z, D]`` bfloat16 bits, the same rows rounded; written if ``has_low``.
        has_bias: whether the table has a bias column.
        has_low: whether ``low`` is wanted.
    """

    rows: Any
    bias: Any
    low: Any
    has_bias: bool
    has_low: bool


@inlined
def lay_out(ends: Any, drawn: Any, layout: Any, ids: Any) -> None:
    """Write the ids of a side's rows: endpoints ``[B]`` and drawn nodes ``[C * u]`` into ids ``[B + C * u]``."""
    chunk_size, uniform, edges = layout
    for chunk in range((edges + chunk_size - 1) // chunk_size):
        begin, end = chunk * chunk_size, min(edges, (chunk + 1) * chunk_size)
        first = begin + chunk * uniform
        for e in range(begin, end):
            ids[first + e - begin] = ends[e]
        for k in range(uniform):
            ids[first + end - begin + k] = drawn[chunk * uniform + k]


@inlined(fastmath=STRICT)
def fetch(table: Any, ids: Any, shift: Any, result: Any) -> None:
    """Fetch rows of a table.

    Args:
        table: ``[n, D]``, or ``[n, D + 1]`` with the bias last.
        ids: ``[Z]``.
        shift: ``[D]``, added to each row (``model.global_emb``), or ``[0]``.
        result: :class:`FetchedRows`.
    """
    columns, shifted = result.rows.shape[1], shift.size > 0
    for z in range(ids.size):
        source, target = table[ids[z]], result.rows[z]
        if shifted:
            for d in range(columns):
                target[d] = source[d] + shift[d]
        else:
            for d in range(columns):
                target[d] = source[d]
        if result.has_bias:
            result.bias[z] = source[columns]
        if result.has_low:
            store(target, result.low[z], columns)


@inlined(fastmath=STRICT)
def fetch_bags(table: Any, bags: Any, ids: Any, shift: Any, result: Any) -> None:
    """Fetch the embeddings of featurized entities: the mean of the rows of an entity's bag; zero if the bag is empty.

    Args:
        table: ``[F, D]`` or ``[F, D + 1]``, a row for each feature.
        bags: :class:`~gtrain_pbg.kernels.updates.Bags`.
        ids: ``[Z]``, entities.
        shift, result: as for :func:`fetch`.
    """
    columns, shifted = result.rows.shape[1], shift.size > 0
    for z in range(ids.size):
        begin, end = bags.offsets[ids[z]], bags.offsets[ids[z] + 1]
        target = result.rows[z]
        target[:] = 0
        total = target.dtype.type(0)
        for k in range(begin, end):
            source = table[bags.features[k]]
            add(source, target, columns)
            if result.has_bias:
                total += source[columns]
        # An empty bag has the embedding 0: the sum is 0, and 1 avoids the division by 0.
        scale = target.dtype.type(1 / max(1, end - begin))
        for d in range(columns):
            target[d] *= scale
            if shifted:
                target[d] += shift[d]
        if result.has_low:
            store(target, result.low[z], columns)
        if result.has_bias:
            result.bias[z] = total * scale


@inlined(fastmath=FAST)
def clip(table: Any, ids: Any, columns: int, max_norm: float) -> None:
    """Scale the rows with these ids to the norm ``max_norm`` where their norm is larger."""
    for z in range(ids.size):
        row = table[ids[z]]
        norm = math.sqrt(_squared_norm(row, columns))
        if norm > max_norm:
            scale = row.dtype.type(max_norm / (norm + 1e-7))  # as torch.embedding_renorm_ does
            for d in range(columns):
                row[d] *= scale


@inlined(fastmath=FAST)
def _squared_norm(row: Any, columns: int) -> Any:
    total = row.dtype.type(0)
    for d in range(columns):
        total += row[d] * row[d]
    return total


@inlined
def squared_norms(rows: Any, result: Any) -> None:
    """``result[z] = |rows[z]|^2``."""
    for z in range(rows.shape[0]):
        result[z] = _squared_norm(rows[z], rows.shape[1])


@inlined(fastmath=FAST)
def normalize(rows: Any, inverse: Any, unit: Any) -> None:
    """``inverse[z] = 1 / |rows[z]|`` and ``unit[z] = inverse[z] * rows[z]``, as ``torch.nn.functional.normalize``."""
    for z in range(rows.shape[0]):
        norm = math.sqrt(_squared_norm(rows[z], rows.shape[1]))
        inverse[z] = rows.dtype.type(1) / rows.dtype.type(norm if norm > 1e-12 else 1e-12)
        for d in range(rows.shape[1]):
            unit[z, d] = rows[z, d] * inverse[z]


@inlined(fastmath=FAST)
def normalize_backward(gradient: Any, unit: Any, inverse: Any, result: Any) -> None:
    """Backward pass of :func:`normalize`: ``result = inverse * (g - (g . unit) unit)``, g the gradient by ``unit``."""
    columns = unit.shape[1]
    for z in range(gradient.shape[0]):
        along = unit.dtype.type(0)
        for d in range(columns):
            along += number(gradient[z, d]) * unit[z, d]
        if inverse[z] >= 1e12:
            # The norm was clamped: the forward pass divided by a constant.
            along = unit.dtype.type(0)
        for d in range(columns):
            result[z, d] = (number(gradient[z, d]) - along * unit[z, d]) * inverse[z]


@inlined(fastmath=FAST)
def distances_backward(product: Any, rows: Any, sums: Any, result: Any) -> None:
    """Backward pass of distances: ``result[z] = product[z] - sums[z] * rows[z]``.

    With w[i, k] the gradient by the score, times the derivative of the score by the squared distance, the gradient by
    query i is ``sum_k w[i, k] (candidate[k] - query[i])``: a matrix product (``product``) less a multiple of the row.
    The same holds for candidates, with the roles exchanged.

    Args:
        product: ``[Z, D]``, float or bfloat16 bits.
        rows: ``[Z, D]``.
        sums: ``[Z]``, ``sum_k w[i, k]``.
        result: ``[Z, D]``.
    """
    for z in range(product.shape[0]):
        for d in range(rows.shape[1]):
            result[z, d] = number(product[z, d]) - sums[z] * rows[z, d]


@inlined(fastmath=STRICT)
def add_rows(first: Any, second: Any, layout: Any, result: Any) -> None:
    """``result`` ``[Z, D]`` = ``first`` ``[Z, D]`` plus ``second`` ``[B, D]`` at the rows of edges."""
    columns = result.shape[1]
    for z in range(first.shape[0]):
        e = edge_of(z, layout)
        if e >= 0:
            for d in range(columns):
                result[z, d] = number(first[z, d]) + number(second[e, d])
        else:
            for d in range(columns):
                result[z, d] = number(first[z, d])


@inlined
def edge_of(row: int, layout: Any) -> int:
    """Return the edge of a side's row; -1 for the row of a drawn node."""
    chunk_size, uniform, edges = layout
    # In an incomplete last chunk the drawn nodes follow its last edge, hence the comparison with ``edges``.
    chunk, slot = divmod(row, chunk_size + uniform)
    edge = chunk * chunk_size + slot
    return edge if slot < chunk_size and edge < edges else -1


@inlined(fastmath=FAST)
def pairs(queries: Any, rows: Any, layout: Any, result: Any) -> None:
    """``result[e]`` = inner product of query e ``[B, D]`` and its edge's row on a side ``[Z, D]``."""
    for e in range(queries.shape[0]):
        z = e + e // layout.chunk_size * layout.uniform
        product = result.dtype.type(0)
        for d in range(queries.shape[1]):
            product += queries[e, d] * rows[z, d]
        result[e] = product


@inlined
def pairs_backward(by_product: Any, queries: Any, rows: Any, layout: Any, by_query: Any, by_row: Any) -> None:
    """Backward pass of :func:`pairs`: add the gradient by queries ``[B, D]``, write that by their rows ``[Z, D]``."""
    for e in range(queries.shape[0]):
        z = e + e // layout.chunk_size * layout.uniform
        for d in range(queries.shape[1]):
            more = number(by_query[e, d]) + by_product[e] * rows[z, d]
            by_query[e, d] = stored(more, by_query[e, d])
            by_row[z, d] = stored(by_product[e] * queries[e, d], by_row[z, d])


@inlined(fastmath=STRICT)
def add_all(rows: Any, result: Any) -> None:
    """Add the sum of all rows ``[n, D]`` to ``result`` ``[D]``."""
    for z in range(rows.shape[0]):
        add(rows[z], result, result.size)


@inlined
def count_total(values: Any) -> float:
    """Return the sum of the values in float64."""
    total = 0.0
    for value in values:
        total += value
    return total
