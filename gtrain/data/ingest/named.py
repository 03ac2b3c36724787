"""Read tables of numbers whose first column is the name of a node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from gtrain.data.ingest.blocks import first_lines
from gtrain.data.ingest.layout import line_separator, split_fields, to_number
from gtrain.data.ingest.lines import LineReader, TextPiece
from gtrain.data.ingest.rows import first_true
from gtrain.errors import DataError

COMMENTS = "#%"
_HINT = "give a file with one node per line: its name and its values"


@dataclass(frozen=True)
class NamedTable:
    """EdgeRows of numbers for nodes that have names.

    Attributes:
        ids: the node id of each row, ``[rows]``, without repetition.
        values: the numbers, ``[rows, columns]``, all finite.
    """

    ids: NDArray[np.int64]
    values: NDArray[np.float64]


def read_named_table(path: Path, names: pa.LargeStringArray, comments: str = COMMENTS) -> NamedTable:
    """Read a text file of lines ``name number number ...``, separated by tabs, commas, semicolons or spaces.

    A first line whose second field is not a number is a header.

    Args:
        path: the file; ``.gz`` is decompressed.
        names: the name of each node.
        comments: each of these characters starts a comment line.

    Raises:
        DataError: a line is malformed, has an unknown name, or repeats a name; the message names the line.
    """
    lines = _reader(path, comments)
    pieces = [
        (_node_ids(piece, names), np.stack([piece.finite(i, "value") for i in range(1, lines.num_columns)], axis=1))
        for piece in lines.pieces()
    ]
    if not pieces:
        raise DataError(f"{path} has no line of values", hint=_HINT)
    ids, values = map(np.concatenate, zip(*pieces, strict=True))
    counts = np.bincount(ids, minlength=len(names))
    if counts.max() > 1:
        node = int(counts.argmax())
        first, second = (f"{path}, line {lines.line(row)}" for row in np.flatnonzero(ids == node)[:2].tolist())
        raise DataError(
            f"{second}: {names[node].as_py()!r} already has a line: {first}", hint="delete one of the two lines"
        )
    return NamedTable(ids, values)


def _reader(path: Path, comments: str) -> LineReader:
    lines = first_lines(path, comments, 1)
    if not lines:
        raise DataError(f"{path} has no lines other than comments", hint=_HINT)
    number, text = lines[0]
    separator = line_separator(text, "string")
    fields = split_fields(text, separator, f"{path}, line {number}")
    if len(fields) < 2:
        raise DataError(
            f"{path}, line {number}: 1 column, and 2 or more were expected, since nodes have names: {text[:60]!r}",
            hint="write one node per line, its name and its values, separated by tabs, commas, semicolons or spaces",
        )
    header = number if to_number(fields[1]) is None else 0
    columns = {0: pa.string()} | dict.fromkeys(range(1, len(fields)), pa.float64())
    return LineReader(path, separator, header, len(fields), columns, comments)


def _node_ids(piece: TextPiece, names: pa.LargeStringArray) -> NDArray[np.int64]:
    strings = piece.strings(0).cast(pa.large_string())
    ids = pyarrow.compute.index_in(strings, value_set=names)
    unknown = first_true(ids.is_null().to_numpy(zero_copy_only=False))
    if unknown is not None:
        raise DataError(
            f"{piece.location(unknown)}: values for {strings[unknown].as_py()!r}, and no edge has a node of that name",
            hint="correct the name, or delete the line",
        )
    return np.asarray(ids.to_numpy(zero_copy_only=False)).astype(np.int64)
