"""Feature tables: the rows of one tensor of a node type or edge type, in several segments of memory.

A segment is the memory of one hosted part, of the cache, or of received replies; :mod:`gtrain_pyg.features.kernels`
describes how rows are located. A rank hosts tensors of the store, which it maps into memory, and computed tensors; it
serves them to the other ranks.
"""

from __future__ import annotations

import math
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gtrain.errors import DataError, StoreError
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import edge_key
from gtrain.graph.store.tables import csr_tensor
from gtrain.nn.compressed import CompressedMatrix, is_compressed
from gtrain.nn.csr import Csr
from gtrain.wire import Message
from gtrain_pyg.buffers import BufferPool
from gtrain_pyg.features import kernels
from gtrain_pyg.peers import Array, NodeOrEdgeType, PartBook

SCRATCH_BYTES = 256 << 10
"""Rows are converted to another dtype in blocks of this size, which stay in a core's cache."""
_LARGEST_HALF = torch.finfo(torch.float16).max
ExtraTensors = Mapping[NodeOrEdgeType, Mapping[str, Mapping[int, Any]]]
"""Tensors by node type or edge type, name and part."""


class FeatureTable(ABC):
    """The rows of one tensor in the segments of the hosted parts and the cache.

    Attributes:
        dtype: of the values as stored.
        shape: of a row.
        row_bytes: bytes of a row; of a sparse row, the mean.
        bases: int64 ``[arrays, segments]``, the addresses of each segment's arrays; 0 for a segment without rows. Dense
            rows have one array, those in CSR form three: indptr, indices and values, or two if all values are 1.
        last_is_values: whether the last array holds values, of :attr:`dtype`.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    row_bytes: float
    last_is_values: bool = True

    def __init__(self, arrays: int, segments: int) -> None:
        self.bases: Array = np.zeros((arrays, segments), np.int64)
        self._segments: dict[int, Sequence[Tensor | Array]] = {}

    def set_segment(self, segment: int, arrays: Sequence[Tensor | Array]) -> None:
        """Read a segment's rows from these arrays from now on."""
        self._segments[segment] = arrays  # keeps the memory alive
        self.bases[:, segment] = addresses(arrays)

    @abstractmethod
    def gather(self, location: Array, bases: Array, pool: BufferPool, dtype: torch.dtype) -> list[Tensor]:
        """Copy rows.

        Args:
            location: int64 ``[n]``, segment and row, packed as :mod:`gtrain_pyg.features.kernels` describes.
            bases: :attr:`bases`, or the same with further segments of received rows.
            pool: memory of the result.
            dtype: of the values.

        Returns:
            The arrays of the rows.
        """

    @abstractmethod
    def check(self, arrays: Sequence[Tensor], rows: int, dtype: torch.dtype) -> str | None:
        """Return what is wrong with arrays that should hold ``rows`` rows; None if they are valid."""

    @abstractmethod
    def tensor(self, arrays: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the one tensor of ``dtype`` that a batch has, made of its arrays."""

    def output_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype of values if floats are requested as ``dtype``; None leaves them as stored."""
        return dtype if dtype is not None and self.dtype.is_floating_point else self.dtype


class DenseFeatureTable(FeatureTable):
    """A dense tensor.

    Args:
        example: any rows of it, ``[n, ...]``.
        segments: number of segments.
    """

    def __init__(self, example: Tensor, segments: int) -> None:
        super().__init__(1, segments)
        self.dtype, self.shape = example.dtype, tuple(example.shape[1:])
        self.row_bytes = math.prod(self.shape) * self.dtype.itemsize

    def gather(self, location: Array, bases: Array, pool: BufferPool, dtype: torch.dtype) -> list[Tensor]:
        out = self.empty(location.size, pool, dtype)
        if dtype == self.dtype:
            self.fill(out, location, bases, 0, bases.shape[1])
            return [out]
        if (self.dtype, dtype) == (torch.float32, torch.bfloat16):
            rows = out.view(torch.uint16).view(location.size, math.prod(self.shape))
            kernels.gather_bfloat16(location, bases[0], rows.numpy())
            return [out]
        step = max(1, SCRATCH_BYTES // max(1, int(self.row_bytes)))
        scratch = self.empty(min(step, location.size), pool, self.dtype)
        for start in range(0, location.size, step):
            block = location[start : start + step]
            self.fill(scratch, block, bases, 0, bases.shape[1])
            convert(scratch[: block.size], out[start : start + step])
        return [out]

    def empty(self, rows: int, pool: BufferPool, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory for rows."""
        return pool.tensor((rows, *self.shape), dtype)

    def fill(self, out: Tensor, location: Array, bases: Array, low: int, high: int) -> None:
        """Copy the rows of segments ``low .. high-1``, as stored; other rows of ``out`` stay as they are."""
        kernels.gather(location, bases[0], int(self.row_bytes), out.data_ptr(), low, high)

    def check(self, arrays: Sequence[Tensor], rows: int, dtype: torch.dtype) -> str | None:
        actual, expected = (arrays[0].dtype, tuple(arrays[0].shape)), (dtype, (rows, *self.shape))
        return None if actual == expected else f"{actual[0]} {list(actual[1])}, not {expected[0]} {list(expected[1])}"

    def tensor(self, arrays: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return arrays[0]


class CsrFeatureTable(FeatureTable):
    """A matrix in CSR form: a sparse one, or a dense one of which most elements are 0.

    Args:
        example: any rows of it ``[n, F]``, a ``torch.sparse_csr`` tensor or a
            :class:`~gtrain.nn.compressed.CompressedMatrix`.
        segments: number of segments.
        row_entries: mean entries of a row.
    """

    def __init__(self, example: Tensor, segments: int, row_entries: float) -> None:
        pointers, ids, *values = arrays_of(example)
        super().__init__(2 + len(values), segments)
        self.dtype, self.shape = example.dtype, (example.size(1),)
        self.index_dtypes, self.last_is_values = (pointers.dtype, ids.dtype), bool(values)
        self._is_dense = is_compressed(example)
        entry_bytes = sum(array.element_size() for array in (ids, *values))
        self.row_bytes = pointers.element_size() + row_entries * entry_bytes

    def gather(self, location: Array, bases: Array, pool: BufferPool, dtype: torch.dtype) -> list[Tensor]:
        pointer_dtype, id_dtype = self.index_dtypes
        width = pointer_dtype.itemsize
        indptr = pool.tensor(location.size + 1, pointer_dtype)
        starts = indptr.numpy()
        kernels.build_indptr(location, bases[0], width, starts)
        count = int(starts[-1])
        entries = [pool.tensor(count, each) for each in (id_dtype, self.dtype)[: len(bases) - 1]]
        for base, out in zip(bases[1:], entries, strict=True):
            kernels.gather_entries(location, bases[0], width, base, out.element_size(), starts, out.data_ptr())
        if self.last_is_values and dtype != self.dtype:
            entries[-1] = convert(entries[-1], pool.tensor(count, dtype))
        return [indptr, *entries]

    def check(self, arrays: Sequence[Tensor], rows: int, dtype: torch.dtype) -> str | None:
        indptr, *entries = arrays
        actual, expected = tuple(array.dtype for array in arrays), (*self.index_dtypes, dtype)[: len(arrays)]
        if actual != expected:
            return f"rows of {actual}, not of {expected}"
        if indptr.numel() != rows + 1 or any(array.numel() != int(indptr[-1]) for array in entries):
            return f"{indptr.numel() - 1} sparse rows of {entries[0].numel()} entries, not {rows}"
        ascending = int(indptr[0]) == 0 and bool((indptr[1:] >= indptr[:-1]).all())
        return None if ascending else "sparse rows whose indptr is not ascending"

    def tensor(self, arrays: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        indptr, indices, *values = arrays
        if self._is_dense:
            return CompressedMatrix(Csr(indices, values[0] if values else None, indptr), self.shape[0], dtype)
        return csr_tensor(indptr, indices, values[0], (indptr.numel() - 1, self.shape[0]))


def arrays_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the arrays that hold a part's rows."""
    if is_compressed(tensor):
        ids, values, offsets = tensor.rows
        return (offsets, ids) if values is None else (offsets, ids, values)
    if tensor.layout == torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return (tensor.contiguous(),)


def addresses(arrays: Sequence[Tensor | Array]) -> list[int]:
    """Return the addresses of arrays, which the caller keeps alive."""
    return [array.data_ptr() if isinstance(array, Tensor) else array.ctypes.data for array in arrays]


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
                f"features reach {peak:.3g}, and the largest float16, the dtype requested for the wire, is 65504",
                hint="set strategy.wire_dtype=bfloat16, or scale the features",
            )
    return out.copy_(source)


class HostedTensors:
    """The tensors of the hosted parts; each is opened when it is first used.

    Args:
        store: the graph.
        book: the parts' ranges.
        hosted: the parts whose files this rank reads.
        extra: by type, name and hosted part, tensors ``[n_p, ...]`` that the store does not have.
    """

    def __init__(self, store: Store, book: PartBook, hosted: Sequence[int], extra: ExtraTensors) -> None:
        self._store, self._extra = store, extra
        self.parts, self.hosted = book.num_parts, sorted(hosted)
        self.is_hosted: Array = np.isin(np.arange(book.num_parts), self.hosted)
        self.segments = book.num_parts + 1  # one more for the cache
        self._offsets = book.all_offsets
        self._tables: dict[tuple[NodeOrEdgeType, str], FeatureTable] = {}
        self._lock = threading.Lock()

    @property
    def types(self) -> Collection[NodeOrEdgeType]:
        """The node types and edge types of the store."""
        return self._offsets.keys()

    def offsets(self, graph_type: NodeOrEdgeType) -> Array:
        """Return int64 ``[P + 1]``; part p has the rows ``offsets[p] .. offsets[p+1]-1`` of the type.

        Raises:
            DataError: the store does not have this node type or edge type.
        """
        if graph_type not in self._offsets:
            raise DataError(
                f"the store {self._store.path} has no node type or edge type {graph_type!r}",
                hint=f"choose one of {', '.join(str(known) for known in self._offsets)}",
            )
        return self._offsets[graph_type]

    def table(self, graph_type: NodeOrEdgeType, name: str) -> FeatureTable:
        """Return the table of a tensor; open the tensor if this is its first use.

        Raises:
            StoreError: the store does not have this tensor.
            DataError: the tensor does not have one row per node or edge.
        """
        with self._lock:
            if (graph_type, name) not in self._tables:
                self._tables[graph_type, name] = self._open(graph_type, name)
            return self._tables[graph_type, name]

    def _open(self, graph_type: NodeOrEdgeType, name: str) -> FeatureTable:
        offsets = self.offsets(graph_type)
        parts = {part: self._tensor(graph_type, name, part) for part in self.hosted}
        example = parts[self.hosted[0]]
        table: FeatureTable
        if example.layout == torch.sparse_csr or is_compressed(example):
            table = CsrFeatureTable(example, self.segments, self._row_entries(graph_type, name))
        else:
            table = DenseFeatureTable(example, self.segments)
        for part, tensor in parts.items():
            rows = int(offsets[part + 1] - offsets[part])
            if tensor.size(0) != rows:
                raise DataError(
                    f"{name} of {graph_type} has {tensor.size(0)} rows in part {part}, which has {rows}",
                    hint="give it one row for each node or edge of the part",
                )
            table.set_segment(part, arrays_of(tensor))
        return table

    def _tensor(self, graph_type: NodeOrEdgeType, name: str, part: int) -> Tensor:
        extra = self._extra.get(graph_type, {}).get(name)
        if extra is not None:
            return torch.as_tensor(extra[part])
        if isinstance(graph_type, str):
            return self._store.node(name, part, graph_type)
        if name == "indptr":
            raise DataError(f"indptr of {graph_type} has no row per edge", hint="choose another edge tensor")
        return self._store.edge(name, part, graph_type)

    def _row_entries(self, graph_type: NodeOrEdgeType, name: str) -> float:
        manifest = self._store.manifest
        if isinstance(graph_type, str):
            spec = manifest.node_types[graph_type].tensors[name]
        else:
            spec = manifest.edge_types[edge_key(graph_type)].tensors[name]
        return (spec.nnz or 0) / max(1, spec.shape[0])


class RowServer:
    """Serves the rows of hosted parts to other ranks.

    A request is a message with

    * ``store``: the checksum of the requester's manifest, ``part``: the part of the rows;
    * ``wants``: a list of ``{"kind", "names", "dtypes", "chunk"}``: the name on the wire of a node type or edge type
      (:func:`wire_name`), the tensors' names, the dtype of each tensor's values on the wire, and the rows of a chunk;
    * for each entry of ``wants`` an int32 or int64 tensor: rows within the part.

    The reply has the tensors of each entry in turn: for each chunk of its rows, in order, and each name the arrays of
    these rows, one for a dense tensor, and three (indptr, indices, values) for one in CSR form, or two if all values
    are 1. Rows travel in chunks
    because the wire allocates fresh pages for each large frame.

    Args:
        hosted: the rows.
        store: the graph.
        pool: memory of the replies.
    """

    def __init__(self, hosted: HostedTensors, store: Store, pool: BufferPool) -> None:
        self._hosted, self._pool = hosted, pool
        self._checksum = fingerprint(store)
        self._types = {wire_name(graph_type): graph_type for graph_type in hosted.types}

    def __call__(self, message: Message) -> Message:
        """Reply to one request.

        Raises:
            StoreError: the requester has another store.
            DataError: this rank does not have the part, the rows or the tensor.
        """
        fields = message.fields
        if fields["store"] != self._checksum:
            raise StoreError(
                f"this rank has the store with checksum {self._checksum}, and the request is for rows of "
                f"{fields['store']}",
                hint="have all ranks open the same store, or copies of it",
            )
        tensors: list[Tensor] = []
        for entry, rows in zip(fields["wants"], message.tensors, strict=True):
            tensors += self._read(entry, int(fields["part"]), rows)
        return Message({}, tensors)

    def _read(self, entry: Mapping[str, Any], part: int, rows: Tensor) -> list[Tensor]:
        graph_type, chunk = self._types.get(entry["kind"], entry["kind"]), entry["chunk"]
        tables = [self._hosted.table(graph_type, name) for name in entry["names"]]
        dtypes = [getattr(torch, name) for name in entry["dtypes"]]
        location = self._locate(graph_type, part, rows)
        return [
            array
            for start in range(0, location.size, chunk)
            for table, dtype in zip(tables, dtypes, strict=True)
            for array in table.gather(location[start : start + chunk], table.bases, self._pool, dtype)
        ]

    def _locate(self, graph_type: NodeOrEdgeType, part: int, rows: Tensor) -> kernels.Array:
        """Return the locations of rows of one part."""
        if part not in self._hosted.hosted:
            raise DataError(
                f"received a request for rows of part {part}; this rank hosts parts {self._hosted.hosted}",
                hint="start all ranks from the same configuration",
            )
        offsets = self._hosted.offsets(graph_type)
        count = int(offsets[part + 1] - offsets[part])
        low, high = (int(bound) for bound in rows.aminmax()) if rows.numel() else (0, -1)
        if low < 0 or high >= count:
            raise DataError(
                f"received a request for rows {low} to {high} of {graph_type} in part {part}, which has {count}",
                hint="have all ranks open the same store, or copies of it",
            )
        return np.bitwise_or(rows.numpy(), np.int64(part << kernels.SHIFT), out=self._pool.take(rows.numel()))


def fingerprint(store: Store) -> int:
    """Return a checksum of a store's contents, by which ranks notice that they opened different stores."""
    return zlib.crc32(repr(sorted(store.manifest.checksums.items())).encode())


def wire_name(graph_type: NodeOrEdgeType) -> str:
    """Return the distinct name of a node type or edge type in requests."""
    return f"node {graph_type}" if isinstance(graph_type, str) else f"edge {edge_key(graph_type)}"
