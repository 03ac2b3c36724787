"""Read a libsvm file in blocks of lines; errors name the malformed line.

Only one block of lines is in memory; entries go to memory-mapped temporary files. Arrow's CSV reader parses a block
after it was rewritten with one token per line. A block that Arrow refuses is parsed line by line in Python, which
accepts some forms that Arrow does not (``1:+2``), or finds the malformed line.
"""

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
from numpy.typing import NDArray

from gtrain.data.ingest.columns import Column
from gtrain.data.readers.files import first_true
from gtrain.errors import DataError

BLOCK_BYTES = 1 << 22
LARGEST_ID = (1 << 31) - 1
_LARGEST_VALUE = float(np.finfo(np.float32).max)
_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_COMMENT = re.compile(rb"#[^\n]*")
_UNLABELLED = re.compile(rb"\n(?=[^ \n]*:)")
_BLANKS = bytes.maketrans(b"\t\r", b"  ")
_BOM = b"\xef\xbb\xbf"  # byte order mark, which some editors write


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
    rest = b""
    try:
        with _open(path) as file:
            rest = file.read(len(_BOM)).removeprefix(_BOM)
            while block := file.read(BLOCK_BYTES):
                head, newline, tail = block.rpartition(b"\n")
                if newline:
                    yield rest + head + newline
                    rest = tail
                else:
                    rest += tail
    except (OSError, EOFError, zlib.error) as err:
        raise DataError(
            f"{path} cannot be read: {err}",
            hint="copy or download the file again, or remove .gz from its name if it is not compressed",
        ) from err
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
    text = b"\n" + text.strip(b" \n")
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
    label_counts = 1 + several - unlabelled[np.cumsum(1 + several) - 1 - several]
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
