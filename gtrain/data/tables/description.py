"""What a user says about each table, ``data.nodes`` and ``data.edges``: its file, and what its columns mean. Light."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gtrain.errors import ConfigError

SINGLE_TYPE = "node"
"""The node type of a graph whose tables name none."""
SINGLE_RELATION = "to"
MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL")
"""Texts that mean a missing value, in text files and in columns of strings; keys are exempt."""
KINDS = {
    "number": "standardised to mean 0 and deviation 1, or as it is where all values are 0 and 1",
    "plain": "numbers as they are",
    "category": "one column of 0 and 1 for each value",
    "list": "one column of 0 and 1 for each item",
    "vector": "lists of equally many numbers, as they are",
    "date": "seconds, standardised",
    "text": "needs an `encoder`",
    "ignore": "left out",
}
"""The kinds of features, and what becomes of their values."""

LABEL_KINDS = {"class": "whole numbers, strings or truth values, or lists of these", "number": "numbers to predict"}
"""What labels may be."""

_SOURCES = ("path", "duckdb", "polars", "frame")
_READING = ("separator", "header", "missing")
_FEATURES = ("features", "ignore", "columns")
_LABELS = ("key", "label", "label_kind", "label_separator", "split")
_NODES = (*_SOURCES, *_READING, *_FEATURES, *_LABELS, "time", "labels")
_EDGES = (
    *(*_SOURCES, *_READING, *_FEATURES, "source", "target", "source_type", "target_type", "relation"),
    *("weight", "time", "split", "undirected", "optional"),
)
_COLUMN = ("kind", "separator", "max_values", "encoder")


@dataclass(frozen=True)
class Place:
    """Where a table's rows are: exactly one of ``path``, ``duckdb``, ``polars`` and ``frame`` is set.

    Attributes:
        key: the setting that names the table, such as ``data.nodes.paper``, for messages.
        path: file names, as :func:`~gtrain.data.readers.files.find_files` takes them.
        duckdb: a query in DuckDB's SQL.
        polars: a query in Polars' SQL.
        frame: a ``pyarrow.Table``.
        separator: of columns in a text file; None: detected.
        header: names of the columns of text files whose first line has none; None: the first line has them.
        missing: texts that mean a missing value.
    """

    key: str
    path: Any = None
    duckdb: str | None = None
    polars: str | None = None
    frame: Any = None
    separator: str | None = None
    header: tuple[str, ...] | None = None
    missing: tuple[str, ...] = MISSING


@dataclass(frozen=True)
class ColumnChoice:
    """What a user says about a column of features.

    Attributes:
        kind: one of :data:`KINDS`; None: inferred.
        separator: of the items of a list that is written as text.
        max_values: the number of values or items with a column of their own, the most frequent ones; None: all.
        encoder: a function from a list of values to an array ``[n, d]``.
    """

    kind: str | None = None
    separator: str | None = None
    max_values: int | None = None
    encoder: Any = None


@dataclass(frozen=True)
class Features:
    """Which columns of a table are features.

    Attributes:
        names: the columns; None: all that have no other meaning.
        ignore: columns that are left out.
        columns: what the user says about single columns.
    """

    names: tuple[str, ...] | None
    ignore: tuple[str, ...]
    columns: Mapping[str, ColumnChoice]


@dataclass(frozen=True)
class LabelColumns:
    """The columns of labels, in the table of the nodes or in one of their own.

    Attributes:
        place: the table.
        key: columns of the nodes' key; None: as in the node table.
        label: column of labels; None: nodes have none.
        split: column of splits; None: nodes have none.
        kind: of the labels, one of :data:`LABEL_KINDS`.
        separator: of several labels of a node that are written as one text; None: a text is one label.
    """

    place: Place
    key: tuple[str, ...] | None
    label: str | None
    split: str | None
    kind: str = "class"
    separator: str | None = None


@dataclass(frozen=True)
class NodeDescription:
    """The table of one node type; ``key`` None: the column ``id``, or else the first one."""

    type: str
    place: Place
    key: tuple[str, ...] | None
    features: Features
    labels: LabelColumns
    time: str | None


@dataclass(frozen=True)
class EdgeDescription:
    """The table of one edge type.

    Attributes:
        type: types of the sources and targets, with the relation between them.
        place: the table.
        features: columns of features.
        source: columns of the source's key; None: columns of usual names, or else the first two; empty: the rows.
        target: likewise, of the target.
        relation: column of relations.
        weight: column of weights.
        time: column of times.
        split: column of splits.
        undirected: whether each row means an edge in both directions.
        optional: whether a row without a target is no edge, as a foreign key may be null; else it is an error.
        predicted: whether no message passes along the edges, which are predicted: those of train are held out too.
    """

    type: tuple[str, str, str]
    place: Place
    features: Features
    source: tuple[str, ...] | None
    target: tuple[str, ...] | None
    relation: str | None
    weight: str | None
    time: str | None
    split: str | None
    undirected: bool
    optional: bool = False
    predicted: bool = False


def node_descriptions(nodes: Any) -> dict[str, NodeDescription]:
    """Return the node tables by type.

    Args:
        nodes: ``data.nodes``: a file name, the entry of a table, or entries by node type.

    Raises:
        ConfigError: an entry has an unknown or a missing key.
    """
    if nodes is None:
        return {}
    if _is_entry(nodes, _NODES):
        return {SINGLE_TYPE: _node("data.nodes", SINGLE_TYPE, nodes)}
    return {str(name): _node(f"data.nodes.{name}", str(name), entry) for name, entry in _by_name("data.nodes", nodes)}


def edge_descriptions(edges: Any, node_types: Sequence[str]) -> list[EdgeDescription]:
    """Return the edge tables.

    Args:
        edges: ``data.edges``: a file name, the entry of a table, or entries by relation.
        node_types: the types of the node tables.

    Raises:
        ConfigError: an entry has an unknown or a missing key, or does not say which types it joins.
    """
    if edges is None:
        return []
    if _is_entry(edges, _EDGES):
        return [_edge("data.edges", SINGLE_RELATION, edges, node_types)]
    return [_edge(f"data.edges.{name}", str(name), entry, node_types) for name, entry in _by_name("data.edges", edges)]


def _node(key: str, node_type: str, value: Any) -> NodeDescription:
    entry = _entry(key, value, _NODES)
    place, columns = _place(key, entry), _names(key, "key", entry)
    apart = entry.get("labels")
    if apart is None:
        labels = _labels(key, entry, place, columns)
    else:
        for name in ("label", "label_kind", "label_separator", "split"):
            if entry.get(name) is not None:
                raise ConfigError(
                    f"{key} has both {name}={entry[name]} and labels.",
                    hint=f"set {name} in one of the two tables.",
                )
        within = f"{key}.labels"
        other = _entry(within, apart, (*_SOURCES, *_READING, *_LABELS))
        labels = _labels(within, other, _place(within, other), _names(within, "key", other))
    return NodeDescription(node_type, place, columns, _features(key, entry), labels, _name(key, "time", entry))


def _labels(key: str, entry: Mapping[str, Any], place: Place, columns: tuple[str, ...] | None) -> LabelColumns:
    kind = entry.get("label_kind") or "class"
    if kind not in LABEL_KINDS:
        kinds = "; ".join(f"{known}: {meaning}" for known, meaning in LABEL_KINDS.items())
        raise ConfigError(f"{key}.label_kind={kind} was set.", hint=f"choose one of {kinds}.")
    separator = entry.get("label_separator")
    if separator is not None and (kind == "number" or not separator):
        raise ConfigError(
            f"{key}.label_separator={separator!r} was set with label_kind={kind}.",
            hint="name what separates several classes of a node, such as label_separator: '|'.",
        )
    return LabelColumns(place, columns, _name(key, "label", entry), _name(key, "split", entry), kind, separator)


def _edge(key: str, relation: str, value: Any, node_types: Sequence[str]) -> EdgeDescription:
    entry = _entry(key, value, _EDGES)
    only = node_types[0] if len(node_types) == 1 else None if node_types else SINGLE_TYPE
    ends = {name: entry.get(name) or only for name in ("source_type", "target_type")}
    for name, end in ends.items():
        if end is None:
            raise ConfigError(
                f"{key} has no {name}, and the node types are {', '.join(node_types)}.",
                hint=f"say which nodes it joins: {name}: {node_types[0]}.",
            )
    return EdgeDescription(
        (str(ends["source_type"]), relation, str(ends["target_type"])),
        _place(key, entry),
        _features(key, entry),
        _names(key, "source", entry),
        _names(key, "target", entry),
        relation=_name(key, "relation", entry),
        weight=_name(key, "weight", entry),
        time=_name(key, "time", entry),
        split=_name(key, "split", entry),
        undirected=_flag(key, "undirected", entry),
        optional=_flag(key, "optional", entry),
    )


def _is_entry(value: Any, keys: Sequence[str]) -> bool:
    """Return whether a value is the entry of a single table, not several entries by name."""
    return not isinstance(value, Mapping) or any(name in value for name in _SOURCES) or not set(value) - set(keys)


def _by_name(key: str, value: Mapping[Any, Any]) -> Sequence[tuple[Any, Any]]:
    if not value:
        raise ConfigError(f"{key}={{}} was set.", hint="name a file, or a file for each type.")
    return list(value.items())


def _entry(key: str, value: Any, allowed: Sequence[str]) -> dict[str, Any]:
    """Return the entry of a table: a file name or a frame stands for an entry with nothing else."""
    if isinstance(value, Sequence):
        return {"path": value}
    if not isinstance(value, Mapping):
        if hasattr(value, "column_names"):  # a pyarrow.Table
            return {"frame": value}
        raise ConfigError(f"{key}={value} was set.", hint=f"name a file, or give it {', '.join(allowed)}.")
    for name in value:
        if name not in allowed:
            close = difflib.get_close_matches(str(name), allowed, n=1)
            also = f"did you mean {close[0]}? " if close else ""
            known = ", ".join(option for option in allowed if option != "frame")
            raise ConfigError(f"{key}.{name}={value[name]} was set.", hint=f"{also}a table has {known}.")
    given = [name for name in _SOURCES if value.get(name) is not None]
    if len(given) != 1:
        found = "neither path nor a query" if not given else " and ".join(given)
        raise ConfigError(f"{key} has {found}.", hint="set path to a file, or duckdb or polars to a query.")
    return dict(value)


def _place(key: str, entry: Mapping[str, Any]) -> Place:
    return Place(
        key,
        path=entry.get("path"),
        duckdb=entry.get("duckdb"),
        polars=entry.get("polars"),
        frame=entry.get("frame"),
        separator=entry.get("separator"),
        header=_names(key, "header", entry),
        missing=_missing(key, entry.get("missing")),
    )


def _missing(key: str, value: Any) -> tuple[str, ...]:
    """Return the texts that mean a missing value: one, or several of them."""
    if value is None:
        return MISSING
    texts = [value] if isinstance(value, (str, int, float)) else value
    if isinstance(texts, Sequence) and all(isinstance(text, (str, int, float)) for text in texts):
        return tuple(map(str, texts))
    raise ConfigError(f"{key}.missing={value} was set.", hint="give a text, or a list of texts.")


def _flag(key: str, name: str, entry: Mapping[str, Any]) -> bool:
    value = entry.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise ConfigError(f"{key}.{name}={value!r} was set.", hint="set true or false.")


def _features(key: str, entry: Mapping[str, Any]) -> Features:
    choices = column_choices(f"{key}.columns", entry.get("columns") or {})
    return Features(_names(key, "features", entry), _names(key, "ignore", entry) or (), choices)


def column_choices(key: str, columns: Mapping[str, Any]) -> dict[str, ColumnChoice]:
    """Return what a user says about single columns: a kind, or the attributes of a :class:`ColumnChoice`.

    Args:
        key: the setting, for messages.
        columns: by name.

    Raises:
        ConfigError: a kind or an attribute is unknown, or a text has no encoder.
    """
    choices = {}
    for name, value in columns.items():
        within = f"{key}.{name}"
        choice = {"kind": value} if isinstance(value, str) else value
        if not isinstance(choice, Mapping) or set(choice) - set(_COLUMN):
            raise ConfigError(f"{within}={value} was set.", hint=f"give a kind, or a mapping of {', '.join(_COLUMN)}.")
        if choice.get("kind") not in (None, *KINDS):
            kinds = "; ".join(f"{kind}: {meaning}" for kind, meaning in KINDS.items())
            raise ConfigError(f"{within}: the kind is {choice['kind']}.", hint=f"choose one of {kinds}.")
        if choice.get("kind") == "text" and choice.get("encoder") is None:
            raise ConfigError(
                f"{within}: the kind is text, and there is no encoder.",
                hint="encoder: {_target_: your_package.embed, _partial_: true}, a function from a list of strings to "
                "an array with a row for each.",
            )
        most = choice.get("max_values")
        if most is not None and (not isinstance(most, int) or most < 1):
            raise ConfigError(f"{within}.max_values={most} was set.", hint="give a number of values, 1 or more.")
        choices[str(name)] = ColumnChoice(**choice)
    return choices


def _names(key: str, name: str, entry: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the names of one or several columns."""
    value = entry.get(name)
    if value is None:
        return None
    if isinstance(value, (str, int)):
        return (str(value),)
    if isinstance(value, Sequence) and all(isinstance(column, (str, int)) for column in value):
        return tuple(map(str, value))
    raise ConfigError(f"{key}.{name}={value} was set.", hint="name a column, or a list of columns.")


def _name(key: str, name: str, entry: Mapping[str, Any]) -> str | None:
    names = _names(key, name, entry)
    if names is not None and len(names) != 1:
        raise ConfigError(f"{key}.{name}={list(names)} was set.", hint="name one column.")
    return None if names is None else names[0]
