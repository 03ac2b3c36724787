"""Relational databases with a task, in the form of RelBench."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data, HeteroData

from gtrain.data.config import RelBenchConfig
from gtrain.data.readers.files import find_folder, similar
from gtrain.data.tables.description import (
    EdgeDescription,
    Features,
    LabelColumns,
    NodeDescription,
    Place,
    column_choices,
)
from gtrain.data.tables.graph import REVERSE, TableData, log
from gtrain.data.tables.labels import has_fractions
from gtrain.data.tables.reading import Table, is_list, open_table
from gtrain.errors import ConfigError, DataError, unreadable
from gtrain.graph.store.manifest import EdgeType
from gtrain.graph.store.tables import EdgeArrays

ALWAYS = -(2**62)
"""The time of rows of tables without times: before every other."""
TASK = "task"
"""The node type of the rows of the task's tables, unless a table has this name; of a task of recommendation, the
relation of its edges."""
_SPLITS = ("train", "val", "test")
_NOTHING = Features((), (), {})


@dataclass(frozen=True)
class _Table:
    """A table of the database, and what its metadata say.

    Attributes:
        paths: its files.
        columns: names of its columns.
        key: column of the primary key; None: rows have none.
        time: column of the time at which a row comes into being; None: it is always there.
        foreign: the table that each foreign key refers to, by column.
    """

    paths: tuple[Path, ...]
    columns: tuple[str, ...]
    key: str | None
    time: str | None
    foreign: Mapping[str, str]


@dataclass(frozen=True)
class _Recommendation:
    """The columns of a task that predicts links: which rows of another table a row will refer to next.

    Attributes:
        source: column of the key of the entity.
        target: column of the keys of the answers.
        has_lists: whether that column has lists; else one key per row, which may be null.
        edge_type: of the answers: table of the entity, :data:`TASK`, table of the answers.
    """

    source: str
    target: str
    has_lists: bool
    edge_type: EdgeType


class RelBenchData(TableData[RelBenchConfig]):
    """A relational database as a temporal heterogeneous graph, with a task on the rows of one of its tables.

    Each row of a table is a node with its time, and each foreign key an edge in both directions (Fey et al. 2024,
    "Position: Relational Deep Learning"). Each row of the task's tables is a node of the type ``task`` with a time, a
    label and an edge from its entity; an entity has as many of them as there are times at which it is asked about.
    No edge leads from these nodes, so that no label is seen through another row. With ``temporal_strategy`` a seed sees
    rows that are not later than its time alone.

    The answers of a task of recommendation are edges with the time of their row, from the entity to each answer. They
    are held out, also those of train: no message passes along them.

    Files are as RelBench caches them: ``db/<table>.parquet`` and ``tasks/<name>/{train,val,test}.parquet``, with
    ``pkey_col``, ``time_col`` and ``fkey_col_to_pkey_table`` in the metadata of each file.

    Its settings are those of :class:`~gtrain.data.config.RelBenchConfig`.
    """

    name = "relbench"
    always_featured = True

    @cached_property
    def described_nodes(self) -> dict[str, NodeDescription]:
        """The tables of the database, and the rows of a task of labels."""
        chosen = self.settings.columns or {}
        if unknown := [name for name in chosen if name not in self._database]:
            raise ConfigError(
                f"data.columns.{unknown[0]} was set; the tables are {', '.join(self._database)}.", hint="correct it."
            )
        nodes = {}
        for name, table in self._database.items():
            place = self._place(name, table)
            choices = column_choices(f"data.columns.{name}", chosen.get(name) or {})
            features = Features(None, tuple(table.foreign), choices)
            labels = LabelColumns(place, None, None, None)
            nodes[name] = NodeDescription(name, place, (table.key,) if table.key else (), features, labels, table.time)
        if self._recommendation is not None:
            return nodes
        place, node_type = self._task_place, self._task_type
        labels = LabelColumns(place, None, self._label, None, self._label_kind(place))
        nodes[node_type] = NodeDescription(node_type, place, self._task_key, _NOTHING, labels, self._task.time)
        return nodes

    @cached_property
    def described_edges(self) -> list[EdgeDescription]:
        """The foreign keys, and the answers of a task of recommendation."""
        edges = []
        for name, table in self._database.items():
            for column, other in table.foreign.items():
                rows = (table.key,) if table.key else ()
                edges.append(self._foreign_key((name, column, other), self._place(name, table), rows, (column,)))
        if self._recommendation is not None:
            return [*edges, self._answers(self._recommendation)]
        for column, entity in self._task.foreign.items():
            # From the entity to the row, and not back.
            kind = (entity, f"{REVERSE}{column}", self._task_type)
            edges.append(self._foreign_key(kind, self._task_place, (column,), self._task_key))
        return edges

    @property
    def outline(self) -> dict[str, Any] | None:  # type: ignore[override]
        """That of the tables, and whether the task is one of recommendation."""
        facts = super().outline
        return None if facts is None else {**facts, "recommends": self._recommendation is not None}

    def read(self) -> Data | HeteroData | EdgeArrays:
        """Read the database and the task."""
        graph = super().read()
        assert isinstance(graph, HeteroData)
        for name in graph.node_types:
            count = int(graph[name].num_nodes or 0)
            if "x" not in graph[name]:
                graph[name].x = torch.ones(count, 1)  # else a model would learn a row of its own for each node
            if "time" not in graph[name]:
                graph[name].time = torch.full((count,), ALWAYS)
        if self._recommendation is not None:
            self._drop_unknown(graph, self._recommendation)
            return graph
        first = 0
        for split, rows in zip(_SPLITS, self._task_rows, strict=True):
            task = graph[self._task_type]
            mask = torch.zeros(int(task.num_nodes or 0), dtype=torch.bool)
            mask[first : first + rows] = True
            task[f"{split}_mask"], first = mask, first + rows
        return graph

    def follow(self, training: Mapping[str, Any] | None, *, applied: bool = True) -> None:
        super().follow(training, applied=applied)
        # What the tables are depends on it: rows that a model is applied to may lack the column of labels.
        for name in ("described_nodes", "described_edges", "_recommendation", "_task_place", "_tables"):
            self.__dict__.pop(name, None)

    def check_files(self) -> None:
        """Refuse missing files, unknown columns, missing labels, and a task of another kind than the model's."""
        if not self.applied and self._recommendation is None and self._label is None:
            raise ConfigError(
                f"data.name={self.settings.name} has no column that is neither a key nor the time.",
                hint="add the column of labels to its files.",
            )
        if not self.applied:
            # Refuses files with different columns.
            open_table(self._place(self._task_type, self._task), self.root, self.store)
        super().check_files()
        asks, task = ("for labels", "node") if self._recommendation is None else ("which rows follow", "link")
        if self.task != task:
            raise ConfigError(
                f"data.name={self.settings.name} asks {asks}, and the model has the task {self.task}.",
                hint=f"set model.task={task} (without a model data.task={task}), with model=hetero_sage or hgt.",
            )

    # --------------------------------------------------------------------------------------------- recommendation

    @cached_property
    def _recommendation(self) -> _Recommendation | None:
        """The columns of a task of recommendation; None: the task asks for labels."""
        foreign = self._task.foreign
        types = self._open(self._task_place).types
        if self.applied and self._trained_on_numbers(self._task_type) is not None:
            return None  # its new rows may lack the column of labels
        lists = [column for column in foreign if is_list(types[column])]
        others = [name for name in self._task.columns if name not in (*foreign, self._task.time)]
        if not lists and (len(foreign) != 2 or others or self.settings.label is not None):
            return None
        if len(foreign) != 2 or len(lists) > 1:
            raise DataError(
                f"{self._task.paths[0]}: the foreign keys are {', '.join(foreign)}, of which {len(lists)} have lists",
                hint="a task of recommendation has two: that of the entity, and that of the answers",
            )
        source, target = sorted(foreign, key=lambda column: column in lists)
        for column in (source, target):
            if foreign[column] not in self._database:
                raise DataError(
                    f"{self._task.paths[0]}: the foreign key {column!r} refers to the table {foreign[column]!r}; the "
                    f"tables are {', '.join(self._database)}",
                    hint="correct fkey_col_to_pkey_table",
                )
        return _Recommendation(source, target, bool(lists), (foreign[source], TASK, foreign[target]))

    def _answers(self, asked: _Recommendation) -> EdgeDescription:
        return EdgeDescription(
            asked.edge_type,
            replace(self._task_place, key=f"{TASK}.{asked.target}"),
            _NOTHING,
            (asked.source,),
            (asked.target,),
            relation=None,
            weight=None,
            time=self._task.time,
            split=None,
            undirected=False,
            optional=not asked.has_lists,
            predicted=True,
        )

    def _edge_splits(self, edges: EdgeDescription, table: Table) -> NDArray[Any] | None:
        return np.repeat(np.array(_SPLITS, dtype=object), self._task_rows) if edges.predicted else None

    def _drop_unknown(self, graph: HeteroData, asked: _Recommendation) -> None:
        """Remove answers that nobody can name at the time of their row: rows that come into being later."""
        source, _, target = asked.edge_type
        answers = graph[asked.edge_type]
        for split in _SPLITS:
            index, time = answers[f"{split}_edge_index"], answers[f"{split}_edge_time"]
            known = (graph[source].time[index[0]] <= time) & (graph[target].time[index[1]] <= time)
            answers[f"{split}_edge_index"], answers[f"{split}_edge_time"] = index[:, known], time[known]
            if count := int((~known).sum()):
                log.warning(
                    "%s: %d of %d answers of %s are left out: the row of %s or of %s is later than the question",
                    self._task.paths[_SPLITS.index(split)], count, known.numel(), split, source, target,
                )  # fmt: skip
        if not answers.train_edge_index.numel():
            raise DataError(
                f"{self._task.paths[0]} has no answer: all lists of {asked.target!r} are empty, or name later rows",
                hint="correct the file",
            )

    # ------------------------------------------------------------------------------------------------------- files

    @cached_property
    def _folder(self) -> Path:
        return find_folder("data.path", self.settings.path, self.root, "name the folder that has db and tasks")

    @cached_property
    def _database(self) -> dict[str, _Table]:
        files = sorted((self._folder / "db").glob("*.parquet"))
        if not files:
            raise DataError(
                f"data.path={self.settings.path}: {self._folder / 'db'} has no *.parquet",
                hint="name a folder that RelBench wrote: db/<table>.parquet and tasks/<name>",
            )
        tables = {file.stem: _described(file) for file in files}
        for name, table in tables.items():
            for column, other in table.foreign.items():
                if other not in tables:
                    raise DataError(
                        f"{table.paths[0]}: the foreign key {column!r} of {name} refers to the table {other!r}, and "
                        f"{self._folder / 'db'} has {', '.join(tables)}",
                        hint=f"add {other}.parquet, or remove the key from the metadata",
                    )
        return tables

    @cached_property
    def _task(self) -> _Table:
        folder = self._folder / "tasks" / self.settings.name
        if not folder.is_dir():
            tasks = sorted(path.name for path in (self._folder / "tasks").glob("*") if path.is_dir())
            raise DataError(
                f"data.name={self.settings.name}: no such task in {self._folder / 'tasks'}",
                hint=f"the tasks are {', '.join(tasks)}" if tasks else "name a folder of train, val and test.parquet",
            )
        files = [folder / f"{split}.parquet" for split in _SPLITS]
        for file in files:
            if not file.is_file():
                raise DataError(f"{file}: no such file", hint=f"a task has three files{similar(file.name, [folder])}")
        tables = [_described(file) for file in files]
        if tables[0].time is None or not tables[0].foreign:
            raise DataError(
                f"{files[0]}: its metadata name {'no time' if tables[0].time is None else 'no entity'}",
                hint="write time_col and fkey_col_to_pkey_table, as RelBench does",
            )
        columns = tuple(name for name in tables[0].columns if all(name in table.columns for table in tables))
        return _Table(tuple(files), columns, None, tables[0].time, tables[0].foreign)

    @cached_property
    def _task_key(self) -> tuple[str, ...]:
        """The entity and the time, if no two rows have the same ones: predictions then name them; else no columns."""
        time = self._task.time
        columns = [*self._task.foreign, *([] if time is None else [time])]
        if not set(columns) <= set(self._task.columns):
            return ()  # refused where the columns are read
        try:
            tables = [pq.read_table(file, columns=columns) for file in self._task.paths]
            rows = pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException:  # of types that do not suit; refused where the columns are read
            return ()
        distinct = rows.group_by(columns).aggregate([])
        named = not any(rows.column(name).null_count for name in columns)
        return tuple(columns) if named and len(distinct) == len(rows) else ()

    @cached_property
    def _task_type(self) -> str:
        """The node type of the rows of the task."""
        name = TASK
        while name in self._database:
            name += "_rows"
        return name

    @cached_property
    def _task_place(self) -> Place:
        """The rows of the task: its files, or their common columns where some lack labels."""
        task = self._task
        if all(pq.read_schema(file).names == list(task.columns) for file in task.paths):
            return Place(self._task_type, path=[str(path) for path in task.paths])
        tables = [pq.read_table(file, columns=list(task.columns)) for file in task.paths]
        return Place(self._task_type, frame=pa.concat_tables(tables, promote_options="permissive"))

    @property
    def _task_rows(self) -> list[int]:
        return [pq.read_metadata(file).num_rows for file in self._task.paths]

    @property
    def _label(self) -> str | None:
        """The column of labels; None: the files have none."""
        others = [name for name in self._task.columns if name not in (*self._task.foreign, self._task.time)]
        if (chosen := self.settings.label) is not None:
            return None if self.applied and chosen not in self._task.columns else chosen
        if not others:
            return None
        if len(others) > 1:
            raise ConfigError(
                f"data.name={self.settings.name} has {len(others)} columns that are neither a key nor the time: "
                f"{', '.join(others)}.",
                hint="set data.label to the column of labels.",
            )
        return others[0]

    def _label_kind(self, place: Place) -> str:
        """Return the kind of the labels: the one that was set, or ``number`` if a label has a fraction."""
        label = self._label
        if self.settings.label_kind is not None or label not in self._task.columns:  # check_files refuses it
            return self.settings.label_kind or "class"
        return "number" if has_fractions(self._open(place), label) else "class"

    def _place(self, name: str, table: _Table) -> Place:
        return Place(name, path=[str(path) for path in table.paths])

    def _foreign_key(
        self, kind: tuple[str, str, str], place: Place, source: tuple[str, ...], target: tuple[str, ...]
    ) -> EdgeDescription:
        both = not kind[1].startswith(REVERSE)
        return EdgeDescription(
            kind,
            replace(place, key=f"{place.key}.{kind[1]}"),
            _NOTHING,
            source,
            target,
            relation=None,
            weight=None,
            time=None,
            split=None,
            undirected=both,
            optional=True,
        )


def _described(file: Path) -> _Table:
    """Return what the metadata of a file say."""
    with unreadable(f"{file} is not a Parquet file, or is damaged", "write it again", pa.ArrowInvalid, OSError):
        schema = pq.read_schema(file)
    try:
        known = {key.decode(): value for key, value in (schema.metadata or {}).items()}
        key, time, foreign = (json.loads(known[name]) for name in ("pkey_col", "time_col", "fkey_col_to_pkey_table"))
        named: Sequence[str] = [name for name in (key, time, *foreign) if name is not None]
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(
            f"{file} has no metadata pkey_col, time_col and fkey_col_to_pkey_table",
            hint="write the file with RelBench's Table.save, or add them to the schema's metadata as JSON",
        ) from error
    if missing := [name for name in named if name not in schema.names]:
        raise DataError(
            f"{file} has no column {missing[0]!r}, which its metadata name; it has {', '.join(schema.names)}",
            hint="correct the metadata",
        )
    return _Table((file,), tuple(schema.names), key, time, dict(foreign))
