"""Tables of numbers whose first column is a name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from gtrain.data.ingest.blocks import first_lines
from gtrain.data.ingest.layout import line_separator, split_fields, to_number
from gtrain.data.ingest.lines import LineReader, Piece
from gtrain.data.ingest.rows import first_true
from gtrain.errors import DataError

COMMENTS = "#%"


@dataclass(frozen=True)
class NamedTable:
    """Rows of numbers for nodes that have names.

    Attributes:
        ids: the node of each row, ``[rows]``; each occurs once.
        values: the numbers, ``[rows, columns]``, all finite.
    """

    ids: NDArray[np.int64]
    values: NDArray[np.float64]


def read_named_table(path: Path, names: pa.LargeStringArray, comments: str = COMMENTS) -> NamedTable:
    """Read a text file of lines ``name number number ...``, separated by tabs, commas, semicolons or spaces.

    A first line of column names is recognised by its second field, which is no number.

    Args:
        path: the file, ``.gz`` is unpacked.
        names: the name of each node.
        comments: characters that begin a comment line.

    Raises:
        DataError: names the line that is malformed, whose name is no node's, or occurred before.
    """
    lines = _reader(path, comments)
    pieces: list[tuple[pa.Array, NDArray[np.float64]]] = []
    for piece in lines.pieces():
        pieces.append((_known(piece, names), _values(piece, lines.num_columns)))
    if not pieces:
        raise DataError(
            f"{path} has no line of values", hint="name a file with one node in each line: its name, values"
        )
    ids = np.concatenate([known for known, _ in pieces])
    _check_once(lines, ids, names)
    return NamedTable(ids, np.concatenate([values for _, values in pieces]))


def _reader(path: Path, comments: str) -> LineReader:
    lines = first_lines(path, comments, 1)
    if not lines:
        raise DataError(
            f"{path} has no lines other than comments", hint="name a file with one node in each line: its name, values"
        )
    number, text = lines[0]
    separator = line_separator(text, "string")
    fields = split_fields(text, separator, f"{path}, line {number}")
    if len(fields) < 2:
        raise DataError(
            f"{path}, line {number}: 1 column, and 2 or more were expected, since nodes have names: {text[:60]!r}",
            hint="write a name and its values in each line, separated by tabs, commas, semicolons or spaces",
        )
    header = number if to_number(fields[1]) is None else 0
    columns = {0: pa.string()} | dict.fromkeys(range(1, len(fields)), pa.float64())
    return LineReader(path, separator, header, len(fields), columns, comments)


def _known(piece: Piece, names: pa.LargeStringArray) -> NDArray[np.int64]:
    strings = piece.strings(0).cast(pa.large_string())
    found = pyarrow.compute.index_in(strings, value_set=names)
    unknown = first_true(found.is_null().to_numpy(zero_copy_only=False))
    if unknown is not None:
        raise DataError(
            f"{piece.place(unknown)}: values for {strings[unknown].as_py()!r}, and no edge has a node of that name",
            hint="correct the name, or leave the line out",
        )
    return np.asarray(found.to_numpy(zero_copy_only=False)).astype(np.int64)


def _values(piece: Piece, num_columns: int) -> NDArray[np.float64]:
    return np.stack([piece.finite(column, "value") for column in range(1, num_columns)], axis=1)


def _check_once(lines: LineReader, ids: NDArray[np.int64], names: pa.LargeStringArray) -> None:
    counts = np.bincount(ids, minlength=len(names))
    if counts.max() < 2:
        return
    node = int(counts.argmax())
    first, second = (f"{lines.path}, line {lines.line(row)}" for row in np.flatnonzero(ids == node)[:2].tolist())
    raise DataError(
        f"{second}: a second line for {names[node].as_py()!r}, after {first}", hint="delete one of the two lines"
    )
