"""Check a graph before it is written to a store."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.prepare.split import MASKS
from gtrain.errors import DataError
from gtrain.graph.store.files import chunks
from gtrain.graph.store.manifest import HELD_OUT, NODE_TYPE
from gtrain.graph.store.tables import Graph, tables_of
from gtrain.nn.compressed import is_compressed
from gtrain.nn.csr import Csr


def check_edges(edges: Any, sizes: tuple[int, int], origin: str) -> int | None:
    """Check the edge tensors of one type, held-out ones included.

    Args:
        edges: the storage of the edge type.
        sizes: number of source nodes and of target nodes.
        origin: the file or data set, for messages.

    Returns:
        Number of relations, the largest ``edge_type`` + 1; None without ``edge_type``.

    Raises:
        DataError: a tensor is invalid; the message names it and the position.
    """
    relations = None
    for prefix in ("", *(f"{split}_" for split in HELD_OUT)):
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
        raise DataError(
            f"{origin}: {name} is {_described(edges)}, and it should be int64 of shape [2, E]",
            hint=f"give {name} the sources in row 0 and the targets in row 1, as torch.int64",
        )
    limits = torch.tensor(sizes).unsqueeze(1)
    outside = ((edges < 0) | (edges >= limits)).any(dim=0).nonzero()
    if outside.numel():
        edge = int(outside[0])
        nodes = f"{sizes[0]} nodes, 0..{sizes[0] - 1}" if sizes[0] == sizes[1] else f"{sizes[0]} and {sizes[1]} nodes"
        suffix = "" if name == "edge_index" else f" of {name}"
        raise DataError(
            f"{origin}: edge {edge}{suffix} joins {int(edges[0, edge])} and {int(edges[1, edge])}, and the graph has "
            f"{nodes}",
            hint="correct the edges, or give the graph more nodes",
        )


def weight_facts(graph: Graph, origin: str) -> dict[str, Any]:
    """Return the facts about edge weights that models need; empty if the graph has no weights.

    ``edge_weights`` has the lowest and the highest weight. ``negative_weight`` is the position (edge number) and the
    value of the first negative weight; a source that knows the file and the line overrides it.
    """
    limits: list[float] = []
    negative: str | None = None
    for table in tables_of(graph).edges:
        location = origin if table.edge_type[0] == NODE_TYPE else f"{origin}, edges {' '.join(table.edge_type)}"
        for split, tensors in (("", table.tensors), *((f"{split} ", held) for split, held in table.held_out.items())):
            weights = tensors.get("edge_weight", np.empty(0))
            for rows in chunks(0, len(weights)):
                block = np.asarray(weights[rows]).reshape(rows.stop - rows.start, -1)
                limits += [float(block.min()), float(block.max())]
                if negative is None and limits[-2] < 0:
                    row = int((block < 0).any(axis=1).argmax())
                    value = block[row].min()
                    negative = f"{location}: the weight of {split}edge {rows.start + row} (from 0) is {value:g}"
    if not limits:
        return {}
    facts: dict[str, Any] = {"edge_weights": [min(limits), max(limits)]}
    return facts if negative is None else {**facts, "negative_weight": negative}


def _described(value: object) -> str:
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def check_integers(name: str, values: object, rows: int, origin: str, *, negative: bool) -> None:
    """Raise DataError unless ``values`` has one integer per row, at least 0 unless ``negative`` is set."""
    if not isinstance(values, Tensor) or values.is_floating_point() or values.shape != (rows,):
        raise DataError(
            f"{origin}: {name} is {_described(values)}, and it should be whole numbers of shape [{rows}]",
            hint=f"give {name} as torch.int64, one number for each row",
        )
    if not negative and rows and int(values.min()) < 0:
        row = int((values < 0).nonzero()[0])
        raise DataError(
            f"{origin}: {name} is {int(values[row])} at row {row}; values must be 0 or more", hint=f"correct {name}"
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
    """Raise DataError unless a tensor has one row per node, or per item of another kind ``of``."""
    actual = tensor.size(0) if tensor.dim() else 0
    if actual != rows:
        raise DataError(
            f"{origin}: {name} has {actual} rows, and the graph has {rows} {of}",
            hint=f"give {name} one row for each of the {of}, in their order",
        )


def validate_graph(
    data: Data | HeteroData,
    *,
    unlabelled: int | None = None,
    num_classes: int | None = None,
    number_labels: Collection[str] = (),
    origin: str = "the data",
) -> dict[str, Any]:
    """Check a graph, and return the facts that a model needs.

    Args:
        data: the graph; ``x`` and ``y`` may be None. At most one node type of a heterogeneous graph may have ``y``.
        unlabelled: the value of ``y`` that means no label; None means that every node has a label.
        num_classes: the number of classes; None counts them.
        number_labels: the node types, ``node`` in a homogeneous graph, whose ``y`` are numbers to predict, with NaN for
            no label.
        origin: the file or data set, for messages.

    Returns:
        ``num_nodes``, ``num_features`` (None without features), ``sparse_features`` (whether ``x`` is a sparse
        tensor), ``num_relations`` (None without ``edge_type``), ``num_classes`` and ``multilabel`` (None without
        labels, and with numbers to predict). For a heterogeneous graph the first two are dictionaries by node type,
        ``sparse_features`` is a list of node types, and ``target`` is the node type with labels.

    Raises:
        DataError: the graph is invalid; the message names the tensor and the position.
    """
    if isinstance(data, HeteroData):
        return _validate_hetero(data, unlabelled, num_classes, number_labels, origin)
    num_nodes = data.num_nodes
    if not num_nodes:
        raise DataError(
            f"{origin}: the graph has no nodes",
            hint="give it an edge, or a number of nodes (data.num_nodes for an edge list)",
        )
    nodes = _check_nodes(data.stores[0], num_nodes, origin)
    relations = check_edges(data.stores[0], (num_nodes, num_nodes), origin)
    labels = _check_targets(data.y, num_nodes, NODE_TYPE in number_labels, unlabelled, num_classes, origin)
    return {"num_nodes": num_nodes, **nodes, "num_relations": relations, **labels}


def _validate_hetero(
    data: HeteroData, unlabelled: int | None, num_classes: int | None, number_labels: Collection[str], origin: str
) -> dict[str, Any]:
    sizes = {node_type: _num_nodes(data, node_type, origin) for node_type in data.node_types}
    if not sizes:
        raise DataError(f"{origin}: the graph has no node types", hint="give the graph nodes of at least one type")
    nodes = {
        node_type: _check_nodes(data[node_type], size, f"{origin}, nodes {node_type!r}")
        for node_type, size in sizes.items()
    }
    relations = None
    for edge_type in data.edge_types:
        where = f"{origin}, edges {' '.join(edge_type)}"
        unknown = [end for end in (edge_type[0], edge_type[2]) if end not in sizes]
        if unknown:
            raise DataError(
                f"{where}: the graph has no nodes of the type {unknown[0]!r}", hint=f"the types are {', '.join(sizes)}"
            )
        count = check_edges(data[edge_type], (sizes[edge_type[0]], sizes[edge_type[2]]), where)
        relations = count if relations is None else max(relations, count or 0)
    targets = [node_type for node_type in data.node_types if isinstance(data[node_type].get("y"), Tensor)]
    if len(targets) > 1:
        raise DataError(
            f"{origin}: nodes of {len(targets)} types have labels: {', '.join(targets)}",
            hint="set data.target to the node type whose labels are to be predicted",
        )
    labels: dict[str, Any] = {"num_classes": None, "multilabel": None}
    if targets:
        y, size, where = data[targets[0]].y, sizes[targets[0]], f"{origin}, nodes {targets[0]!r}"
        labels = _check_targets(y, size, targets[0] in number_labels, unlabelled, num_classes, where)
    return {
        "num_nodes": sizes,
        "num_features": {node_type: facts["num_features"] for node_type, facts in nodes.items()},
        "sparse_features": [node_type for node_type, facts in nodes.items() if facts["sparse_features"]],
        "num_relations": relations,
        "target": targets[0] if targets else None,
        **labels,
    }


def _num_nodes(data: HeteroData, node_type: str, origin: str) -> int:
    count = data[node_type].num_nodes
    if not count:
        raise DataError(
            f"{origin}: the node type {node_type!r} has no nodes, or their number is unknown",
            hint="give the node type features, labels or num_nodes, or remove it",
        )
    return int(count)


def _check_nodes(nodes: Any, num_nodes: int, origin: str) -> dict[str, Any]:
    """Check the node tensors of one type."""
    x = nodes.get("x")
    _check_features(x, num_nodes, origin)
    for name in MASKS:
        if name in nodes:
            _check_mask(name, nodes[name], num_nodes, origin)
    if "time" in nodes:
        check_integers("time", nodes["time"], num_nodes, origin, negative=True)
    sparse = isinstance(x, Tensor) and x.layout == torch.sparse_csr
    return {"num_features": None if x is None else x.size(1), "sparse_features": sparse}


def _check_labels(
    y: object, num_nodes: int, unlabelled: int | None, num_classes: int | None, origin: str
) -> dict[str, Any]:
    if not isinstance(y, Tensor):
        return {"num_classes": None, "multilabel": None}
    check_rows("y", y, num_nodes, origin)
    if y.dim() == 2 and y.size(1) > 1:
        return _check_multilabel(y, unlabelled, num_classes, origin)
    return {"num_classes": _check_classes(y, unlabelled, num_classes, origin), "multilabel": False}


def _check_targets(
    y: object, num_nodes: int, are_numbers: bool, unlabelled: int | None, num_classes: int | None, origin: str
) -> dict[str, Any]:
    """Check labels, which are numbers to predict or classes; return their facts."""
    if are_numbers:
        return _check_numbers(y, num_nodes, origin)
    return _check_labels(y, num_nodes, unlabelled, num_classes, origin)


def _check_numbers(y: object, num_nodes: int, origin: str) -> dict[str, Any]:
    """Check labels that are numbers to predict."""
    facts = {"num_classes": None, "multilabel": None}
    if not isinstance(y, Tensor):
        return facts
    check_rows("y", y, num_nodes, origin)
    if y.dim() != 1 or not y.is_floating_point() or bool(y.isinf().any()):
        problem = _described(y) if not y.is_floating_point() or y.dim() != 1 else f"{_described(y)} with infinity"
        raise DataError(
            f"{origin}: y is {problem}, and numbers to predict are expected",
            hint=f"give y as torch.float32 of shape [{num_nodes}], with NaN for nodes without a label",
        )
    if bool(y.isnan().all()):
        raise DataError(
            f"{origin}: none of {num_nodes} nodes has a label",
            hint="give some nodes a label, or correct the column that has them",
        )
    return facts


def labelled_nodes(y: Tensor, unlabelled: float | None) -> Tensor:
    """Return which nodes have a label, ``[N]`` bool; of several labels each, those whose row is not ``unlabelled``.

    Args:
        y: the labels.
        unlabelled: the value that means no label, which may be NaN; None: every node has a label.
    """
    if unlabelled is None:
        return torch.ones(y.size(0), dtype=torch.bool)
    known = ~y.isnan() if math.isnan(unlabelled) else y != unlabelled
    return known if y.dim() == 1 else known.any(dim=1)


def check_distinct(y: Tensor, unlabelled: float | None, origin: str, label_values: Sequence[Any] | None = None) -> None:
    """Raise DataError if all labels are equal, since a model could learn nothing.

    Args:
        y: the labels.
        unlabelled: see :func:`labelled_nodes`.
        origin: of the data, for the message.
        label_values: the label that each class stands for; None: the class itself.
    """
    if y.dim() == 2 and y.size(1) > 1:
        return
    known = y.flatten()[labelled_nodes(y.flatten(), unlabelled)]
    if known.numel() and bool((known == known[0]).all()):
        needs = "a model needs two numbers" if math.isnan(unlabelled or 0) else "a classifier needs two classes"
        label = f"{known[0].item():.10g}" if label_values is None else repr(label_values[int(known[0])])
        raise DataError(
            f"{origin}: all {known.numel()} labels are {label}, and {needs} at least",
            hint="correct the labels, or the column or file that they are read from",
        )


def _check_features(x: object, num_nodes: int, origin: str) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor) or x.dim() != 2 or x.layout not in (torch.strided, torch.sparse_csr):
        actual = f"{x.layout} of shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise DataError(
            f"{origin}: x is {actual}, and it should be a dense or sparse CSR tensor of shape [N, F]",
            hint="give x one row per node: x.to_sparse_csr() if it is sparse, x.reshape(N, -1) if it has another shape",
        )
    check_rows("x", x, num_nodes, origin)
    if not x.size(1):
        raise DataError(
            f"{origin}: x has the shape {list(x.shape)}: its rows have no columns",
            hint="give each node at least one feature, or remove the features (data.features=null, degree or constant "
            "for an edge list)",
        )
    if x.layout == torch.sparse_csr:
        _check_sparse(Csr(x.col_indices(), x.values(), x.crow_indices()), x.shape, origin)
        return
    if is_compressed(x):
        _check_sparse(x.rows, x.shape, origin)
        return
    first: tuple[int, int] | None = None
    damaged = 0
    for rows in chunks(0, num_nodes, x.element_size() * x.size(1)):  # isfinite allocates a copy
        infinite = ~torch.isfinite(x[rows])
        if infinite.any():
            damaged += int(infinite.any(dim=1).sum())
            row, column = infinite.nonzero()[0].tolist()
            first = first or (rows.start + row, column)
    if first is not None:
        row, column = first
        raise DataError(
            f"{origin}: x has {float(x[row, column])} at row {row}, column {column} (rows and columns count from 0), "
            f"and {damaged} of {num_nodes} rows are not finite",
            hint="replace missing features before training, for example by the column's mean",
        )


def _check_sparse(x: Csr, shape: torch.Size, origin: str) -> None:
    columns, values, pointers = x
    count, entry = 0, -1
    for rows in chunks(0, 0 if values is None else values.numel()):  # isfinite allocates a copy
        assert values is not None
        wrong = (~torch.isfinite(values[rows])).nonzero().flatten()
        entry = rows.start + int(wrong[0]) if wrong.numel() and entry < 0 else entry
        count += wrong.numel()
    if values is not None and count:
        row = int(torch.searchsorted(pointers, entry, right=True)) - 1
        raise DataError(
            f"{origin}: x has {float(values[entry])} at row {row}, column {int(columns[entry])} (rows and columns "
            f"count from 0), and {count} of its {values.numel()} entries are not finite",
            hint="replace missing features before training, or remove them from the sparse rows",
        )
    if columns.numel() and (int(columns.min()) < 0 or int(columns.max()) >= shape[1]):
        raise DataError(
            f"{origin}: x has entries in columns {int(columns.min())}..{int(columns.max())}, and its shape is "
            f"{list(shape)}",
            hint="columns count from 0 and are below the number of features",
        )


def _check_mask(name: str, mask: Tensor, num_nodes: int, origin: str) -> None:
    check_rows(name, mask, num_nodes, origin)
    if mask.dim() > 2 or not ((mask == 0) | (mask == 1)).all():
        raise DataError(
            f"{origin}: {name} is not a mask: it must be boolean, of shape [N] or [N, number of splits]",
            hint=f"give {name} as torch.bool, one row for each node",
        )


def _check_multilabel(y: Tensor, unlabelled: int | None, num_classes: int | None, origin: str) -> dict[str, Any]:
    outside = (y != 0) & (y != 1)  # includes NaN
    wrong = (outside & labelled_nodes(y, unlabelled).unsqueeze(1)).nonzero()
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
    """Check labels with one class per node, and return the number of classes."""
    y = y.flatten()
    wrong = (~(y.isfinite() & (y == y.round()))).nonzero() if y.is_floating_point() else y.new_empty(0)
    if wrong.numel():
        node = int(wrong[0])
        raise DataError(
            f"{origin}: the label of node {node} is {float(y[node])}; labels must be integers, and {wrong.numel()} of "
            f"{y.numel()} are not",
            hint="give each node a class 0..C-1; mark those without a label by -1, and set data.unlabelled=-1",
        )
    known = y if unlabelled is None else y[y != unlabelled]
    if not known.numel():
        raise DataError(
            f"{origin}: none of the {y.numel()} nodes has a label; data.unlabelled={unlabelled} marks missing ones",
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
    # A few classes may be absent from a sample. If most numbers are absent, the labels are codes, not 0..C-1.
    distinct = known.unique().numel()
    if 2 * distinct < highest + 1:
        raise DataError(
            f"{origin}: labels must be 0..C-1; the largest is {highest} and only {distinct} different ones occur",
            hint="renumber the labels, or set data.num_classes to the number of classes",
        )
    return highest + 1
