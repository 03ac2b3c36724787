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
from gtrain.data.module import BAGS, OUTLINE, GraphDataModule, file_stamp
from gtrain.data.readers.files import Ints, candidates, first_true
from gtrain.data.readers.number_table import read_table
from gtrain.errors import DataError
from gtrain.graph.store.tables import csr_tensor

FILES = {"edges": r"_edges\.csv", "features": r"(_features)?\.json", "target": r"_target\.csv"}
MISSING = ["", "nan", "NaN", "NULL", "null"]
"""Fields without a value in the file of labels."""
MAX_FEATURES = 1 << 31
"""Feature ids are below this number."""
LABELS = ("page_type", "mature", "ml_target")
"""The columns of labels of Facebook, Twitch and GitHub."""


class MusaeData(GraphDataModule[MusaeConfig]):
    """An undirected social network with sparse binary features (Rozemberczki et al. 2021).

    The folder or its subfolders have three files: ``<name>_edges.csv`` (two columns of node ids),
    ``<name>_features.json`` (the feature ids of each node) and ``<name>_target.csv`` (a column of node ids, ``new_id``
    or else ``id``, and a column of labels), optionally with the prefix ``musae_``. Classes are numbered in the order of
    the labels, nodes in the order of their ids.

    Its settings are those of :class:`~gtrain.data.config.MusaeConfig`.
    """

    outline = OUTLINE

    def __init__(self, settings: MusaeConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        self.name = f"musae-{self.settings.name.lower()}"

    def identity(self) -> dict[str, Any]:
        """Return the stamps of the files, and the column of labels."""
        return {**{role: file_stamp(file) for role, file in self._find().items()}, "label": self.settings.label, **BAGS}

    def check_files(self) -> None:
        """Refuse missing files, and a missing column of labels."""
        path = self._find()["target"]
        if (first := next(_records(path), None)) is not None:
            self._label_columns(path, first[1])

    @property
    def origin(self) -> str:
        """Where the graph comes from, for messages."""
        return f"data.name={self.settings.name}"

    def read(self) -> Data:
        """Read the three files."""
        files = self._find()
        ids, y = self._read_targets(files["target"])
        edge_index = to_undirected(_read_edges(files["edges"], ids), num_nodes=len(ids))
        return Data(x=_read_features(files["features"], ids), y=y, edge_index=edge_index, num_nodes=len(ids))

    def _find(self) -> dict[str, Path]:
        """Return the three files by role."""
        path, name = self.settings.path, self.settings.name
        folders = candidates(path, self.root) if path is not None else (self.root / "musae", self.root)
        missing = ""
        for folder in folders:
            if not folder.is_dir():
                continue
            listing = folder.iterdir() if folder == self.root else folder.rglob("*")  # root may have other subfolders
            names = sorted(file for file in listing if file.is_file())
            files: dict[str, Path] = {}
            for role, ending in FILES.items():
                pattern = re.compile(rf"(musae_)?{re.escape(name)}{ending}", re.IGNORECASE)
                if matches := [file for file in names if pattern.fullmatch(file.name)]:
                    files[role] = matches[0]
                else:
                    extension = "json" if role == "features" else "csv"
                    missing = missing or f"{folder} has no {name}_{role}.{extension}"
            if len(files) == len(FILES):
                return files
        raise DataError(
            f"{self.origin}: {missing or 'no folder ' + ' or '.join(map(str, folders))}",
            hint=f"put {name}_edges.csv, {name}_features.json and {name}_target.csv into {folders[0]}, or set "
            "data.path to their folder",
        )

    def _label_columns(self, path: Path, columns: Sequence[str]) -> tuple[str, str]:
        """Return the columns of ids and of labels."""
        key = "new_id" if "new_id" in columns else "id"
        label = self.settings.label or next((name for name in LABELS if name in columns), "")
        labels = f"labels ({', '.join(LABELS)})" if self.settings.label is None else f"data.label={label}"
        for content, name in (("ids (id, new_id)", key), (labels, label)):
            if name not in columns:
                raise DataError(
                    f"{path}: no column for {content}; it has {', '.join(columns)}",
                    hint=f"set data.label to one of {', '.join(columns)}; the ids are in a column id or new_id",
                )
        return key, label

    def _read_targets(self, path: Path) -> tuple[Ints, Tensor]:
        """Return the ids of the nodes in ascending order, and their classes; set names and facts."""
        table = _read_csv(path)
        key, label = self._label_columns(path, table.column_names)
        if not len(table):
            raise DataError(f"{path} has no line below the column names", hint="give each node a line")
        for column in (key, label):
            if (row := first_true(pc.is_null(table[column], nan_is_null=True).to_numpy())) is not None:
                raise DataError(f"{_line(path, row)}: {column} is empty", hint="give each node an id and a label")
        ids, labels = _integers(path, key, table[key]), table[label]
        if pa.types.is_floating(labels.type) and not pc.all(pc.equal(labels, pc.round(labels))).as_py():
            raise DataError(f"{path}: the column {label} holds numbers with fractions", hint="name classes in it")
        order = np.argsort(ids, kind="stable")
        ascending = ids[order]
        if (position := first_true(ascending[1:] == ascending[:-1])) is not None:
            row = int(order[position + 1])
            raise DataError(f"{_line(path, row)}: node {ids[row]} already has a label", hint="delete the line")
        values = labels.to_pylist()
        classes = sorted(set(values))
        number = {value: position for position, value in enumerate(classes)}
        self._facts = {"label_values": classes}
        if ascending[0] != 0 or ascending[-1] != len(ascending) - 1:
            self._names = {"node": pc.cast(pa.array(ascending), pa.string())}
        return ascending, torch.tensor([number[value] for value in values])[torch.from_numpy(order)]


def _read_csv(path: Path) -> Any:
    try:
        return pa.csv.read_csv(
            path, convert_options=pa.csv.ConvertOptions(null_values=MISSING, strings_can_be_null=True)
        )
    except pa.ArrowInvalid as err:
        reason = "it is empty" if not path.stat().st_size else str(err).splitlines()[0]
        width = 0
        for line, fields in _records(path):
            width = width or len(fields)
            if len(fields) != width:
                reason = f"line {line} has {len(fields)} columns, and the first {width}"
                break
        raise DataError(f"{path} cannot be read: {reason}", hint="copy or download the file again") from err


def _integers(path: Path, name: str, column: Any) -> Ints:
    if not pa.types.is_integer(column.type):
        texts = [str(value) for value in column.to_pylist()]
        row = next((row for row, text in enumerate(texts) if re.fullmatch(r"-?\d{1,18}(\.0)?", text) is None), 0)
        raise DataError(
            f"{_line(path, row)}: the {name} {texts[row]!r} is not a whole number", hint="number nodes from 0"
        )
    ids: Ints = column.to_numpy()
    if (negative := first_true(ids < 0)) is not None:
        raise DataError(f"{_line(path, negative)}: the id {ids[negative]} is negative", hint="number nodes from 0")
    return ids


def _records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line and the fields of each record, as Arrow's reader counts them; slow, for messages."""
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        reader, line = csv.reader(file), 1
        for fields in reader:
            if fields:
                yield line, fields
            line = reader.line_num + 1


def _line(path: Path, row: int) -> str:
    """Return ``file, line n`` for a row below the column names."""
    return f"{path}, line {next(itertools.islice(_records(path), row + 1, None), (0,))[0]}"


def _read_edges(path: Path, ids: Ints) -> Tensor:
    """Return the edges ``[2, E]`` between positions in ``ids``."""
    table = read_table(path, integers=2, header=True, widths=(2,))
    ends = np.stack(table.columns)
    positions, unknown = _positions(ends, ids)
    if (row := first_true(unknown.any(axis=0))) is not None:
        raise DataError(
            f"{path}, line {table.line(row)}: the edge {ends[0, row]} - {ends[1, row]} names node "
            f"{ends[:, row][unknown[:, row]][0]}, which has no label",
            hint="give the node a line in the file of labels, or delete the edge",
        )
    return torch.from_numpy(positions)


def _positions(values: Ints, ids: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the position of each value in ascending ``ids``, and whether it is missing there."""
    positions = np.minimum(np.searchsorted(ids, values), len(ids) - 1)
    return positions, ids[positions] != values


def _read_features(path: Path, ids: Ints) -> Tensor:
    """Return the features as a CSR tensor of ones ``[N, F]``."""
    try:
        lists = json.loads(path.read_bytes())
        nodes = np.array([int(node) for node in lists], dtype=np.int64)
        counts = np.array([len(features) for features in lists.values()], dtype=np.int64)
        listed = [feature for features in lists.values() for feature in features]
    except json.JSONDecodeError as err:
        raise DataError(f"{path}, line {err.lineno}: not JSON: {err.msg}", hint="copy or download it again") from err
    except (AttributeError, TypeError, ValueError) as err:
        raise DataError(
            f"{path} must have a list of feature ids for each node: {err}", hint='write it as {"0": [3, 17], "1": []}'
        ) from err
    rows, unknown = _positions(nodes, ids)
    if unknown.any():
        raise DataError(
            f"{path} has features of node {nodes[unknown][0]}, which has no label", hint="correct one of the files"
        )
    for value in listed:
        if type(value) is not int or not 0 <= value < MAX_FEATURES:
            raise DataError(
                f"{path}: the feature id {value!r} is not a whole number from 0 to {MAX_FEATURES - 1}",
                hint="number features from 0",
            )
    if not listed:
        raise DataError(f"{path} names no feature", hint='write it as {"0": [3, 17], "1": []}')
    columns = np.array(listed, dtype=np.int64)
    width = int(columns.max()) + 1
    # One number per entry sorts by row, then by column; a feature that a node lists twice counts once.
    pairs = np.unique(np.repeat(rows, counts) * width + columns)
    crow = np.concatenate([[0], np.cumsum(np.bincount(pairs // width, minlength=len(ids)))])
    return csr_tensor(
        torch.from_numpy(crow), torch.from_numpy(pairs % width), torch.ones(len(pairs)), (len(ids), width)
    )
