"""DGL's partition book: which ids each part has, from the JSON that ``partition_graph`` writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
