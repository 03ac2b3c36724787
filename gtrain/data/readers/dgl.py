"""Reading what DGL's ``partition_graph`` writes, without DGL: the partition book, tensors and graphs."""

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

from gtrain.errors import DataError

Ints = NDArray[np.int64]
EdgeType = tuple[str, str, str]

ANEW = "name the .json that dgl.distributed.partition_graph of DGL 1.0 or later wrote, beside its part folders"
FILES = ("node_feats", "edge_feats", "part_graph")


@dataclass(frozen=True)
class Ranges:
    """The ids of a node type, or an edge type: a range for each part, within the ids of all types.

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
        """Ids of each part."""
        return self.last - self.first

    @property
    def total(self) -> int:
        """Ids of all parts."""
        return int(self.counts.sum())

    @property
    def parts(self) -> Tensor:
        """The part of each id within its type."""
        return torch.from_numpy(np.repeat(np.arange(self.first.size), self.counts))

    def local(self, ids: Tensor) -> Tensor:
        """Turn ids among all types into ids within the type; -1 for those of other types."""
        part = torch.bucketize(ids.contiguous(), torch.from_numpy(self.first), right=True) - 1
        safe = part.clamp(min=0)
        before = torch.from_numpy(np.cumsum(self.counts) - self.counts)
        inside = (part >= 0) & (ids < torch.from_numpy(self.last)[safe])
        return torch.where(inside, ids - torch.from_numpy(self.first)[safe] + before[safe], -1)


@dataclass(frozen=True)
class Book:
    """What the JSON says.

    Attributes:
        path: the file.
        num_parts: P.
        nodes: ids of each node type, in the order of types.
        edges: ids of each edge type.
        files: the files of each part, by ``node_feats``, ``edge_feats`` and ``part_graph``.
    """

    path: Path
    num_parts: int
    nodes: dict[str, Ranges]
    edges: dict[EdgeType, Ranges]
    files: tuple[dict[str, Path], ...]

    @property
    def is_hetero(self) -> bool:
        """Whether there are several types of nodes or of edges."""
        return len(self.nodes) > 1 or len(self.edges) > 1


def read_book(path: Path) -> Book:
    """Read and check the JSON."""
    try:
        found = json.loads(path.read_text())
        num_parts = int(found["num_parts"])
        nodes = {str(name): _ranges(path, found, "node_map", name, num_parts) for name in _order(found["ntypes"])}
        edges = {_edge_type(path, key, list(nodes)): key for key in _order(found["etypes"])}
        ranges = {name: _ranges(path, found, "edge_map", key, num_parts) for name, key in edges.items()}
        totals = {"num_nodes": int(found["num_nodes"]), "num_edges": int(found["num_edges"])}
    except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as err:
        reason = f"no {err.args[0]!r}" if isinstance(err, KeyError) else str(err)
        raise DataError(f"data.path={path} cannot be read as DGL's partition book: {reason}", hint=ANEW) from err
    for kind, key in ((nodes, "num_nodes"), (ranges, "num_edges")):
        _check_cover(path, list(kind.values()), totals[key], key)
    files = tuple(_files(path, found, part, num_parts) for part in range(num_parts))
    return Book(path, num_parts, nodes, ranges, files)


def _order(types: dict[str, int]) -> list[str]:
    return sorted(types, key=lambda name: int(types[name]))


def _edge_type(path: Path, key: str, node_types: list[str]) -> EdgeType:
    names = key.split(":")
    if len(names) == 3:
        return names[0], names[1], names[2]
    if len(node_types) == 1:
        return node_types[0], key, node_types[0]
    raise DataError(
        f"data.path={path} names the edge type {key!r} without its node types, as DGL before 1.0 did", hint=ANEW
    )


def _ranges(path: Path, found: dict[str, Any], name: str, key: str, num_parts: int) -> Ranges:
    if not isinstance(found[name], dict):
        raise DataError(
            f"data.path={path}: {name} is no dictionary of ranges: ids were not reassigned to parts",
            hint="partition the graph anew with DGL 1.0 or later, which reassigns ids always",
        )
    values = np.array(found[name][key], dtype=np.int64)
    if values.shape != (num_parts, 2) or (np.diff(values.ravel()) < 0).any():
        raise DataError(
            f"data.path={path}: {name} has {len(values)} ranges of {key}, and {num_parts} ascending ones are expected "
            f"(num_parts={num_parts})",
            hint=ANEW,
        )
    first, last = np.ascontiguousarray(values.T)
    return Ranges(key, first, last)


def _check_cover(path: Path, ranges: list[Ranges], total: int, key: str) -> None:
    """Check that the ranges of all types follow one another without a gap, and sum to the total."""
    first = np.concatenate([entry.first for entry in ranges])
    last = np.concatenate([entry.last for entry in ranges])
    order = np.lexsort((last, first))
    ends = np.concatenate([[0], last[order]])
    if (first[order] != ends[:-1]).any() or ends[-1] != total:
        raise DataError(
            f"data.path={path}: the ranges of ids do not cover 0..{total - 1} ({key}={total}) once each", hint=ANEW
        )


def _files(path: Path, found: dict[str, Any], part: int, num_parts: int) -> dict[str, Path]:
    entry = found.get(f"part-{part}")
    if not isinstance(entry, dict):
        raise DataError(f"data.path={path} has no part-{part}, and num_parts is {num_parts}", hint=ANEW)
    missing = [name for name in FILES if name not in entry]
    if missing:
        told = "; it was written for GraphBolt" if any("graphbolt" in name for name in entry) else ""
        raise DataError(
            f"data.path={path}: part-{part} names no {missing[0]}{told}",
            hint="partition the graph with dgl.distributed.partition_graph(..., use_graphbolt=False)",
        )
    return {name: path.parent / entry[name] for name in FILES}


T = TypeVar("T")

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
"""The formats that a graph is saved in, as bits."""

_DTYPES = {(code, 8 * size): f"<{kind}{size}" for code, kind in enumerate("iuf") for size in (1, 2, 4, 8)}
del _DTYPES[2, 8]  # no floating-point number of 8 bits

AGAIN = "copy the file again, or partition the graph anew with DGL 0.5 or later"


@dataclass(frozen=True)
class DGLGraph:
    """A graph of one node type and one edge type, as ``partition_graph`` saves a part.

    Attributes:
        source: source of each edge, int64 ``[E]``, in the order of edge ids.
        target: target of each edge.
        node_data: tensors with a row for each node.
        edge_data: tensors with a row for each edge.
    """

    source: Tensor
    target: Tensor
    node_data: dict[str, Tensor]
    edge_data: dict[str, Tensor]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read what ``dgl.data.utils.save_tensors`` wrote."""
    stream = _Stream(path)
    stream.expect(TENSORS, "a file of tensors")
    stream.number()  # the number of tensors, which the list says again
    return stream.named_tensors()


def tensor_names(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of what ``dgl.data.utils.save_tensors`` wrote; contents are skipped."""
    stream = _Stream(path)
    stream.expect(TENSORS, "a file of tensors")
    stream.number()
    return {name: array.shape for name, array in stream.many(lambda stream: (stream.text(), stream.array(copy=False)))}


def read_graph(path: Path) -> DGLGraph:
    """Read the first graph of what ``dgl.save_graphs`` wrote."""
    stream = _Stream(path)
    stream.expect(FILE, "a file of graphs")
    version, kind = stream.number(), stream.number()
    if (version, kind) != (2, 2):
        raise DataError(f"{path} is of version {version} and kind {kind} of DGL's format, and 2, 2 is read", hint=AGAIN)
    stream.place = HEADER
    stream.place = stream.number()  # skips the labels
    stream.expect(HETERO, "a graph")
    _skip_meta(stream)
    graphs = stream.many(_read_unit)
    num_nodes = stream.many(_Stream.number)
    node_data, edge_data = (stream.many(_Stream.named_tensors) for _ in range(2))
    if not len(num_nodes) == len(graphs) == len(node_data) == len(edge_data) == 1:
        raise DataError(
            f"{path} has {len(graphs)} edge types and {len(node_data)} node types, and a part has one of each",
            hint="name what dgl.distributed.partition_graph wrote, not a graph of your own",
        )
    source, target = graphs[0]
    graph = DGLGraph(torch.from_numpy(source), torch.from_numpy(target), node_data[0], edge_data[0])
    _check(path, graph, num_nodes[0])
    return graph


def _check(path: Path, graph: DGLGraph, num_nodes: int) -> None:
    """Check that ends are nodes, and that each tensor has its rows."""
    num_edges = graph.source.numel()
    for ends in (graph.source, graph.target):
        if ends.numel() != num_edges or (num_edges and not 0 <= int(ends.min()) <= int(ends.max()) < num_nodes):
            raise DataError(f"{path}: the ends of its edges are not all among its {num_nodes} nodes", hint=AGAIN)
    for tensors, rows in ((graph.node_data, num_nodes), (graph.edge_data, num_edges)):
        for name, tensor in tensors.items():
            if tensor.dim() == 0 or tensor.size(0) != rows:
                raise DataError(f"{path}: {name} is of shape {list(tensor.shape)}, with {rows} rows", hint=AGAIN)


class _Stream:
    """A place in a file that is mapped into memory."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise DataError(f"there is no {path}", hint="copy all files that DGL's partition_graph wrote")
        self.path = path
        self.bytes: NDArray[np.uint8] = (
            np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
        )
        self.place = 0

    def take(self, count: int) -> NDArray[np.uint8]:
        """Return the next bytes."""
        if count < 0 or self.place + count > self.bytes.size:
            raise DataError(f"{self.path} ends before its contents do, at {self.bytes.size} bytes", hint=AGAIN)
        self.place += count
        return self.bytes[self.place - count : self.place]

    def number(self, form: str = "<Q") -> int:
        """Return the next number, 64 bits without a sign unless told."""
        value: int = struct.unpack(form, self.take(struct.calcsize(form)).tobytes())[0]
        return value

    def expect(self, magic: int, what: str) -> None:
        """Check the magic number of a structure."""
        found = self.number()
        if found != magic:
            raise DataError(
                f"{self.path}, byte {self.place - 8}: {what} of DGL begins with {magic:#x}, and {found:#x} is there",
                hint=AGAIN,
            )

    def many(self, read: Callable[[_Stream], T]) -> list[T]:
        """Return a list."""
        count = self.number()
        if count > self.bytes.size:  # each entry takes bytes
            raise DataError(f"{self.path}, byte {self.place - 8}: a list of {count} entries", hint=AGAIN)
        return [read(self) for _ in range(count)]

    def text(self) -> str:
        """Return the next string."""
        return self.take(self.number()).tobytes().decode(errors="replace")

    def array(self, *, copy: bool = True) -> NDArray[Any]:
        """Return the next array: a copy, or a view of the file."""
        self.expect(ARRAY, "an array")
        self.take(16)  # reserved, and the device
        dims, code, bits, lanes = (self.number(form) for form in ("<i", "<B", "<B", "<H"))
        if (code, bits) not in _DTYPES or lanes != 1 or not 0 <= dims <= 8:
            raise DataError(
                f"{self.path}, byte {self.place}: an array of {dims} dimensions, type {code} and {bits} bits",
                hint=AGAIN,
            )
        dtype = np.dtype(_DTYPES[code, bits])
        shape = [self.number("<q") for _ in range(dims)]
        data = self.take(self.number("<q"))
        if min(shape, default=0) < 0 or data.size != int(np.prod(shape, dtype=object)) * dtype.itemsize:
            raise DataError(f"{self.path}: an array of shape {shape} has {data.size} bytes", hint=AGAIN)
        return (np.array(data, subok=False) if copy else data).view(dtype).reshape(shape)

    def named_tensors(self) -> dict[str, Tensor]:
        """Return a list of names and arrays."""
        return {
            name: torch.from_numpy(array) for name, array in self.many(lambda stream: (stream.text(), stream.array()))
        }


def _skip_meta(stream: _Stream) -> None:
    """Skip the graph of the types."""
    stream.expect(META, "the graph of types")
    _read_csr(stream)


def _read_unit(stream: _Stream) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return sources and targets of one edge type; further formats of the same edges follow, and are skipped."""
    stream.expect(UNIT, "an edge type")
    saved = stream.number("<q") & 0xFFFFFFFF
    stream.number("<q")  # the formats that it may be turned into
    found = []
    if saved & IN_COO:
        _skip_meta(stream)
        found.append(_read_coo(stream))
    for bit in (IN_CSR, IN_CSC):
        if saved & bit:
            _skip_meta(stream)
            indptr, indices, ids = _read_csr(stream)
            degrees = np.diff(indptr)
            if (degrees < 0).any() or degrees.sum() != indices.size:
                raise DataError(f"{stream.path}: a sparse matrix whose rows do not fit its entries", hint=AGAIN)
            rows = np.repeat(np.arange(degrees.size), degrees)
            ends = (rows, indices) if bit == IN_CSR else (indices, rows)
            found.append((_by_id(stream, ends[0], ids), _by_id(stream, ends[1], ids)))
    if not found:
        raise DataError(f"{stream.path} has a graph in the formats {saved:#x}, which are not known", hint=AGAIN)
    return found[0]


def _read_coo(stream: _Stream) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    stream.expect(COO, "a list of edges")
    stream.take(16)  # columns and rows
    source, target, ids = stream.array(), stream.array(), stream.array()
    stream.take(2)  # whether it is sorted
    return _by_id(stream, source, ids), _by_id(stream, target, ids)


def _read_csr(stream: _Stream) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    stream.expect(CSR, "a sparse matrix")
    stream.take(16)
    arrays = stream.array(), stream.array(), stream.array()
    stream.take(1)
    return arrays


def _by_id(stream: _Stream, ends: NDArray[Any], ids: NDArray[Any]) -> NDArray[np.int64]:
    """Return ends in the order of edge ids; no ids mean that they are in order."""
    ends = ends.astype(np.int64, copy=False).ravel()
    if ids.size == 0:
        return ends
    if ids.shape != ends.shape or not np.array_equal(np.sort(ids), np.arange(ends.size)):
        raise DataError(f"{stream.path}: edge ids are not 0..{ends.size - 1} once each", hint=AGAIN)
    ordered = np.empty_like(ends)
    ordered[ids] = ends
    return ordered
