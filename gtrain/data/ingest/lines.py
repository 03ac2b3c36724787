"""Parse lines of text, block by block, into strings, integers or numbers; errors name the malformed line.

Arrow's CSV reader parses a block, after comments, blanks beside separators and runs of blanks have been removed, which
it does not support. If Arrow rejects the block, Python parses it line by line: that either accepts syntax that Arrow
does not (``+5``, a blank before a quote) or raises an error that names the line.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
from numpy.typing import NDArray

from gtrain.data.ingest.blocks import Block, read_blocks
from gtrain.data.ingest.dictionary import EdgeRows, Ints, Keys, first_true
from gtrain.data.ingest.format import EdgeFormat, TextLayout, split_fields, to_integer, to_number
from gtrain.errors import DataError

ColumnTypes = Mapping[int, pa.DataType]
Floats = NDArray[np.floating[Any]]

_COMMENT_HINT = "or put # in front of the line if it is a comment or names columns"
_NO_WEIGHT = "; if the column does not hold weights, select columns: data.columns=[0,1]"
_ORDER = ("source", "target", "weight", "relation", "time")
_TAB_TO_SPACE = bytes.maketrans(b"\t", b" ")


class TextReader:
    """Reads one text file of an edge list.

    Args:
        path: the file.
        options: the user's settings.
        layout: the columns of the file.
    """

    def __init__(self, path: Path, options: EdgeFormat, layout: TextLayout) -> None:
        self._names = layout.id_types.ids == "string"
        self._named_relations = layout.id_types.relation == "string"
        order = sorted(layout.roles, key=_ORDER.index)
        self._slots = {role: slot for slot, role in enumerate(order)}
        ids = pa.string() if self._names else pa.int64()
        relation = pa.string() if self._named_relations else pa.int64()
        types = dict(source=ids, target=ids, weight=pa.float64(), relation=relation, time=pa.int64())
        columns = {layout.roles[role]: types[role] for role in order}
        self._lines = LineReader(path, layout.separator, layout.header, layout.num_columns, columns, options.comments)

    @property
    def comments(self) -> int:
        """Comment lines seen so far."""
        return self._lines.skipped

    def read(self) -> Iterator[EdgeRows]:
        """Yield the edges, some hundred thousand at a time.

        Raises:
            DataError: a line is malformed; the message names the first such line.
        """
        weight, relation, time = map(self._slots.get, ("weight", "relation", "time"))
        for piece in self._lines.pieces():
            relations = piece.keys if self._named_relations else piece.integers
            yield EdgeRows(
                ids=piece.keys(0, 2) if self._names else piece.integers(0, 2, "; names need data.ids=string"),
                relation=None if relation is None else relations(relation, relation + 1),
                weight=None if weight is None else piece.finite(weight, "weight", _NO_WEIGHT).astype(np.float32),
                time=None if time is None else piece.integers(time, time + 1),
                read=piece.block.read,
                location=piece.location,
            )


class LineReader:
    """Reads some columns of a text file.

    Args:
        path: the file.
        separator: the character between fields; a space stands for any run of spaces and tabs. Unless it is a tab, a
            quoted field may contain the separator, but not a quote.
        header: number of the line that names the columns; 0 if no line does.
        num_columns: fields per line.
        columns: the columns to read: type by position; ``string``, ``int64`` or a floating type.
        comments: each of these characters starts a comment line.

    Attributes:
        skipped: comment lines seen so far.
    """

    def __init__(
        self, path: Path, separator: str, header: int, num_columns: int, columns: ColumnTypes, comments: str
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

    def pieces(self) -> Iterator[TextPiece]:
        """Yield the parsed columns, some hundred thousand lines at a time.

        Raises:
            DataError: a line has another number of columns; the message names the first such line.
        """
        for block in read_blocks(self.path):
            text = self._tidy(block.text)
            if text.isspace() or not text:
                continue
            try:
                columns = self._parsed(text)
            except pa.ArrowInvalid:
                columns = self._split(block)
            skipped = int(block.line <= self.header < block.line_at(len(block.text)))  # the header is the first row
            if len(columns[0]) > skipped:
                lines = partial(block.lines, self._comments, self._blanks)
                yield TextPiece(block, [column.slice(skipped) for column in columns], skipped, lines)

    def line(self, row: int) -> int:
        """Return the line number of a row, from 1; reads the file again."""
        first = 0
        for piece in self.pieces():
            if row < first + len(piece):
                return piece.line(row - first)
            first += len(piece)
        raise IndexError(row)

    def _tidy(self, text: bytes) -> bytes:
        """Remove comments, and replace tabs by spaces where both separate fields."""
        if any(mark.encode() in text for mark in self._comments):
            text, count = self._comment.subn(b"", b"\n" + text)
            self.skipped += count
        return text.translate(_TAB_TO_SPACE) if self.separator == " " and b"\t" in text else text

    def _parsed(self, text: bytes) -> list[pa.Array]:
        """Parse the columns with Arrow.

        Raises:
            pa.ArrowInvalid: Arrow cannot parse a line, or a string is empty.
        """
        if pa.int64() in self._columns.values() and (b"0x" in text or b"0X" in text):
            raise pa.ArrowInvalid("Arrow would accept hexadecimal numbers as integers")
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
            # One block: the position of a row then gives its line.
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
        """Split the lines in Python; return all columns as strings."""
        rows = []
        for number, line in block.lines(self._comments, self._blanks):
            location = f"{self.path}, line {number}"
            fields = split_fields(line, self.separator, location)
            if len(fields) != self.num_columns:
                raise DataError(
                    f"{location}: {len(fields)} columns, and the lines before have {self.num_columns}: "
                    f"{line.strip()[:60]!r}",
                    hint=f"write {self.num_columns} columns, or put # in front of the line if it is a comment",
                )
            rows.append([fields[column].encode(errors="surrogateescape") for column in self._columns])
        if any(dtype == pa.string() for dtype in self._columns.values()):
            _check_encoding(block)
        return [pa.array(column, pa.binary()).view(pa.string()) for column in zip(*rows, strict=True)]


def _single_spaces(text: bytes) -> bytes:
    """Replace each run of spaces by one space, and strip the lines."""
    text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    # Each pass halves the runs of spaces.
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
            hint="convert the file to UTF-8, for example: iconv -f latin1 -t utf-8",
        ) from None


class TextPiece:
    """The requested columns of one block.

    Args:
        block: the block.
        columns: the fields of each column: of the requested type, or strings if Arrow could not convert them.
        skipped: rows of the block before the first of the columns.
        lines: returns the number and the text of the lines that are rows, for messages.
    """

    def __init__(
        self,
        block: Block,
        columns: Sequence[pa.Array],
        skipped: int,
        lines: Callable[[], Iterator[tuple[int, str]]],
    ) -> None:
        self.block = block
        self._columns, self._skipped, self._lines = columns, skipped, lines

    def __len__(self) -> int:
        return len(self._columns[0])

    def line(self, row: int) -> int:
        """Return the line number of a row, from 1; slow, for messages."""
        return self._numbered(row)[0]

    def location(self, row: int) -> str:
        """Return the file and the line of a row, for messages."""
        return f"{self.block.path}, line {self.line(row)}"

    def keys(self, first: int, last: int) -> Keys:
        """Return the fields of the columns ``first .. last - 1``, row by row, as hashed keys.

        Raises:
            DataError: a field is empty.
        """
        return Keys.interleaved(*(self.strings(column) for column in range(first, last)))

    def strings(self, column: int) -> pa.StringArray:
        """Return the fields of a column as strings.

        Raises:
            DataError: a field is empty.
        """
        strings = self._columns[column]
        empty = pyarrow.compute.index(pyarrow.compute.binary_length(strings), 0).as_py()
        if empty >= 0:
            raise DataError(
                f"{self.location(empty)}: a field is empty: {self._line(empty)!r}",
                hint="write a name there, or delete the line",
            )
        return strings

    def integers(self, first: int, last: int, hint: str = "") -> Ints:
        """Return the fields of the columns ``first .. last - 1``, row by row, ``[rows * (last - first)]`` int64.

        Args:
            first: the first column.
            last: the column behind the last.
            hint: addition to the hint of the error.

        Raises:
            DataError: a field is not an integer of 64 bits.
        """
        columns = [self._numeric(column, to_integer, "an integer", hint) for column in range(first, last)]
        return np.stack(columns, axis=1).reshape(-1)

    def numbers(self, column: int, hint: str = "") -> Floats:
        """Return the numbers of a column; they may be infinite or NaN.

        Args:
            column: the column.
            hint: addition to the hint of the error.

        Raises:
            DataError: a field is not a number.
        """
        return self._numeric(column, to_number, "a number", hint)

    def finite(self, column: int, what: str, hint: str = "") -> Floats:
        """Return the finite numbers of a column.

        Args:
            column: the column.
            what: the name of the quantity, for the message.
            hint: addition to the hint of the error.

        Raises:
            DataError: a field is not a number that is finite in float32.
        """
        values = self.numbers(column, hint)
        wrong = first_true(~(np.abs(values) <= np.finfo(np.float32).max))
        if wrong is not None:
            raise DataError(
                f"{self.location(wrong)}: the {what} is {values[wrong]}: {self._line(wrong)!r}",
                hint="write a number that is finite in 32 bits there, or delete the line",
            )
        return values

    def _numeric(self, column: int, parse: Callable[[str], float | None], wanted: str, hint: str) -> NDArray[Any]:
        """Return the numbers of a column; parse strings that Arrow did not convert one by one."""
        if self._columns[column].type != pa.string():
            return np.asarray(self._columns[column])
        fields = [raw.decode(errors="replace") for raw in self._columns[column].view(pa.binary()).to_pylist()]
        values = [parse(field) for field in fields]
        if None in values:
            row = values.index(None)
            raise DataError(
                f"{self.location(row)}: {fields[row][:30]!r} is not {wanted}: {self._line(row)!r}",
                hint=f"write {wanted} there, {_COMMENT_HINT}{hint}",
            )
        return np.array(values)

    def _line(self, row: int) -> str:
        """Return the first 60 characters of a row's line."""
        return self._numbered(row)[1].strip()[:60]

    def _numbered(self, row: int) -> tuple[int, str]:
        return next(itertools.islice(self._lines(), row + self._skipped, None))
