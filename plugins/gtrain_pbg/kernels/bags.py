"""Rows that are means of bags of features: fetching them, and gradients by the features.

An entity's bag is ``features[offsets[id]:offsets[id + 1]]``, rows of the table; a feature may be in it twice. The row
of an empty bag is zero.
"""

from __future__ import annotations

from typing import Any

from gtrain.kernels.options import STRICT, inlined
from gtrain_pbg.kernels.numbers import number, stored
from gtrain_pbg.kernels.rows import edge_of
from gtrain_pbg.kernels.updates import apply


@inlined(fastmath=STRICT)
def fetch_bags(
    table: Any,
    offsets: Any,
    features: Any,
    ids: Any,
    shift: Any,
    rows: Any,
    bias: Any,
    low: Any,
    has_bias: bool,
    has_low: bool,
) -> None:
    """Means of the features' rows for entities ``[Z]``; other arguments as of ``rows.fetch``."""
    columns, shifted = rows.shape[1], shift.size > 0
    for z in range(ids.size):
        begin, end = offsets[ids[z]], offsets[ids[z] + 1]
        target = rows[z]
        target[:] = 0
        total = target.dtype.type(0)
        for k in range(begin, end):
            source = table[features[k]]
            for d in range(columns):
                target[d] += source[d]
            if has_bias:
                total += source[columns]
        scale = target.dtype.type(1 / max(1, end - begin))
        for d in range(columns):
            target[d] *= scale
            if shifted:
                target[d] += shift[d]
            if has_low:
                low[z, d] = stored(target[d], low[z, d])
        if has_bias:
            bias[z] = total * scale


@inlined(fastmath=STRICT)
def add_bags(
    ids: Any,
    offsets: Any,
    features: Any,
    by_row: Any,
    by_edge: Any,
    by_bias: Any,
    places: int,
    uniform: int,
    edges: int,
    head: Any,
    touched: Any,
    count: int,
    sums: Any,
    has_bias: bool,
) -> int:
    """Add up the gradients by features of one side's rows.

    Args:
        ids: entities of the rows, ``[Z]``.
        offsets, features: the bags.
        by_row, by_edge, by_bias: as of ``updates.scatter``.
        places, uniform, edges: how the side is laid out.
        head: ``[F]``, -1 at first; receives the place of each feature's sum.
        touched: receives the features, each once.
        count: features in ``touched`` so far.
        sums: ``[k, width]``, receives the gradients.
        has_bias: whether the last column is the bias.

    Returns:
        Features in ``touched`` now.
    """
    columns = sums.shape[1] - (1 if has_bias else 0)
    for z in range(ids.size):
        begin, end = offsets[ids[z]], offsets[ids[z] + 1]
        edge = edge_of(z, places, uniform, edges)
        scale = sums.dtype.type(1 / max(1, end - begin))
        for k in range(begin, end):
            feature = features[k]
            if head[feature] < 0:
                head[feature] = count
                touched[count] = feature
                sums[count, :] = 0
                count += 1
            target = sums[head[feature]]
            if by_row.shape[0] > 0:
                for d in range(columns):
                    target[d] += scale * number(by_row[z, d])
            if edge >= 0 and by_edge.shape[0] > 0:
                for d in range(columns):
                    target[d] += scale * number(by_edge[edge, d])
            if has_bias:
                target[columns] += scale * by_bias[z]
    return count


@inlined
def apply_bags(
    touched: Any,
    count: int,
    head: Any,
    sums: Any,
    table: Any,
    state: Any,
    kind: int,
    lr: float,
    eps: float,
    decay: float,
) -> None:
    """Change the rows of features by their gradients, and let ``head`` be as it was."""
    for t in range(count):
        feature = touched[t]
        head[feature] = -1
        apply(kind, table[feature], state[feature], sums[t], lr, eps, decay)
