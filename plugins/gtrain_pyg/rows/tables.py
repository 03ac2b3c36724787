"""One tensor of a node type or edge type as rows that lie in segments of memory, see :mod:`gtrain_pyg.rows.kernels`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.errors import DataError
from gtrain.graph.store.tables import csr_tensor
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.rows import kernels

Array = NDArray[Any]

SCRATCH_BYTES = 256 << 10
"""Rows that change their dtype are copied in pieces of this size, which stay in a core's cache."""
_LARGEST_HALF = torch.finfo(torch.float16).max


class Table(ABC):
    """Where the rows of one tensor are, in the segments that this rank always has.

    Attributes:
        dtype: of the numbers as stored.
        shape: of a row.
        row_bytes: of a row; of a sparse one, on the average.
        bases: int64 ``[pieces, segments]``, the address of each segment's pieces; 0 where there are none.
        is_csr: whether rows are sparse, in three pieces: indptr, indices and values. Dense rows have one.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    row_bytes: float
    is_csr: bool

    def __init__(self, pieces: int, segments: int) -> None:
        self.bases: Array = np.zeros((pieces, segments), np.int64)
        self._held: dict[int, Sequence[Tensor | Array]] = {}

    def hold(self, segment: int, pieces: Sequence[Tensor | Array]) -> None:
        """Read a segment's rows from these pieces from now on."""
        self._held[segment] = pieces
        self.point(self.bases, segment, pieces)

    def point(self, bases: Array, segment: int, pieces: Sequence[Tensor | Array]) -> None:
        """Enter the addresses of a segment in a copy of :attr:`bases`; the caller keeps the pieces."""
        bases[:, segment] = [p.data_ptr() if isinstance(p, Tensor) else p.ctypes.data for p in pieces]

    @abstractmethod
    def gather(self, place: Array, bases: Array, pool: BufferPool, dtype: torch.dtype) -> list[Tensor]:
        """The pieces of the rows at these places, floats as ``dtype``."""

    @abstractmethod
    def check(self, pieces: Sequence[Tensor], rows: int, dtype: torch.dtype) -> str | None:
        """What is wrong with pieces that should hold so many rows; None if nothing is."""

    @abstractmethod
    def finish(self, pieces: Sequence[Tensor]) -> Tensor:
        """The one tensor that a batch gets, from its pieces."""

    def goes_as(self, dtype: torch.dtype | None) -> torch.dtype:
        """The dtype of values for which floats are asked for as ``dtype``; None leaves them as stored."""
        return dtype if dtype is not None and self.dtype.is_floating_point else self.dtype


class DenseTable(Table):
    """A dense tensor.

    Args:
        example: any part of it, ``[n, ...]``.
        segments: how many there are to be.
    """

    is_csr = False

    def __init__(self, example: Tensor, segments: int) -> None:
        super().__init__(1, segments)
        self.dtype, self.shape = example.dtype, tuple(example.shape[1:])
        self.row_bytes = math.prod(self.shape) * self.dtype.itemsize

    def gather(self, place: Array, bases: Array, pool: BufferPool, dtype: torch.dtype) -> list[Tensor]:
        out = self.empty(place.size, pool, dtype)
        if dtype == self.dtype:
            self.fill(out, place, bases, 0, bases.shape[1])
        else:
            self._fill_cast(out, place, bases, pool)
        return [out]

    def empty(self, rows: int, pool: BufferPool, dtype: torch.dtype) -> Tensor:
        """Memory for so many rows."""
        return pool.tensor((rows, *self.shape), dtype)

    def fill(self, out: Tensor, place: Array, bases: Array, low: int, high: int) -> None:
        """Copy the rows of segments ``low .. high-1``, as stored; others are left as they are."""
        kernels.gather(place, bases[0], int(self.row_bytes), out.data_ptr(), low, high)

    def _fill_cast(self, out: Tensor, place: Array, bases: Array, pool: BufferPool) -> None:
        step = max(1, SCRATCH_BYTES // max(1, int(self.row_bytes)))
        scratch = self.empty(min(step, place.size), pool, self.dtype)
        for start in range(0, place.size, step):
            piece = place[start : start + step]
            self.fill(scratch, piece, bases, 0, bases.shape[1])
            convert(scratch[: piece.size], out[start : start + step])

    def check(self, pieces: Sequence[Tensor], rows: int, dtype: torch.dtype) -> str | None:
        found, expected = (pieces[0].dtype, tuple(pieces[0].shape)), (dtype, (rows, *self.shape))
        return None if found == expected else f"{found[0]} {list(found[1])}, not {expected[0]} {list(expected[1])}"

    def finish(self, pieces: Sequence[Tensor]) -> Tensor:
        return pieces[0]


class CsrTable(Table):
    """A sparse matrix by rows.

    Args:
        example: any part of it, a ``torch.sparse_csr`` tensor ``[n, F]``.
        segments: how many there are to be.
        row_entries: entries of a row on the average.
    """

    is_csr = True

    def __init__(self, example: Tensor, segments: int, row_entries: float) -> None:
        super().__init__(3, segments)
        self.dtype, self.index_dtype, self.shape = example.dtype, example.crow_indices().dtype, (example.size(1),)
        self.row_bytes = self.index_dtype.itemsize + row_entries * (self.index_dtype.itemsize + self.dtype.itemsize)

    def gather(self, place: Array, bases: Array, pool: BufferPool, dtype: torch.dtype) -> list[Tensor]:
        width = self.index_dtype.itemsize
        indptr = pool.tensor(place.size + 1, self.index_dtype)
        starts = indptr.numpy()
        kernels.measure(place, bases[0], width, starts)
        count = int(starts[-1])
        indices, values = pool.tensor(count, self.index_dtype), pool.tensor(count, self.dtype)
        for base, out in ((bases[1], indices), (bases[2], values)):
            kernels.gather_entries(place, bases[0], width, base, out.element_size(), starts, out.data_ptr())
        if dtype != self.dtype:
            values = convert(values, pool.tensor(count, dtype))
        return [indptr, indices, values]

    def check(self, pieces: Sequence[Tensor], rows: int, dtype: torch.dtype) -> str | None:
        indptr, indices, values = pieces
        found = (indptr.dtype, indices.dtype, values.dtype)
        if found != (self.index_dtype, self.index_dtype, dtype):
            return f"rows of {found}, not of {self.index_dtype} and {dtype}"
        if indptr.numel() != rows + 1 or not indices.numel() == values.numel() == int(indptr[-1]):
            return f"{indptr.numel() - 1} sparse rows of {indices.numel()} entries, not {rows}"
        ascending = int(indptr[0]) == 0 and bool((indptr[1:] >= indptr[:-1]).all())
        return None if ascending else "sparse rows in no order"

    def finish(self, pieces: Sequence[Tensor]) -> Tensor:
        indptr, indices, values = pieces
        return csr_tensor(indptr, indices, values, (indptr.numel() - 1, self.shape[0]))


def pieces_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The pieces that hold a part's rows."""
    if tensor.layout == torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return (tensor.contiguous(),)


def convert(source: Tensor, out: Tensor) -> Tensor:
    """Copy numbers into a tensor of another dtype, and return it.

    Raises:
        DataError: a number is too large for float16.
    """
    if out.dtype == torch.float16 and source.numel():
        low, high = source.aminmax()
        peak = max(-float(low), float(high))
        if _LARGEST_HALF < peak < math.inf:
            raise DataError(
                f"features reach {peak:.3g}, and float16, in which they were asked for, ends at 65504",
                hint="set strategy.wire_dtype=bfloat16, or scale the features",
            )
    return out.copy_(source)
