"""Sparse rows in CSR form, and the selection of rows of a CSR matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gtrain.errors import DataError


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
    matrix = x if x.layout == torch.sparse_csr else x.to_sparse_csr()
    return Csr(matrix.col_indices(), matrix.values(), matrix.crow_indices())


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
    shift = torch.repeat_interleave(starts - offsets[:-1], counts)
    entries = shift.add_(torch.arange(shift.numel(), dtype=shift.dtype, device=shift.device))
    return Csr(ids[entries], None if values is None else values[entries], offsets)
