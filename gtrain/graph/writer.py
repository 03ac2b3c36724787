"""Writing a store: renumber, cut, write under a temporary name, rename."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from gtrain.graph.manifest import (
    EDGE_TYPE,
    FORMAT,
    NODE_TYPE,
    EdgeTypeSpec,
    Manifest,
    NodeTypeSpec,
    PartitionReport,
    TensorSpec,
    edge_key,
)
from gtrain.graph.store import Store, edge_file, file_crc, node_file


def write_store(
    path: Path,
    data: Data,
    assignment: Tensor,
    num_parts: int,
    *,
    source: dict[str, Any],
    facts: dict[str, Any],
    partitioner: str,
    seed: int,
) -> Store:
    """Write a graph as a store of ``num_parts`` parts.

    Nothing is at ``path`` before the store is complete, and nothing is left anywhere after an exception.

    Args:
        path: folder of the store; it must not exist.
        data: the graph; every tensor with one row for each node or for each edge is stored.
        assignment: the part of each node, ``[N]`` int64.
        num_parts: P.
        source: the options that identify the graph, JSON.
        facts: what a model needs to know, JSON; see :class:`~gtrain.graph.manifest.Manifest`.
        partitioner: name of the method that made the assignment, for the manifest.
        seed: seed of that method, for the manifest.
    """
    scratch = temporary_path(path)
    try:
        scratch.mkdir(parents=True)
        manifest = _write_parts(scratch, _order(data, assignment, num_parts), source, facts, partitioner, seed)
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
class _Ordered:
    """A graph in the store's numbering.

    Attributes:
        offsets: first global id of each part, and N, ``[P + 1]``.
        orig_id: source data's id of each global id, ``[N]``.
        indptr: column starts over all nodes, ``[N + 1]``.
        indices: source of each edge as a global id, edges by target and then source, ``[E]``.
        edge_id: position of each edge in the source data, ``[E]``.
        nodes: node tensors, still in the order of the source data.
        edges: edge tensors, still in the order of the source data.
    """

    offsets: Tensor
    orig_id: Tensor
    indptr: Tensor
    indices: Tensor
    edge_id: Tensor
    nodes: dict[str, Tensor] = field(default_factory=dict)
    edges: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_parts(self) -> int:
        return self.offsets.numel() - 1

    def node_range(self, part: int) -> slice:
        return slice(int(self.offsets[part]), int(self.offsets[part + 1]))

    def edge_range(self, part: int) -> slice:
        nodes = self.node_range(part)
        return slice(int(self.indptr[nodes.start]), int(self.indptr[nodes.stop]))

    def node_tensors(self, part: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the node tensors of one part, one at a time."""
        rows = self.orig_id[self.node_range(part)]
        yield "orig_id", rows
        for name, tensor in self.nodes.items():
            yield name, tensor[rows]

    def edge_tensors(self, part: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the edge tensors of one part, one at a time."""
        nodes, edges = self.node_range(part), self.edge_range(part)
        yield "indptr", self.indptr[nodes.start : nodes.stop + 1] - edges.start
        narrow = torch.int32 if self.orig_id.numel() < 2**31 else torch.int64
        yield "indices", self.indices[edges].to(narrow)
        yield "edge_id", self.edge_id[edges]
        for name, tensor in self.edges.items():
            yield name, tensor[self.edge_id[edges]]


def _order(data: Data, assignment: Tensor, num_parts: int) -> _Ordered:
    """Renumber the nodes by part and sort the edges by target, source and position."""
    num_nodes = assignment.numel()
    sizes = torch.bincount(assignment, minlength=num_parts)
    orig_id = torch.argsort(assignment, stable=True)
    global_id = torch.empty_like(orig_id)
    global_id[orig_id] = torch.arange(num_nodes)
    assert data.edge_index is not None  # validated before a store is written
    source, target = global_id[data.edge_index]
    edge_id = torch.argsort(target * num_nodes + source, stable=True)
    stored = [name for name, value in data.to_dict().items() if isinstance(value, Tensor) and name != "edge_index"]
    return _Ordered(
        offsets=_starts(sizes),
        orig_id=orig_id,
        indptr=_starts(torch.bincount(target, minlength=num_nodes)),
        indices=source[edge_id],
        edge_id=edge_id,
        nodes={name: data[name] for name in stored if data.is_node_attr(name)},
        edges={name: data[name] for name in stored if data.is_edge_attr(name)},
    )


def _starts(counts: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])


def _write_parts(
    folder: Path, graph: _Ordered, source: dict[str, Any], facts: dict[str, Any], partitioner: str, seed: int
) -> Manifest:
    nodes: dict[str, TensorSpec] = {}
    edges: dict[str, TensorSpec] = {}
    for part in range(graph.num_parts):
        for name, tensor in graph.node_tensors(part):
            _write_array(folder / node_file(part, name), tensor, nodes)
        for name, tensor in graph.edge_tensors(part):
            _write_array(folder / edge_file(part, name), tensor, edges)
    files = sorted(file for file in folder.rglob("*.npy"))
    sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
    return Manifest(
        format=FORMAT,
        gtrain=_version(),
        num_parts=graph.num_parts,
        node_types={NODE_TYPE: NodeTypeSpec(tuple(graph.offsets.tolist()), nodes)},
        edge_types={edge_key(EDGE_TYPE): EdgeTypeSpec(graph.indices.numel(), edges)},
        partition=_report(graph, partitioner, seed),
        source=source,
        facts=facts,
        checksums={name: file_crc(folder / name) for name in sizes},
        sizes=sizes,
        nbytes=tuple(
            sum(size for name, size in sizes.items() if name.startswith(f"part-{p}/")) for p in range(graph.num_parts)
        ),
    )


def _write_array(file: Path, tensor: Tensor, specs: dict[str, TensorSpec]) -> None:
    """Write one part of a tensor and add its rows to the tensor's specification."""
    # numpy has no bfloat16.
    array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous().numpy()
    file.parent.mkdir(parents=True, exist_ok=True)
    np.save(file, array, allow_pickle=False)
    before = specs[file.stem].shape[0] if file.stem in specs else 0
    specs[file.stem] = TensorSpec(array.dtype.name, (before + array.shape[0], *array.shape[1:]))


def _report(graph: _Ordered, partitioner: str, seed: int) -> PartitionReport:
    cut, halo = 0, []
    for part in range(graph.num_parts):
        own, sources = graph.node_range(part), graph.indices[graph.edge_range(part)]
        remote = sources[(sources < own.start) | (sources >= own.stop)]
        cut += remote.numel()
        halo.append(remote.unique().numel())
    counts = {
        "nodes": graph.offsets.diff().tolist(),
        "edges": graph.indptr[graph.offsets].diff().tolist(),
        "train_nodes": _train_nodes(graph),
    }
    return PartitionReport(
        partitioner=partitioner,
        seed=seed,
        edge_cut=cut,
        halo=tuple(halo),
        **{name: tuple(values) for name, values in counts.items()},
        imbalance={name: _imbalance(values) for name, values in counts.items()},
    )


def _train_nodes(graph: _Ordered) -> list[int]:
    if "train_mask" not in graph.nodes:
        return [0] * graph.num_parts
    mask = graph.nodes["train_mask"][graph.orig_id]
    return [int(mask[graph.node_range(part)].sum()) for part in range(graph.num_parts)]


def _imbalance(counts: list[int]) -> float:
    return max(counts) * len(counts) / sum(counts) if sum(counts) else 0.0


def _write_durably(file: Path, text: str) -> None:
    with file.open("w") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())


def _version() -> str:
    try:
        return importlib.metadata.version("gtrain")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
