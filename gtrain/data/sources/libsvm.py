"""Rows of sparse features with labels, from libsvm files."""

from __future__ import annotations

import gzip
import itertools
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data

from gtrain.data.config import LibsvmConfig
from gtrain.data.ingest.columns import Column
from gtrain.data.module import file_stamp
from gtrain.data.readers.files import find_file, first_true
from gtrain.data.sources.feature_rows import RowColumns, RowData, among_unlabelled, number_labels
from gtrain.errors import DataError, unreadable

MAX_LABEL_ENTRIES = 1 << 31
"""Entries of the largest matrix of labels, 8 GB."""


class LibsvmData(RowData[LibsvmConfig]):
    """Sparse rows with labels: ``label id:value id:value ...`` on each line (Chang and Lin 2011).

    Rows are the nodes of a graph without edges; ``x`` is a sparse CSR tensor. Labels are numbered in the order of their
    values: -1 and +1 become 0 and 1, and 1..C become 0..C-1. Labels 0..C-1, and labels below ``num_classes`` if it is
    set, stay. For rows with several labels, ``1,3,5``, ``y`` is a matrix ``[N, C]`` of zeros and ones, one column per
    label 0..C-1. ``#`` starts a comment.

    Its settings are those of :class:`~gtrain.data.config.LibsvmConfig`.
    """

    name = "libsvm"

    _first_feature: int | None = None

    def identity(self) -> dict[str, Any]:
        """Return the stamps of the files and the options that control how they are read."""
        options = {key: getattr(self.settings, key) for key in ("index_base", "num_features", "labels")}
        options["index_base"] = str(options["index_base"])  # the integer 0 gives the same store
        stamps = {key: file_stamp(file) for key, file in self._files().items()}
        return {**stamps, **options, "public": self.public_identity()}

    def _files(self) -> dict[str, Path]:
        named = {"path": self.settings.path, "test_path": self.settings.test_path}
        return {key: find_file(f"data.{key}", name, self.root) for key, name in named.items() if name is not None}

    def read(self) -> Data:
        """Read the files; the entries are in temporary files in ``store`` and may exceed the memory."""
        files = [read_rows(file, self.store) for file in self._files().values()]
        if all(rows.highest is None for rows in files):
            raise DataError(
                f"{self.origin}: no row has a feature",
                hint="write each line as label id:value id:value ...; tables of numbers are for data=parquet",
            )
        x, (y, label_values) = self._features(files), self._labels(files)
        return self.rows_as_graph(x, y, len(files[0]), label_values)

    def numbering(self) -> dict[str, Any]:
        """Return the feature id of the first column."""
        return {"the first feature id": self._first_feature}

    def _features(self, files: list[LibsvmRows]) -> Tensor:
        base = 0 if any(rows.lowest == 0 for rows in files) else 1
        if self.trained is not None:
            base = int(self.trained["numbering"]["the first feature id"])
        if str(self.settings.index_base) != "auto":
            base = int(self.settings.index_base)
        self._first_feature = base
        highest = max(base if rows.highest is None else rows.highest for rows in files)
        width = self.settings.num_features or (self.trained or {}).get("num_features") or highest + 1 - base
        entries = RowColumns(self.store)
        for rows in files:
            if base == 1 and rows.lowest == 0:
                raise DataError(
                    f"{_first(rows, 0, 0)}, and data.index_base=1",
                    hint="set data.index_base=0 or auto",
                )
            if rows.highest is not None and rows.highest >= width + base:
                raise DataError(
                    f"{_first(rows, width + base, rows.highest)}, and data.num_features={width} allows "
                    f"{base}..{width + base - 1}",
                    hint="raise data.num_features, or set it to null to take the largest id",
                )
            for ids, values in zip(rows.ids.chunks(), rows.values.chunks(), strict=True):
                entries.add_entries(ids - base, values)
            entries.add_rows(np.diff(rows.row_ptr))
        return entries.tensor(width)

    def _labels(self, files: list[LibsvmRows]) -> tuple[Tensor, list[Any] | None]:
        """Return ``y``, and the label that each class stands for (None: they are equal)."""
        for rows in files:
            if (position := first_true(rows.labels != np.round(rows.labels))) is not None:
                raise DataError(
                    f"{_label(rows, position)} is not a whole number",
                    hint="give each row a class; gtrain does not train regression targets",
                )
            # float64, as which labels are read, has no consecutive integers beyond.
            if (position := first_true(np.abs(rows.labels) >= 2**53)) is not None:
                raise DataError(
                    f"{_label(rows, position)} is too large to be a class",
                    hint="number the classes from 0, or correct the line",
                )
        counts = [np.diff(rows.label_ptr) for rows in files]
        several = any((count > 1).any() for count in counts)
        if self.settings.labels == "multi" or (self.settings.labels == "auto" and several):
            return self._label_matrix(files), None
        for rows, count in zip(files, counts, strict=True):
            if (row := first_true(count != 1)) is not None:
                raise DataError(
                    f"{rows.where(row)}: the row has {count[row]} labels, and others one",
                    hint="correct the line, or set data.labels=multi if rows may have any number of labels",
                )
        labels = np.concatenate([rows.labels for rows in files]).astype(np.int64)
        labelled = labels != self.unlabelled_value
        classes, values = number_labels(labels[labelled], *self.known_classes)
        return among_unlabelled(classes, labelled, self.unlabelled_value), values

    def _label_matrix(self, files: list[LibsvmRows]) -> Tensor:
        """Return the labels as a matrix of zeros and ones, float ``[N, C]``."""
        labels = [rows.labels.astype(np.int64) for rows in files]
        width = self.num_classes or max(int(ids.max(initial=0)) for ids in labels) + 1
        if width < 2 and not self.applied:
            raise DataError(
                f"{self.origin}: rows may have several labels, and no label is above 0",
                hint="rows of several labels need two different ones at least; for one that is present or not, write "
                "0 or 1 and set data.labels=single",
            )
        for rows, ids in zip(files, labels, strict=True):
            if (position := first_true((ids < 0) | (ids >= width))) is not None:
                raise DataError(
                    f"{_label(rows, position)}; labels of rows that may have several are 0..{width - 1}",
                    hint="number the labels from 0; data.num_classes may be set larger",
                )
        counts = np.concatenate([np.diff(rows.label_ptr) for rows in files])
        if len(counts) * width > MAX_LABEL_ENTRIES:
            rows = max(files, key=lambda rows: rows.labels.max(initial=0))
            raise DataError(
                f"{_label(rows, int(rows.labels.argmax()))} makes a matrix of {len(counts)} rows x {width} labels; "
                f"{MAX_LABEL_ENTRIES} entries are the most",
                hint="number the labels from 0 without gaps",
            )
        y = torch.zeros(len(counts), width)
        y[torch.from_numpy(np.repeat(np.arange(len(counts)), counts)), torch.from_numpy(np.concatenate(labels))] = 1
        return y


def _label(rows: LibsvmRows, position: int) -> str:
    """Return ``file, line n: the label l`` for a position in the labels of all rows."""
    row = int(np.searchsorted(rows.label_ptr, position, side="right")) - 1
    return f"{rows.where(row)}: the label {rows.labels[position]:.16g}"


def _first(rows: LibsvmRows, low: int, high: int) -> str:
    """Return ``file, line n: the feature id i`` for the first feature with an id in ``low..high``."""
    begin = 0
    for ids in rows.ids.chunks():
        if (position := first_true((ids >= low) & (ids <= high))) is not None:
            row = int(np.searchsorted(rows.row_ptr, begin + position, side="right")) - 1
            return f"{rows.where(row)}: the feature id {ids[position]}"
        begin += len(ids)
    raise IndexError(low)


BLOCK_BYTES = 1 << 22
LARGEST_ID = (1 << 31) - 1
"""The largest feature id."""
_LARGEST_VALUE = float(np.finfo(np.float32).max)
_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_COMMENT = re.compile(rb"#[^\n]*")
_UNLABELLED = re.compile(rb"\n(?=[^ \n]*:)")  # the start of a row whose first field is a feature
_BLANKS = bytes.maketrans(b"\t\r", b"  ")
# Byte order mark, which some editors write.
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class LibsvmRows:
    """The rows of a libsvm file.

    Attributes:
        path: the file.
        labels: the labels of all rows, float64 ``[L]``.
        label_ptr: row r has the labels ``labels[label_ptr[r]:label_ptr[r + 1]]``, int64 ``[N + 1]``.
        ids: feature ids as written, ascending in each row, int64 ``[K]``.
        values: their values, float32 ``[K]``.
        row_ptr: row r has the entries ``row_ptr[r]`` to ``row_ptr[r + 1]``, int64 ``[N + 1]``.
        lowest, highest: the smallest and the largest id; None without entries.
    """

    path: Path
    labels: NDArray[np.float64]
    label_ptr: NDArray[np.int64]
    ids: Column
    values: Column
    row_ptr: NDArray[np.int64]
    lowest: int | None
    highest: int | None

    def __len__(self) -> int:
        return len(self.row_ptr) - 1

    def where(self, row: int) -> str:
        """Return ``file, line n`` for a row; slow, for messages."""
        with _open(self.path) as file:
            if file.read(len(_BOM)) != _BOM:
                file.seek(0)
            return f"{self.path}, line {nth_row(file, row)}"


def read_rows(path: Path, folder: Path) -> LibsvmRows:
    """Read a libsvm file, ``label[,label...] id:value id:value ...`` on each line; ``#`` starts a comment.

    Args:
        path: the file.
        folder: folder for temporary files, 12 bytes per entry.

    Raises:
        DataError: names the file and the malformed line, or the disk is full.
    """
    ids, values = Column(folder, np.int64), Column(folder, np.float32)
    blocks: list[tuple[NDArray[Any], ...]] = []
    bounds: list[int] = []
    lines = 0
    for text in _blocks(path):
        labels, label_counts, block_ids, block_values, row_counts = _parse(path, text, lines)
        block_ids, block_values = _in_order(path, text, lines, row_counts, block_ids, block_values)
        blocks.append((labels, label_counts, row_counts))
        ids.append(block_ids)
        values.append(block_values)
        if block_ids.size:
            bounds += [int(block_ids.min()), int(block_ids.max())]
        lines += text.count(b"\n")
    labels, label_counts, row_counts = (np.concatenate(block) for block in zip(*blocks, strict=True))
    if not len(row_counts):
        raise DataError(f"{path} is empty", hint="name a file with one row in each line: label id:value id:value ...")
    lowest, highest = min(bounds, default=None), max(bounds, default=None)
    return LibsvmRows(path, labels, _pointers(label_counts), ids, values, _pointers(row_counts), lowest, highest)


def _open(path: Path) -> Any:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of the file in blocks of whole lines."""
    hint = "copy or download the file again, or remove .gz from its name if it is not compressed"
    with unreadable(f"{path} cannot be read", hint, OSError, EOFError, zlib.error), _open(path) as file:
        rest = file.read(len(_BOM)).removeprefix(_BOM)
        while block := file.read(BLOCK_BYTES):
            head, newline, tail = (rest + block).rpartition(b"\n")
            if newline:
                yield head + newline
            rest = tail
        yield rest


def _parse(path: Path, text: bytes, lines: int) -> tuple[NDArray[Any], ...]:
    """Return the labels, the number of labels of each row, ids, values, and the number of entries of each row.

    Args:
        path: the file, for messages.
        text: some of its lines.
        lines: number of preceding lines of the file.
    """
    try:
        return _parse_block(text)
    except pa.ArrowInvalid:
        return _parse_lines(path, text, lines)


def _parse_block(text: bytes) -> tuple[NDArray[Any], ...]:
    """Parse lines with Arrow.

    ``1,3 7:0.5`` becomes the lines ``:1``, ``-1:3`` and ``7:0.5`` of a table of two columns: an empty id starts a row
    of the file, with its first label or NaN as the value, and the id -1 marks further labels.

    Raises:
        pa.ArrowInvalid: Arrow cannot parse a line, or the line is malformed.
    """
    text = _COMMENT.sub(b"", text) if b"#" in text else text
    text = text.translate(_BLANKS)
    for run, single in ((b"  ", b" "), (b" \n", b"\n"), (b"\n ", b"\n"), (b"\n\n", b"\n")):
        while run in text:
            text = text.replace(run, single)
    # A newline now stands only at the start of a row, and each row has one: the replacements below rely on it.
    text = b"\n" + text.strip(b" \n")
    # An empty id and the id -1 would be taken for marks of labels. Arrow would read the others as hexadecimal, infinite
    # or missing numbers, or as numbers with two signs.
    if any(odd in text for odd in (b" :", b" -", b"++", b"+-", b"x", b"X", b"n", b"N")):
        raise pa.ArrowInvalid("malformed, but Arrow would accept it")
    text = _UNLABELLED.sub(b"\nnan ", text).replace(b"\n+", b"\n").replace(b"\n", b"\n:") if len(text) > 1 else text
    tokens = text.replace(b",", b"\n-1:").replace(b" ", b"\n")
    table = pyarrow.csv.read_csv(
        pa.BufferReader(tokens),
        read_options=pyarrow.csv.ReadOptions(
            column_names=["id", "value"], block_size=len(tokens) + 1, use_threads=False
        ),
        parse_options=pyarrow.csv.ParseOptions(delimiter=":", quote_char=False),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types={"id": pa.int64(), "value": pa.float64()}, null_values=[""]
        ),
    )
    starts_row, ids = np.asarray(table["id"].is_null()), np.asarray(table["id"].fill_null(0))
    further, values = ids == -1, np.asarray(table["value"])
    is_label = starts_row | further
    if (further[1:] & ~is_label[:-1]).any() or not (ids <= LARGEST_ID).all():
        raise pa.ArrowInvalid("a list instead of a value, or an id that is too large")
    labels, values = values[is_label], values[~is_label]
    if np.isinf(labels).any() or not (np.abs(values) <= _LARGEST_VALUE).all():
        raise pa.ArrowInvalid("a number is not finite")
    starts = np.flatnonzero(starts_row)
    several = np.add.reduceat(further, starts, dtype=np.int64) if further.any() else np.zeros_like(starts)
    unlabelled = np.isnan(labels)
    # The index selects the first label of each row.
    without = unlabelled[np.cumsum(1 + several) - 1 - several]
    if unlabelled.sum() != (without & (several == 0)).sum():
        raise pa.ArrowInvalid("an empty label in a list of several")
    label_counts = 1 + several - without
    row_counts = np.diff(starts, append=len(table)) - 1 - several
    return labels[~unlabelled], label_counts, ids[~is_label], values.astype(np.float32), row_counts


def _parse_lines(path: Path, text: bytes, lines: int) -> tuple[NDArray[Any], ...]:
    """Parse lines one by one."""
    labels: list[float] = []
    features: list[tuple[int, float]] = []
    label_ptr, row_ptr = [0], [0]
    for number, line in enumerate(text.split(b"\n"), start=lines + 1):
        tokens = line.partition(b"#")[0].split()
        if not tokens:
            continue
        token = tokens[0]
        try:
            if b":" not in token:
                labels += [_number(label) for label in tokens.pop(0).split(b",")]
            for token in tokens:
                features.append(_feature(token))
        except ValueError as err:
            fault, hint = err.args
            shown = token.decode(errors="replace")[:40]
            raise DataError(
                f"{path}, line {number}: {shown!r} {fault}: {line[:60].decode(errors='replace').strip()!r}", hint=hint
            ) from None
        label_ptr.append(len(labels))
        row_ptr.append(len(features))
    ids, values = (np.array(column) for column in zip(*features, strict=True)) if features else ((), ())
    return (
        *(np.array(labels, dtype=np.float64), np.diff(label_ptr)),
        *(np.asarray(ids, dtype=np.int64), np.asarray(values, dtype=np.float32), np.diff(row_ptr)),
    )


_HINT = "write each line as label id:value id:value ..., with ids that are whole numbers and finite values"


def _number(field: bytes, largest: float = float(np.finfo(np.float64).max)) -> float:
    """Return the number in a field; raise ValueError with the fault and a hint."""
    if field.lstrip(b"+-")[:1] in (b"n", b"N", b"i", b"I"):
        raise ValueError("is not finite as a 32-bit number", _HINT)
    if not _NUMBER.fullmatch(field):
        raise ValueError("has no number where there should be one", _HINT)
    value = float(field)
    if abs(value) > largest:
        raise ValueError("is not finite as a 32-bit number", _HINT)
    return value


def _feature(token: bytes) -> tuple[int, float]:
    """Return the id and value of a feature; raise ValueError like :func:`_number`."""
    name, colon, value = token.partition(b":")
    if re.match(rb"q..:", token):
        raise ValueError(
            "groups rows for ranking, which gtrain does not support",
            "remove these fields: sed 's/ qid:[0-9]*//' FILE > NEW",
        )
    if not re.fullmatch(rb"-?[0-9]+", name):
        raise ValueError("has no feature id", _HINT)
    if not colon:
        raise ValueError("has no colon", _HINT)
    if name.startswith(b"-"):
        raise ValueError("has a negative feature id", _HINT)
    if int(name) > LARGEST_ID:
        raise ValueError(
            f"has a feature id above {LARGEST_ID}, the largest allowed",
            "number the features without gaps, or hash the ids to fewer, such as id % 1048576",
        )
    return int(name), _number(value, _LARGEST_VALUE)


def _pointers(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _in_order(
    path: Path, text: bytes, lines: int, counts: NDArray[Any], ids: NDArray[Any], values: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Sort the entries of each row of a block by id, and refuse an id that occurs twice in a row."""
    row_of = np.repeat(np.arange(len(counts)), counts)
    inside = row_of[1:] == row_of[:-1]
    if (inside & (ids[1:] < ids[:-1])).any():
        order = np.lexsort((ids, row_of))
        ids, values = ids[order], values[order]
    if (position := first_true(inside & (ids[1:] == ids[:-1]))) is not None:
        number = nth_row(text.split(b"\n"), int(row_of[position]))
        raise DataError(
            f"{path}, line {lines + number}: the feature {ids[position]} occurs twice",
            hint="give each feature of a row one value",
        )
    return ids, values


def nth_row(lines: Iterable[bytes], row: int) -> int:
    """Return the line number (from 1) of a row (from 0)."""
    rows = (
        number
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.lstrip(b" \t").startswith(b"#")
    )
    return next(itertools.islice(rows, row, None))
