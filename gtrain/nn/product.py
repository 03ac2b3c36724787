"""Products of sparse rows and a table, whose gradient has only the rows that were read."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gtrain.nn.csr import Csr

_BLOCK = 1 << 16  # entries whose table rows are gathered at once for the gradient of values


def product(rows: Csr, table: Tensor, *, sparse: bool = False) -> Tensor:
    """Multiply sparse rows by a table: row i of the result is the sum over its entries of value * table[id].

    The forward pass is torch's ``embedding_bag``; the backward pass sorts the entries by id and is an ``embedding_bag``
    over the result's gradient. It costs as much as the forward pass; with ``sparse``, the cost does not depend on the
    number of rows of the table. Sums are computed in a fixed order.

    Args:
        rows: m rows.
        table: [n, d].
        sparse: the table's gradient is a coalesced ``torch.sparse_coo`` tensor of the rows that were read.

    Returns:
        [m, d], differentiable in the table and in ``rows.values``.
    """
    values = None if rows.values is None else rows.values.to(table.dtype)
    return _Product.apply(table, values, rows.ids, rows.offsets, sparse)


def transposed(rows: Csr, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply the transpose of sparse rows by a dense matrix: the gradient of a table.

    Args:
        rows: m rows.
        gradient: [m, d].

    Returns:
        The distinct ids, ascending, int64 [U], and their rows of the product, [U, d].
    """
    order, unique, offsets = grouped(rows.ids)
    values = None if rows.values is None else rows.values.to(gradient.dtype)[order]
    return unique, _bag(gradient, rows.row_of_entry()[order], offsets, values)


def grouped(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Group equal ids: return the order that sorts them, the distinct ids [U], and the start of each group [U + 1]."""
    sorted_ids, order = ids.sort(stable=True)
    unique, counts = torch.unique_consecutive(sorted_ids, return_counts=True)
    return order, unique.long(), torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def coalesce(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Add up rows with equal ids.

    Shapes:
        ids [Z], rows [Z, d]; the distinct ids, ascending, [U], and their sums [U, d].
    """
    if bool((ids[1:] > ids[:-1]).all()):
        return ids, rows  # torch does not keep the coalesced flag when a gradient is assigned to a parameter
    order, unique, offsets = grouped(ids)
    return unique, _bag(rows, order, offsets, None)


def _bag(table: Tensor, ids: Tensor, offsets: Tensor, values: Tensor | None) -> Tensor:
    if not ids.numel():
        return table.new_zeros(offsets.numel() - 1, table.size(1))
    return F.embedding_bag(
        ids, table, offsets.to(ids.dtype), mode="sum", per_sample_weights=values, include_last_offset=True
    )


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, values: Tensor | None, ids: Tensor, offsets: Tensor, sparse: bool) -> Tensor:
        values_need_gradient = values is not None and values.requires_grad
        ctx.save_for_backward(ids, offsets, values, table if values_need_gradient else None)
        ctx.sparse, ctx.shape = sparse, table.shape
        return _bag(table, ids, offsets, values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ids, offsets, values, table = ctx.saved_tensors
        gradient, rows = gradients[0].contiguous(), Csr(ids, values, offsets)
        dtable = _table_gradient(rows, gradient, ctx.shape, ctx.sparse) if ctx.needs_input_grad[0] else None
        dvalues = _value_gradient(rows, gradient, table) if ctx.needs_input_grad[1] else None
        return dtable, dvalues, None, None, None


def _table_gradient(rows: Csr, gradient: Tensor, shape: torch.Size, sparse: bool) -> Tensor:
    ids, summed = transposed(rows, gradient)
    if sparse:
        return torch.sparse_coo_tensor(ids[None], summed, shape, is_coalesced=True, check_invariants=False)
    return summed.new_zeros(shape).index_copy_(0, ids, summed)


def _value_gradient(rows: Csr, gradient: Tensor, table: Tensor) -> Tensor:
    pairs = zip(rows.ids.split(_BLOCK), rows.row_of_entry().split(_BLOCK), strict=True)
    return torch.cat([(table[ids] * gradient[row]).sum(1) for ids, row in pairs])
