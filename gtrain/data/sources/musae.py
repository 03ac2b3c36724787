"""The social networks of MUSAE: Facebook pages, Twitch users and others."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from gtrain.data.config import MusaeConfig
from gtrain.data.module import SPARSE_OUTLINE, GraphDataModule, file_stamp
from gtrain.data.readers.number_table import read_table
from gtrain.errors import ConfigError, DataError
from gtrain.graph.store.tables import csr_tensor

FILES = {"edges": r"_edges\.csv", "features": r"(_features)?\.json", "target": r"_target\.csv"}
MISSING = ["", "nan", "NaN", "NULL", "null"]
"""What stands for no value in the file of labels."""
MOST_FEATURES = 1 << 31
"""Feature ids are below this."""
LABELS = ("page_type", "mature", "ml_target")
"""Columns of labels that are known: of Facebook, Twitch and GitHub."""

Ints = NDArray[np.int64]


class MusaeData(GraphDataModule):
    """An undirected social network with sparse binary features (Rozemberczki et al. 2021).

    Three files, wherever below the folder they lie: ``<name>_edges.csv`` (two columns of node ids),
    ``<name>_features.json`` (the feature ids of each node) and ``<name>_target.csv`` (a column of node ids, ``new_id``
    or else ``id``, and one of labels); ``musae_`` may stand before their names. Classes are numbered in the order of
    the labels, and nodes in the order of their ids.

    Its settings are those of :class:`~gtrain.data.config.MusaeConfig`.
    """

    outline = SPARSE_OUTLINE

    settings_type = MusaeConfig
    settings: MusaeConfig

    def __init__(self, settings: MusaeConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        name = self.settings.name
        if self.split.kind == "public":
            raise ConfigError("data.split=public, and MUSAE's data have no masks", hint="set data.split=random")
        self._dataset = name
        self.name = f"musae-{name.lower()}"
        self.path = self.settings.path
        self.label = self.settings.label
        self._classes: list[Any] = []
        self._names: Any = None

    def identity(self) -> dict[str, Any]:
        """Return the stamps of the files, and the column of labels."""
        return {**{kind: file_stamp(file) for kind, file in self._find().items()}, "label": self.label}

    def check_inputs(self) -> None:
        """Refuse missing files, and labels whose file has no such column."""
        super().check_inputs()
        path = self._find()["target"]
        if (first := next(_records(path), None)) is not None:
            self._label_columns(path, first[1])

    @property
    def origin(self) -> str:
        """Where the graph comes from, for messages."""
        return f"data.name={self._dataset}"

    def read(self) -> Data:
        """Read the three files."""
        files = self._find()
        ids, y = self._targets(files["target"])
        edge_index = to_undirected(_edges(files["edges"], ids), num_nodes=len(ids))
        return Data(x=_features(files["features"], ids), y=y, edge_index=edge_index, num_nodes=len(ids))

    def names(self) -> dict[str, Any]:
        """Return the ids of the files where they are not 0..N-1."""
        return {} if self._names is None else {"node": self._names}

    def extra_facts(self) -> dict[str, Any]:
        """Return the label that each class stands for."""
        return {"label_values": self._classes}

    def _find(self) -> dict[str, Path]:
        """Return the three files."""
        if self.path is not None:
            folders = [Path(self.path).expanduser(), self.root / Path(self.path).expanduser()]
        else:
            folders = [self.root / "musae", self.root]
        missing = ""
        for folder in folders:
            if not folder.is_dir():
                continue
            listing = folder.iterdir() if folder == self.root else folder.rglob("*")  # a root may hold anything
            candidates = sorted(file for file in listing if file.is_file())
            found = {kind: self._match(ending, candidates) for kind, ending in FILES.items()}
            if all(found.values()):
                return {kind: file for kind, file in found.items() if file is not None}
            lacking = next(kind for kind, file in found.items() if file is None)
            missing = missing or f"{folder} has no {self._dataset}{'.'.join(_plain(lacking))}"
        raise DataError(
            f"{self.origin}: {missing or 'there is no folder ' + ' or '.join(str(folder) for folder in folders)}",
            hint=f"put {self._dataset}_edges.csv, {self._dataset}_features.json and {self._dataset}_target.csv into "
            f"{folders[0]}, or set data.path to their folder",
        )

    def _label_columns(self, path: Path, columns: Sequence[str]) -> tuple[str, str]:
        """Return the columns of ids and of labels."""
        key = "new_id" if "new_id" in columns else "id"
        label = self.label or next((name for name in LABELS if name in columns), "")
        wanted = "labels (page_type, mature, ml_target)" if self.label is None else f"data.label={self.label}"
        for option, name in (("ids (id, new_id)", key), (wanted, label)):
            if name not in columns:
                raise DataError(
                    f"{path}: there is no column for {option}; it has {', '.join(columns)}",
                    hint=f"set data.label to one of {', '.join(columns)}; the ids are in a column id or new_id",
                )
        return key, label

    def _match(self, ending: str, files: list[Path]) -> Path | None:
        pattern = re.compile(rf"(musae_)?{re.escape(self._dataset)}{ending}", re.IGNORECASE)
        return next((file for file in files if pattern.fullmatch(file.name)), None)

    def _targets(self, path: Path) -> tuple[Ints, Tensor]:
        """Return the ids of the nodes in their order, and their classes."""
        table = _csv(path)
        key, label = self._label_columns(path, table.column_names)
        if not len(table):
            raise DataError(f"{path} has no line below the names of its columns", hint="give each node a line")
        for column in (key, label):
            empty = pc.is_null(table[column], nan_is_null=True)
            if pc.any(empty).as_py():
                raise DataError(
                    f"{_place(path, int(empty.to_numpy().argmax()))}: {column} is empty",
                    hint="give each node an id and a label",
                )
        ids = _whole(path, key, table[key])
        if (
            pa.types.is_floating(table[label].type)
            and not pc.all(pc.equal(table[label], pc.round(table[label]))).as_py()
        ):
            raise DataError(f"{path}: the column {label} holds numbers with fractions", hint="name classes in it")
        order = np.argsort(ids, kind="stable")
        twice = ids[order][1:] == ids[order][:-1]
        if twice.any():
            row = int(order[1:][twice][0])
            raise DataError(f"{_place(path, row)}: a second label for node {ids[row]}", hint="delete the line")
        values = table[label].to_pylist()
        self._classes = sorted(set(values))
        number = {value: position for position, value in enumerate(self._classes)}
        known = ids[order]
        self._names = None if known[-1] == len(known) - 1 and known[0] == 0 else pc.cast(pa.array(known), pa.string())
        return known, torch.tensor([number[value] for value in values])[torch.from_numpy(order)]


def _plain(kind: str) -> tuple[str, str]:
    """Return the two parts of the ending of a file."""
    return f"_{kind}", "json" if kind == "features" else "csv"


def _csv(path: Path) -> Any:
    try:
        return pa.csv.read_csv(
            path, convert_options=pa.csv.ConvertOptions(null_values=MISSING, strings_can_be_null=True)
        )
    except pa.ArrowInvalid as err:
        reason = "it is empty" if not path.stat().st_size else _uneven(path) or str(err).splitlines()[0]
        raise DataError(f"{path} cannot be read: {reason}", hint="copy or download the file again") from err


def _whole(path: Path, name: str, column: Any) -> Ints:
    if not pa.types.is_integer(column.type):
        texts = [str(value) for value in column.to_pylist()]
        row = next((row for row, text in enumerate(texts) if re.fullmatch(r"-?\d{1,18}(\.0)?", text) is None), 0)
        raise DataError(
            f"{_place(path, row)}: the {name} {texts[row]!r} is no whole number", hint="number nodes from 0"
        )
    ids: Ints = column.to_numpy()
    if (ids < 0).any():
        row = int((ids < 0).argmax())
        raise DataError(f"{_place(path, row)}: the id {ids[row]} is negative", hint="number nodes from 0")
    return ids


def _records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the line that each record begins in, and its fields, as Arrow's reader takes them; slow, for messages."""
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        reader, line = csv.reader(file), 1
        for fields in reader:
            if fields:
                yield line, fields
            line = reader.line_num + 1


def _place(path: Path, row: int) -> str:
    """Return ``file, line n`` of a row below the names of columns."""
    return f"{path}, line {next(itertools.islice(_records(path), row + 1, None), (0,))[0]}"


def _uneven(path: Path) -> str | None:
    """Return which line has another number of columns than the first, and how many."""
    width = 0
    for line, fields in _records(path):
        width = width or len(fields)
        if len(fields) != width:
            return f"line {line} has {len(fields)} columns, and the first {width}"
    return None


def _edges(path: Path, ids: Ints) -> Tensor:
    """Return the edges ``[2, E]`` between positions in ``ids``."""
    table = read_table(path, integers=2, header=True, widths=(2,))
    ends = np.stack(table.columns)
    found, unknown = _positions(ends, ids)
    if unknown.any():
        row = int(unknown.any(axis=0).argmax())
        raise DataError(
            f"{path}, line {table.line(row)}: the edge {ends[0, row]} - {ends[1, row]} names node "
            f"{ends[:, row][unknown[:, row]][0]}, which has no label",
            hint="give the node a line in the file of labels, or delete the edge",
        )
    return torch.from_numpy(found)


def _positions(values: Ints, ids: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Return where each value stands in ascending ``ids``, and which do not."""
    found = np.minimum(np.searchsorted(ids, values), len(ids) - 1)
    return found, ids[found] != values


def _features(path: Path, ids: Ints) -> Tensor:
    """Return the features as a CSR tensor of ones."""
    try:
        lists = json.loads(path.read_bytes())
        nodes = np.array([int(node) for node in lists], dtype=np.int64)
        counts = np.array([len(features) for features in lists.values()], dtype=np.int64)
        listed = [feature for features in lists.values() for feature in features]
    except json.JSONDecodeError as err:
        raise DataError(f"{path}, line {err.lineno}: no JSON: {err.msg}", hint="copy or download it again") from err
    except (AttributeError, TypeError, ValueError) as err:
        raise DataError(
            f"{path} has no list of feature ids for each node: {err}", hint='write it as {"0": [3, 17], "1": []}'
        ) from err
    rows, unknown = _positions(nodes, ids)
    if unknown.any():
        raise DataError(
            f"{path} has features of node {nodes[unknown][0]}, which has no label", hint="correct one of the files"
        )
    for value in listed:
        if type(value) is not int or not 0 <= value < MOST_FEATURES:
            raise DataError(
                f"{path}: the feature id {value!r} is no whole number from 0 to {MOST_FEATURES - 1}",
                hint="number features from 0",
            )
    if not listed:
        raise DataError(f"{path} names no feature", hint='write it as {"0": [3, 17], "1": []}')
    columns = np.array(listed, dtype=np.int64)
    width = int(columns.max()) + 1
    pairs = np.unique(np.repeat(rows, counts) * width + columns)
    crow = np.concatenate([[0], np.cumsum(np.bincount(pairs // width, minlength=len(ids)))])
    return csr_tensor(
        torch.from_numpy(crow), torch.from_numpy(pairs % width), torch.ones(len(pairs)), (len(ids), width)
    )
