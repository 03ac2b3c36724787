"""The base of sources that read tables: a graph of one node type or of several, from described tables."""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import cloudpickle
import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import coalesce

from gtrain.data.config import TableConfig
from gtrain.data.ingest.columns import Column
from gtrain.data.ingest.dictionary import first_true
from gtrain.data.module import ColumnFact, GraphDataModule, file_stamp
from gtrain.data.readers.files import find_files
from gtrain.data.tables.columns import (
    ColumnSchema,
    apply,
    feature_columns,
    first_wrong,
    infer,
    present,
    side_by_side,
    whole_seconds,
)
from gtrain.data.tables.description import (
    ColumnChoice,
    EdgeDescription,
    Features,
    LabelColumns,
    NodeDescription,
    Place,
)
from gtrain.data.tables.keys import NodeKeys, edge_ends, has_key, node_key, one_row_per_item
from gtrain.data.tables.labels import UNLABELLED, masks, read_labels, read_numbers, read_split, rows_of
from gtrain.data.tables.outline import outline
from gtrain.data.tables.reading import Table, in_one_piece, is_list, is_text, open_table, query_files
from gtrain.errors import DataError
from gtrain.graph.store.manifest import HELD_OUT, NODE_TYPE
from gtrain.graph.store.tables import EdgeArrays

log = logging.getLogger("gtrain")

IN_MEMORY_EDGES = 10_000_000
"""The largest number of edges, counting both directions, of a graph of one type that is held in memory."""
REVERSE = "rev_"
"""Begins the relation of reverse edges between two node types."""
_LABEL_ROLES = {"class": "label", "number": "label: number"}


@dataclass
class _Edges:
    """The edges of one type: ids of both ends, and tensors ``[E, ...]`` by name."""

    source: Column
    target: Column
    tensors: dict[str, NDArray[Any]] = field(default_factory=dict)
    splits: NDArray[Any] | None = None

    def chosen(self, rows: NDArray[np.int64]) -> _Edges:
        """Return the edges of some rows, whose ends are all that were read."""
        tensors = {name: values[rows] for name, values in self.tensors.items()}
        return _Edges(self.source, self.target, tensors, None if self.splits is None else self.splits[rows])


T = TypeVar("T", bound=TableConfig)


class TableData(GraphDataModule[T]):
    """A graph from tables that a source describes.

    A source sets :attr:`described_nodes` and :attr:`described_edges`.
    """

    @property
    @abstractmethod
    def described_nodes(self) -> Mapping[str, NodeDescription]:
        """The node tables, by type."""

    @property
    @abstractmethod
    def described_edges(self) -> Sequence[EdgeDescription]:
        """The edge tables."""

    always_featured: ClassVar[bool] = False
    """Whether all nodes have features, whatever columns the tables have."""

    @property
    def outline(self) -> dict[str, Any] | None:  # type: ignore[override]
        """What the descriptions and the types of the columns tell; None for new data, and where values decide."""
        if self.trained is not None:
            return None
        types = self._edge_types if self._has_types else None
        return outline(self.described_nodes, self.described_edges, self._open, types, self.always_featured)

    @property
    def origin(self) -> str:
        """Where the graph comes from, for messages."""
        places = [nodes.place for nodes in self.described_nodes.values()]
        places += [edges.place for edges in self.described_edges]
        return ", ".join(place.key if place.path is None else f"{place.key}={place.path}" for place in places)

    def identity(self) -> dict[str, Any]:
        """Return the stamps of the files, and what the user said about each table."""
        nodes = {name: self._described(described) for name, described in self.described_nodes.items()}
        edges = {",".join(described.type): self._described(described) for described in self.described_edges}
        options = {"max_values": self.settings.max_values, "time_scale": self.settings.time_scale}
        return {"nodes": nodes, "edges": edges, **options}

    def check_files(self) -> None:
        """Refuse missing files, failing queries and unknown columns."""
        for nodes in self.described_nodes.values():
            table = self._open(nodes.place)
            node_key(table, nodes.key)
            table.check([nodes.time])
            if not self.applied:
                labels = nodes.labels
                self._open(labels.place).check([labels.label, labels.split, *(labels.key or ())])
                feature_columns(table, nodes.features, [])
        for edges in self.described_edges:
            table = self._open(edges.place)
            edge_ends(table, edges.source, edges.target)
            table.check([edges.relation, edges.weight, edges.time, edges.split])
            if self.trained is None:  # new data may lack columns that the training ignores
                feature_columns(table, edges.features, [])

    def read(self) -> Data | HeteroData | EdgeArrays:
        """Read the tables."""
        self._facts, self._names = {"schema": {}, "keys": {}}, {}
        self._relation_values = list((self.trained or {}).get("relation_values") or ())
        keys = {name: NodeKeys(name, nodes.place) for name, nodes in self.described_nodes.items()}
        for edges in self.described_edges:
            for end in (edges.type[0], edges.type[2]):
                if end not in keys:
                    self._warn_of_type(edges, end)
                    keys[end] = NodeKeys(end, None)
        for name, nodes in self.described_nodes.items():
            table = self._open(nodes.place)
            keys[name].add(table, node_key(table, nodes.key))
            if not len(keys[name]):
                raise DataError(f"{nodes.place.key}: {table.where} has no rows", hint="name a table with nodes")
        read = {edges.type: self._edges(edges, keys) for edges in self.described_edges}
        tensors = {name: self._nodes(nodes, keys[name]) for name, nodes in self.described_nodes.items()}
        is_single = not self._has_types
        counts = {name: len(numbers) for name, numbers in keys.items()}
        graph = self._homogeneous(read, tensors, counts) if is_single else self._heterogeneous(read, tensors, counts)
        for name, numbers in keys.items():
            stored, known = NODE_TYPE if is_single else name, numbers.names()
            if known is not None:
                self._names = {**self._names, stored: known}
                if (form := numbers.form(known)) is not None:
                    self._facts["keys"][stored] = asdict(form)
        return graph

    def _warn_of_type(self, edges: EdgeDescription, node_type: str) -> None:
        """Log that edges name nodes of a type without a table, if other types have one."""
        if self.described_nodes:
            near = difflib.get_close_matches(node_type, self.described_nodes, n=1)
            log.warning(
                "%s: the type %r has no node table, and its nodes are those that edges name%s; the node tables are %s",
                *(edges.place.key, node_type, f" (did you mean {near[0]}?)" if near else ""),
                ", ".join(self.described_nodes),
            )

    def columns(self) -> list[ColumnFact]:
        """Return the role of each column of each table; transformations of features are inferred from their values."""
        facts = []
        for nodes in self.described_nodes.values():
            table, labels = self._open(nodes.place), nodes.labels
            own = labels.place.key == nodes.place.key
            roles: dict[str | None, str] = {name: "key" for name in node_key(table, nodes.key)}
            roles[nodes.time] = "time"
            marked: dict[str | None, str] = {labels.label: _LABEL_ROLES[labels.kind], labels.split: "split"}
            roles |= marked if own else {}
            facts += self._column_facts(table, nodes.features, roles)
            if not own:
                apart = self._open(labels.place)
                named: dict[str | None, str] = {name: "key" for name in _label_key(apart, labels, table, nodes)}
                named |= marked
                facts += [ColumnFact(apart.place.key, name, role, "") for name, role in named.items() if name]
        for edges in self.described_edges:
            table = self._open(edges.place)
            source, target = edge_ends(table, edges.source, edges.target)
            roles = {
                **dict.fromkeys(source, f"source: {edges.type[0]}"),
                **dict.fromkeys(target, f"target: {edges.type[2]}"),
            }
            named = {edges.relation: "relation", edges.weight: "weight", edges.time: "time", edges.split: "split"}
            facts += self._column_facts(table, edges.features, {**roles, **named})
        return facts

    def _column_facts(self, table: Table, features: Features, roles: dict[str | None, str]) -> list[ColumnFact]:
        chosen = feature_columns(table, features, list(roles))
        result = []
        for name in table.types:
            role, detail = roles.get(name, "left out"), ""
            if name in chosen:
                schema = infer(table, name, features.columns.get(name, ColumnChoice()), self.settings.max_values)
                if schema is not None:
                    role, detail = schema.kind, schema.summary
            result.append(ColumnFact(table.place.key, name, role, detail))
        return result

    @property
    def _has_types(self) -> bool:
        """Whether the graph has several types of nodes, or several tables of edges."""
        ends = {end for edges in self.described_edges for end in (edges.type[0], edges.type[2])}
        return len(ends | {*self.described_nodes}) > 1 or len(self.described_edges) > 1

    @property
    def _edge_types(self) -> list[tuple[str, str, str]]:
        """The edge types of a graph with types."""
        types = []
        for edges in self.described_edges:
            source, relation, target = edges.type
            types.append(edges.type)
            if edges.undirected and source != target:
                types.append((target, f"{REVERSE}{relation}", source))
        return types

    @property
    def _no_label(self) -> int | None:
        return UNLABELLED

    @property
    def number_labels(self) -> frozenset[str]:
        """The node types whose labels are numbers to predict."""
        numeric = [name for name, nodes in self.described_nodes.items() if self._has_numbers(nodes)]
        return frozenset(numeric if self._has_types else [NODE_TYPE] * bool(numeric))

    def _has_numbers(self, nodes: NodeDescription) -> bool:
        """Whether labels are numbers to predict: as the trained model has them, else as the user says."""
        known = self._trained_on_numbers(nodes.type)
        return nodes.labels.kind == "number" if known is None else known

    # ----------------------------------------------------------------------------------------------------- nodes

    def _nodes(self, nodes: NodeDescription, keys: NodeKeys) -> dict[str, Tensor]:
        """Return the tensors of a node type."""
        table, chosen = self._open(nodes.place), nodes.labels
        columns = node_key(table, nodes.key)
        own = chosen.place.key == nodes.place.key
        taken = [*columns, nodes.time, *((chosen.label, chosen.split) if own else ())]
        result: dict[str, Tensor] = {}
        x = self._features(f"nodes {nodes.type}", table, nodes.features, taken)
        if x is not None:
            result["x"] = x
        if nodes.time is not None:
            result["time"] = whole_seconds(table.column(nodes.time), nodes.time, table, self.settings.time_scale)
        if chosen.label is None and chosen.split is None:
            return result
        labels, rows = table, np.arange(len(keys))
        if not own:
            labels = self._open(chosen.place)
            named = _label_key(labels, chosen, table, nodes)
            rows = rows_of(labels, partial(keys.find, labels, named), named)
        if chosen.label is not None and chosen.label in labels.types:
            result["y"] = self._labels(nodes, labels, chosen.label, rows, len(keys))
        if chosen.split is not None and chosen.split in labels.types:
            result |= masks(read_split(labels, chosen.split), rows, len(keys), labels)
        return result

    def _labels(
        self, nodes: NodeDescription, table: Table, name: str, rows: NDArray[np.int64], num_nodes: int
    ) -> Tensor:
        if self._has_numbers(nodes):
            return read_numbers(table, name, rows, num_nodes)
        trained = self.trained or {}
        of_model = trained.get("label_values") if trained.get("target") in (None, nodes.type) else None
        several = trained.get("multilabel") if of_model else None
        read = read_labels(table, name, rows, num_nodes, of_model, several, nodes.labels.separator)
        if self.target in (None, nodes.type):
            if read.y.dim() == 2 and len(read.classes) < 2 and self.task == "node" and not self.applied:
                reason = f"the only label is {read.classes[0]!r}" if read.classes else "no row has a label"
                raise DataError(
                    f"{table.place.key}: the column {name!r} has lists of labels, and {reason}",
                    hint="lists need two different labels at least; for one that is present or not, name a column of "
                    "truth values",
                )
            self._facts["label_values"] = read.classes
        return read.y

    def _features(self, key: str, table: Table, features: Features, taken: list[str | None]) -> Tensor | None:
        """Return the features of a table's rows, ``[N, F]``; None without any."""
        trained = (self.trained or {}).get("schema")
        choices = features.columns
        if trained is None:
            named = feature_columns(table, features, taken)
            found = (infer(table, n, choices.get(n, ColumnChoice()), self.settings.max_values) for n in named)
            schemas = [schema for schema in found if schema is not None]
        else:
            schemas = [ColumnSchema.of(fields) for fields in trained.get(key, [])]
            _check_trained(table, schemas)
        self._facts["schema"][key] = [schema.fields() for schema in schemas]
        if not schemas:
            return None
        return side_by_side([apply(table, s, choices.get(s.name, ColumnChoice())) for s in schemas])

    # ----------------------------------------------------------------------------------------------------- edges

    def _edges(self, edges: EdgeDescription, keys: Mapping[str, NodeKeys]) -> _Edges:
        """Read the edges of one type."""
        table = self._open(edges.place)
        source, target = edge_ends(table, edges.source, edges.target)
        read = _Edges(Column(self.store, np.int32), Column(self.store, np.int32))
        kept = []
        lists = any(is_list(table.types[name]) for name in target)
        for first, batch in table.batches(list(dict.fromkeys((*source, *target)))):
            rows = np.arange(first, first + len(batch))
            if lists:
                batch, rows = one_row_per_item(table, target, batch, rows)
            if edges.optional:
                chosen = np.flatnonzero(has_key(batch, target))
                batch, rows = batch.take(chosen), rows[chosen]
            if lists or edges.optional:
                kept.append(rows)
            read.source.append(keys[edges.type[0]].find(table, source, batch, rows))
            read.target.append(keys[edges.type[2]].find(table, target, batch, rows))
        if not len(read.source):
            log.warning("%s: %s has no rows: there are no such edges", edges.place.key, table.where)
        if edges.weight is not None:
            read.tensors["edge_weight"] = self._weights(table, edges.weight)
        if edges.time is not None:
            times = whole_seconds(table.column(edges.time), edges.time, table, self.settings.time_scale)
            read.tensors["edge_time"] = times.numpy()
        if edges.relation is not None:
            read.tensors["edge_type"] = self._relations(table, edges.relation)
        taken = [*source, *target, edges.relation, edges.weight, edges.time, edges.split]
        attributes = self._features(f"edges {','.join(edges.type)}", table, edges.features, taken)
        if attributes is not None:
            read.tensors["edge_attr"] = attributes.to_dense().numpy()
        read.splits = self._edge_splits(edges, table)
        return read.chosen(np.concatenate(kept)) if kept else read

    def _edge_splits(self, edges: EdgeDescription, table: Table) -> NDArray[Any] | None:
        """Return the split of each row as :func:`~gtrain.data.tables.labels.read_split` does; None: it is not used."""
        used = self.task == "link" and self.split.kind == "public" and not self.applied
        return read_split(table, edges.split) if used and edges.split is not None else None

    def _weights(self, table: Table, name: str) -> NDArray[np.float32]:
        column = present(table.column(name), table)
        try:
            values = column.cast(pa.float64(), safe=False).to_numpy()  # rounds whole numbers above 2^53
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            hint = "name a column of numbers"
            if is_text(column.type):
                wrong = first_wrong(column, lambda part: part.cast(pa.float64()))
                problem = f"{table.row(wrong)}: the weight is {column[wrong].as_py()!r}, which is not a number"
                raise DataError(problem, hint=f"correct it, or {hint}") from error
            problem = f"{table.place.key}: the column of weights {name!r} holds {column.type}"
            raise DataError(problem, hint=hint) from error
        if (row := first_true(~(np.abs(values) <= np.finfo(np.float32).max))) is not None:
            raise DataError(
                f"{table.row(row)}: the weight is {values[row]}",
                hint="give each edge a weight that is finite in 32 bits",
            )
        if (row := first_true(values < 0)) is not None:
            where = f"{table.row(row)}: the weight is {values[row]:g}"
            self.check_negative(where)
            self._facts["negative_weight"] = where
        return values.astype(np.float32)

    def _relations(self, table: Table, name: str) -> NDArray[np.int64]:
        column = present(table.column(name), table)
        if column.null_count:
            row = first_true(column.is_null().to_numpy().astype(bool)) or 0
            raise DataError(f"{table.row(row)}: the column {name!r} has no relation", hint="give each edge a relation")
        try:
            texts = column.cast(pa.string())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:  # also bytes that UTF-8 does not allow
            reason = str(error).splitlines()[0]
            raise DataError(
                f"{table.place.key}: the column of relations {name!r} holds {column.type}: {reason}",
                hint="name a column of strings or whole numbers",
            ) from error
        coded = in_one_piece(texts).dictionary_encode()
        codes, values = coded.indices.to_numpy(zero_copy_only=False), coded.dictionary.to_pylist()
        # One numbering for all tables.
        known = self._relation_values
        seen = set(known)
        if new := [value for value in values if value not in seen]:
            if "relation_values" in (self.trained or {}):
                row = first_true(codes == values.index(new[0])) or 0
                raise DataError(
                    f"{table.row(row)}: the relation {new[0]!r} is none of the checkpoint's {len(known)} relations: "
                    f"{', '.join(known[:10])}",
                    hint="correct it, leave such edges out, or train again",
                )
            known += new
        self._names = {**self._names, "relation": list(known)}
        self._facts |= {"num_relations": len(known), "relation_values": list(known)}
        numbers = {value: number for number, value in enumerate(known)}
        return np.array([numbers[value] for value in values], np.int64)[codes]

    # ----------------------------------------------------------------------------------------------------- graphs

    def _homogeneous(
        self,
        read: Mapping[tuple[str, str, str], _Edges],
        tensors: Mapping[str, dict[str, Tensor]],
        counts: Mapping[str, int],
    ) -> Data | EdgeArrays:
        (num_nodes,) = counts.values()
        node_tensors = next(iter(tensors.values()), {})
        edges = next(iter(read.values()), None)
        if edges is None:
            return Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=num_nodes, **node_tensors)
        (described,) = self.described_edges
        if len(edges.source) * (1 + described.undirected) > IN_MEMORY_EDGES:
            if described.undirected:
                message = "%s: more than %d edges, both directions counted: duplicates are not merged"
                log.info(message, described.place.key, IN_MEMORY_EDGES)
                _append_reversed(edges)
            held = _by_split(edges)
            columns = held.pop("train")
            ends = columns.pop("source"), columns.pop("target")
            return EdgeArrays(num_nodes, *ends, columns, dict(node_tensors), held)
        data = Data(num_nodes=num_nodes, **node_tensors)
        _set_edges(data, edges, described.undirected, num_nodes)
        return data

    def _heterogeneous(
        self,
        read: Mapping[tuple[str, str, str], _Edges],
        tensors: Mapping[str, dict[str, Tensor]],
        counts: Mapping[str, int],
    ) -> HeteroData:
        graph = HeteroData()
        for name, count in counts.items():
            graph[name].num_nodes = count
            graph[name].update(tensors.get(name, {}))
        for described in self.described_edges:
            source, relation, target = described.type
            edges, same = read[described.type], source == target
            _set_edges(graph[described.type], edges, described.undirected and same, counts[source])
            if described.predicted:
                _hold_out_training(graph[described.type])
            if described.undirected and not same:
                reverse = graph[target, f"{REVERSE}{relation}", source]
                reverse.update({n: v for n, v in graph[described.type].items() if not n.startswith(HELD_OUT)})
                reverse.edge_index = reverse.edge_index.flip(0)
        return graph

    # ------------------------------------------------------------------------------------------------------ files

    def _open(self, place: Place) -> Table:
        if place.key not in self._tables:
            self._tables[place.key] = open_table(place, self.root, self.store)
        return self._tables[place.key]

    @cached_property
    def _tables(self) -> dict[str, Table]:
        """The tables that this process has opened, by the setting that names them."""
        return {}

    @cached_property
    def _digests(self) -> dict[str, str]:
        """Digests of the frames, which take as long as reading them."""
        return {}

    def _described(self, described: NodeDescription | EdgeDescription) -> dict[str, Any]:
        """Return what identifies a table: the stamps of its files, or its query, and the meaning of its columns."""
        places = {"files": described.place}
        if isinstance(described, NodeDescription) and described.labels.place.key != described.place.key:
            places["labels"] = described.labels.place
        content = {name: self._stamps(place) for name, place in places.items()}
        options = {name: _plain(value) for name, value in vars(described).items() if name not in ("place", "type")}
        reading = {name: changed for name, place in places.items() if (changed := _reading(place))}
        return {**content, **options, **({"reading": reading} if reading else {})}

    def _stamps(self, place: Place) -> Any:
        if place.frame is not None:
            if place.key not in self._digests:
                schema, batches = place.frame.schema, place.frame.to_batches()  # without names and types
                self._digests[place.key] = _digest(schema.serialize(), *(batch.serialize() for batch in batches))
            return self._digests[place.key]
        if place.path is not None:
            return [file_stamp(path) for path in find_files(f"{place.key}.path", place.path, self.root)]
        return [place.duckdb or place.polars, [file_stamp(path) for path in query_files(place)]]


def _label_key(labels: Table, chosen: LabelColumns, table: Table, nodes: NodeDescription) -> tuple[str, ...]:
    """Return the columns of the key in a table of labels: those that were named, else those of the node table."""
    columns = node_key(table, nodes.key)
    return node_key(labels, chosen.key or (columns if set(columns) <= set(labels.types) else None))


def _check_trained(table: Table, schemas: Sequence[ColumnSchema]) -> None:
    """Refuse a table without a column that a model was trained on."""
    for schema in schemas:
        if schema.name not in table.types:
            raise DataError(
                f"{table.place.key}: {table.where} has no column {schema.name!r}, which the checkpoint's model was "
                f"trained on; it has {', '.join(table.types)}",
                hint="give the new data the columns of the training data",
            )


def _set_edges(storage: Any, edges: _Edges, undirected: bool, num_nodes: int) -> None:
    """Set the edges of a PyG storage; undirected duplicates are merged unless they have times or relations."""
    if undirected:
        _append_reversed(edges)
    by_split = _by_split(edges)
    for split, columns in by_split.items():
        prefix = "" if split == "train" else f"{split}_"
        ends = [columns.pop(name).astype(np.int64) for name in ("source", "target")]
        index = torch.from_numpy(np.stack(ends))
        values = {name: torch.from_numpy(np.array(column)) for name, column in columns.items()}
        if undirected and not prefix and len(by_split) == 1 and not {"edge_time", "edge_type"} & set(values):
            index, merged = coalesce(index, list(values.values()), num_nodes=num_nodes, reduce="mean")
            values = dict(zip(values, merged, strict=True))
        storage[f"{prefix}edge_index"] = index
        storage.update({f"{prefix}{name}": value for name, value in values.items()})


def _hold_out_training(storage: Any) -> None:
    """Rename ``edge_*``, the training edges, to ``train_edge_*``, and leave no edge in the graph."""
    for name in [name for name in storage if name.startswith("edge_")]:
        value = storage[name]
        storage[f"train_{name}"] = value
        storage[name] = value[:, :0] if name == "edge_index" else value[:0]


def _append_reversed(edges: _Edges) -> None:
    """Append the reverse of each edge except self-loops."""
    source, target = edges.source.array(), edges.target.array()
    rows = np.flatnonzero(source != target)
    reversed_ends = target[rows], source[rows]
    edges.source.append(reversed_ends[0])
    edges.target.append(reversed_ends[1])
    edges.tensors = {name: np.concatenate([values, values[rows]]) for name, values in edges.tensors.items()}
    if edges.splits is not None:
        edges.splits = np.concatenate([edges.splits, edges.splits[rows]])


def _by_split(edges: _Edges) -> dict[str, dict[str, NDArray[Any]]]:
    """Return the columns of the edges by split; ``train`` alone without a column of splits."""
    columns = {"source": edges.source.array(), "target": edges.target.array(), **edges.tensors}
    if edges.splits is None:
        return {"train": columns}
    chosen = {split: np.flatnonzero(edges.splits == split) for split in HELD_OUT}
    return {split: {n: np.asarray(v)[rows] for n, v in columns.items()} for split, rows in chosen.items()}


def _reading(place: Place) -> dict[str, Any]:
    """Return how the text of a table is read: only what differs from the defaults, whose stores keep their names."""
    options = ("separator", "header", "missing")
    return {name: value for name in options if (value := getattr(place, name)) != getattr(Place, name)}


def _plain(value: Any) -> Any:
    """Return what the user said as JSON; a function as its name, with its arguments."""
    if isinstance(value, LabelColumns):
        return {name: _plain(item) for name, item in vars(value).items() if name != "place"}
    if isinstance(value, (Features, ColumnChoice)):
        return {name: _plain(item) for name, item in vars(value).items()}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, partial):
        return [_plain(value.func), [str(argument) for argument in value.args], _plain(value.keywords)]
    return _function(value) if callable(value) else value


def _function(function: Callable[..., Any]) -> Any:
    """Return what identifies a function: its name, and what it consists of unless it can be imported by that name."""
    module = getattr(function, "__module__", None) or type(function).__module__
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    named: Any = None if module == "__main__" else sys.modules.get(module)
    for part in name.split("."):
        named = getattr(named, part, None)
    if named is function:
        return f"{module}.{name}"
    try:
        content = cloudpickle.dumps(function)
    except Exception:  # of any object that it refers to
        content = os.urandom(16)  # not comparable: no store is used again
    return [f"{module}.{name}", _digest(content)]


def _digest(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]
