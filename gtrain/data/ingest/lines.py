"""The fields of lines of text, block by block, as strings, integers or numbers; the line that is wrong is named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gtrain.data.ingest.blocks import Block, read_blocks
from gtrain.data.ingest.layout import is_number, split_fields
from gtrain.data.ingest.rows import Keys, first_true
from gtrain.data.ingest.scan import Ints, gather, hash_keys, parse_integers, split
from gtrain.errors import DataError

Places = NDArray[np.int32]
Floats = NDArray[np.float64]

_COMMENT_HINT = "or put # in front of the line if it is a comment or names columns"


class LineReader:
    """Reads some columns of a text file.

    Args:
        path: the file.
        separator: the character between fields; a space stands for any run of spaces and tabs.
        header: number of the line that names the columns; 0 without.
        num_columns: fields of each line.
        columns: positions of the columns to read.
        comments: characters that begin a comment line.

    Attributes:
        skipped: comment lines seen so far.
    """

    def __init__(
        self, path: Path, separator: str, header: int, num_columns: int, columns: Sequence[int], comments: str
    ) -> None:
        self.path = path
        self.separator = separator
        self.header = header
        self.num_columns = num_columns
        self.skipped = 0
        self._width = len(columns)
        self._marks = np.frombuffer(comments.encode(), dtype=np.uint8).copy()
        self._slots = np.full(num_columns, -1, dtype=np.int64)
        self._slots[list(columns)] = np.arange(len(columns))

    def pieces(self) -> Iterator[Piece]:
        """Yield the lines, some hundred thousand at a time.

        Raises:
            DataError: names the first line of another number of columns.
        """
        for block in read_blocks(self.path):
            starts, lengths = self._split(block)
            if len(starts):
                yield Piece(block, starts, lengths)

    def _split(self, block: Block) -> tuple[Places, Places]:
        most = block.size // self.num_columns + 1  # a field has a byte behind it at least
        starts = np.empty((most, self._width), dtype=np.int32)
        lengths = np.empty_like(starts)
        separator = ord(self.separator)
        rows, skipped, wrong = split(block.data, block.size, separator, self._marks, self._slots, starts, lengths)
        if wrong >= 0:
            self._refuse(block, wrong)
        self.skipped += skipped
        named = block.line <= self.header and rows > 0 and block.line_at(int(starts[0, 0])) == self.header
        return starts[named:rows], lengths[named:rows]

    def _refuse(self, block: Block, position: int) -> NoReturn:
        text, place = block.text_at(position), f"{self.path}, line {block.line_at(position)}"
        found = len(split_fields(text, self.separator))
        if found == self.num_columns or text.count('"') % 2:
            raise DataError(
                f"{place}: a quote inside quotes, or one that is not closed: {text[:60]!r}",
                hint="write each field plainly or in one pair of quotes, or separate the columns by tabs, where "
                "quotes have no meaning",
            )
        raise DataError(
            f"{place}: {found} columns, and the lines before have {self.num_columns}: {text[:60]!r}",
            hint=f"give the line {self.num_columns} columns, or put # in front of it if it is a comment",
        )


class Piece:
    """The wanted columns of some lines.

    Args:
        block: the lines.
        starts: where each field begins, ``[rows, columns]``.
        lengths: bytes of each field, likewise.
    """

    def __init__(self, block: Block, starts: Places, lengths: Places) -> None:
        self.block = block
        self._starts = starts
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._starts)

    def place(self, row: int) -> str:
        """Return the file and the line of a row, for messages."""
        return f"{self.block.path}, line {self.block.line_at(int(self._starts[row, 0]))}"

    def keys(self, first: int, last: int) -> Keys:
        """Return the fields of the columns ``first .. last - 1`` row by row, hashed.

        Raises:
            DataError: a field is empty, or no UTF-8.
        """
        starts, lengths = self._fields(first, last)
        empty = first_true(lengths == 0)
        if empty is not None:
            row = empty // (last - first)
            raise DataError(
                f"{self.place(row)}: a field is empty: {self._line(row)!r}",
                hint="write a name there, or take the line out",
            )
        hashes = np.empty(starts.size, dtype=np.uint64)
        if hash_keys(self.block.data, starts, lengths, hashes):
            self._check_encoding()
        return Keys(self.block.data, starts, lengths, hashes)

    def strings(self, column: int) -> pa.LargeStringArray:
        """Return the fields of a column as strings; those of :meth:`keys`."""
        keys = self.keys(column, column + 1)
        return self._packed(keys.starts, keys.lengths).cast(pa.large_string())

    def integers(self, first: int, last: int, hint: str = "") -> Ints:
        """Return the fields of the columns ``first .. last - 1`` row by row.

        Args:
            first: the first column.
            last: the column behind the last.
            hint: what else may help where a field is no integer.

        Raises:
            DataError: a field is not an integer of 64 bits.
        """
        starts, lengths = self._fields(first, last)
        values = np.empty(starts.size, dtype=np.int64)
        wrong = parse_integers(self.block.data, starts, lengths, values)
        if wrong >= 0:
            row, field = wrong // (last - first), self._field(int(starts[wrong]), int(lengths[wrong]))
            raise DataError(
                f"{self.place(row)}: {field[:30]!r} is not an integer: {self._line(row)!r}",
                hint=f"write an integer there, {_COMMENT_HINT}{hint}",
            )
        return values

    def numbers(self, column: int, hint: str = "") -> Floats:
        """Return the fields of a column, which may be infinite or NaN.

        Args:
            column: the column.
            hint: what else may help where a field is no number.

        Raises:
            DataError: a field is not a number.
        """
        starts, lengths = self._fields(column, column + 1)
        try:
            values = self._packed(starts, lengths).cast(pa.float64())
        except pa.ArrowInvalid:
            return self._numbers_one_by_one(starts, lengths, hint)  # spellings that Arrow does not know, such as +1.5
        return np.asarray(values.to_numpy(zero_copy_only=False))

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

    def _numbers_one_by_one(self, starts: Places, lengths: Places, hint: str) -> Floats:
        fields = [self._field(start, length) for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
        for row, field in enumerate(fields):
            if not is_number(field):
                raise DataError(
                    f"{self.place(row)}: {field[:30]!r} is not a number: {self._line(row)!r}",
                    hint=f"write a number there, {_COMMENT_HINT}{hint}",
                )
        return np.array([float(field) for field in fields])

    def _packed(self, starts: Places, lengths: Places) -> pa.StringArray:
        offsets = np.zeros(starts.size + 1, dtype=np.int32)
        np.cumsum(lengths, out=offsets[1:])
        packed = np.empty(int(offsets[-1]), dtype=np.uint8)
        gather(self.block.data, starts, offsets, packed)
        return pa.StringArray.from_buffers(starts.size, pa.py_buffer(offsets), pa.py_buffer(packed))

    def _check_encoding(self) -> None:
        try:
            str(self.block.data[: self.block.size].data, "utf-8")
        except UnicodeDecodeError as err:
            wrong = self.block.data[err.start : err.end].tobytes()
            raise DataError(
                f"{self.block.path}, line {self.block.line_at(err.start)}: the bytes {wrong!r} are not UTF-8",
                hint="convert the file: iconv -f latin1 -t utf-8, or from what it is written in",
            ) from None

    def _fields(self, first: int, last: int) -> tuple[Places, Places]:
        """Return where the fields of some columns begin and how long they are, row by row."""
        columns = slice(first, last)
        return (
            np.ascontiguousarray(self._starts[:, columns]).reshape(-1),
            np.ascontiguousarray(self._lengths[:, columns]).reshape(-1),
        )

    def _field(self, start: int, length: int) -> str:
        return self.block.data[start : start + length].tobytes().decode(errors="replace")

    def _line(self, row: int) -> str:
        """Return the beginning of a row's line."""
        before = self.block.data[: int(self._starts[row].min())].tobytes()
        return self.block.text_at(max(before.rfind(b"\n"), before.rfind(b"\r")) + 1)[:60]
