"""Read the output of DGL's ``partition_graph`` without DGL: the partition book, tensors and graphs."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.errors import DataError, unreadable

Ints = NDArray[np.int64]
EdgeType = tuple[str, str, str]

_BOOK_HINT = "name the .json that dgl.distributed.partition_graph of DGL 1.0 or later wrote, beside its part folders"
FILES = ("node_feats", "edge_feats", "part_graph")
"""The keys of a part's files in the partition book."""


@dataclass(frozen=True)
class IdRanges:
    """The ids of a node type or an edge type: one range per part, among the ids of all types.

    Attributes:
        key: the name of the type in the files.
        first: first id of each part, ``[P]``.
        last: the id after the last one, ``[P]``.
    """

    key: str
    first: Ints
    last: Ints

    @property
    def counts(self) -> Ints:
        """Number of ids of each part."""
        return self.last - self.first

    @property
    def total(self) -> int:
        """Number of ids of all parts."""
        return int(self.counts.sum())

    @property
    def parts(self) -> Tensor:
        """The part of each id, ``[total]``."""
        return torch.from_numpy(np.repeat(np.arange(self.first.size), self.counts))

    def local(self, ids: Tensor) -> Tensor:
        """Convert ids among all types to ids within this type; -1 for ids of other types."""
        # Ids of other types lie between the ranges of this one, and below the first: part is then -1.
        part = torch.bucketize(ids.contiguous(), torch.from_numpy(self.first), right=True) - 1
        safe = part.clamp(min=0)
        before = torch.from_numpy(np.cumsum(self.counts) - self.counts)
        inside = (part >= 0) & (ids < torch.from_numpy(self.last)[safe])
        return torch.where(inside, ids - torch.from_numpy(self.first)[safe] + before[safe], -1)


@dataclass(frozen=True)
class PartitionBook:
    """The contents of the partition's JSON file.

    Attributes:
        path: the file.
        num_parts: P.
        nodes: ids of each node type, in the order of types.
        edges: ids of each edge type.
        files: the files of each part, by ``node_feats``, ``edge_feats`` and ``part_graph``.
    """

    path: Path
    num_parts: int
    nodes: dict[str, IdRanges]
    edges: dict[EdgeType, IdRanges]
    files: tuple[dict[str, Path], ...]

    @property
    def is_hetero(self) -> bool:
        """Whether there are several types of nodes or of edges."""
        return len(self.nodes) > 1 or len(self.edges) > 1


def read_book(path: Path) -> PartitionBook:
    """Read and check the partition's JSON file.

    Raises:
        DataError: the file is not a partition book, or is inconsistent.
    """
    errors = (ValueError, KeyError, TypeError, AttributeError)
    with unreadable(f"data.path={path} cannot be read as DGL's partition book", _BOOK_HINT, *errors):
        book = json.loads(path.read_text())
        num_parts = int(book["num_parts"])
        nodes = {str(name): _ranges(path, book, "node_map", name, num_parts) for name in _in_order(book["ntypes"])}
        edges = {
            _edge_type(path, key, list(nodes)): _ranges(path, book, "edge_map", key, num_parts)
            for key in _in_order(book["etypes"])
        }
        totals = {"num_nodes": int(book["num_nodes"]), "num_edges": int(book["num_edges"])}
    for ranges, key in ((list(nodes.values()), "num_nodes"), (list(edges.values()), "num_edges")):
        _check_cover(path, ranges, totals[key], key)
    files = tuple(_files(path, book, part, num_parts) for part in range(num_parts))
    return PartitionBook(path, num_parts, nodes, edges, files)


def _in_order(types: dict[str, int]) -> list[str]:
    return sorted(types, key=lambda name: int(types[name]))


def _edge_type(path: Path, key: str, node_types: list[str]) -> EdgeType:
    names = key.split(":")
    if len(names) == 3:
        return names[0], names[1], names[2]
    if len(node_types) == 1:
        return node_types[0], key, node_types[0]
    raise DataError(
        f"data.path={path} names the edge type {key!r} without its node types, as DGL before 1.0 did", hint=_BOOK_HINT
    )


def _ranges(path: Path, book: dict[str, Any], name: str, key: str, num_parts: int) -> IdRanges:
    if not isinstance(book[name], dict):
        raise DataError(
            f"data.path={path}: {name} is not a dictionary of ranges: ids were not reassigned to parts",
            hint="partition the graph again with DGL 1.0 or later, which always reassigns ids",
        )
    values = np.array(book[name][key], dtype=np.int64)
    if values.shape != (num_parts, 2) or (np.diff(values.ravel()) < 0).any():
        raise DataError(
            f"data.path={path}: {name} has {len(values)} ranges of {key}; {num_parts} ascending ones are expected "
            f"(num_parts={num_parts})",
            hint=_BOOK_HINT,
        )
    first, last = np.ascontiguousarray(values.T)
    return IdRanges(key, first, last)


def _check_cover(path: Path, ranges: list[IdRanges], total: int, key: str) -> None:
    """Check that the ranges of all types are contiguous and sum to the total."""
    first = np.concatenate([entry.first for entry in ranges])
    last = np.concatenate([entry.last for entry in ranges])
    order = np.lexsort((last, first))  # of ranges with one start the empty ones come first
    ends = np.concatenate([[0], last[order]])
    if (first[order] != ends[:-1]).any() or ends[-1] != total:
        raise DataError(
            f"data.path={path}: the ranges of ids do not cover 0..{total - 1} ({key}={total}) once each",
            hint=_BOOK_HINT,
        )


def _files(path: Path, book: dict[str, Any], part: int, num_parts: int) -> dict[str, Path]:
    entry = book.get(f"part-{part}")
    if not isinstance(entry, dict):
        raise DataError(f"data.path={path} has no part-{part}, and num_parts is {num_parts}", hint=_BOOK_HINT)
    missing = [name for name in FILES if name not in entry]
    if missing:
        cause = "; it was written for GraphBolt" if any("graphbolt" in name for name in entry) else ""
        raise DataError(
            f"data.path={path}: part-{part} names no {missing[0]}{cause}",
            hint="partition the graph with dgl.distributed.partition_graph(..., use_graphbolt=False)",
        )
    return {name: path.parent / entry[name] for name in FILES}


T = TypeVar("T")

# Magic numbers at the start of DGL's serialised structures (dgl/src/graph/serialize, dgl/src/runtime)
TENSORS, ARRAY, FILE = 0xDD5A9FBE3FA2443F, 0xDD5E40F096B4A13F, 0xDD2E4FF046B4A13F
HETERO, META, UNIT, COO, CSR = (
    0xDD589FBE35224ABF,
    0xDD3C5FFE20046ABF,
    0xDD2E60F0F6B4A127,
    0xDD61FFD305DFF127,
    0xDD6CD31205DFF127,
)
HEADER = 4096
"""Bytes before the first graph of a file."""
IN_COO, IN_CSR, IN_CSC = 1, 2, 4
"""Bits of the formats in which a graph is saved."""

_DTYPES = {(code, 8 * size): f"<{kind}{size}" for code, kind in enumerate("iuf") for size in (1, 2, 4, 8)}
# DLPack's code and width would also give an 8-bit floating-point type, which numpy lacks.
del _DTYPES[2, 8]

_FILE_HINT = "copy the file again, or partition the graph again with DGL 0.5 or later"


@dataclass(frozen=True)
class DGLGraph:
    """A graph of one node type and one edge type, as ``partition_graph`` saves a part.

    Attributes:
        source: source of each edge, int64 ``[E]``, in the order of edge ids.
        target: target of each edge, likewise.
        node_data: tensors with one row per node.
        edge_data: tensors with one row per edge.
    """

    source: Tensor
    target: Tensor
    node_data: dict[str, Tensor]
    edge_data: dict[str, Tensor]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file of ``dgl.data.utils.save_tensors``; the tensors are copies."""
    return {name: torch.from_numpy(np.array(array)) for name, array in _named_arrays(path)}


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes in a file of ``dgl.data.utils.save_tensors`` without reading the contents."""
    return {name: array.shape for name, array in _named_arrays(path)}


def _named_arrays(path: Path) -> list[tuple[str, NDArray[Any]]]:
    stream = _Stream(path)
    stream.expect(TENSORS, "a file of tensors")
    # The number of tensors, which the list repeats.
    stream.number()
    return stream.list_of(_Stream.named_array)


def read_graph(path: Path) -> DGLGraph:
    """Read the first graph of a file of ``dgl.save_graphs``."""
    stream = _Stream(path)
    stream.expect(FILE, "a file of graphs")
    version, kind = stream.number(), stream.number()  # kind 2: graphs with types
    if (version, kind) != (2, 2):
        raise DataError(
            f"{path} has version {version} and kind {kind} of DGL's format; gtrain reads 2, 2", hint=_FILE_HINT
        )
    stream.position = HEADER
    stream.position = stream.number()  # skips the labels
    stream.expect(HETERO, "a graph")
    _skip_metagraph(stream)
    graphs = stream.list_of(_read_unit)
    num_nodes = stream.list_of(_Stream.number)
    node_data, edge_data = (stream.list_of(_Stream.named_tensors) for _ in range(2))
    if not len(num_nodes) == len(graphs) == len(node_data) == len(edge_data) == 1:
        raise DataError(
            f"{path} has {len(graphs)} edge types and {len(node_data)} node types; a part has one of each",
            hint="name a file that dgl.distributed.partition_graph wrote, not another graph",
        )
    source, target = graphs[0]
    graph = DGLGraph(torch.from_numpy(source), torch.from_numpy(target), node_data[0], edge_data[0])
    _check(path, graph, num_nodes[0])
    return graph


def _check(path: Path, graph: DGLGraph, num_nodes: int) -> None:
    """Check that the ends of edges are nodes, and that each tensor has one row per node or edge."""
    num_edges = graph.source.numel()
    for ends in (graph.source, graph.target):
        if ends.numel() != num_edges or (num_edges and not 0 <= int(ends.min()) <= int(ends.max()) < num_nodes):
            raise DataError(f"{path}: the ends of its edges are not all among its {num_nodes} nodes", hint=_FILE_HINT)
    for tensors, rows in ((graph.node_data, num_nodes), (graph.edge_data, num_edges)):
        for name, tensor in tensors.items():
            if tensor.dim() == 0 or tensor.size(0) != rows:
                raise DataError(
                    f"{path}: {name} has shape {list(tensor.shape)}; {rows} rows are expected", hint=_FILE_HINT
                )


class _Stream:
    """A reader over a memory-mapped file; ``position`` is the offset of the next byte."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise DataError(f"{path} is missing", hint="copy all files that DGL's partition_graph wrote")
        self.path = path
        self.bytes: NDArray[np.uint8] = (
            np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
        )
        self.position = 0

    def take(self, count: int) -> NDArray[np.uint8]:
        """Return the next ``count`` bytes."""
        if count < 0 or self.position + count > self.bytes.size:
            raise DataError(f"{self.path} is truncated at {self.bytes.size} bytes", hint=_FILE_HINT)
        self.position += count
        return self.bytes[self.position - count : self.position]

    def number(self, form: str = "<Q") -> int:
        """Return the next number, by default an unsigned 64-bit integer."""
        return struct.unpack(form, self.take(struct.calcsize(form)).tobytes())[0]

    def expect(self, magic: int, structure: str) -> None:
        """Check the magic number of a structure."""
        actual = self.number()
        if actual != magic:
            raise DataError(
                f"{self.path}, byte {self.position - 8}: {structure} of DGL starts with {magic:#x}, not with "
                f"{actual:#x}",
                hint=_FILE_HINT,
            )

    def list_of(self, read: Callable[[_Stream], T]) -> list[T]:
        """Return the next list, whose entries ``read`` reads."""
        count = self.number()
        if count > self.bytes.size:  # each entry takes at least a byte
            raise DataError(f"{self.path}, byte {self.position - 8}: a list of {count} entries", hint=_FILE_HINT)
        return [read(self) for _ in range(count)]

    def array(self) -> NDArray[Any]:
        """Return the next array, a view of the file."""
        self.expect(ARRAY, "an array")
        self.take(16)  # reserved, and the device
        dims, code, bits, lanes = (self.number(form) for form in ("<i", "<B", "<B", "<H"))
        if (code, bits) not in _DTYPES or lanes != 1 or not 0 <= dims <= 8:
            raise DataError(
                f"{self.path}, byte {self.position}: an array of {dims} dimensions, type {code} and {bits} bits",
                hint=_FILE_HINT,
            )
        dtype = np.dtype(_DTYPES[code, bits])
        shape = [self.number("<q") for _ in range(dims)]
        data = self.take(self.number("<q"))
        if min(shape, default=0) < 0 or data.size != int(np.prod(shape, dtype=object)) * dtype.itemsize:
            raise DataError(f"{self.path}: an array of shape {shape} has {data.size} bytes", hint=_FILE_HINT)
        return data.view(dtype).reshape(shape)

    def named_array(self) -> tuple[str, NDArray[Any]]:
        """Return the next name and array."""
        return self.take(self.number()).tobytes().decode(errors="replace"), self.array()

    def named_tensors(self) -> dict[str, Tensor]:
        """Return the next list of names and arrays; the tensors are copies."""
        return {name: torch.from_numpy(np.array(array)) for name, array in self.list_of(_Stream.named_array)}


def _skip_metagraph(stream: _Stream) -> None:
    """Skip the graph between node types."""
    stream.expect(META, "the graph of types")
    _read_csr(stream)


def _read_unit(stream: _Stream) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return sources and targets of one edge type from the first of the formats in which it is saved."""
    stream.expect(UNIT, "an edge type")
    saved = stream.number("<q") & 0xFFFFFFFF
    # The formats that DGL may convert it to.
    stream.number("<q")
    formats = []
    if saved & IN_COO:
        _skip_metagraph(stream)
        stream.expect(COO, "a list of edges")
        stream.take(16)  # columns and rows
        source, target, ids = stream.array(), stream.array(), stream.array()
        stream.take(2)  # whether rows and columns are sorted
        formats.append((_sort_by_id(stream, source, ids), _sort_by_id(stream, target, ids)))
    for bit in (IN_CSR, IN_CSC):
        if saved & bit:
            _skip_metagraph(stream)
            indptr, indices, ids = _read_csr(stream)
            degrees = np.diff(indptr)
            if (degrees < 0).any() or degrees.sum() != indices.size:
                raise DataError(f"{stream.path}: a sparse matrix whose rows do not match its entries", hint=_FILE_HINT)
            rows = np.repeat(np.arange(degrees.size), degrees)
            source, target = (rows, indices) if bit == IN_CSR else (indices, rows)
            formats.append((_sort_by_id(stream, source, ids), _sort_by_id(stream, target, ids)))
    if not formats:
        raise DataError(f"{stream.path} has a graph in the unknown formats {saved:#x}", hint=_FILE_HINT)
    return formats[0]


def _read_csr(stream: _Stream) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    stream.expect(CSR, "a sparse matrix")
    stream.take(16)  # columns and rows
    arrays = stream.array(), stream.array(), stream.array()
    stream.take(1)  # whether it is sorted
    return arrays


def _sort_by_id(stream: _Stream, ends: NDArray[Any], ids: NDArray[Any]) -> NDArray[np.int64]:
    """Return a copy of the ends of edges in the order of edge ids; without ids they are in order already."""
    ends = np.array(ends, dtype=np.int64).ravel()
    if ids.size == 0:
        return ends
    if ids.shape != ends.shape or not np.array_equal(np.sort(ids), np.arange(ends.size)):
        raise DataError(f"{stream.path}: edge ids are not 0..{ends.size - 1} once each", hint=_FILE_HINT)
    ordered = np.empty_like(ends)
    ordered[ids] = ends
    return ordered
