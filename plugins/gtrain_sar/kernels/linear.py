"""Sparse products over a block of edges: sums of source rows, and the gradient of their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from gtrain_sar.kernels import compiled_linear, plain
from gtrain_sar.kernels.threads import array, arrays, compiled, over_rows

if TYPE_CHECKING:
    from gtrain_sar.edges import Compressed


def spmm(block: Compressed, x: Tensor, out: Tensor, weight: Tensor | None = None) -> None:
    """Add ``weight[edge] * x[column]`` of each edge to the row of ``out``.

    Args:
        block: E_b edges by row.
        x: ``[S, H, C]``, rows that columns name.
        out: ``[T, H, C]``, added to in place.
        weight: ``[E, H]``, at the positions that ``block.edges`` names; None: 1.
    """
    if not compiled([x, weight], [out]):
        return plain.spmm(block, x, out, weight)
    rows, ptr, columns, edges = arrays(block)
    a, b, w = array(x), array(out), None if weight is None else array(weight)

    def work(first: int, last: int) -> None:
        compiled_linear.spmm(rows, ptr, columns, edges, a, b, w, first, last)

    return over_rows(block, work)


def sddmm(block: Compressed, a: Tensor, b: Tensor, out: Tensor) -> None:
    """Set each edge's row of ``out`` to the inner product of its two ends, head by head.

    Args:
        block: E_b edges by row.
        a: ``[R, H, C]``, rows that the block's rows name.
        b: ``[K, H, C]``, rows that its columns name.
        out: ``[E, H]``, set at the positions that ``block.edges`` names.
    """
    if not compiled([a, b], [out]):
        return plain.sddmm(block, a, b, out)
    rows, ptr, columns, edges = arrays(block)
    left, right, result = array(a), array(b), array(out)

    def work(first: int, last: int) -> None:
        compiled_linear.sddmm(rows, ptr, columns, edges, left, right, result, first, last)

    return over_rows(block, work)
