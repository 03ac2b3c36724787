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
from gtrain.graph.store.buckets import write_buckets
from gtrain.graph.store.columns import write_columns, write_held_out
from gtrain.graph.store.files import Ledger
from gtrain.graph.store.manifest import FORMAT, NODE_TYPE, EdgeTypeSpec, HeldOutSpec, Manifest, NodeTypeSpec, edge_key
from gtrain.graph.store.names import write_names
from gtrain.graph.store.numbering import Numbering
from gtrain.graph.store.quality import measure
from gtrain.graph.store.rows import write_nodes
from gtrain.graph.store.store import Store
from gtrain.graph.store.tables import EdgeArrays, EdgeTable, Graph, NodeTable, Tables, tables_of

__all__ = ["EdgeArrays", "temporary_path", "write_store"]


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
