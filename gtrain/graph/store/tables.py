"""The writer's input: a graph as one node table per node type and one edge table per edge type."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.errors import DataError
from gtrain.graph.store.files import chunks, release, row_bytes
from gtrain.graph.store.manifest import EDGE_TYPE, HELD_OUT, NODE_TYPE, EdgeType
from gtrain.nn.compressed import CompressedMatrix, as_dense, is_compressed
from gtrain.nn.csr import Csr

Array = NDArray[Any]

HELD_OUT_PREFIXES = tuple(f"{split}_edge_" for split in HELD_OUT)
"""How the names of the tensors of held-out edges begin in a graph of PyG."""


@dataclass
class EdgeArrays:
    """A homogeneous graph as numpy arrays, which may be memory maps larger than memory.

    Attributes:
        num_nodes: N.
        source: source of each edge, ``[E]`` int32 or int64, original ids ``0 .. N-1``.
        target: target of each edge, ``[E]`` int32 or int64, original ids ``0 .. N-1``.
        edge_tensors: further edge tensors, ``[E, ...]``, by name (``edge_type``, ``edge_weight``...).
        node_tensors: node tensors, ``[N, ...]``, by name; a sparse one as ``torch.sparse_csr``.
        held_out: held-out edges by split: ``source``, ``target`` and tensors named as in ``edge_tensors``; empty if
            no edges are held out.
    """

    num_nodes: int
    source: Array
    target: Array
    edge_tensors: dict[str, Array] = field(default_factory=dict)
    node_tensors: dict[str, Array | Tensor] = field(default_factory=dict)
    held_out: dict[str, dict[str, Array]] = field(default_factory=dict)

    @property
    def num_edges(self) -> int:
        """E."""
        return len(self.source)


@dataclass
class CsrArrays:
    """A matrix ``[N, F]`` in CSR form.

    Attributes:
        shape: N and F.
        indptr: ``[N + 1]``.
        indices: ``[nnz]``.
        values: ``[nnz]``; None: all are 1.
        dtype: of the values.
        compressed: whether this is the CSR form of a dense matrix, as which models read it; else a sparse matrix.
    """

    shape: tuple[int, int]
    indptr: Array
    indices: Array
    values: Array | None
    dtype: np.dtype[Any]
    compressed: bool = False


@dataclass
class NodeTable:
    """The nodes of one type: their number N, and their tensors ``[N, ...]`` by name, in order of original ids."""

    num_nodes: int
    tensors: dict[str, Array | CsrArrays]


@dataclass
class EdgeTable:
    """The edges of one type, in the order of the source data.

    Attributes:
        edge_type: type of the sources, relation, type of the targets.
        source: original ids, ``[E]`` int32 or int64.
        target: original ids, ``[E]`` int32 or int64.
        tensors: further edge tensors, ``[E, ...]``.
        held_out: by split, ``source``, ``target`` and further tensors of the held-out edges.
    """

    edge_type: EdgeType
    source: Array
    target: Array
    tensors: dict[str, Array]
    held_out: dict[str, dict[str, Array]]

    @property
    def num_edges(self) -> int:
        return len(self.source)


@dataclass
class Tables:
    """A graph: node tables by type, and edge tables."""

    nodes: dict[str, NodeTable]
    edges: list[EdgeTable]


Graph: TypeAlias = Data | HeteroData | EdgeArrays


def tables_of(graph: Graph) -> Tables:
    """Return the tables of a graph, which share its memory; tensors with rows for neither nodes nor edges are omitted.

    Raises:
        DataError: a tensor of held-out edges has the wrong number of rows.
    """
    if isinstance(graph, EdgeArrays):
        nodes = {name: _array(value) for name, value in graph.node_tensors.items()}
        edges = EdgeTable(EDGE_TYPE, graph.source, graph.target, graph.edge_tensors, graph.held_out)
        return Tables({NODE_TYPE: NodeTable(graph.num_nodes, nodes)}, [edges])
    if isinstance(graph, HeteroData):
        tables = {t: _node_table(graph[t].to_dict(), int(graph[t].num_nodes or 0)) for t in graph.node_types}
        return Tables(tables, [_edge_table(t, graph[t].to_dict()) for t in graph.edge_types])
    tensors, num_nodes = graph.to_dict(), int(graph.num_nodes or 0)
    edges = _edge_table(EDGE_TYPE, tensors, num_nodes)
    held_out = {f"{split}_{name}" for split, columns in edges.held_out.items() for name in columns}
    others = {name: value for name, value in tensors.items() if name not in held_out and name not in edges.tensors}
    return Tables({NODE_TYPE: _node_table(others, num_nodes)}, [edges])


def compress(dense: Array) -> CsrArrays | None:
    """Return a matrix in CSR form if :func:`is_worthwhile`, else None.

    Column ids are int32, and values are left out if all of them are 1. The array may be a memory map; it is read in
    chunks, and only as far as it has few entries.
    """
    count, columns = dense.shape
    if dense.dtype.kind != "f" or columns >= 2**31:
        return None
    pieces: list[tuple[Array, Array]] = [(np.empty(0, np.int32), np.empty(0, dense.dtype))]
    lengths, entries = np.zeros(count, np.int64), 0
    for rows in chunks(0, count, row_bytes(dense)):
        chunk = np.ascontiguousarray(dense[rows])
        present = chunk != 0
        lengths[rows] = present.sum(1)
        entries += int(lengths[rows].sum())
        if not is_worthwhile(dense.shape, entries):
            return None
        pieces.append((np.nonzero(present)[1].astype(np.int32), chunk[present]))
        release(dense)
    indptr = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=indptr[1:])
    indices, values = (np.concatenate(column) for column in zip(*pieces, strict=True))
    ones = bool((values == 1).all())
    return CsrArrays((count, columns), indptr, indices, None if ones else values, dense.dtype, compressed=True)


def is_worthwhile(shape: tuple[int, ...], entries: int) -> bool:
    """Return whether a dense matrix with this number of elements other than 0 should be stored in CSR form.

    Up to one element in eight, its products take less time than those of the dense matrix. Its row offsets take the
    memory of two numbers per row.
    """
    return entries <= math.prod(shape) // 8 - shape[0]


def expanded(matrix: CsrArrays) -> Array:
    """Return a matrix in CSR form as a dense array."""
    indptr, indices = (torch.from_numpy(np.array(array)) for array in (matrix.indptr, matrix.indices))
    values = None if matrix.values is None else torch.from_numpy(np.array(matrix.values))
    return as_dense(compressed_matrix(indptr, indices, values, matrix.shape[1], matrix.dtype.name)).numpy()  # type: ignore[no-any-return]


def compressed_matrix(indptr: Tensor, indices: Tensor, values: Tensor | None, columns: int, dtype: str) -> Tensor:
    """Return a dense matrix in CSR form that shares the memory of its arrays."""
    return CompressedMatrix(Csr(indices, values, indptr), columns, getattr(torch, dtype))


def csr_tensor(indptr: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return a ``torch.sparse_csr`` tensor that shares the memory of its three arrays."""
    # torch warns once per process that the layout is in beta.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(indptr, indices, values, size=shape, check_invariants=False)


def _node_table(tensors: dict[str, Any], num_nodes: int) -> NodeTable:
    rows = {name: value for name, value in tensors.items() if _rows(name, value) == num_nodes}
    return NodeTable(num_nodes, {name: _array(value) for name, value in rows.items()})


def _edge_table(edge_type: EdgeType, tensors: dict[str, Any], num_nodes: int | None = None) -> EdgeTable:
    """Return the edges of a PyG storage; ``num_nodes`` is set if the storage also holds nodes."""
    index = tensors.get("edge_index")
    edge_index = index if isinstance(index, Tensor) else torch.empty(2, 0, dtype=torch.int64)
    held_out = {split: _held_out(split, tensors) for split in HELD_OUT if f"{split}_edge_index" in tensors}
    excluded = {f"{split}_{name}" for split, columns in held_out.items() for name in columns}
    rows = edge_index.size(1)
    edge_tensors = {
        name: _dense(value)
        for name, value in tensors.items()
        if _rows(name, value) == rows and name not in excluded and (num_nodes != rows or "edge" in name)
    }
    source, target = (row.numpy() for row in edge_index)
    return EdgeTable(edge_type, source, target, edge_tensors, held_out)


def _held_out(split: str, tensors: dict[str, Any]) -> dict[str, Array]:
    """Return the tensors of one split's held-out edges, by name without the prefix."""
    edge_index = tensors[f"{split}_edge_index"]
    columns = {"source": edge_index[0].numpy(), "target": edge_index[1].numpy()}
    for key, value in tensors.items():
        name = key.removeprefix(f"{split}_")
        if name == key or name in ("edge_index", "mask") or _rows(key, value) is None:
            continue
        if name.startswith("edge_") and value.size(0) != edge_index.size(1):
            raise DataError(
                f"{key} has {value.size(0)} rows, and {split}_edge_index has {edge_index.size(1)} edges",
                hint=f"give {key} one row per held-out edge",
            )
        if name.startswith("edge_") or (name in tensors and value.size(0) == edge_index.size(1)):
            columns[name] = _dense(value)
    return columns


def _rows(name: str, value: object) -> int | None:
    """Return the number of rows of a tensor; None for an ``edge_index``, a scalar or another type."""
    if not isinstance(value, Tensor) or value.dim() == 0 or name.endswith("edge_index"):
        return None
    return value.size(0)


def _array(value: Array | Tensor) -> Array | CsrArrays:
    if is_compressed(value):
        ids, weights, offsets = value.rows
        values, dtype = None if weights is None else _dense(weights), np.dtype(str(value.dtype).removeprefix("torch."))
        return CsrArrays((value.size(0), value.size(1)), offsets.numpy(), ids.numpy(), values, dtype, compressed=True)
    if not isinstance(value, Tensor) or value.layout == torch.strided:
        return _dense(value)
    matrix = value.detach()
    matrix = matrix if matrix.layout == torch.sparse_csr else matrix.to_sparse_csr()
    shape, entries = (matrix.size(0), matrix.size(1)), _dense(matrix.values())
    return CsrArrays(shape, matrix.crow_indices().numpy(), matrix.col_indices().numpy(), entries, entries.dtype)


def _dense(value: Array | Tensor) -> Array:
    """Return a tensor as an array; bfloat16, which numpy lacks, becomes float32."""
    if not isinstance(value, Tensor):
        return np.asanyarray(value)
    value = value.detach()
    return (value.float() if value.dtype == torch.bfloat16 else value).contiguous().numpy()
