"""The merged scatter: gradients of the same row are added up and applied at once, without sorting.

Positions with the same id are chained: ``head[id]`` is the last position seen, ``after[position]`` the one before it.
A table of one number for each row of the partition replaces a sort of all ids.
"""

from __future__ import annotations

import math
from typing import Any

from gtrain.kernels.options import FAST, STRICT, bare, inlined
from gtrain_pbg.kernels.numbers import number
from gtrain_pbg.kernels.rows import edge_of

SGD, ADAGRAD, ROWWISE = 0, 1, 2


@inlined
def chain(ids: Any, first: int, head: Any, after: Any, touched: Any, count: int) -> int:
    """Chain positions ``first ...`` by their ids.

    Args:
        ids: of the positions.
        first: number of the first position.
        head: ``[n]``, -1 at first.
        after: a number for each position.
        touched: receives the ids, each once.
        count: ids in ``touched`` so far.

    Returns:
        Ids in ``touched`` now.
    """
    for z in range(ids.size):
        node = ids[z]
        if head[node] < 0:
            touched[count] = node
            count += 1
        after[first + z] = head[node]
        head[node] = first + z
    return count


@bare(fastmath=STRICT)
def _add(target: Any, row: Any, columns: int) -> None:
    for d in range(columns):
        target[d] += number(row[d])


@bare(fastmath=STRICT)
def _add_row(
    target: Any, z: int, by_row: Any, by_edge: Any, by_bias: Any, edge: int, columns: int, has_bias: bool
) -> None:
    """Add the gradients of one position of a side; ``edge`` is -1 where no edge's comes on top."""
    if by_row.shape[0] > 0:
        _add(target, by_row[z], columns)
    if edge >= 0 and by_edge.shape[0] > 0:
        _add(target, by_edge[edge], columns)
    if has_bias:
        target[columns] += by_bias[z]


@bare
def _any(values: Any) -> bool:
    for value in values:  # noqa: SIM110 - numba has no any(); the first one is rarely zero
        if value != 0:
            return True
    return False


@bare(fastmath=FAST)
def apply(kind: int, row: Any, state: Any, gradient: Any, lr: float, eps: float, decay: float) -> None:
    """Change a row by its gradient, which is lost; the rules are those of ``gtrain.nn.rules``.

    A row whose gradient is zero in every column is left as it is.
    """
    width = row.size
    if not _any(gradient):
        return
    one = row.dtype.type
    if decay != 0:
        for d in range(width):
            gradient[d] += one(decay) * row[d]
    if kind == SGD:
        for d in range(width):
            row[d] -= one(lr) * gradient[d]
    elif kind == ADAGRAD:
        for d in range(width):
            state[d] += gradient[d] * gradient[d]
            row[d] -= one(lr) * gradient[d] / (math.sqrt(state[d]) + one(eps))
    else:
        squares = one(0)
        for d in range(width):
            squares += gradient[d] * gradient[d]
        state[0] += squares / one(width)
        scale = one(lr) / (math.sqrt(state[0]) + one(eps))
        for d in range(width):
            row[d] -= scale * gradient[d]


@inlined
def scatter(
    touched: Any,
    count: int,
    head: Any,
    after: Any,
    split: int,
    rows_a: Any,
    edges_a: Any,
    bias_a: Any,
    rows_b: Any,
    edges_b: Any,
    bias_b: Any,
    places: int,
    uniform: int,
    edges: int,
    table: Any,
    state: Any,
    kind: int,
    lr: float,
    eps: float,
    decay: float,
    has_bias: bool,
    work: Any,
) -> None:
    """Apply the gradients of the rows that :func:`chain` chained, and unchain them.

    Args:
        touched, count, head, after: from :func:`chain`.
        split: positions of side a; those from here on are of side b.
        rows_a, rows_b: ``[Z, D]`` gradients by a side's rows; ``[0, D]`` where there are none.
        edges_a, edges_b: ``[B, D]`` gradients by the rows of its edges, which come on top; ``[0, D]`` where none do.
        bias_a, bias_b: ``[Z]`` gradients by the biases, if there are such.
        places, uniform, edges: how sides are laid out.
        table: ``[n, D]`` or ``[n, D + 1]``.
        state: ``[n, 1]`` or ``[n, width]``, the optimizer's.
        kind, lr, eps, decay: the rule.
        has_bias: whether the last column is the bias.
        work: ``[width]``, scratch.
    """
    columns = table.shape[1] - (1 if has_bias else 0)
    for t in range(count):
        node = touched[t]
        work[:] = 0
        z = head[node]
        while z >= 0:
            if z < split:
                _add_row(work, z, rows_a, edges_a, bias_a, edge_of(z, places, uniform, edges), columns, has_bias)
            else:
                y = z - split
                _add_row(work, y, rows_b, edges_b, bias_b, edge_of(y, places, uniform, edges), columns, has_bias)
            z = after[z]
        head[node] = -1
        apply(kind, table[node], state[node], work, lr, eps, decay)


@inlined
def find_touched(relation: Any, seen: Any, touched: Any) -> int:
    """List each relation of a batch once; ``seen`` is all 0 before and after."""
    count = 0
    for r in relation:
        if seen[r] == 0:
            seen[r] = 1
            touched[count] = r
            count += 1
    for t in range(count):
        seen[touched[t]] = 0
    return count


@inlined
def update_rows(
    touched: Any, count: int, gradient: Any, table: Any, state: Any, kind: int, lr: float, eps: float, decay: float
) -> None:
    """Apply gradients ``[R, w]`` to these rows of a table, and set them to 0."""
    for t in range(count):
        r = touched[t]
        apply(kind, table[r], state[r], gradient[r], lr, eps, decay)
        gradient[r, :] = 0
