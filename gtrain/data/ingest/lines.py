"""The fields of lines of text, block by block, as strings, integers or numbers; the line that is wrong is named.

Arrow's reader of CSV parses a block. What it does not know is tidied away before (comments, blanks beside separators,
runs of blanks as separators); a block that it refuses all the same is taken apart line by line, which either serves
what Arrow does not (``+5``, a blank in front of a quote) or finds the line to name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
from numpy.typing import NDArray

from gtrain.data.ingest.blocks import Block, read_blocks
from gtrain.data.ingest.layout import split_fields, to_integer, to_number
from gtrain.data.ingest.rows import Ints, Keys, first_true
from gtrain.errors import DataError

Columns = Mapping[int, pa.DataType]
Floats = NDArray[np.floating[Any]]

_COMMENT_HINT = "or put # in front of the line if it is a comment or names columns"
_TAB_TO_SPACE = bytes.maketrans(b"\t", b" ")


class LineReader:
    """Reads some columns of a text file.

    Args:
        path: the file.
        separator: the character between fields; a space stands for any run of spaces and tabs. Between other
            separators than tabs a field may be in quotes, and then hold the separator, but no quotes.
        header: number of the line that names the columns; 0 without.
        num_columns: fields of each line.
        columns: what to read: the types of columns by their positions; ``string``, ``int64`` or a floating type.
        comments: characters that begin a comment line.

    Attributes:
        skipped: comment lines seen so far.
    """

    def __init__(
        self, path: Path, separator: str, header: int, num_columns: int, columns: Columns, comments: str
    ) -> None:
        self.path = path
        self.separator = separator
        self.header = header
        self.num_columns = num_columns
        self.skipped = 0
        self._columns = columns
        self._comments = comments
        self._blanks = " " if separator == "\t" else " \t"
        marks = re.escape(comments or "#")  # a class cannot be empty
        self._comment = re.compile(rf"[\r\n][{self._blanks}]*[{marks}][^\r\n]*".encode())

    def pieces(self) -> Iterator[Piece]:
        """Yield the lines, some hundred thousand at a time.

        Raises:
            DataError: names the first line of another number of columns.
        """
        for block in read_blocks(self.path):
            text = self._tidy(block.text)
            if text.isspace() or not text:
                continue
            try:
                columns = self._parsed(text)
            except pa.ArrowInvalid:
                columns = self._split(block)
            named = block.line <= self.header < block.line_at(len(block.text))  # it is the first line with fields
            if len(columns[0]) > named:
                lines = _Lines(block, self._comments, self._blanks, int(named))
                yield Piece(lines, [column.slice(int(named)) for column in columns])

    def line(self, row: int) -> int:
        """Return the number of a row's line, from 1; it reads the file again."""
        first = 0
        for piece in self.pieces():
            if row < first + len(piece):
                return piece.line(row - first)
            first += len(piece)
        raise IndexError(row)

    def _tidy(self, text: bytes) -> bytes:
        """Remove comments, and tabs where spaces separate as well."""
        if any(mark.encode() in text for mark in self._comments):
            text, count = self._comment.subn(b"", b"\n" + text)
            self.skipped += count
        return text.translate(_TAB_TO_SPACE) if self.separator == " " and b"\t" in text else text

    def _parsed(self, text: bytes) -> list[pa.Array]:
        """Return the columns as Arrow reads them.

        Raises:
            pa.ArrowInvalid: it does not know how, a line is malformed, or a string is empty.
        """
        if pa.int64() in self._columns.values() and (b"0x" in text or b"0X" in text):
            raise pa.ArrowInvalid("Arrow takes hexadecimal numbers for integers")
        try:
            return self._read(text)
        except pa.ArrowInvalid:
            if self.separator != " ":
                raise
            return self._read(_single_spaces(text))

    def _read(self, text: bytes) -> list[pa.Array]:
        names = [str(column) for column in range(self.num_columns)]
        quoted = self.separator not in " \t" and b'"' in text
        table = pyarrow.csv.read_csv(
            pa.BufferReader(text),
            read_options=pyarrow.csv.ReadOptions(column_names=names, block_size=len(text) + 1, use_threads=False),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=self.separator, quote_char='"' if quoted else False, double_quote=False
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types={names[column]: dtype for column, dtype in self._columns.items()},
                include_columns=[names[column] for column in self._columns],
                null_values=[],
                strings_can_be_null=False,
            ),
        )
        columns = [pa.concat_arrays(column.chunks) for column in table.columns]
        strings = [i for i, dtype in enumerate(self._columns.values()) if dtype == pa.string()]
        if self.separator != " " and any(blank.encode() in text for blank in self._blanks):
            for i in strings:
                columns[i] = pyarrow.compute.ascii_trim(columns[i], " \t")
        compute = pyarrow.compute
        if any(compute.index(compute.binary_length(columns[i]), 0).as_py() >= 0 for i in strings) or (
            quoted
            and (
                len(columns[0]) < sum(map(bool, text.splitlines()))  # a line end within quotes
                or any(compute.any(compute.match_substring(columns[i], '"')).as_py() for i in strings)
            )
        ):
            raise pa.ArrowInvalid("a field is empty, or has a quote within")
        return columns

    def _split(self, block: Block) -> list[pa.Array]:
        """Return the columns as strings, whatever their types."""
        rows = []
        for number, line in block.lines(self._comments, self._blanks):
            place = f"{self.path}, line {number}"
            fields = split_fields(line, self.separator, place)
            if len(fields) != self.num_columns:
                raise DataError(
                    f"{place}: {len(fields)} columns, and the lines before have {self.num_columns}: "
                    f"{line.strip()[:60]!r}",
                    hint=f"give the line {self.num_columns} columns, or put # in front of it if it is a comment",
                )
            rows.append([fields[column].encode(errors="surrogateescape") for column in self._columns])
        if any(dtype == pa.string() for dtype in self._columns.values()):
            _check_encoding(block)
        return [pa.array(column, pa.binary()).view(pa.string()) for column in zip(*rows, strict=True)]


def _single_spaces(text: bytes) -> bytes:
    """Return lines whose fields are separated by runs of spaces with one space between them."""
    text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    while b"  " in text:
        text = text.replace(b"  ", b" ")
    return text.replace(b" \n", b"\n").replace(b"\n ", b"\n").strip(b" ")


def _check_encoding(block: Block) -> None:
    try:
        block.text.decode()
    except UnicodeDecodeError as err:
        wrong = block.text[err.start : err.end]
        raise DataError(
            f"{block.path}, line {block.line_at(err.start)}: the bytes {wrong!r} are not UTF-8",
            hint="convert the file: iconv -f latin1 -t utf-8, or from what it is written in",
        ) from None


class _Lines:
    """The lines of a block's rows, for messages: slow."""

    def __init__(self, block: Block, comments: str, blanks: str, skipped: int) -> None:
        self.block = block
        self._arguments = comments, blanks
        self._skipped = skipped

    def of(self, row: int) -> tuple[int, str]:
        """Return number and contents of a row's line."""
        return next(itertools.islice(self.block.lines(*self._arguments), row + self._skipped, None))


class Piece:
    """The wanted columns of some lines.

    Args:
        lines: the lines.
        columns: the fields of each column: of its type, or strings where Arrow could not convert them.
    """

    def __init__(self, lines: _Lines, columns: Sequence[pa.Array]) -> None:
        self.block = lines.block
        self._lines = lines
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns[0])

    def line(self, row: int) -> int:
        """Return the number of a row's line, from 1; slow, for messages."""
        return self._lines.of(row)[0]

    def place(self, row: int) -> str:
        """Return the file and the line of a row, for messages."""
        return f"{self.block.path}, line {self.line(row)}"

    def keys(self, first: int, last: int) -> Keys:
        """Return the fields of the columns ``first .. last - 1`` row by row, hashed.

        Raises:
            DataError: a field is empty, or no UTF-8.
        """
        return Keys.interleaved(*(self.strings(column) for column in range(first, last)))

    def strings(self, column: int) -> pa.StringArray:
        """Return the fields of a column as strings.

        Raises:
            DataError: a field is empty, or no UTF-8.
        """
        strings = self._columns[column]
        empty = pyarrow.compute.index(pyarrow.compute.binary_length(strings), 0).as_py()
        if empty >= 0:
            raise DataError(
                f"{self.place(empty)}: a field is empty: {self._line(empty)!r}",
                hint="write a name there, or take the line out",
            )
        return strings

    def integers(self, first: int, last: int, hint: str = "") -> Ints:
        """Return the fields of the columns ``first .. last - 1`` row by row.

        Args:
            first: the first column.
            last: the column behind the last.
            hint: what else may help where a field is no integer.

        Raises:
            DataError: a field is not an integer of 64 bits.
        """
        columns = [self._numeric(column, to_integer, "an integer", hint) for column in range(first, last)]
        return np.stack(columns, axis=1).reshape(-1)

    def numbers(self, column: int, hint: str = "") -> Floats:
        """Return the fields of a column, which may be infinite or NaN.

        Args:
            column: the column.
            hint: what else may help where a field is no number.

        Raises:
            DataError: a field is not a number.
        """
        return self._numeric(column, to_number, "a number", hint)

    def finite(self, column: int, what: str, hint: str = "") -> Floats:
        """Return the fields of a column.

        Args:
            column: the column.
            what: what the numbers are, for the message.
            hint: what else may help where a field is no number.

        Raises:
            DataError: a field is not a finite number of 32 bits.
        """
        values = self.numbers(column, hint)
        wrong = first_true(~(np.abs(values) <= np.finfo(np.float32).max))
        if wrong is not None:
            raise DataError(
                f"{self.place(wrong)}: the {what} is {values[wrong]}: {self._line(wrong)!r}",
                hint="write a finite number of 32 bits there, or leave the line out",
            )
        return values

    def _numeric(self, column: int, parse: Callable[[str], float | None], wanted: str, hint: str) -> NDArray[Any]:
        """Return the numbers of a column; one by one those that Arrow did not convert."""
        if self._columns[column].type != pa.string():
            return np.asarray(self._columns[column])
        fields = [raw.decode(errors="replace") for raw in self._columns[column].view(pa.binary()).to_pylist()]
        values = [parse(field) for field in fields]
        if None in values:
            row = values.index(None)
            raise DataError(
                f"{self.place(row)}: {fields[row][:30]!r} is not {wanted}: {self._line(row)!r}",
                hint=f"write {wanted} there, {_COMMENT_HINT}{hint}",
            )
        return np.array(values)

    def _line(self, row: int) -> str:
        """Return the beginning of a row's line."""
        return self._lines.of(row)[1].strip()[:60]
