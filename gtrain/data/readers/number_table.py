"""Reading number tables from text: fast where they are well formed, exact about the line where they are not."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from gtrain.errors import DataError

COMMENTS = ("#", "%")
_COMMENT = re.compile(rb"^[ \t]*[#%][^\n]*\n?", re.MULTILINE)
_INTEGER = re.compile(r"[+-]?\d+")


@dataclass(frozen=True)
class Table:
    """A table of numbers read from text.

    Attributes:
        path: the file.
        columns: one array for each column: int64 for the leading integer columns, float64 for the others.
        header: whether the first line that is no comment was skipped, as names of columns.
    """

    path: Path
    columns: tuple[NDArray[Any], ...]
    header: bool

    @property
    def num_rows(self) -> int:
        """Rows of the table, which are lines of the file without comments, blank lines and the header."""
        return len(self.columns[0])

    def line(self, row: int) -> int:
        """Return the line number, from 1, of a row, from 0; slow, for messages."""
        lines = _data_lines(_text(self.path))
        for _ in range(row + self.header):
            next(lines)
        return next(lines)[0]


def read_table(path: Path, *, integers: int | None, header: bool, widths: tuple[int, ...] | None = None) -> Table:
    """Read a table of numbers.

    Columns are separated by commas, semicolons, tabs or spaces, ``#`` and ``%`` begin comment lines, and ``.gz`` files
    are unpacked.

    Args:
        path: the file.
        integers: how many leading columns hold integers; None means all.
        header: whether a first line of names may be there; it is recognised by fields that are no numbers.
        widths: the numbers of columns that are allowed; None allows any.

    Raises:
        DataError: names the file and the line that is malformed.
    """
    text = _text(path)
    first = next(_data_lines(text), None)
    if first is None:
        raise DataError(
            f"{path} has no lines other than comments", hint="name a file with one row of numbers in each line"
        )
    separator = _separator(first[1])
    fields = _fields(first[1], separator)
    named = header and not any(_is_number(field) for field in fields[:2])
    if widths is not None and len(fields) not in widths:
        wanted = " or ".join(str(width) for width in widths)
        raise DataError(
            f"{path}, line {first[0]}: {len(fields)} columns, and {wanted} were expected: {first[1][:60]!r}",
            hint=f"give each line {wanted} columns, separated by commas, semicolons, tabs or spaces",
        )
    kinds = [integers is None or column < integers for column in range(len(fields))]
    try:
        columns = _parse(text, separator, kinds, skip=int(named))
    except pa.ArrowInvalid as err:
        raise _malformed(path, text, separator, kinds, skip=int(named)) from err
    if not len(columns[0]):
        raise DataError(f"{path} has no line below the names of its columns", hint="name a file with rows of numbers")
    return Table(path, columns, named)


def unpacked(path: Path) -> bytes:
    """Return the file's bytes, unpacked where it ends in ``.gz``, without a byte order mark.

    Raises:
        DataError: it cannot be unpacked.
    """
    raw = path.read_bytes()
    try:
        text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as err:
        raise DataError(
            f"{path} cannot be unpacked: {err}",
            hint="copy or download the file again, or take .gz off its name if it is not compressed",
        ) from err
    return text.removeprefix(b"\xef\xbb\xbf")  # the byte order mark that spreadsheets put in front


def _text(path: Path) -> bytes:
    """Return the file's bytes, unpacked, with plain line ends."""
    text = unpacked(path)
    return text.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in text else text


def _data_lines(text: bytes) -> Iterator[tuple[int, str]]:
    """Yield number and contents of each line that is neither blank nor a comment."""
    for number, line in enumerate(io.BytesIO(text), start=1):
        shown = line.decode(errors="replace").strip()
        if shown and not shown.startswith(COMMENTS):
            yield number, shown


def _separator(line: str) -> str:
    """Return the separator of a line; a space stands for any run of spaces and tabs."""
    return "," if "," in line else ";" if ";" in line else " "


def _fields(line: str, separator: str) -> list[str]:
    return line.split() if separator == " " else [field.strip() for field in line.split(separator)]


def _parse(text: bytes, separator: str, kinds: list[bool], skip: int) -> tuple[NDArray[Any], ...]:
    names = [str(column) for column in range(len(kinds))]
    table = pa.csv.read_csv(
        io.BytesIO(_tidy(text, separator)),
        read_options=pa.csv.ReadOptions(column_names=names, skip_rows=skip),
        parse_options=pa.csv.ParseOptions(delimiter=separator, quote_char=False),
        convert_options=pa.csv.ConvertOptions(
            column_types={name: pa.int64() if kind else pa.float64() for name, kind in zip(names, kinds, strict=True)},
            null_values=[],
        ),
    )
    return tuple(column.to_numpy() for column in table.columns)


def _tidy(text: bytes, separator: str) -> bytes:
    """Remove comments and blanks that Arrow's reader does not know how to skip."""
    if any(mark.encode() in text for mark in COMMENTS):
        text = _COMMENT.sub(b"", text)
    if separator != " ":
        return text.translate(None, b" \t").lstrip(b"\n")
    text = text.translate(bytes.maketrans(b"\t", b" "))
    while b"  " in text:
        text = text.replace(b"  ", b" ")
    return text.replace(b" \n", b"\n").replace(b"\n ", b"\n").strip(b" \n")


def _malformed(path: Path, text: bytes, separator: str, kinds: list[bool], skip: int) -> DataError:
    """Find the first line that does not fit, and say why."""
    for count, (number, line) in enumerate(_data_lines(text)):
        if count < skip:
            continue
        fields = _fields(line, separator)
        if len(fields) != len(kinds):
            wrong = f"{len(fields)} columns, and the lines before have {len(kinds)}"
            return DataError(
                f"{path}, line {number}: {wrong}: {line[:60]!r}",
                hint=f"give the line {len(kinds)} columns, or put # in front of it if it is a comment",
            )
        for field, integer in zip(fields, kinds, strict=True):
            if not (_is_integer(field) if integer else _is_number(field)):
                wanted = "an integer" if integer else "a number"
                return DataError(
                    f"{path}, line {number}: {field[:30]!r} is not {wanted}: {line[:60]!r}",
                    hint=f"write {wanted} there, or put # in front of the line if it is a comment or names columns",
                )
    return DataError(
        f"{path} cannot be read as a table of {len(kinds)} columns of numbers",
        hint=f"write it again as plain text, {len(kinds)} columns of numbers in each line",
    )


def _is_integer(field: str) -> bool:
    return _INTEGER.fullmatch(field) is not None and -(2**63) <= int(field) < 2**63


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True
