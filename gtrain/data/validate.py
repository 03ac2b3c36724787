"""Checks on a graph that was read, before anything of it is written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from gtrain.data.split import MASKS
from gtrain.errors import DataError


def validate_graph(
    data: Data, *, unlabelled: int | None = None, num_classes: int | None = None, origin: str = "the data"
) -> dict[str, Any]:
    """Check a graph, and return what a model needs to know of it.

    Args:
        data: the graph; ``x`` and ``y`` may be None.
        unlabelled: the value of ``y`` that means no label; None means that each node has one.
        num_classes: the number of classes, where the caller knows it; None counts them.
        origin: the file or data set, for messages.

    Returns:
        ``num_features`` (None without features), ``num_classes`` and ``multilabel`` (None without labels).

    Raises:
        DataError: says what is wrong, and where.
    """
    num_nodes = data.num_nodes
    if not num_nodes:
        raise DataError(
            f"{origin}: the graph has no nodes",
            hint="give it an edge, or a number of nodes (data.num_nodes for an edge list)",
        )
    _check_edges(data, num_nodes, origin)
    _check_features(data.x, num_nodes, origin)
    for name in MASKS:
        if name in data:
            _check_mask(name, data[name], num_nodes, origin)
    features = None if data.x is None else data.x.size(1)
    if not isinstance(data.y, Tensor):
        return {"num_features": features, "num_classes": None, "multilabel": None}
    _check_rows("y", data.y, num_nodes, origin)
    if data.y.dim() == 2 and data.y.size(1) > 1:
        return {"num_features": features, **_check_multilabel(data.y, num_classes, origin)}
    classes = _check_classes(data.y, unlabelled, num_classes, origin)
    return {"num_features": features, "num_classes": classes, "multilabel": False}


def labelled_nodes(y: Tensor, unlabelled: int | None) -> Tensor:
    """Return which nodes have a label, ``[N]`` bool; in multi-label data all have."""
    if unlabelled is None or y.dim() == 2:
        return torch.ones(y.size(0), dtype=torch.bool)
    return y != unlabelled


def _check_rows(name: str, tensor: Tensor, num_nodes: int, origin: str) -> None:
    found = tensor.size(0) if tensor.dim() else 0
    if found != num_nodes:
        raise DataError(
            f"{origin}: {name} has {found} rows, and the graph has {num_nodes} nodes",
            hint=f"give {name} one row for each node, in the order of the node ids",
        )


def _check_edges(data: Data, num_nodes: int, origin: str) -> None:
    edges = data.edge_index
    if not isinstance(edges, Tensor) or edges.dim() != 2 or edges.size(0) != 2 or edges.dtype != torch.int64:
        found = f"{edges.dtype} of shape {list(edges.shape)}" if isinstance(edges, Tensor) else type(edges).__name__
        raise DataError(
            f"{origin}: edge_index is {found}, and it should be int64 of shape [2, E]",
            hint="give edge_index the sources in row 0 and the targets in row 1, as torch.int64",
        )
    outside = ((edges < 0) | (edges >= num_nodes)).any(dim=0).nonzero()
    if outside.numel():
        edge = int(outside[0])
        raise DataError(
            f"{origin}: edge {edge} joins {int(edges[0, edge])} and {int(edges[1, edge])}, and the graph has "
            f"{num_nodes} nodes, 0..{num_nodes - 1}",
            hint="correct the edges, or raise the number of nodes (data.num_nodes)",
        )


def _check_features(x: object, num_nodes: int, origin: str) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor) or x.dim() != 2 or x.layout != torch.strided:
        found = f"{x.layout} of shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise DataError(
            f"{origin}: x is {found}, and it should be a dense tensor of shape [N, F]",
            hint="give x one row for each node: x.to_dense() if it is sparse, x.reshape(N, -1) if its shape differs",
        )
    _check_rows("x", x, num_nodes, origin)
    finite = torch.isfinite(x)
    if not finite.all():
        row, column = (~finite).nonzero()[0].tolist()
        rows = int((~finite).any(dim=1).sum())
        raise DataError(
            f"{origin}: x has {float(x[row, column])} at row {row}, column {column} (rows and columns count from 0), "
            f"and {rows} of {num_nodes} rows are not finite",
            hint="replace missing features before training, for example by the column's mean",
        )


def _check_mask(name: str, mask: Tensor, num_nodes: int, origin: str) -> None:
    _check_rows(name, mask, num_nodes, origin)
    if mask.dim() > 2 or not ((mask == 0) | (mask == 1)).all():
        raise DataError(
            f"{origin}: {name} is no mask: it should hold true and false, as [N] or [N, number of splits]",
            hint=f"give {name} as torch.bool, one row for each node",
        )


def _check_multilabel(y: Tensor, num_classes: int | None, origin: str) -> dict[str, Any]:
    wrong = ((y != 0) & (y != 1)).nonzero()  # a NaN is neither, and so is caught here
    if wrong.numel():
        row, column = wrong[0].tolist()
        raise DataError(
            f"{origin}: y is a matrix of {y.size(1)} labels for each node and has {y[row, column].item()} at row "
            f"{row}, column {column}",
            hint="give 0 or 1 for each label, or one column of class numbers",
        )
    if num_classes is not None and num_classes != y.size(1):
        raise DataError(
            f"{origin}: y has {y.size(1)} columns, and data.num_classes={num_classes}",
            hint=f"set data.num_classes={y.size(1)}, or null to count the columns",
        )
    return {"num_classes": y.size(1), "multilabel": True}


def _check_classes(y: Tensor, unlabelled: int | None, num_classes: int | None, origin: str) -> int:
    """Check one label for each node, and return the number of classes."""
    y = y.flatten()
    wrong = (~(y.isfinite() & (y == y.round()))).nonzero() if y.is_floating_point() else y.new_empty(0)
    if wrong.numel():
        node = int(wrong[0])
        raise DataError(
            f"{origin}: the label of node {node} is {float(y[node])}, and labels are integers; {wrong.numel()} of "
            f"{y.numel()} are not",
            hint="give each node a class 0..C-1; mark those without a label by -1, and set data.unlabelled=-1",
        )
    known = y if unlabelled is None else y[y != unlabelled]
    if not known.numel():
        raise DataError(
            f"{origin}: all {y.numel()} nodes have the label {unlabelled}, which data.unlabelled names",
            hint="give some nodes a label, or correct data.unlabelled (null if every node has a label)",
        )
    lowest, highest = int(known.min()), int(known.max())
    if lowest < 0:
        node, count = int((y == lowest).nonzero()[0]), int((known < 0).sum())
        raise DataError(
            f"{origin}: node {node} has the label {lowest}, and {count} of {y.numel()} labels are negative",
            hint=f"if {lowest} marks nodes without a label, set data.unlabelled={lowest}",
        )
    if num_classes is not None:
        if highest >= num_classes:
            node = int((y == highest).nonzero()[0])
            raise DataError(
                f"{origin}: node {node} has the label {highest}, and data.num_classes={num_classes} allows "
                f"0..{num_classes - 1}",
                hint=f"correct the label, or set data.num_classes={highest + 1}, or null to count the classes",
            )
        return num_classes
    distinct = known.unique().numel()
    if 2 * distinct < highest + 1:
        raise DataError(
            f"{origin}: labels must be 0..C-1; the largest is {highest} and only {distinct} different ones occur",
            hint="renumber the labels, or set data.num_classes to the number of classes",
        )
    return highest + 1
