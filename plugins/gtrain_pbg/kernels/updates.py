"""Sparse optimizer updates: gradients of the same row are added up and applied at once, without sorting ids.

There are two ways to add them up. :func:`chain` and :func:`scatter` link the positions of each row in a list
(``head[row]`` is the last position seen, ``after[position]`` the one before it) and sum along it: an array of one
number per row of the partition replaces a sort of all ids. :class:`GradientSums` assigns each row that occurs a slot of
an array of sums.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from gtrain.kernels.memory import prefetch_row
from gtrain.kernels.options import FAST, STRICT, bare, inlined
from gtrain.kernels.rows import any_nonzero
from gtrain_pbg.kernels.numbers import add, add_scaled
from gtrain_pbg.kernels.rows import edge_of

SGD, ADAGRAD, ROWWISE = 0, 1, 2
PREFETCH_DISTANCE = 8
"""Rows that are prefetched before they are updated."""


class RuleNumbers(NamedTuple):
    """An update rule of ``gtrain.nn.rules``: ``code`` is SGD, ADAGRAD or ROWWISE, ``decay`` the weight decay."""

    code: int
    lr: float
    eps: float
    decay: float


class SideGradients(NamedTuple):
    """Gradients by one side of a batch; see :mod:`gtrain_pbg.kernels.rows`.

    Attributes:
        by_row: ``[Z, D]``, gradients by all rows of the side, or ``[0, D]``.
        by_edge: ``[B, D]``, added at the rows of edges, or ``[0, D]``.
        by_bias: ``[Z]``, gradients by the biases; read only if the table has them.
    """

    by_row: Any
    by_edge: Any
    by_bias: Any


class UpdatedTable(NamedTuple):
    """A table, and how its rows are updated.

    Attributes:
        rows: ``[n, D]``, or ``[n, D + 1]`` with the bias last.
        state: ``[n, s]``, of the optimizer.
        rule: :class:`RuleNumbers`.
        has_bias: whether the last column is the bias.
    """

    rows: Any
    state: Any
    rule: Any
    has_bias: bool


class RowChains(NamedTuple):
    """Positions of a batch linked by row.

    Attributes:
        touched: int64, receives the rows that occur, each once.
        head: int32 ``[n]``, the last position of each row; all -1 between batches.
        after: int32 ``[positions]``, the position before, -1 at the end of a list.
    """

    touched: Any
    head: Any
    after: Any


class GradientSums(NamedTuple):
    """Sums of gradients by rows of a table over a batch.

    Attributes:
        slot: int32 ``[n]``, the slot of each row's sum, -1: the row has none; all -1 between batches.
        row: int64 ``[S]``, the row of each slot.
        count: int64 ``[1]``, slots in use.
        gradient: ``[S, W]``, the sums.
    """

    slot: Any
    row: Any
    count: Any
    gradient: Any


class Bags(NamedTuple):
    """Features of entities: those of entity e are ``features[offsets[e]:offsets[e + 1]]``, repetitions allowed."""

    offsets: Any
    features: Any


@bare(fastmath=FAST)
def apply(rule: Any, row: Any, state: Any, gradient: Any) -> None:
    """Update one row by its gradient g, which is overwritten.

    - all rules: ``g += decay * row``
    - SGD: ``row -= lr * g``
    - ADAGRAD (Duchi et al. 2011): ``state += g^2``, ``row -= lr * g / (sqrt(state) + eps)``
    - ROWWISE: ``state[0] += mean(g^2)``, ``row -= lr * g / (sqrt(state[0]) + eps)``

    A row whose gradient is zero in every column is left as it is, as with a sparse gradient in torch.

    Args:
        rule: :class:`RuleNumbers`.
        row: ``[w]``.
        state: ``[0]``, ``[w]`` or ``[1]``, of the optimizer.
        gradient: ``[w]``.
    """
    width = row.size
    # Otherwise weight decay would change rows that no edge of the batch reads.
    if not any_nonzero(gradient):
        return
    # Converted to the row's dtype: a float64 constant would make the loop compute in float64.
    one = row.dtype.type
    if rule.decay != 0:
        for d in range(width):
            gradient[d] += one(rule.decay) * row[d]
    if rule.code == SGD:
        for d in range(width):
            row[d] -= one(rule.lr) * gradient[d]
    elif rule.code == ADAGRAD:
        for d in range(width):
            state[d] += gradient[d] * gradient[d]
            row[d] -= one(rule.lr) * gradient[d] / (math.sqrt(state[d]) + one(rule.eps))
    else:
        squares = one(0)
        for d in range(width):
            squares += gradient[d] * gradient[d]
        state[0] += squares / one(width)
        scale = one(rule.lr) / (math.sqrt(state[0]) + one(rule.eps))
        for d in range(width):
            row[d] -= scale * gradient[d]


@inlined
def chain(ids: Any, first: int, chains: Any, count: int) -> int:
    """Link the positions ``first ...`` by their rows.

    Args:
        ids: rows of the positions.
        first: number of the first position.
        chains: :class:`RowChains`.
        count: rows in ``chains.touched`` so far.

    Returns:
        Rows in ``chains.touched`` now.
    """
    for z in range(ids.size):
        row = ids[z]
        if chains.head[row] < 0:
            chains.touched[count] = row
            count += 1
        chains.after[first + z] = chains.head[row]
        chains.head[row] = first + z
    return count


@bare(fastmath=STRICT)
def _add_position(target: Any, z: int, side: Any, edge: int, columns: int, has_bias: bool) -> None:
    """Add the gradients of one position of a side; ``edge`` is -1 at the row of a drawn node."""
    if side.by_row.shape[0] > 0:
        add(side.by_row[z], target, columns)
    if edge >= 0 and side.by_edge.shape[0] > 0:
        add(side.by_edge[edge], target, columns)
    if has_bias:
        target[columns] += side.by_bias[z]


@inlined
def scatter(chains: Any, count: int, split: int, gradients: Any, layout: Any, table: Any, work: Any) -> None:
    """Update the rows that :func:`chain` linked, and reset ``chains.head``.

    A row's gradients are summed in ``work``, which stays in the nearest cache, in the order of the list: last position
    first. One pass over the rows that occur reads and writes each row of the table once.

    Args:
        chains, count: from :func:`chain`.
        split: positions before this are of the first side; from here on of the second.
        gradients: :class:`SideGradients` of the first and of the second side.
        layout: :class:`~gtrain_pbg.kernels.rows.SideLayout` of both sides.
        table: :class:`UpdatedTable`.
        work: ``[width of the table]``, scratch.
    """
    first, second = gradients
    rows, state, rule, has_bias = table
    columns = rows.shape[1] - (1 if has_bias else 0)
    for t in range(count):
        row = chains.touched[t]
        work[:] = 0
        z = chains.head[row]
        while z >= 0:
            if z < split:
                _add_position(work, z, first, edge_of(z, layout), columns, has_bias)
            else:
                _add_position(work, z - split, second, edge_of(z - split, layout), columns, has_bias)
            z = chains.after[z]
        # Reset while the row is at hand: ``head`` is all -1 again after the last row.
        chains.head[row] = -1
        apply(rule, rows[row], state[row], work)


@inlined(fastmath=STRICT)
def add_bags(ids: Any, bags: Any, side: Any, layout: Any, sums: Any, has_bias: bool) -> None:
    """Add the gradients by the embeddings of one side's entities to the sums of their features' rows.

    An embedding is the mean of n features' rows: each of these rows receives 1/n of its gradient.

    Args:
        ids: ``[Z]``, entities.
        bags: :class:`Bags`.
        side: :class:`SideGradients`.
        layout: :class:`~gtrain_pbg.kernels.rows.SideLayout`.
        sums: :class:`GradientSums` of the features' table.
        has_bias: whether the last column of the table is the bias.
    """
    columns = sums.gradient.shape[1] - (1 if has_bias else 0)
    for z in range(ids.size):
        begin, end = bags.offsets[ids[z]], bags.offsets[ids[z] + 1]
        edge = edge_of(z, layout)
        scale = sums.gradient.dtype.type(1 / max(1, end - begin))
        for k in range(begin, end):
            feature = bags.features[k]
            slot = sums.slot[feature]
            if slot < 0:
                slot = take_slot(sums, feature)
                sums.gradient[slot, :] = 0
            target = sums.gradient[slot]
            if side.by_row.shape[0] > 0:
                add_scaled(side.by_row[z], scale, target, columns)
            if edge >= 0 and side.by_edge.shape[0] > 0:
                add_scaled(side.by_edge[edge], scale, target, columns)
            if has_bias:
                target[columns] += scale * side.by_bias[z]


@bare
def take_slot(sums: Any, row: Any) -> Any:
    """Assign the next slot to a row without one, and return it; its sum is not initialized."""
    slot = sums.count[0]
    sums.count[0] += 1
    sums.slot[row], sums.row[slot] = slot, row
    return slot


@bare
def apply_sums(sums: Any, table: Any, state: Any, rule: Any) -> None:
    """Update the rows that have a sum, and reset the sums."""
    columns = table.shape[1]
    for t in range(sums.count[0]):
        row = sums.row[t]
        sums.slot[row] = -1
        if t + PREFETCH_DISTANCE < sums.count[0]:
            prefetch_row(table, sums.row[t + PREFETCH_DISTANCE], columns)
        apply(rule, table[row], state[row], sums.gradient[t, :columns])
    sums.count[0] = 0


@inlined
def find_touched(relation: Any, seen: Any, touched: Any) -> int:
    """List each relation of a batch once and return their number; ``seen`` int8 ``[R]`` is all 0 before and after."""
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
def update_rows(touched: Any, count: int, gradient: Any, table: Any, state: Any, rule: Any) -> None:
    """Apply dense gradients ``[R, w]`` to the touched rows of a table ``[R, w]``, and set these gradients to 0."""
    for t in range(count):
        r = touched[t]
        apply(rule, table[r], state[r], gradient[r])
        gradient[r, :] = 0
