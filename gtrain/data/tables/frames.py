"""Data frames and graphs of networkx as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from gtrain.errors import ConfigError


def entries(frames: Any) -> Any:
    """Return frames as ``data.nodes`` or ``data.edges``: the entry of a table, or entries by name.

    Args:
        frames: a frame, an entry with a ``frame``, or frames or entries by name; None.

    Raises:
        ConfigError: a value is no frame.
    """
    if frames is None:
        return None
    if not isinstance(frames, Mapping):
        return {"frame": as_table(frames)}
    if "frame" in frames:
        labels = frames.get("labels")
        apart = {} if labels is None else {"labels": entries(labels)}
        return {**frames, "frame": as_table(frames["frame"]), **apart}
    return {name: entries(frame) for name, frame in frames.items()}


def as_table(frame: Any) -> Any:
    """Return a frame of pandas or Polars, or one of pyarrow as it is, as a ``pyarrow.Table``.

    Raises:
        ConfigError: it is no frame, or a column holds objects of different types.
    """
    try:
        if isinstance(frame, pa.Table):
            return frame
        if hasattr(frame, "collect_schema") and hasattr(frame, "collect"):  # a lazy frame of Polars
            frame = frame.collect()
        if hasattr(frame, "to_arrow"):
            return frame.to_arrow()
        if hasattr(frame, "iloc"):
            return pa.Table.from_pandas(_with_index(frame), preserve_index=False).replace_schema_metadata()
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError) as error:
        raise ConfigError(
            f"a data frame cannot be read: {str(error).splitlines()[0]}",
            hint="give each column values of one type: frame[column].astype(str).",
        ) from error
    raise ConfigError(
        f"a {type(frame).__name__} was given as a table.", hint="give a frame of pandas, Polars or pyarrow."
    )


def _with_index(frame: Any) -> Any:
    """Return a frame of pandas in which an index with names is columns.

    Raises:
        ConfigError: an index without a name holds texts.
    """
    if all(name is not None for name in frame.index.names):
        try:
            return frame.reset_index()
        except ValueError as error:  # a column has the name
            raise ConfigError(
                f"the index of a data frame cannot become a column: {error}.",
                hint="rename it, or leave it out by frame.reset_index(drop=True).",
            ) from error
    if frame.index.nlevels > 1 or frame.index.inferred_type == "string":
        raise ConfigError(
            "a data frame has an index without a name, which would be lost.",
            hint="frame.rename_axis('id').reset_index() makes it a column; frame.reset_index(drop=True) leaves it out.",
        )
    return frame


def of_networkx(graph: Any, label: str | None) -> dict[str, Any]:
    """Return the settings ``nodes`` and ``edges`` of a graph of networkx.

    Nodes that are neither all whole numbers of 64 bits nor all strings are named by ``str``.

    Raises:
        ConfigError: two nodes have one name, or an attribute has values of different types or above 64 bits.
    """
    if not len(graph):
        raise ConfigError("a networkx graph without nodes was given.", hint="add nodes.")
    whole = all(type(node) is int and -(2**63) <= node < 2**63 for node in graph)
    names = {node: node if whole else str(node) for node in graph}
    if len(set(names.values())) < len(names):
        raise ConfigError(
            "two nodes of a networkx graph have the same name as text, such as 1 and '1'.",
            hint="networkx.convert_node_labels_to_integers numbers them.",
        )
    attributes = {name for _, values in graph.nodes(data=True) for name in values}
    of_edges = {name for *_, values in graph.edges(data=True) for name in values}
    key, source, target = _free("id", attributes), _free("source", of_edges), _free("target", of_edges)
    node_rows = [{**values, key: names[node]} for node, values in graph.nodes(data=True)]
    edge_rows = [{**values, source: names[a], target: names[b]} for a, b, values in graph.edges(data=True)]
    nodes = {"frame": _rows(node_rows), "key": key, **({} if label is None else {"label": label})}
    frame = _rows(edge_rows or [{source: None, target: None}]).slice(0, len(edge_rows))
    weight = {"weight": "weight"} if "weight" in frame.column_names else {}
    edges = {"frame": frame, "source": source, "target": target, "undirected": not graph.is_directed(), **weight}
    return {"nodes": nodes, "edges": edges}


def _free(name: str, taken: set[str]) -> str:
    """Return a name that no attribute has."""
    while name in taken:
        name += "_"
    return name


def _rows(rows: list[dict[str, Any]]) -> Any:
    """Return rows as a table with every column that one of them has."""
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        return pa.table({str(name): [row.get(name) for row in rows] for name in names})
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise ConfigError(
            f"the attributes of a networkx graph cannot be read: {str(error).splitlines()[0]}",
            hint="give an attribute values of one type, and whole numbers of at most 64 bits.",
        ) from error
