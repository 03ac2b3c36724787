"""The kernels of :mod:`gtrain_pbg.device.kernels` in Triton; the formulas and the shapes are there.

A program has whole rows: D columns are padded to a power of two and masked. All positions are converted to int64 before
they are multiplied by a width, because a table may have more than 2^31 numbers.
"""

# Triton has types of its own, which it infers.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gtrain_pbg.device.batches import BatchShape, BatchTensors

GATHERED = 4
"""Rows that a program gathers."""
EDGES = 4
"""Edges of a program of the backward pass of operators, sorted by relation."""
SUMMED = 2
"""Positions of a row whose gradients a program reads at a time. On an H100, 42,000 rows of 400 columns take 59 us with
2 warps, in float32, and 46 in bfloat16; 8 positions with 4 warps take 92 and 155."""
SUMMING_WARPS = 2
"""Warps of such a program."""


@triton.jit
def _gather(table, ids, result, count, width, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = row < count
    source = tl.load(ids + row, mask=inside, other=0).to(tl.int64)
    mask = inside[:, None] & (column[None, :] < columns)
    values = tl.load(table + source[:, None] * width + column[None, :], mask=mask, other=0.0)
    target = result + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(target, values.to(result.dtype.element_ty), mask=mask)


def gather(table: Tensor, ids: Tensor, result: Tensor) -> None:
    """Gather rows ``[n, D]`` of a table ``[N, W]``."""
    count, columns = result.shape
    grid = (triton.cdiv(count, GATHERED),)
    _gather[grid](table, ids, result, count, table.stride(0), columns, GATHERED, _block(columns))


@triton.jit
def _transform(
    tails, heads, ids, relation, weights, result, relations, width,
    C, M, K, D: tl.constexpr, CODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    direction = tl.program_id(0) // (C * M)
    edge = tl.program_id(0) % (C * M)
    # heads are given in direction 0, and are the second side
    position = ((1 - direction) * C + edge // M) * K + edge % M
    row = tl.load(ids + position).to(tl.int64) * width
    r = tl.load(relation + edge).to(tl.int64)
    target = result + (direction * C * M + edge).to(tl.int64) * D
    if CODE == 3:
        HALF: tl.constexpr = D // 2
        column = tl.arange(0, BLOCK)
        mask = column < HALF
        real = _of_side(direction, tails, heads, row + column, mask)
        imaginary = _of_side(direction, tails, heads, row + HALF + column, mask)
        parameter = weights + (direction * 2 * relations + r) * HALF
        a = tl.load(parameter + column, mask=mask, other=0.0)
        b = tl.load(parameter + relations * HALF + column, mask=mask, other=0.0)
        tl.store(target + column, (real * a - imaginary * b).to(result.dtype.element_ty), mask=mask)
        tl.store(target + HALF + column, (real * b + imaginary * a).to(result.dtype.element_ty), mask=mask)
    else:
        column = tl.arange(0, BLOCK)
        mask = column < D
        x = _of_side(direction, tails, heads, row + column, mask)
        if CODE != 0:
            v = tl.load(weights + (direction * relations + r) * D + column, mask=mask, other=0.0)
            if CODE == 1:
                x += v
            else:
                x *= v
        tl.store(target + column, x.to(result.dtype.element_ty), mask=mask)


@triton.jit
def _of_side(direction, tails, heads, source, mask):
    """Load numbers of the given end's table: that of heads in direction 0, of tails in direction 1."""
    if direction == 0:
        x = tl.load(heads + source, mask=mask, other=0.0)
    else:
        x = tl.load(tails + source, mask=mask, other=0.0)
    return x


def transform(
    tables: tuple[Tensor, Tensor], batch: BatchTensors, shape: BatchShape, operators: Any, code: int, result: Tensor
) -> None:
    """See :func:`gtrain_pbg.device.kernels.transform`."""
    columns = result.size(-1)
    _transform[(2 * shape.edges,)](
        tables[0], tables[1], batch.ids, batch.relation, operators.value, result, operators.value.size(1),
        tables[0].stride(0), shape.chunks, shape.slots, shape.columns, columns, code,
        _block(columns // 2 if code == 3 else columns),
    )  # fmt: skip


@triton.jit
def _loss(
    scores, weight, edges, lost, stride,
    M, K, edges_of_batch, margin: tl.constexpr, LOSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    edge = query % edges_of_batch
    answer = edge % M
    total_edges = tl.load(edges)
    valid = edge < total_edges
    column = tl.arange(0, BLOCK)
    inside = column < K
    filled = (column >= M) | (edge - answer + column < total_edges)
    negatives = inside & filled & (column != answer)
    memory = scores + query.to(tl.int64) * stride
    w = tl.load(weight + edge)
    dtype: tl.constexpr = weight.dtype.element_ty
    x = tl.load(memory + column, mask=inside, other=0.0).to(dtype)
    true = tl.load(memory + answer).to(dtype)
    if LOSS == 2:
        x = tl.where(negatives, x, float("-inf"))
        top = tl.maximum(tl.max(x, 0), true)
        among = tl.exp(x - top)
        own = tl.exp(true - top)
        total = tl.sum(among, 0) + own
        value = tl.log(total) + top - true
        gradient = w * among / total
        by_true = w * (own / total) - w
    elif LOSS == 1:
        count = tl.maximum(tl.sum(negatives.to(tl.int32), 0), 1).to(dtype)
        small = tl.exp(-tl.abs(x))
        soft = tl.maximum(x, 0.0) + _log1p(small)
        value = tl.sum(tl.where(negatives, soft, 0.0), 0) / count
        gradient = tl.where(negatives, w / count * tl.where(x > 0, 1.0, small) / (1.0 + small), 0.0)
        tiny = tl.exp(-tl.abs(true))
        value += tl.maximum(-true, 0.0) + _log1p(tiny)
        by_true = -w * tl.where(true > 0, tiny, 1.0) / (1.0 + tiny)
    else:
        excess = x - (true - margin)
        hit = negatives & ((excess <= 0) == 0)
        value = tl.sum(tl.where(hit, excess, 0.0), 0)
        gradient = tl.where(hit, w, 0.0)
        by_true = -w * tl.sum(hit.to(tl.int32), 0).to(dtype)
    gradient = tl.where(column == answer, by_true, gradient)
    gradient = tl.where(valid, gradient, 0.0)
    tl.store(memory + column, gradient.to(scores.dtype.element_ty), mask=inside)
    tl.store(lost + query, tl.where(valid, value * w, 0.0).to(dtype))


@triton.jit
def _log1p(x):
    """``log(1 + x)`` for 0 <= x <= 1; a series where 1 + x would round x away."""
    return tl.where(x < 1e-4, x - x * x * 0.5 + x * x * x * 0.3333333333333333, tl.log(1.0 + x))


def loss(scores: Tensor, batch: BatchTensors, shape: BatchShape, name: int, margin: float, lost: Tensor) -> None:
    """See :func:`gtrain_pbg.device.kernels.loss`."""
    block = _block(shape.columns)
    _loss[(2 * shape.edges,)](
        scores, batch.weight, batch.edges, lost, scores.stride(2),
        shape.slots, shape.columns, shape.edges, margin, name, block, num_warps=_warps(block),
    )  # fmt: skip


@triton.jit
def _transform_backward(
    tails, heads, ids, relation, order, weights, gradients, by_query, by_end, relations, width,
    C, M, K, D: tl.constexpr, CODE: tl.constexpr, BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    direction = tl.program_id(1)
    W: tl.constexpr = D // 2 if CODE == 3 else D
    column = tl.arange(0, BLOCK)
    inside = column < W
    dtype: tl.constexpr = by_end.dtype.element_ty
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    exists = at < C * M
    edge = tl.load(order + at, mask=exists, other=0)
    r = tl.load(relation + edge).to(tl.int64)
    row = tl.load(ids + ((1 - direction) * C + edge // M) * K + edge % M).to(tl.int64) * width
    mask = exists[:, None] & inside[None, :]
    memory = (direction * C * M + edge).to(tl.int64)[:, None] * D + column[None, :]
    source = row[:, None] + column[None, :]
    of_direction = direction * (2 if CODE == 3 else 1) * relations
    parameter = (of_direction + r)[:, None] * W + column[None, :]
    u = tl.load(by_query + memory, mask=mask, other=0.0).to(dtype)
    if CODE == 3:
        v = tl.load(by_query + memory + W, mask=mask, other=0.0).to(dtype)
        a = tl.load(weights + parameter, mask=mask, other=0.0)
        b = tl.load(weights + parameter + relations * W, mask=mask, other=0.0)
        x1 = _of_side(direction, tails, heads, source, mask)
        x2 = _of_side(direction, tails, heads, source + W, mask)
        tl.store(by_end + memory, u * a + v * b, mask=mask)
        tl.store(by_end + memory + W, v * a - u * b, mask=mask)
        by_a = u * x1 + v * x2
        by_b = v * x1 - u * x2
    elif CODE == 2:
        a = tl.load(weights + parameter, mask=mask, other=0.0)
        tl.store(by_end + memory, u * a, mask=mask)
        by_a = u * _of_side(direction, tails, heads, source, mask)
    else:
        tl.store(by_end + memory, u, mask=mask)
        by_a = u
    if CODE != 0:
        lowest = tl.min(tl.where(exists, r, relations), 0)
        highest = tl.max(tl.where(exists, r, -1), 0)
        if lowest == highest:
            # edges of one relation are added up first
            target = gradients + (of_direction + lowest) * W + column
            tl.atomic_add(target, tl.sum(by_a, 0), mask=inside)
            if CODE == 3:
                tl.atomic_add(target + relations * W, tl.sum(by_b, 0), mask=inside)
        else:
            tl.atomic_add(gradients + parameter, by_a, mask=mask)
            if CODE == 3:
                tl.atomic_add(gradients + parameter + relations * W, by_b, mask=mask)


def transform_backward(
    tables: tuple[Tensor, Tensor],
    batch: BatchTensors,
    shape: BatchShape,
    operators: Any,
    code: int,
    by_query: Tensor,
    by_end: Tensor,
) -> None:
    """See :func:`gtrain_pbg.device.kernels.transform_backward`."""
    columns = by_end.size(-1)
    # CUDA allows 65,535 along the second axis.
    _transform_backward[(triton.cdiv(shape.edges, EDGES), 2)](
        tables[0], tables[1], batch.ids, batch.relation, batch.relation_order, operators.value, operators.gradient,
        by_query, by_end, operators.value.size(1), tables[0].stride(0), shape.chunks, shape.slots, shape.columns,
        columns, code, _block(columns // 2 if code == 3 else columns), EDGES,
    )  # fmt: skip


@triton.jit
def _applied(row, state, gradient, rule, column, width, RULE: tl.constexpr):
    """Apply a rule to one row in memory; its gradient is not zero in every column."""
    mask = column < width
    lr = tl.load(rule)
    eps = tl.load(rule + 1)
    decay = tl.load(rule + 2)
    old = tl.load(row + column, mask=mask, other=0.0)
    gradient = tl.where(mask, gradient + decay * old, 0.0)
    if RULE == 0:
        new = old - lr * gradient
    elif RULE == 1:
        total = tl.load(state + column, mask=mask, other=0.0) + gradient * gradient
        tl.store(state + column, total, mask=mask)
        new = old - lr * gradient / (tl.sqrt(total) + eps)
    else:
        total = tl.load(state) + tl.sum(gradient * gradient, 0) / width
        tl.store(state, total)
        new = old - lr / (tl.sqrt(total) + eps) * gradient
    tl.store(row + column, new, mask=mask)


@triton.jit
def _update_relations(
    relation, order, starts, distinct, value, state, gradients, rule, relations, width, state_width,
    RULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    if number < tl.load(distinct):
        r = tl.load(relation + tl.load(order + tl.load(starts + number))).to(tl.int64)
        row = tl.program_id(1) * relations + r
        column = tl.arange(0, BLOCK)
        mask = column < width
        gradient = tl.load(gradients + row * width + column, mask=mask, other=0.0)
        if tl.max((gradient != 0).to(tl.int32), 0) > 0:
            _applied(value + row * width, state + row * state_width, gradient, rule, column, width, RULE)
            tl.store(gradients + row * width + column, tl.zeros([BLOCK], gradient.dtype), mask=mask)


def update_relations(batch: BatchTensors, operators: Any, rule: Tensor, name: int) -> None:
    """See :func:`gtrain_pbg.device.kernels.update_relations`."""
    parameters, relations, width = operators.value.shape
    _update_relations[(batch.relation_starts.size(-1) - 1, parameters)](
        batch.relation, batch.relation_order, batch.relation_starts, batch.relation_distinct, operators.value,
        operators.state, operators.gradient, rule, relations, width, operators.state.size(2), name, _block(width),
    )  # fmt: skip


@triton.jit
def _update_rows(
    value, state, ids, order, starts, distinct, by_row, by_end, rule, first, width, state_width,
    half, M, K, edges_of_batch,
    HAS_ENDS: tl.constexpr, RULE: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    if number < tl.load(distinct):
        begin = tl.load(starts + number)
        end = tl.load(starts + number + 1)
        row = tl.load(ids + first + tl.load(order + begin)).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < width
        dtype: tl.constexpr = value.dtype.element_ty
        gradient = tl.zeros([BLOCK], dtype=dtype)
        for chunk in range(begin, end, COUNT):
            at = chunk + tl.arange(0, COUNT)
            exists = at < end
            position = tl.load(order + at, mask=exists, other=0) + first
            mask = exists[:, None] & inside[None, :]
            memory = by_row + position.to(tl.int64)[:, None] * width + column[None, :]
            gradient += tl.sum(tl.load(memory, mask=mask, other=0.0).to(dtype), 0)
            if HAS_ENDS:
                slot = position % K
                is_edge = exists & (slot < M)
                edge = (1 - position // half) * edges_of_batch + (position % half) // K * M + slot
                memory = by_end + edge.to(tl.int64)[:, None] * width + column[None, :]
                gradient += tl.sum(tl.load(memory, mask=mask & is_edge[:, None], other=0.0), 0)
        if tl.max((gradient != 0).to(tl.int32), 0) > 0:
            _applied(value + row * width, state + row * state_width, gradient, rule, column, width, RULE)


def update_rows(
    table: Any,
    ids: Tensor,
    lists: tuple[Tensor, Tensor, Tensor],
    first: int,
    shape: BatchShape,
    by_row: Tensor,
    by_end: Tensor | None,
    rule: Tensor,
    name: int,
) -> None:
    """Update the rows of one table; ``lists`` are the order, the starts and the number of its distinct rows."""
    order, starts, distinct = lists
    width = table.value.size(1)
    _update_rows[(starts.numel() - 1,)](
        table.value, table.state, ids, order, starts, distinct, by_row, by_row if by_end is None else by_end, rule,
        first, width, table.state.size(1), shape.rows // 2, shape.slots, shape.columns, shape.edges,
        by_end is not None, name, _block(width), SUMMED, num_warps=SUMMING_WARPS,
    )  # fmt: skip


def _block(columns: int) -> int:
    return int(triton.next_power_of_2(max(columns, 1)))


def _warps(block: int) -> int:
    return min(16, max(4, block // 512))
