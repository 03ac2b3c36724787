"""Checks on the edges of a graph, and on tensors with a number for each row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gtrain.errors import DataError
from gtrain.graph.store.manifest import NODE_TYPE
from gtrain.graph.store.tables import Graph, tables_of

_CHUNK = 1 << 22  # edges of a memory map that are in memory at a time


def check_edges(edges: Any, sizes: tuple[int, int], origin: str) -> int | None:
    """Check the edge tensors of one type, held-out ones included.

    Args:
        edges: the storage of the edge type.
        sizes: number of source nodes and of target nodes.
        origin: the file or data set, for messages.

    Returns:
        number of relations, the largest ``edge_type`` + 1; None without ``edge_type``.

    Raises:
        DataError: says what is wrong, and where.
    """
    relations = None
    for prefix in ("", "val_", "test_"):
        if prefix and f"{prefix}edge_index" not in edges:
            continue
        index = edges.get(f"{prefix}edge_index")
        _check_index(f"{prefix}edge_index", index, sizes, origin)
        count = index.size(1)
        for name in ("edge_type", "edge_time"):
            if f"{prefix}{name}" in edges:
                check_integers(f"{prefix}{name}", edges[f"{prefix}{name}"], count, origin, negative=name == "edge_time")
        for name in ("edge_weight", "edge_attr"):
            if f"{prefix}{name}" in edges:
                _check_finite(f"{prefix}{name}", edges[f"{prefix}{name}"], count, origin)
        types = edges.get(f"{prefix}edge_type")
        if types is not None and types.numel():
            relations = max(relations or 0, int(types.max()) + 1)
    return relations


def _check_index(name: str, edges: object, sizes: tuple[int, int], origin: str) -> None:
    if not isinstance(edges, Tensor) or edges.dim() != 2 or edges.size(0) != 2 or edges.dtype != torch.int64:
        found = f"{edges.dtype} of shape {list(edges.shape)}" if isinstance(edges, Tensor) else type(edges).__name__
        raise DataError(
            f"{origin}: {name} is {found}, and it should be int64 of shape [2, E]",
            hint=f"give {name} the sources in row 0 and the targets in row 1, as torch.int64",
        )
    limits = torch.tensor(sizes).unsqueeze(1)
    outside = ((edges < 0) | (edges >= limits)).any(dim=0).nonzero()
    if outside.numel():
        edge = int(outside[0])
        there = f"{sizes[0]} nodes, 0..{sizes[0] - 1}" if sizes[0] == sizes[1] else f"{sizes[0]} and {sizes[1]} nodes"
        held = "" if name == "edge_index" else f" of {name}"
        raise DataError(
            f"{origin}: edge {edge}{held} joins {int(edges[0, edge])} and {int(edges[1, edge])}, and the graph has "
            f"{there}",
            hint="correct the edges, or give the graph more nodes",
        )


def weight_facts(graph: Graph, origin: str) -> dict[str, Any]:
    """Return what models need to know of edge weights; empty where the graph has none.

    ``edge_weights`` has the lowest and the highest of the graph. ``negative_weight`` says where the first negative one
    is, and what: by the edge's number, for a source may know the line of a file.
    """
    ends: list[float] = []
    negative: str | None = None
    for table in tables_of(graph).edges:
        where = origin if table.edge_type[0] == NODE_TYPE else f"{origin}, edges {' '.join(table.edge_type)}"
        for split, tensors in (("", table.tensors), *((f"{split} ", held) for split, held in table.held_out.items())):
            weights = tensors.get("edge_weight", np.empty(0))
            for first in range(0, len(weights), _CHUNK):
                block = np.asarray(weights[first : first + _CHUNK]).reshape(min(_CHUNK, len(weights) - first), -1)
                ends += [float(block.min()), float(block.max())]
                if negative is None and ends[-2] < 0:
                    row = int((block < 0).any(axis=1).argmax())
                    negative = f"{where}: the weight of {split}edge {first + row} (from 0) is {block[row].min():g}"
    if not ends:
        return {}
    facts: dict[str, Any] = {"edge_weights": [min(ends), max(ends)]}
    return facts if negative is None else {**facts, "negative_weight": negative}


def check_integers(name: str, values: object, rows: int, origin: str, *, negative: bool) -> None:
    """Refuse what is not one whole number for each row, from 0 on unless it may be negative."""
    if not isinstance(values, Tensor) or values.is_floating_point() or values.shape != (rows,):
        found = f"{values.dtype} of shape {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise DataError(
            f"{origin}: {name} is {found}, and it should be whole numbers of shape [{rows}]",
            hint=f"give {name} as torch.int64, one number for each row",
        )
    if not negative and rows and int(values.min()) < 0:
        row = int((values < 0).nonzero()[0])
        raise DataError(
            f"{origin}: {name} has {int(values[row])} at row {row}, and it counts from 0", hint=f"correct {name}"
        )


def _check_finite(name: str, values: Tensor, rows: int, origin: str) -> None:
    check_rows(name, values, rows, origin, of="edges")
    wrong = (~torch.isfinite(values)).nonzero()
    if wrong.numel():
        raise DataError(
            f"{origin}: {name} has {values[tuple(wrong[0])].item()} at edge {int(wrong[0, 0])} (edges count from 0)",
            hint=f"replace values of {name} that are missing before training",
        )


def check_rows(name: str, tensor: Tensor, rows: int, origin: str, of: str = "nodes") -> None:
    """Refuse a tensor that has not one row for each node, or each of what ``of`` says."""
    found = tensor.size(0) if tensor.dim() else 0
    if found != rows:
        raise DataError(
            f"{origin}: {name} has {found} rows, and the graph has {rows} {of}",
            hint=f"give {name} one row for each of the {of}, in their order",
        )
