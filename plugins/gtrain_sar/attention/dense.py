"""Gradients of what GAT makes its rows and logits from, summed up as rows are complete."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gtrain_sar.attention.fused import AttentionBackward

_ROWS = 1 << 12  # that are gathered at once


class DenseGradients:
    """Gradients of x, W and attention vectors, of rows ``x W^T`` and their logits ``<row[h], att[h]>`` of both ends.

    With A the attention vectors as a block diagonal matrix, D the gradients of rows and L those of logits, the rows'
    gradients are ``D + L A^T`` in all. So the weight's are ``D^T x + A L^T x`` and A's ``W (L^T x)^T``: no row need be
    made again.

    Args:
        x: [n, in].
        weight: [H * C, in].
        both: A, [H * C, 2 * H].
        wanted: whether x needs a gradient.

    Attributes:
        of_x: [n, in]; it takes the place of D, where that is as wide. None: not wanted.
    """

    def __init__(self, x: Tensor, weight: Tensor, both: Tensor, *, wanted: bool) -> None:
        self._x, self._weight, self._both, self._wanted = x, weight, both, wanted
        self._of_weight = torch.zeros_like(weight)
        self._mixed = x.new_zeros((both.size(1), x.size(1)))  # L^T x
        self._both_weight = both.t() @ weight
        self.of_x: Tensor | None = None

    def add(self, attention: AttentionBackward, rows: Tensor | None) -> None:
        """Take in own rows whose gradients are complete, int64, or None for all; each row once."""
        given = attention.dx.flatten(1)
        if self._wanted and self.of_x is None:
            self.of_x = given if given.size(1) == self._x.size(1) else torch.empty_like(self._x)
        for part in _parts(rows, len(given)):
            x, of_rows = _take(self._x, part), _take(given, part)
            of_logits = torch.cat([_take(attention.dsource, part), _take(attention.dtarget, part)], 1)
            self._of_weight.addmm_(of_rows.t(), x)
            self._mixed.addmm_(of_logits.t(), x)
            if self.of_x is not None:
                _put(self.of_x, part, (of_rows @ self._weight).addmm_(of_logits, self._both_weight))

    def result(self) -> tuple[Tensor, Tensor]:
        """Gradients of the weight and of A; the latter's off A's diagonal blocks are of no use."""
        return self._of_weight.addmm_(self._both, self._mixed), self._weight @ self._mixed.t()


def _parts(rows: Tensor | None, count: int) -> Iterator[slice | Tensor]:
    if rows is not None:
        yield from rows.split(_ROWS)
        return
    for start in range(0, count, _ROWS):
        yield slice(start, start + _ROWS)


def _take(tensor: Tensor, part: slice | Tensor) -> Tensor:
    return tensor[part] if isinstance(part, slice) else tensor.index_select(0, part)


def _put(tensor: Tensor, part: slice | Tensor, rows: Tensor) -> None:
    if isinstance(part, slice):
        tensor[part] = rows
    else:
        tensor.index_copy_(0, part, rows)
