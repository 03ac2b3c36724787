"""Tensors of node types and edge types as rows in segments of memory, see :mod:`gtrain_pyg.features.kernels`.

A rank hosts tensors of the store, by memory map, and tensors that were computed besides.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.errors import DataError
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import TensorSpec, edge_key
from gtrain.graph.store.tables import csr_tensor
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.features import kernels
from gtrain_pyg.ranks.parts import Kind, PartBook

Array = NDArray[Any]

SCRATCH_BYTES = 256 << 10
"""Rows that change their dtype are copied in pieces of this size, which stay in a core's cache."""
_LARGEST_HALF = torch.finfo(torch.float16).max
Extra = Mapping[Kind, Mapping[str, Mapping[int, Any]]]


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
        actual, expected = (pieces[0].dtype, tuple(pieces[0].shape)), (dtype, (rows, *self.shape))
        return None if actual == expected else f"{actual[0]} {list(actual[1])}, not {expected[0]} {list(expected[1])}"

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
        dtypes = (indptr.dtype, indices.dtype, values.dtype)
        if dtypes != (self.index_dtype, self.index_dtype, dtype):
            return f"rows of {dtypes}, not of {self.index_dtype} and {dtype}"
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


class HostedTensors:
    """Opens a tensor when it is first asked for.

    Args:
        store: the graph.
        book: who owns what.
        hosted: the parts whose files this rank reads.
        extra: by kind, name and hosted part, tensors ``[n_p, ...]`` that the store does not have.
    """

    def __init__(self, store: Store, book: PartBook, hosted: Sequence[int], extra: Extra) -> None:
        self._store, self._extra = store, extra
        self.parts, self.hosted = book.num_parts, sorted(hosted)
        self.is_hosted: Array = np.isin(np.arange(book.num_parts), self.hosted)
        self.segments = book.num_parts + 1  # one more for the cache
        self._offsets: dict[Kind, Array] = {}
        for offsets in (book.offsets, book.edge_offsets):
            self._offsets.update((kind, starts) for kind, starts in offsets.items())
        self._tables: dict[tuple[Kind, str], Table] = {}
        self._lock = threading.Lock()

    def offsets(self, kind: Kind) -> Array:
        """Int64 ``[P + 1]``; part p has the rows ``offsets[p] .. offsets[p+1]-1`` of the kind.

        Raises:
            DataError: there is no such node type or edge type.
        """
        if kind not in self._offsets:
            raise DataError(
                f"the store {self._store.path} has no node type or edge type {kind!r}",
                hint=f"choose one of {', '.join(str(known) for known in self._offsets)}",
            )
        return self._offsets[kind]

    def table(self, kind: Kind, name: str) -> Table:
        """A tensor's rows.

        Raises:
            StoreError: the store has no such tensor.
            DataError: it has no rows for nodes or edges, or an extra one has too few or too many.
        """
        with self._lock:
            if (kind, name) not in self._tables:
                self._tables[kind, name] = self._open(kind, name)
            return self._tables[kind, name]

    def _open(self, kind: Kind, name: str) -> Table:
        offsets = self.offsets(kind)
        parts = {part: self._tensor(kind, name, part) for part in self.hosted}
        example = parts[self.hosted[0]]
        table: Table
        if example.layout == torch.sparse_csr:
            table = CsrTable(example, self.segments, self._row_entries(kind, name))
        else:
            table = DenseTable(example, self.segments)
        for part, tensor in parts.items():
            rows = int(offsets[part + 1] - offsets[part])
            if tensor.size(0) != rows:
                raise DataError(
                    f"{name} of {kind} has {tensor.size(0)} rows in part {part}, which has {rows}",
                    hint="give it one row for each node or edge of the part",
                )
            table.hold(part, pieces_of(tensor))
        return table

    def _tensor(self, kind: Kind, name: str, part: int) -> Tensor:
        given = self._extra.get(kind, {}).get(name)
        if given is not None:
            return torch.as_tensor(given[part])
        if isinstance(kind, str):
            return self._store.node(name, part, kind)
        if name == "indptr":
            raise DataError(f"indptr of {kind} has no rows for edges", hint="choose another edge tensor")
        return self._store.edge(name, part, kind)

    def _row_entries(self, kind: Kind, name: str) -> float:
        manifest = self._store.manifest
        types: Mapping[str, Any] = manifest.node_types if isinstance(kind, str) else manifest.edge_types
        spec: TensorSpec = types[kind if isinstance(kind, str) else edge_key(kind)].tensors[name]
        return (spec.nnz or 0) / max(1, spec.shape[0])
