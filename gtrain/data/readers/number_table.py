"""Read tables of numbers from text; errors name the malformed line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from gtrain.data.ingest.blocks import first_lines
from gtrain.data.ingest.dictionary import first_true
from gtrain.data.ingest.format import line_separator, split_fields, to_number
from gtrain.data.ingest.lines import LineReader, TextPiece
from gtrain.errors import DataError

COMMENTS = "#%"
"""Characters that start a comment line, unless a user sets others."""


@dataclass(frozen=True)
class NumberTable:
    """A table of numbers read from text.

    Attributes:
        columns: one array per column, ``[rows]``: int64 for the leading integer columns, float64 for the others.
        lines: reads the lines again, for messages.
    """

    columns: tuple[NDArray[Any], ...]
    lines: LineReader

    @property
    def path(self) -> Path:
        """The file."""
        return self.lines.path

    def line(self, row: int) -> int:
        """Return the line number (from 1) of a row (from 0); slow, for messages."""
        return self.lines.line(row)


def read_table(
    path: Path, *, integers: int | None, header: bool, widths: tuple[int, ...] | None = None, comments: str = COMMENTS
) -> NumberTable:
    """Read a table of numbers.

    Columns are separated by commas, semicolons, tabs or spaces, and ``.gz`` files are decompressed.

    Args:
        path: the file.
        integers: the number of leading columns that hold integers; None: all.
        header: whether the first line may hold column names, which are recognised since they are not numbers.
        widths: the allowed numbers of columns; None allows any.
        comments: each of these characters starts a comment line.

    Raises:
        DataError: names the file and the malformed line.
    """
    number, line, separator, fields = _first_line(
        path, "int", "name a file with one row of numbers in each line", comments
    )
    named = header and all(to_number(field) is None for field in fields[:2])
    if widths is not None and len(fields) not in widths:
        expected = " or ".join(str(width) for width in widths)
        raise DataError(
            f"{path}, line {number}: {len(fields)} columns, and {expected} were expected: {line.strip()[:60]!r}",
            hint=f"give each line {expected} columns, separated by commas, semicolons, tabs or spaces",
        )
    whole = len(fields) if integers is None else integers
    types = {column: pa.int64() if column < whole else pa.float64() for column in range(len(fields))}
    lines = LineReader(path, separator, number if named else 0, len(fields), types, comments)
    blocks = [[block.integers(i, i + 1) if i < whole else block.numbers(i) for i in types] for block in lines.pieces()]
    if not blocks:
        raise DataError(f"{path} has no line below the column names", hint="name a file with rows of numbers")
    return NumberTable(tuple(np.concatenate(column) for column in zip(*blocks, strict=True)), lines)


def _first_line(path: Path, ids: str, hint: str, comments: str) -> tuple[int, str, str, list[str]]:
    """Return number, text, separator and fields of the first line; ``ids`` is the type of the first column."""
    lines = first_lines(path, comments, 1)
    if not lines:
        raise DataError(f"{path} has no lines other than comments", hint=hint)
    number, text = lines[0]
    separator = line_separator(text, ids)
    return number, text, separator, split_fields(text, separator, f"{path}, line {number}")


def read_named_table(
    path: Path, names: pa.LargeStringArray, comments: str = COMMENTS
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Read a text file of lines ``name number number ...``, separated by tabs, commas, semicolons or spaces.

    A first line whose second field is not a number is a header.

    Args:
        path: the file; ``.gz`` is decompressed.
        names: the name of each node.
        comments: each of these characters starts a comment line.

    Returns:
        The node id of each row, ``[rows]``, without repetition, and the numbers, ``[rows, columns]``, all finite.

    Raises:
        DataError: a line is malformed, has an unknown name, or repeats a name; the message names the line.
    """
    hint = "give a file with one node per line: its name and its values"
    number, text, separator, fields = _first_line(path, "string", hint, comments)
    if len(fields) < 2:
        raise DataError(
            f"{path}, line {number}: 1 column, and 2 or more were expected, since nodes have names: {text[:60]!r}",
            hint="write one node per line, its name and its values, separated by tabs, commas, semicolons or spaces",
        )
    header = number if to_number(fields[1]) is None else 0
    columns = {0: pa.string()} | dict.fromkeys(range(1, len(fields)), pa.float64())
    lines = LineReader(path, separator, header, len(fields), columns, comments)
    pieces = [
        (_node_ids(piece, names), np.stack([piece.finite(i, "value") for i in range(1, len(fields))], axis=1))
        for piece in lines.pieces()
    ]
    if not pieces:
        raise DataError(f"{path} has no line of values", hint=hint)
    ids, values = map(np.concatenate, zip(*pieces, strict=True))
    counts = np.bincount(ids, minlength=len(names))
    if counts.max() > 1:
        node = int(counts.argmax())
        first, second = (f"{path}, line {lines.line(row)}" for row in np.flatnonzero(ids == node)[:2].tolist())
        raise DataError(
            f"{second}: {names[node].as_py()!r} already has a line: {first}", hint="delete one of the two lines"
        )
    return ids, values


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
