"""Sparse rows in CSR form: their selection, and their products with a table.

The gradient of a product has only the rows of the table that were read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from gtrain.errors import DataError

_BLOCK = 1 << 16  # entries whose table rows are gathered at once for the gradient of values
_csr_of: Any = WeakIdKeyDictionary()  # sparse matrix -> its rows, so that these are the same tensors in every step
_columns_of: Any = WeakIdKeyDictionary()  # ids -> (what they were sorted with, the entries by column)


class Csr(NamedTuple):
    """m rows with Z entries in total; row i has the entries ``offsets[i] .. offsets[i + 1] - 1``.

    Attributes:
        ids: int64 or int32 ``[Z]``, the column (feature id, row of a table) of each entry; ids may repeat.
        values: float ``[Z]``; None: 1 for every entry.
        offsets: ``[m + 1]``, of the dtype of ``ids``, from 0 to Z, not decreasing.
    """

    ids: Tensor
    values: Tensor | None
    offsets: Tensor

    @property
    def num_rows(self) -> int:
        """Number of rows, m."""
        return self.offsets.numel() - 1

    def row_of_entry(self) -> Tensor:
        """Return the row of each entry, int64 ``[Z]``."""
        return torch.repeat_interleave(torch.arange(self.num_rows, device=self.ids.device), self.offsets.diff())

    def to(self, device: torch.device) -> Csr:
        """Return the rows on another device."""
        values = None if self.values is None else self.values.to(device)
        return Csr(self.ids.to(device), values, self.offsets.to(device))


def mean_rows(bags: Csr, ids: Tensor, table: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the mean of the rows of each requested bag; zero for an empty one.

    Args:
        bags: ids of rows.
        ids: bags, int64 ``[...]``.
        table: looks up rows ``[Z, d]`` of ids ``[Z]``.

    Returns:
        ``[..., d]``, differentiable in the rows.
    """
    selected = select_rows(bags, ids.reshape(-1).to(bags.offsets.device)).to(ids.device)
    rows = table(selected.ids.long())
    total = rows.new_zeros(selected.num_rows, rows.size(1)).index_add(0, selected.row_of_entry(), rows)
    return (total / selected.offsets.diff().clamp(min=1).unsqueeze(1).to(rows)).view(*ids.shape, rows.size(1))


def as_csr(x: Tensor | Csr | tuple[Tensor, Tensor | None, Tensor], num_columns: int | None = None) -> Csr:
    """Return sparse rows in one form.

    Args:
        x: a ``torch.sparse_csr`` tensor or a dense matrix [m, num_columns], or ``(ids, values, offsets)`` as in
            :class:`Csr`.
        num_columns: expected number of columns; None: any.

    Raises:
        DataError: a matrix has another number of columns.
    """
    if not isinstance(x, Tensor):
        return Csr(*x)
    if num_columns is not None and x.size(1) != num_columns:
        raise DataError(
            f"a layer over {num_columns} features was called with rows of {x.size(1)} columns.",
            hint="train and test on data with the same number of features (data.num_features).",
        )
    if x.layout != torch.sparse_csr:
        matrix = x.to_sparse_csr()
        return Csr(matrix.col_indices(), matrix.values(), matrix.crow_indices())
    rows = _csr_of.get(x)
    values = x.values()
    # The tensors are views of the matrix; a matrix that was changed in place has others.
    if rows is None or rows.values.data_ptr() != values.data_ptr() or rows.values.requires_grad != values.requires_grad:
        rows = Csr(x.col_indices(), values, x.crow_indices())
        if not (values.requires_grad or values.is_inference()):
            _csr_of[x] = rows
    return rows


def select_rows(x: Tensor | Csr, chosen: Tensor) -> Csr:
    """Return some rows of a sparse matrix, in the order of ``chosen``, which may repeat rows.

    Args:
        x: ``torch.sparse_csr`` [N, F], or a :class:`Csr`; it may be memory-mapped: only the chosen rows are read.
        chosen: int64 [m], row numbers.
    """
    ids, values, pointers = as_csr(x)
    starts = pointers[chosen]
    counts = pointers[chosen + 1] - starts
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    # The place of an entry in x is its place in the result plus the shift of its row.
    shift = torch.repeat_interleave(starts - offsets[:-1], counts)
    entries = shift.add_(torch.arange(shift.numel(), dtype=shift.dtype, device=shift.device))
    return Csr(ids[entries], None if values is None else values[entries], offsets)


def product(rows: Csr, table: Tensor, *, sparse: bool = False) -> Tensor:
    """Multiply sparse rows by a table: row i of the result is the sum over its entries of value * table[id].

    The forward pass is torch's ``embedding_bag``; the backward pass sorts the entries by id, once for rows that are the
    same tensors in every step, and is an ``embedding_bag`` over the result's gradient. It then costs as much as the
    forward pass; with ``sparse``, the cost does not depend on the number of rows of the table. Sums are computed in a
    fixed order.

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
    # Sorted by id, the entries are the rows of the transpose. The sort is stable and nothing is added atomically, so
    # the order of the sums is fixed.
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
        # torch does not keep the coalesced flag when a gradient is assigned to a parameter.
        return ids, rows
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
    if not sparse and gradient.device.type == "cpu" and rows.ids.numel() < 2**31:
        ids, values, offsets = _by_column(rows, shape[0], gradient.dtype)
        return _bag(gradient, ids, offsets, values)
    ids, summed = transposed(rows, gradient)
    if sparse:
        return torch.sparse_coo_tensor(ids[None], summed, shape, is_coalesced=True, check_invariants=False)
    return summed.new_zeros(shape).index_copy_(0, ids, summed)


def _by_column(rows: Csr, columns: int, dtype: torch.dtype) -> Csr:
    """Return the transpose of rows with ids below ``columns``, from the cache for the same tensors, unchanged."""
    from gtrain.nn.csr_kernels import by_column

    key = columns, dtype, *(None if tensor is None else tensor._version for tensor in rows)
    # Of memory that was freed, another tensor can have the address: these are compared themselves.
    tensors = [None if tensor is None else WeakIdRef(tensor) for tensor in (rows.values, rows.offsets)]
    cached = _columns_of.get(rows.ids)
    if cached is None or cached[0] != key or cached[1] != tensors:
        pointers, sources, positions = by_column(rows.ids.int(), rows.row_of_entry().int(), columns)
        values = None if rows.values is None else rows.values.to(dtype)[positions]
        cached = _columns_of[rows.ids] = key, tensors, Csr(sources, values, pointers.int())
    transpose: Csr = cached[2]
    return transpose


def _value_gradient(rows: Csr, gradient: Tensor, table: Tensor) -> Tensor:
    pairs = zip(rows.ids.split(_BLOCK), rows.row_of_entry().split(_BLOCK), strict=True)
    return torch.cat([(table[ids] * gradient[row]).sum(1) for ids, row in pairs])
