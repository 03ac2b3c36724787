"""Write a store: number the nodes by part, write all files under a temporary name, rename the folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gtrain import __version__
from gtrain.graph.store.edges import write_buckets, write_columns, write_held_out
from gtrain.graph.store.files import CHUNK_BYTES, Array, Ledger, chunks, edge_file, node_file, release, row_bytes
from gtrain.graph.store.manifest import (
    COMPRESSED,
    FORMAT,
    NODE_TYPE,
    EdgeTypeSpec,
    HeldOutSpec,
    Manifest,
    NodeTypeSpec,
    PartitionReport,
    TensorSpec,
    edge_key,
)
from gtrain.graph.store.names import write_names
from gtrain.graph.store.numbering import Numbering
from gtrain.graph.store.store import Store
from gtrain.graph.store.tables import (
    CsrArrays,
    EdgeTable,
    Graph,
    NodeTable,
    Tables,
    compress,
    expanded,
    is_worthwhile,
    tables_of,
)

FEATURES = "x"
"""The node tensor that is stored in CSR form if most of its elements are 0."""


def write_store(
    path: Path,
    graph: Graph,
    assignment: Tensor | Mapping[str, Tensor],
    num_parts: int,
    *,
    groups: Mapping[str, NDArray[Any]] | None = None,
    source: dict[str, Any],
    facts: dict[str, Any],
    partitioner: str,
    seed: int,
    names: Mapping[str, Any] | None = None,
    buckets: bool = False,
    dense_features: bool = False,
) -> Store:
    """Write a graph as a store of ``num_parts`` parts.

    ``path`` does not exist before the store is complete, and no file remains after an exception. Memory grows with the
    nodes and not with the edges: about 32 bytes per node, and 1 GB for :data:`gtrain.graph.store.csc.RANGE_EDGES`.

    Args:
        path: folder of the store; it must not exist.
        graph: the graph; every tensor with one row per node or per edge is stored.
        assignment: the part of each node, ``[N]`` integer; for a ``HeteroData`` by node type.
        num_parts: P.
        groups: the locality group of each node within its part, ``[N]`` integer, by node type; the nodes of a group
            get consecutive global ids.
        source: the options that identify the graph, JSON.
        facts: properties of the data that a model needs, JSON; see :class:`~gtrain.graph.store.manifest.Manifest`.
        partitioner: name of the partitioning method, for the manifest.
        seed: seed of the partitioning method, for the manifest.
        names: string dictionaries by node type (``node`` in a homogeneous graph) or ``relation``: sequences of str or
            pyarrow arrays of strings, by original id.
        buckets: also store the edges by pairs of parts, for :meth:`~gtrain.graph.store.Store.bucket`.
        dense_features: store the features ``x`` as a dense array even if most of them are 0.

    Raises:
        DataError: the graph cannot be stored, for example because an edge names a node that does not exist.
    """
    tables = tables_of(graph)
    for table in tables.nodes.values():
        if FEATURES in table.tensors:
            table.tensors[FEATURES] = _in_stored_form(table.tensors[FEATURES], dense=dense_features)
    parts = assignment if isinstance(assignment, Mapping) else {NODE_TYPE: assignment}
    numberings = {name: Numbering.of(parts[name].numpy(), num_parts, (groups or {}).get(name)) for name in tables.nodes}
    scratch = temporary_path(path)
    try:
        scratch.mkdir(parents=True)
        ledger = Ledger(scratch)
        nodes = {name: write_nodes(ledger, name, table, numberings[name]) for name, table in tables.nodes.items()}
        edges = {edge_key(table.edge_type): _write_edges(ledger, table, numberings, buckets) for table in tables.edges}
        sizes = {name: table.num_nodes for name, table in tables.nodes.items()}
        manifest = Manifest(
            format=FORMAT,
            gtrain=__version__,
            num_parts=num_parts,
            node_types=nodes,
            edge_types=edges,
            names={key: write_names(ledger, key, entries, sizes.get(key)) for key, entries in (names or {}).items()},
            partition=measure(scratch, nodes, edges, _train_nodes(tables, parts, num_parts), partitioner, seed),
            source=source,
            facts=facts,
            checksums=dict(sorted(ledger.checksums.items())),
            sizes=dict(sorted(ledger.sizes.items())),
            nbytes=tuple(ledger.nbytes(part) for part in range(num_parts)),
        )
        with (scratch / "manifest.json").open("w") as file:
            file.write(manifest.to_json())
            file.flush()
            # The manifest is on the disk before the rename makes the store visible.
            os.fsync(file.fileno())
        scratch.rename(path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return Store.open(path)


def temporary_path(path: Path) -> Path:
    """Return the folder that holds the store for ``path`` while it is written."""
    return path.with_name(path.name + ".tmp")


def _write_edges(ledger: Ledger, table: EdgeTable, numberings: dict[str, Numbering], buckets: bool) -> EdgeTypeSpec:
    source, target = numberings[table.edge_type[0]], numberings[table.edge_type[2]]
    tensors = write_columns(ledger, table, source, target)
    held_out = {
        split: HeldOutSpec(*write_held_out(ledger, table.edge_type, split, columns, source, target))
        for split, columns in table.held_out.items()
    }
    counts, bucket_tensors = write_buckets(ledger, table, source, target) if buckets else (None, {})
    return EdgeTypeSpec(table.edge_type, table.num_edges, tensors, held_out, counts, bucket_tensors)


def _train_nodes(tables: Tables, assignment: Mapping[str, Tensor], num_parts: int) -> list[int]:
    """Count the training nodes of each part, over all types."""
    counts = np.zeros(num_parts, dtype=np.int64)
    for name, table in tables.nodes.items():
        if isinstance(mask := table.tensors.get("train_mask"), np.ndarray):
            counts += np.bincount(assignment[name].numpy()[np.asarray(mask, dtype=bool)], minlength=num_parts)
    return counts.tolist()


# ---------------------------------------------------------------------------------------------------- node tensors


def _in_stored_form(x: Array | CsrArrays, *, dense: bool) -> Array | CsrArrays:
    """Return dense features as an array or in CSR form; sparse ones unchanged."""
    if isinstance(x, CsrArrays):
        keep = not x.compressed or (not dense and is_worthwhile(x.shape, len(x.indices)))
        return x if keep else expanded(x)
    return x if dense or x.ndim != 2 else compress(x) or x


def write_nodes(ledger: Ledger, node_type: str, table: NodeTable, numbering: Numbering) -> NodeTypeSpec:
    """Write all tensors of one node type."""
    specs = {
        name: TensorSpec(value.dtype.name, value.shape, COMPRESSED if value.compressed else "csr", len(value.indices))
        if isinstance(value, CsrArrays)
        else TensorSpec(value.dtype.name, value.shape)
        for name, value in table.tensors.items()
    }
    for part in range(numbering.num_parts):
        start, stop = numbering.range(part)
        ids = numbering.originals(start, stop)
        ledger.write(node_file(part, "orig_id", node_type), ids)
        for name, value in table.tensors.items():
            if isinstance(value, CsrArrays):
                _write_sparse(ledger, part, node_type, name, value, ids)
            else:
                _write_dense(ledger, node_file(part, name, node_type), value, ids)
    specs = {"orig_id": TensorSpec("int64", (table.num_nodes,)), **specs}
    return NodeTypeSpec(tuple(numbering.offsets.tolist()), specs)


def _write_dense(ledger: Ledger, path: str, tensor: Array, ids: Array) -> None:
    with ledger.open(path, tensor.dtype, (len(ids), *tensor.shape[1:])) as file:
        for rows in chunks(0, len(ids), row_bytes(tensor)):
            file.append(tensor[ids[rows]])
            release(tensor)


def _write_sparse(ledger: Ledger, part: int, node_type: str, name: str, matrix: CsrArrays, ids: Array) -> None:
    lengths = matrix.indptr[ids + 1] - matrix.indptr[ids]
    indptr = np.zeros(ids.size + 1, dtype=matrix.indptr.dtype)
    np.cumsum(lengths, out=indptr[1:])
    ledger.write(node_file(part, f"{name}.indptr", node_type), indptr)
    columns, shape = {"indices": matrix.indices}, (int(indptr[-1]),)
    if matrix.values is not None:
        columns["values"] = matrix.values
    with ExitStack() as stack:
        files = [
            stack.enter_context(ledger.open(node_file(part, f"{name}.{piece}", node_type), column.dtype, shape))
            for piece, column in columns.items()
        ]
        for rows in _row_groups(indptr):
            entries = _entries(matrix.indptr[ids[rows]], lengths[rows])
            for file, column in zip(files, columns.values(), strict=True):
                file.append(column[entries])
                release(column)


def _row_groups(indptr: Array, entries: int = CHUNK_BYTES // 16) -> list[slice]:
    """Split rows into groups of about ``entries`` stored entries."""
    starts = np.searchsorted(indptr, np.arange(0, int(indptr[-1]) + entries, entries))
    limits = np.unique([0, *starts.tolist(), len(indptr) - 1]).tolist()
    return [slice(a, b) for a, b in pairwise(limits)]


def _entries(starts: Array, lengths: Array) -> Array:
    """Return the positions of all entries of rows that start at ``starts`` and have ``lengths`` entries."""
    lengths = lengths.astype(np.int64)
    before = np.cumsum(lengths) - lengths
    # Row r contributes starts[r], starts[r] + 1, ...: one arange over all entries, shifted row by row.
    return np.repeat(starts.astype(np.int64) - before, lengths) + np.arange(int(lengths.sum()))


# ---------------------------------------------------------------------------------------------------- partition report


def measure(
    folder: Path,
    nodes: dict[str, NodeTypeSpec],
    edges: dict[str, EdgeTypeSpec],
    train_nodes: list[int],
    partitioner: str,
    seed: int,
) -> PartitionReport:
    """Return the report on the partitioning of a store.

    Args:
        folder: folder of the store; its arrays must have been written.
        nodes: the node types.
        edges: the edge types.
        train_nodes: training nodes of each part.
        partitioner: name of the partitioner.
        seed: seed of the partitioner.
    """
    parts = range(len(train_nodes))
    nodes_by_type = {node_type: tuple(np.diff(spec.offsets).tolist()) for node_type, spec in nodes.items()}
    edges_by_type = {key: tuple(_map(folder, p, spec).size for p in parts) for key, spec in edges.items()}
    cut, halo = _remote(folder, nodes, edges, len(parts))
    counts = {"nodes": _sums(nodes_by_type, len(parts)), "edges": _sums(edges_by_type, len(parts))}
    counts["train_nodes"] = tuple(train_nodes)
    return PartitionReport(
        partitioner=partitioner,
        seed=seed,
        edge_cut=sum(cut.values()),
        halo=halo,
        **counts,
        imbalance={name: _imbalance(values) for name, values in counts.items()},
        nodes_by_type=nodes_by_type,
        edges_by_type=edges_by_type,
        edge_cut_by_type=cut,
    )


def _remote(
    folder: Path, nodes: dict[str, NodeTypeSpec], edges: dict[str, EdgeTypeSpec], num_parts: int
) -> tuple[dict[str, int], tuple[int, ...]]:
    """Return the number of cut edges of each type, and of each part's distinct remote sources over all types."""
    cut, halo = dict.fromkeys(edges, 0), []
    if num_parts == 1:
        return cut, (0,)
    seen = {node_type: np.zeros(spec.offsets[-1], dtype=bool) for node_type, spec in nodes.items()}
    for part in range(num_parts):
        for mask in seen.values():
            mask.fill(False)
        for key, spec in edges.items():
            start, stop = nodes[spec.edge_type[0]].offsets[part : part + 2]
            indices = _map(folder, part, spec)
            for rows in chunks(0, indices.size):
                remote = indices[rows][(indices[rows] < start) | (indices[rows] >= stop)]
                # A mask, not a set of ids: a remote source counts once, however many edges it has.
                seen[spec.edge_type[0]][remote] = True
                cut[key] += remote.size
            release(indices)
        halo.append(sum(int(np.count_nonzero(mask)) for mask in seen.values()))
    return cut, tuple(halo)


def _map(folder: Path, part: int, spec: EdgeTypeSpec) -> NDArray[Any]:
    array: NDArray[Any] = np.load(folder / edge_file(part, "indices", spec.edge_type), mmap_mode="r")
    return array


def _sums(by_type: dict[str, tuple[int, ...]], num_parts: int) -> tuple[int, ...]:
    return tuple(sum(counts[part] for counts in by_type.values()) for part in range(num_parts))


def _imbalance(counts: tuple[int, ...]) -> float:
    return max(counts) * len(counts) / sum(counts) if sum(counts) else 0.0
