"""Sparse rows: a batch of rows that have few nonzero columns each, and choosing rows of a CSR matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gtrain.errors import DataError


class Csr(NamedTuple):
    """m rows with Z entries altogether; the entries of row i are ``offsets[i]`` to ``offsets[i + 1]``.

    Attributes:
        ids: int64 or int32 ``[Z]``, the column (feature id, row of a table) of each entry; an id may come twice.
        values: float ``[Z]``, the number at each entry; None means 1 everywhere.
        offsets: ``[m + 1]``, of the dtype of ``ids``, from 0 to Z, never falling.
    """

    ids: Tensor
    values: Tensor | None
    offsets: Tensor

    @property
    def num_rows(self) -> int:
        """Rows, m."""
        return self.offsets.numel() - 1

    def row_of_entry(self) -> Tensor:
        """Row of each entry, int64 ``[Z]``."""
        return torch.repeat_interleave(torch.arange(self.num_rows, device=self.ids.device), self.offsets.diff())

    def to(self, device: torch.device) -> Csr:
        """The rows on another device."""
        values = None if self.values is None else self.values.to(device)
        return Csr(self.ids.to(device), values, self.offsets.to(device))


def mean_rows(bags: Csr, ids: Tensor, table: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the mean of the rows of each bag that is asked for; zero for an empty one.

    Args:
        bags: ids of rows.
        ids: bags, int64 ``[...]``.
        table: looks up rows ``[Z, d]`` of ids ``[Z]``.

    Returns:
        ``[..., d]``, differentiable in the rows.
    """
    some = select_rows(bags, ids.reshape(-1).to(bags.offsets.device)).to(ids.device)
    rows = table(some.ids.long())
    total = rows.new_zeros(some.num_rows, rows.size(1)).index_add(0, some.row_of_entry(), rows)
    return (total / some.offsets.diff().clamp(min=1).unsqueeze(1).to(rows)).view(*ids.shape, rows.size(1))


def as_csr(x: Tensor | Csr | tuple[Tensor, Tensor | None, Tensor], num_columns: int | None = None) -> Csr:
    """Return sparse rows in one form.

    Args:
        x: a ``torch.sparse_csr`` tensor or a dense matrix [m, num_columns], or ``(ids, values, offsets)`` as in
            :class:`Csr`.
        num_columns: columns that are expected; None for any number.

    Raises:
        DataError: a matrix has another number of columns.
    """
    if not isinstance(x, Tensor):
        return Csr(*x)
    if num_columns is not None and x.size(1) != num_columns:
        raise DataError(
            f"a layer over {num_columns} features was given rows with {x.size(1)}.",
            hint="train and test on data with the same number of features (data.num_features).",
        )
    matrix = x if x.layout == torch.sparse_csr else x.to_sparse_csr()
    return Csr(matrix.col_indices(), matrix.values(), matrix.crow_indices())


def select_rows(x: Tensor | Csr, chosen: Tensor) -> Csr:
    """Return some rows of a sparse matrix, in the order asked for; a row may be asked for twice.

    Args:
        x: ``torch.sparse_csr`` [N, F], or a :class:`Csr`; perhaps memory-mapped, for only the chosen rows are read.
        chosen: int64 [m], row numbers.
    """
    ids, values, pointers = as_csr(x)
    begin = pointers[chosen]
    counts = pointers[chosen + 1] - begin
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    shift = torch.repeat_interleave(begin - offsets[:-1], counts)
    entries = shift.add_(torch.arange(shift.numel(), dtype=shift.dtype, device=shift.device))
    return Csr(ids[entries], None if values is None else values[entries], offsets)
