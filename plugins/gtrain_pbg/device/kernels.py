"""The kernels of a step on a device: Triton on a GPU, and the same in plain torch, which tests compare it with.

Matrix products are torch's. In the order of a step, with C chunks of m edges and K rows, D columns:

1. :func:`gather`: the rows of both sides, ``[2, C, K, D]``: tails, then heads.
2. :func:`transform`: queries ``[2, C, m, D]``: heads by the operator of the first direction, tails by the second's.
3. scores = queries times the rows' transpose, ``[2, C, m, K]``.
4. :func:`loss`: replaces the scores by the gradient of the loss, and writes the loss of each query.
5. gradients by queries and by rows: two products.
6. :func:`transform_backward`: gradients by the given ends, and by the operators' parameters.
7. :func:`update_relations`, :func:`update_rows`: gradients of the same row are summed, then applied once.

The formulas are those of :mod:`gtrain_pbg.kernels.operators`, :mod:`gtrain_pbg.kernels.scores` and
:mod:`gtrain_pbg.kernels.updates`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gtrain.kernels.available import has_triton
from gtrain_pbg.device.batches import BatchShape, BatchTensors

MOST_COLUMNS = 16_384
"""Most scores of a query that the loss kernel holds at a time."""
CODES = {"none": 0, "translation": 1, "diagonal": 2, "complex_diagonal": 3}
LOSSES = {"ranking": 0, "logistic": 1, "softmax": 2}
RULES = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2}


def triton_for(tensor: Tensor) -> ModuleType | None:
    """Return the module of the Triton kernels if they run on this tensor's device; else None."""
    # The interpreter runs them on a CPU, for tests.
    if (tensor.is_cuda and has_triton()) or os.environ.get("TRITON_INTERPRET") == "1":
        from gtrain_pbg.device import triton_kernels

        return triton_kernels
    return None


class DeviceTable(NamedTuple):
    """The table of an entity type on a device.

    Attributes:
        value: ``[n, W]``, the partitions one after the other.
        state: ``[n, s]``, of the optimizer.
    """

    value: Tensor
    state: Tensor


@dataclass(frozen=True)
class DeviceRule:
    """An optimizer's rule.

    Attributes:
        name: ``sgd``, ``adagrad`` or ``rowwise_adagrad``.
        numbers: ``[3]`` on the device: learning rate, eps, weight decay; a graph reads them again in each step.
    """

    name: str
    numbers: Tensor


@dataclass(frozen=True)
class PackedOperators:
    """The operators of both directions.

    Attributes:
        name: of the operator; one that acts on columns.
        value: ``[Q, R, w]``, the parameters of the first direction, then those of the second.
        state: ``[Q, R, s]``.
        gradient: ``[Q, R, w]``, zero between steps.
    """

    name: str
    value: Tensor
    state: Tensor
    gradient: Tensor


def gather(tables: tuple[Tensor, Tensor], ids: Tensor, shape: BatchShape, result: Tensor) -> None:
    """Write the rows of tails and of heads.

    Args:
        tables: of tails and of heads, ``[n, D]``; perhaps the same.
        ids: ``[2 C K]``.
        shape: of the batch.
        result: ``[2, C, K, D]``; rows are rounded to its dtype.
    """
    flat = result.view(-1, result.size(-1))
    parts = [slice(None)] if tables[0] is tables[1] else [slice(shape.rows // 2), slice(shape.rows // 2, None)]
    triton = triton_for(result)
    for table, part in zip(tables, parts, strict=False):
        if triton is not None:
            triton.gather(table, ids[part], flat[part])
        else:
            flat[part].copy_(table[ids[part].long()])


def transform(
    tables: tuple[Tensor, Tensor], batch: BatchTensors, shape: BatchShape, operators: PackedOperators, result: Tensor
) -> None:
    """Write the queries: the given ends of edges, each transformed by its relation.

    Args:
        tables: of tails and of heads.
        batch: the edges.
        shape: of the batch.
        operators: of both directions.
        result: ``[2, C, m, D]``: of heads, then of tails.
    """
    triton = triton_for(result)
    if triton is not None:
        triton.transform(tables, batch, shape, operators, CODES[operators.name], result)
        return
    for direction, rows in enumerate(_given(tables, batch, shape)):
        result[direction] = _transformed(operators, direction, rows, batch.relation.long()).view_as(result[direction])


def _given(tables: tuple[Tensor, Tensor], batch: BatchTensors, shape: BatchShape) -> list[Tensor]:
    """Return the rows of the edges' given ends in each direction: heads, then tails, ``[C m, D]``."""
    tails, heads = batch.ids.view(2, shape.chunks, shape.columns)[:, :, : shape.slots].flatten(1).long()
    return [tables[1][heads], tables[0][tails]]


def _parameters(operators: PackedOperators, direction: int) -> Tensor:
    return operators.value.view(2, -1, *operators.value.shape[1:])[direction]


def _transformed(operators: PackedOperators, direction: int, x: Tensor, relation: Tensor) -> Tensor:
    if operators.name == "none":
        return x
    a, *more = (parameter[relation] for parameter in _parameters(operators, direction))
    if operators.name == "complex_diagonal":
        (b,), (real, imaginary) = more, x.chunk(2, dim=1)
        return torch.cat([real * a - imaginary * b, real * b + imaginary * a], dim=1)
    return x + a if operators.name == "translation" else x * a


def loss(scores: Tensor, batch: BatchTensors, shape: BatchShape, name: str, margin: float, lost: Tensor) -> None:
    """Replace scores by the gradient of the weighted loss by them.

    Args:
        scores: ``[2, C, m, K']`` with K' at least K: the columns behind K are not read. The answer of edge i is
            column i.
        batch: the edges.
        shape: of the batch.
        name: of the loss.
        margin: of the ranking loss.
        lost: ``[2 C m]``, receives the weighted loss of each query.
    """
    triton = triton_for(scores)
    if triton is not None:
        triton.loss(scores, batch, shape, LOSSES[name], margin, lost)
        return
    m, k = shape.slots, shape.columns
    wide = scores[..., :k].to(lost.dtype).reshape(2, shape.edges, k)
    edge = torch.arange(shape.edges, device=scores.device)
    valid = edge < batch.edges
    column = edge % m
    absent = torch.zeros(shape.edges, k, dtype=torch.bool, device=scores.device)
    absent[:, :m] = ~valid.view(shape.chunks, 1, m).expand(-1, m, -1).reshape(-1, m)
    absent[edge, column] = True  # the answer, and columns of empty slots, are no negatives
    true = wide[:, edge, column]
    negative = wide.masked_fill(absent, -math.inf)
    weight = torch.where(valid, batch.weight, 0)
    if name == "softmax":
        top = torch.maximum(negative.amax(2), true)
        among, own = (negative - top.unsqueeze(2)).exp(), (true - top).exp()
        total = among.sum(2) + own
        value, gradient, by_true = total.log() + top - true, among / total.unsqueeze(2), own / total - 1
    elif name == "logistic":
        count = (~absent).sum(1).clamp(min=1)
        value = F.softplus(-true) + F.softplus(negative).sum(2) / count
        gradient, by_true = negative.sigmoid() / count.unsqueeze(1), -(-true).sigmoid()
    else:
        excess = negative - (true - margin).unsqueeze(2)
        hit = ~(excess <= 0)
        value, gradient, by_true = torch.where(hit, excess, 0).sum(2), hit.to(lost.dtype), -hit.sum(2).to(lost.dtype)
    gradient = gradient * weight.unsqueeze(1)
    gradient[:, edge, column] = by_true * weight
    gradient = torch.where(valid.unsqueeze(1), gradient, 0)
    scores[..., :k] = gradient.view(2, shape.chunks, m, k).to(scores.dtype)
    lost.copy_(torch.where(valid, value * weight, 0).flatten())


def transform_backward(
    tables: tuple[Tensor, Tensor],
    batch: BatchTensors,
    shape: BatchShape,
    operators: PackedOperators,
    by_query: Tensor,
    by_end: Tensor,
) -> None:
    """Backward pass of :func:`transform`; adds to the gradients of the parameters.

    Args:
        tables, batch, shape, operators: as of :func:`transform`.
        by_query: ``[2, C, m, D]``, gradient by the queries.
        by_end: ``[2, C m, D]``, receives the gradient by the given ends: heads, then tails.
    """
    triton = triton_for(by_end)
    if triton is not None:
        triton.transform_backward(tables, batch, shape, operators, CODES[operators.name], by_query, by_end)
        return
    relation, name = batch.relation.long(), operators.name
    for direction, x in enumerate(_given(tables, batch, shape)):
        g = by_query[direction].reshape(shape.edges, -1).to(x.dtype)
        if name == "none":
            by_end[direction] = g
            continue
        a, *more = (parameter[relation] for parameter in _parameters(operators, direction))
        gradients = operators.gradient.view(2, -1, *operators.gradient.shape[1:])[direction]
        if name == "complex_diagonal":
            (b,), (u, v), (x1, x2) = more, g.chunk(2, dim=1), x.chunk(2, dim=1)
            by_end[direction] = torch.cat([u * a + v * b, v * a - u * b], dim=1)
            gradients[0].index_add_(0, relation, u * x1 + v * x2)
            gradients[1].index_add_(0, relation, v * x1 - u * x2)
        else:
            by_end[direction] = g if name == "translation" else g * a
            gradients[0].index_add_(0, relation, g if name == "translation" else g * x)


def update_relations(batch: BatchTensors, operators: PackedOperators, rule: DeviceRule) -> None:
    """Apply the gradients of the batch's relations, and reset them."""
    triton = triton_for(operators.value)
    if triton is not None:
        triton.update_relations(batch, operators, rule.numbers, RULES[rule.name])
        return
    starts = batch.relation_starts[: int(batch.relation_distinct)].long()
    touched = batch.relation[batch.relation_order[starts].long()].long()
    for value, state, gradient in zip(operators.value, operators.state, operators.gradient, strict=True):
        apply_rule(value, state, touched, gradient[touched], rule)
        gradient[touched] = 0


def update_rows(
    tables: tuple[DeviceTable, DeviceTable],
    batch: BatchTensors,
    shape: BatchShape,
    by_row: Tensor,
    by_end: Tensor | None,
    rule: DeviceRule,
) -> None:
    """Sum the gradients of each distinct row, and apply them.

    Args:
        tables: of tails and of heads; perhaps the same.
        batch: the rows.
        shape: of the batch.
        by_row: ``[2 C K, W]``, gradients by all rows.
        by_end: ``[2, C m, W]``, gradients by the edges' ends, heads before tails, to be added to them; None: none.
        rule: of the tables.
    """
    triton, half = triton_for(by_row), shape.rows // 2
    if tables[0] is tables[1]:
        parts = [(tables[0], 0, shape.rows)]
    else:
        parts = [(table, number * half, half) for number, table in enumerate(tables)]
    for number, (table, first, count) in enumerate(parts):
        order, starts, distinct = batch.order[first : first + count], batch.starts[number], batch.distinct[number]
        if triton is not None:
            lists = order, starts, distinct
            triton.update_rows(table, batch.ids, lists, first, shape, by_row, by_end, rule.numbers, RULES[rule.name])
            continue
        spans = starts[: int(distinct) + 1].long()
        position = order.long() + first
        summed = by_row[position].to(table.value.dtype)
        if by_end is not None:
            side, within = position // half, position % half
            chunk, slot = within // shape.columns, within % shape.columns
            is_edge = (slot < shape.slots).nonzero().flatten()
            edge = (chunk * shape.slots + slot)[is_edge]
            summed[is_edge] += by_end[1 - side[is_edge], edge]
        number_of = torch.repeat_interleave(torch.arange(len(spans) - 1, device=spans.device), spans.diff())
        total = summed.new_zeros(len(spans) - 1, summed.size(1)).index_add_(0, number_of, summed)
        apply_rule(table.value, table.state, batch.ids[position[spans[:-1]]].long(), total, rule)


def apply_rule(value: Tensor, state: Tensor, rows: Tensor, gradient: Tensor, rule: DeviceRule) -> None:
    """Update distinct rows ``[U]`` of a table by gradients ``[U, w]``; rows without a gradient stay as they are."""
    lr, eps, decay = rule.numbers
    old, touched = value[rows], (gradient != 0).any(1, keepdim=True)
    gradient = gradient + decay * old
    if rule.name == "sgd":
        step = lr * gradient
    else:
        square = gradient.square()
        total = state[rows] + (square if rule.name == "adagrad" else square.mean(1, keepdim=True))
        state.index_copy_(0, rows, torch.where(touched, total, state[rows]))
        step = lr * gradient / (total.sqrt() + eps)
    value.index_copy_(0, rows, torch.where(touched, old - step, old))
