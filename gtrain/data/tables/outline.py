"""What descriptions and types of columns tell of a graph before its tables are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gtrain.data.module import OUTLINE
from gtrain.data.tables.columns import feature_columns
from gtrain.data.tables.description import ColumnChoice, EdgeDescription, Features, NodeDescription, Place
from gtrain.data.tables.keys import node_key
from gtrain.data.tables.reading import Table, is_date, is_list, is_text

Open = Callable[[Place], Table]

_EVIDENCE = 1000
"""Rows that are looked at to see whether a column has two values."""


def outline(
    nodes: Mapping[str, NodeDescription],
    edges: Sequence[EdgeDescription],
    open_table: Open,
    edge_types: Sequence[tuple[str, str, str]] | None,
    featured: bool,
) -> dict[str, Any] | None:
    """Return the outline of a graph from tables; see :attr:`~gtrain.data.module.GraphDataModule.outline`.

    Args:
        nodes: the node tables, by type.
        edges: the edge tables.
        open_table: opens a table.
        edge_types: of the graph, with those of reverse edges; None: the graph has no types.
        featured: whether all nodes have features whatever the tables have.

    Returns:
        None if only the values decide whether nodes have features, or which nodes have labels.
    """
    widths: dict[str, int | None] = dict.fromkeys(
        [*nodes, *(end for described in edges for end in (described.type[0], described.type[2]))]
    )
    labelled: dict[str, dict[str, Any]] = {}
    for name, described in nodes.items():
        has_features = featured or _has_features(described, open_table)
        if has_features is None:
            return None
        widths[name] = OUTLINE["num_features"] if has_features else None
        if described.labels.label is not None:
            numeric = described.labels.kind == "number"
            dtype = open_table(described.labels.place).types[described.labels.label]
            listed = not numeric and (is_list(dtype) or described.labels.separator is not None and is_text(dtype))
            labelled[name] = _label_facts(numeric, listed)
    if len(labelled) > 1:
        return None
    facts = {
        **OUTLINE,
        **next(iter(labelled.values()), {"num_classes": None}),
        "num_relations": 2 if any(described.relation is not None for described in edges) else None,
    }
    if edge_types is None:
        return {**facts, "num_features": next(iter(widths.values()))}
    return {
        **facts,
        "num_nodes": dict.fromkeys(widths, OUTLINE["num_nodes"]),
        "num_features": widths,
        "sparse_features": [],
        "target": next(iter(labelled), None),
        "edge_types": tuple(edge_types),
    }


def _label_facts(numeric: bool, listed: bool) -> dict[str, Any]:
    """Return the facts of labels: numbers to predict, lists of classes, or classes."""
    if numeric:
        return {"num_classes": None, "label_scale": {"mean": 0.0, "deviation": 1.0}}
    return {"num_classes": OUTLINE["num_classes"], "multilabel": listed}


def _has_features(described: NodeDescription, open_table: Open) -> bool | None:
    """Return whether a table has a column of features; None if the values decide."""
    table, labels = open_table(described.place), described.labels
    own = labels.place.key == described.place.key
    taken = [*node_key(table, described.key), described.time, *((labels.label, labels.split) if own else ())]
    columns = feature_columns(table, described.features, taken)
    if not columns:
        return False
    return True if any(_is_feature(table, name, described.features) for name in columns) else None


def _is_feature(table: Table, name: str, features: Features) -> bool:
    """Return whether a column is certainly one of features, whatever the values that are not looked at."""
    choice = features.columns.get(name, ColumnChoice())
    if choice.kind is not None or choice.encoder is not None:
        return True
    dtype, types = table.types[name], pa.types
    if is_list(dtype):
        return not _is_constant(table, name, least=1)
    if types.is_integer(dtype) or types.is_floating(dtype) or types.is_boolean(dtype) or is_date(dtype):
        return not _is_constant(table, name, least=2)
    return False  # strings may be text, which is left out


def _is_constant(table: Table, name: str, least: int) -> bool:
    """Return whether a column's first rows have fewer values than ``least``."""
    for _, batch in table.batches([name]):
        column = batch[name].slice(0, _EVIDENCE)
        return len(column) - column.null_count < 1 or (least > 1 and pc.count_distinct(column).as_py() < least)
    return True
