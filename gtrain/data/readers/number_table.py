"""Read tables of numbers from text; errors name the malformed line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gtrain.data.ingest.blocks import first_lines
from gtrain.data.ingest.layout import line_separator, split_fields, to_number
from gtrain.data.ingest.lines import LineReader
from gtrain.errors import DataError

COMMENTS = "#%"


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


def read_table(path: Path, *, integers: int | None, header: bool, widths: tuple[int, ...] | None = None) -> NumberTable:
    """Read a table of numbers.

    Columns are separated by commas, semicolons, tabs or spaces. Lines that start with ``#`` or ``%`` are comments, and
    ``.gz`` files are decompressed.

    Args:
        path: the file.
        integers: the number of leading columns that hold integers; None: all.
        header: whether the first line may hold column names, which are recognised since they are not numbers.
        widths: the allowed numbers of columns; None allows any.

    Raises:
        DataError: names the file and the malformed line.
    """
    first = next(iter(first_lines(path, COMMENTS, 1)), None)
    if first is None:
        raise DataError(
            f"{path} has no lines other than comments", hint="name a file with one row of numbers in each line"
        )
    number, line = first
    separator = line_separator(line, "int")
    fields = split_fields(line, separator, f"{path}, line {number}")
    named = header and all(to_number(field) is None for field in fields[:2])
    if widths is not None and len(fields) not in widths:
        expected = " or ".join(str(width) for width in widths)
        raise DataError(
            f"{path}, line {number}: {len(fields)} columns, and {expected} were expected: {line.strip()[:60]!r}",
            hint=f"give each line {expected} columns, separated by commas, semicolons, tabs or spaces",
        )
    whole = len(fields) if integers is None else integers
    types = {column: pa.int64() if column < whole else pa.float64() for column in range(len(fields))}
    lines = LineReader(path, separator, number if named else 0, len(fields), types, COMMENTS)
    blocks = [[block.integers(i, i + 1) if i < whole else block.numbers(i) for i in types] for block in lines.pieces()]
    if not blocks:
        raise DataError(f"{path} has no line below the column names", hint="name a file with rows of numbers")
    return NumberTable(tuple(np.concatenate(column) for column in zip(*blocks, strict=True)), lines)
