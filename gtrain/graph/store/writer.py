"""Writing a store: renumber, cut, write under a temporary name, rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gtrain import __version__
from gtrain.graph.store.edges import write_buckets, write_columns, write_held_out
from gtrain.graph.store.files import CHUNK_BYTES, Array, Ledger, chunks, edge_file, node_file, release, row_bytes
from gtrain.graph.store.manifest import (
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
from gtrain.graph.store.tables import CsrArrays, EdgeTable, Graph, NodeTable, Tables, tables_of


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
) -> Store:
    """Write a graph as a store of ``num_parts`` parts.

    Nothing is at ``path`` before the store is complete, and nothing is left anywhere after an exception. Memory grows
    with the nodes and not with the edges: about 32 bytes a node, and 1 GB for
    :data:`gtrain.graph.store.csc.RANGE_EDGES`.

    Args:
        path: folder of the store; it must not exist.
        graph: the graph; every tensor with one row for each node or for each edge is stored.
        assignment: the part of each node, ``[N]`` integer; for a ``HeteroData`` by node type.
        num_parts: P.
        groups: the group of each node within its part, ``[N]`` integer, by node type; a group's ids are in a row.
        source: the options that identify the graph, JSON.
        facts: what a model needs to know, JSON; see :class:`~gtrain.graph.store.manifest.Manifest`.
        partitioner: name of the method that made the assignment, for the manifest.
        seed: seed of that method, for the manifest.
        names: string dictionaries by node type (``node`` in a homogeneous graph) or ``relation``: sequences of str or
            pyarrow arrays of strings, by orig id.
        buckets: whether to store the edges once more by pairs of parts, for :meth:`~gtrain.graph.store.Store.bucket`.

    Raises:
        DataError: the graph cannot be stored as it is, such as with an edge to a node that is not there.
    """
    tables = tables_of(graph)
    parts = assignment if isinstance(assignment, Mapping) else {NODE_TYPE: assignment}
    scratch = temporary_path(path)
    try:
        scratch.mkdir(parents=True)
        store = _Writer(Ledger(scratch), tables, parts, num_parts, groups or {})
        manifest = store.write(names or {}, buckets, partitioner, seed, source, facts)
        _write_durably(scratch / "manifest.json", manifest.to_json())
        scratch.rename(path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return Store.open(path)


def temporary_path(path: Path) -> Path:
    """Return where the store for ``path`` is while it is being written."""
    return path.with_name(path.name + ".tmp")


@dataclass
class _Writer:
    """The state of one writing."""

    ledger: Ledger
    tables: Tables
    assignment: Mapping[str, Tensor]
    num_parts: int
    groups: Mapping[str, NDArray[Any]]

    def write(
        self,
        names: Mapping[str, Any],
        buckets: bool,
        partitioner: str,
        seed: int,
        source: dict[str, Any],
        facts: dict[str, Any],
    ) -> Manifest:
        self.numbering = {
            kind: Numbering.of(self.assignment[kind].numpy(), self.num_parts, self.groups.get(kind))
            for kind in self.tables.nodes
        }
        nodes = {kind: self._nodes(kind, table) for kind, table in self.tables.nodes.items()}
        edges = {edge_key(table.edge_type): self._edges(table, buckets) for table in self.tables.edges}
        counts = {kind: write_names(self.ledger, kind, entries, self._ids(kind)) for kind, entries in names.items()}
        return Manifest(
            format=FORMAT,
            gtrain=__version__,
            num_parts=self.num_parts,
            node_types=nodes,
            edge_types=edges,
            names=counts,
            partition=measure(self.ledger.folder, nodes, edges, self._train_nodes(), partitioner, seed),
            source=source,
            facts=facts,
            checksums=dict(sorted(self.ledger.checksums.items())),
            sizes=dict(sorted(self.ledger.sizes.items())),
            nbytes=tuple(self.ledger.nbytes(part) for part in range(self.num_parts)),
        )

    def _nodes(self, kind: str, table: NodeTable) -> NodeTypeSpec:
        numbering = self.numbering[kind]
        tensors = write_nodes(self.ledger, kind, table, numbering)
        return NodeTypeSpec(tuple(numbering.offsets.tolist()), tensors)

    def _edges(self, table: EdgeTable, buckets: bool) -> EdgeTypeSpec:
        source, target = self.numbering[table.edge_type[0]], self.numbering[table.edge_type[2]]
        tensors = write_columns(self.ledger, table, source, target)
        held_out = {
            split: HeldOutSpec(*write_held_out(self.ledger, table.edge_type, split, columns, source, target))
            for split, columns in table.held_out.items()
        }
        counts, bucket_tensors = write_buckets(self.ledger, table, source, target) if buckets else (None, {})
        return EdgeTypeSpec(table.edge_type, table.num_edges, tensors, held_out, counts, bucket_tensors)

    def _ids(self, kind: str) -> int | None:
        return self.tables.nodes[kind].num_nodes if kind in self.tables.nodes else None

    def _train_nodes(self) -> list[int]:
        """Count the training nodes of each part, over all types."""
        counts = np.zeros(self.num_parts, dtype=np.int64)
        for kind, table in self.tables.nodes.items():
            if isinstance(mask := table.tensors.get("train_mask"), np.ndarray):
                parts = self.assignment[kind].numpy()[np.asarray(mask, dtype=bool)]
                counts += np.bincount(parts, minlength=self.num_parts)
        return counts.tolist()


def _write_durably(file: Path, text: str) -> None:
    with file.open("w") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())


# ---------------------------------------------------------------------------------------------------- node tensors


def write_nodes(ledger: Ledger, kind: str, table: NodeTable, numbering: Numbering) -> dict[str, TensorSpec]:
    """Write all tensors of one node type, and return what they look like."""
    specs = {"orig_id": TensorSpec("int64", (table.num_nodes,))}
    for name, value in table.tensors.items():
        if isinstance(value, CsrArrays):
            specs[name] = TensorSpec(value.values.dtype.name, value.shape, "csr", len(value.values))
        else:
            specs[name] = TensorSpec(value.dtype.name, value.shape)
    for part in range(numbering.num_parts):
        start, stop = numbering.range(part)
        ledger.write(node_file(part, "orig_id", kind), numbering.originals(start, stop))
        for name, value in table.tensors.items():
            if isinstance(value, CsrArrays):
                _write_sparse(ledger, part, kind, name, value, numbering)
            else:
                _write_dense(ledger, part, kind, name, value, numbering)
    return specs


def _write_dense(ledger: Ledger, part: int, kind: str, name: str, tensor: Array, numbering: Numbering) -> None:
    start, stop = numbering.range(part)
    with ledger.files() as files:
        file = files.add(name, node_file(part, name, kind), tensor.dtype, (stop - start, *tensor.shape[1:]))
        for rows in chunks(start, stop, row_bytes(tensor)):
            file.append(tensor[numbering.originals(rows.start, rows.stop)])
            release(tensor)


def _write_sparse(ledger: Ledger, part: int, kind: str, name: str, matrix: CsrArrays, numbering: Numbering) -> None:
    start, stop = numbering.range(part)
    ids = numbering.originals(start, stop)
    lengths = matrix.indptr[ids + 1] - matrix.indptr[ids]
    indptr = np.zeros(ids.size + 1, dtype=matrix.indptr.dtype)
    np.cumsum(lengths, out=indptr[1:])
    ledger.write(node_file(part, f"{name}.indptr", kind), indptr)
    with ledger.files() as files:
        for piece, column in (("indices", matrix.indices), ("values", matrix.values)):
            files.add(piece, node_file(part, f"{name}.{piece}", kind), column.dtype, (int(indptr[-1]),))
        for rows in _row_groups(indptr):
            entries = _entries(matrix.indptr[ids[rows]], lengths[rows])
            files.append("indices", matrix.indices[entries])
            files.append("values", matrix.values[entries])
            release(matrix.indices)
            release(matrix.values)


def _row_groups(indptr: Array, entries: int = CHUNK_BYTES // 16) -> list[slice]:
    """Cut rows into groups of about ``entries`` stored entries."""
    cuts = np.searchsorted(indptr, np.arange(0, int(indptr[-1]) + entries, entries))
    edges = np.unique(np.concatenate([[0], cuts, [len(indptr) - 1]])).tolist()
    return [slice(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]


def _entries(starts: Array, lengths: Array) -> Array:
    """Return the positions of the entries of rows that start at ``starts`` and are so long."""
    lengths = lengths.astype(np.int64)
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts.astype(np.int64) - before, lengths) + np.arange(int(lengths.sum()))


# ---------------------------------------------------------------------------------------------------- report on the cut


def measure(
    folder: Path,
    nodes: dict[str, NodeTypeSpec],
    edges: dict[str, EdgeTypeSpec],
    train_nodes: list[int],
    partitioner: str,
    seed: int,
) -> PartitionReport:
    """Return the report on a store whose tensors are in ``folder``.

    Args:
        folder: the store that is being written.
        nodes: its node types.
        edges: its edge types.
        train_nodes: training nodes of each part.
        partitioner: name of the partitioner.
        seed: its seed.
    """
    parts = range(len(train_nodes))
    nodes_by_type = {kind: tuple(np.diff(spec.offsets).tolist()) for kind, spec in nodes.items()}
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
    """Return the cut edges of each type, and each part's distinct remote sources over all types."""
    cut, halo = dict.fromkeys(edges, 0), []
    if num_parts == 1:
        return cut, (0,)
    seen = {kind: np.zeros(spec.offsets[-1], dtype=bool) for kind, spec in nodes.items()}
    for part in range(num_parts):
        for mask in seen.values():
            mask.fill(False)
        for key, spec in edges.items():
            start, stop = nodes[spec.edge_type[0]].offsets[part : part + 2]
            indices = _map(folder, part, spec)
            for rows in chunks(0, indices.size):
                remote = indices[rows][(indices[rows] < start) | (indices[rows] >= stop)]
                seen[spec.edge_type[0]][remote] = True
                cut[key] += remote.size
            release(indices)
        halo.append(sum(int(np.count_nonzero(mask)) for mask in seen.values()))
    return cut, tuple(halo)


def _map(folder: Path, part: int, spec: EdgeTypeSpec) -> NDArray[Any]:
    file = folder / edge_file(part, "indices", spec.edge_type)
    array: NDArray[Any] = np.load(file, mmap_mode="r")
    return array


def _sums(by_type: dict[str, tuple[int, ...]], num_parts: int) -> tuple[int, ...]:
    return tuple(sum(counts[part] for counts in by_type.values()) for part in range(num_parts))


def _imbalance(counts: tuple[int, ...]) -> float:
    return max(counts) * len(counts) / sum(counts) if sum(counts) else 0.0
