"""How well a graph was cut, measured on the files that were written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.graph.store.files import chunks, edge_file, release
from gtrain.graph.store.manifest import EdgeTypeSpec, NodeTypeSpec, PartitionReport


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
