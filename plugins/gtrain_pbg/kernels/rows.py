"""Rows of tables: fetching them, and what lies between products of matrices and gradients of rows.

A *side* of a batch has for each chunk of m edges their m ends and then u nodes drawn at random, one row each; the last
chunk may have fewer edges. So edge e has row ``e + e // m * u``.
"""

from __future__ import annotations

import math
from typing import Any

from gtrain.kernels.options import FAST, STRICT, inlined
from gtrain_pbg.kernels.numbers import number, store, stored


@inlined
def lay_out(ends: Any, drawn: Any, places: int, uniform: int, ids: Any) -> None:
    """Write the ids of a side's rows: ends ``[B]``, drawn ``[C * u]``, ids ``[B + C * u]``."""
    edges = ends.size
    for chunk in range((edges + places - 1) // places):
        begin, end = chunk * places, min(edges, (chunk + 1) * places)
        at = begin + chunk * uniform
        for e in range(begin, end):
            ids[at + e - begin] = ends[e]
        for k in range(uniform):
            ids[at + end - begin + k] = drawn[chunk * uniform + k]


@inlined(fastmath=STRICT)
def fetch(table: Any, ids: Any, shift: Any, rows: Any, bias: Any, low: Any, has_bias: bool, has_low: bool) -> None:
    """Fetch rows of a table ``[n, D]`` or, with a bias, ``[n, D + 1]``.

    Args:
        table: the table.
        ids: ``[Z]``.
        shift: ``[D]``, what is added to each row, or ``[0]``.
        rows: ``[Z, D]``, receives them.
        bias: ``[Z]``, receives the last column.
        low: ``[Z, D]`` bfloat16 bits, receives them too, if there is such.
        has_bias: whether there is a bias.
        has_low: whether there is ``low``.
    """
    columns, shifted = rows.shape[1], shift.size > 0
    for z in range(ids.size):
        source, target = table[ids[z]], rows[z]
        if shifted:
            for d in range(columns):
                target[d] = source[d] + shift[d]
        else:
            for d in range(columns):
                target[d] = source[d]
        if has_bias:
            bias[z] = source[columns]
        if has_low:
            store(target, low[z], columns)


@inlined(fastmath=FAST)
def clip(table: Any, ids: Any, columns: int, most: float) -> None:
    """Scale the rows of these ids to a norm of ``most`` where it is larger."""
    for z in range(ids.size):
        row = table[ids[z]]
        norm = math.sqrt(_squared(row, columns))
        if norm > most:
            scale = row.dtype.type(most / (norm + 1e-7))  # as torch's embedding_renorm_ does
            for d in range(columns):
                row[d] *= scale


@inlined
def lower(rows: Any, low: Any) -> None:
    """Write rows as bfloat16 bits."""
    for z in range(rows.shape[0]):
        store(rows[z], low[z], rows.shape[1])


@inlined(fastmath=FAST)
def _squared(row: Any, columns: int) -> Any:
    found = row.dtype.type(0)
    for d in range(columns):
        found += row[d] * row[d]
    return found


@inlined
def squared_norms(rows: Any, found: Any) -> None:
    """``found[z] = |rows[z]|^2``."""
    for z in range(rows.shape[0]):
        found[z] = _squared(rows[z], rows.shape[1])


@inlined(fastmath=FAST)
def normalize(rows: Any, inverse: Any, unit: Any) -> None:
    """Rows of length 1, and by what they were multiplied; as torch's ``normalize``."""
    for z in range(rows.shape[0]):
        norm = math.sqrt(_squared(rows[z], rows.shape[1]))
        inverse[z] = rows.dtype.type(1) / rows.dtype.type(norm if norm > 1e-12 else 1e-12)
        for d in range(rows.shape[1]):
            unit[z, d] = rows[z, d] * inverse[z]


@inlined(fastmath=FAST)
def from_units(gradient: Any, unit: Any, inverse: Any, result: Any) -> None:
    """The gradient by rows of that by their :func:`normalize`."""
    columns = unit.shape[1]
    for z in range(gradient.shape[0]):
        along = unit.dtype.type(0)
        for d in range(columns):
            along += number(gradient[z, d]) * unit[z, d]
        if inverse[z] >= 1e12:  # divided by a constant
            along = unit.dtype.type(0)
        for d in range(columns):
            result[z, d] = (number(gradient[z, d]) - along * unit[z, d]) * inverse[z]


@inlined(fastmath=FAST)
def from_distances(product: Any, rows: Any, sums: Any, result: Any) -> None:
    """The gradient by rows, of products with the rows of the other side: ``product - sums * rows``."""
    for z in range(product.shape[0]):
        for d in range(rows.shape[1]):
            result[z, d] = number(product[z, d]) - sums[z] * rows[z, d]


@inlined(fastmath=STRICT)
def add_rows(first: Any, second: Any, places: int, uniform: int, edges: int, result: Any) -> None:
    """``result = first``, a row for each row of a side, plus ``second`` at its edges."""
    columns = result.shape[1]
    for z in range(first.shape[0]):
        e = edge_of(z, places, uniform, edges)
        if e >= 0:
            for d in range(columns):
                result[z, d] = number(first[z, d]) + number(second[e, d])
        else:
            for d in range(columns):
                result[z, d] = number(first[z, d])


@inlined
def edge_of(row: int, places: int, uniform: int, edges: int) -> int:
    """The edge of a row of a side; -1 for one that was drawn."""
    chunk, at = divmod(row, places + uniform)
    edge = chunk * places + at
    return edge if at < places and edge < edges else -1


@inlined(fastmath=STRICT)
def widen(source: Any, target: Any) -> None:
    """Write rows as they are computed with."""
    for z in range(source.shape[0]):
        for d in range(target.shape[1]):
            target[z, d] = number(source[z, d])


@inlined(fastmath=FAST)
def pairs(queries: Any, rows: Any, places: int, uniform: int, found: Any) -> None:
    """Inner products of queries ``[B, D]`` and the rows of their edges on a side."""
    for e in range(queries.shape[0]):
        z = e + e // places * uniform
        product = found.dtype.type(0)
        for d in range(queries.shape[1]):
            product += queries[e, d] * rows[z, d]
        found[e] = product


@inlined
def pair_gradients(
    by_product: Any, queries: Any, rows: Any, places: int, uniform: int, by_query: Any, by_row: Any
) -> None:
    """Gradients by queries (added) and by the rows of their edges (written) of that by :func:`pairs`."""
    for e in range(queries.shape[0]):
        z = e + e // places * uniform
        for d in range(queries.shape[1]):
            more = number(by_query[e, d]) + by_product[e] * rows[z, d]
            by_query[e, d] = stored(more, by_query[e, d])
            by_row[z, d] = stored(by_product[e] * queries[e, d], by_row[z, d])


@inlined(fastmath=STRICT)
def add_all(first: Any, second: Any, result: Any) -> None:
    """Add the sum of all rows of both to ``result`` ``[D]``."""
    for z in range(first.shape[0]):
        for d in range(result.size):
            result[d] += number(first[z, d])
    for e in range(second.shape[0]):
        for d in range(result.size):
            result[d] += number(second[e, d])


@inlined
def count_total(values: Any) -> float:
    """Their sum, in float64."""
    found = 0.0
    for value in values:
        found += value
    return found
