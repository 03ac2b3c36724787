"""Read tables: Parquet, CSV, TSV and Arrow files, queries of DuckDB and Polars, and data frames, as pyarrow columns."""

from __future__ import annotations

import csv
import glob
import io
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet

from gtrain.data.readers.files import find_files, require
from gtrain.data.tables.description import Place
from gtrain.errors import DataError, unreadable

BATCH = 1 << 18
"""Rows per batch."""
_TEXT, _TABBED, _ARROW = (".csv", ".tsv", ".txt", ".tab"), (".tsv", ".tab"), (".arrow", ".feather", ".ipc")
_SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "space": " "}
_ERRORS = pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OSError


class Table(ABC):
    """Rows with named columns.

    Attributes:
        place: what the user said about the table.
        types: type of each column, by name, a ``pyarrow.DataType``; a column of pandas' categories has the type of its
            values.
    """

    text: ClassVar[bool] = False
    """Whether all columns are strings, whose kinds remain to be inferred."""
    types: Mapping[str, Any]

    def __init__(self, place: Place) -> None:
        self.place = place

    @abstractmethod
    def batches(self, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield the number of the first row, from 0, and some rows as a ``pyarrow.Table`` of the named columns."""

    @abstractmethod
    def row(self, number: int) -> str:
        """Return the file and the place of a row, from 0, for messages."""

    def column(self, name: str) -> Any:
        """Return a whole column, a ``pyarrow.ChunkedArray``."""
        chunks = [chunk for _, batch in self.batches([name]) for chunk in batch[name].chunks]
        return pa.chunked_array(chunks, self.types[name])

    def check(self, columns: Sequence[str | None]) -> None:
        """Refuse columns that the table lacks; None stands for no column.

        Raises:
            DataError: names the column, and those that the table has.
        """
        for name in columns:
            if name is not None and name not in self.types:
                raise DataError(
                    f"{self.place.key}: {self.where} has no column {name!r}; it has {', '.join(self.types)}",
                    hint=f"correct the name in {self.place.key}",
                )

    @property
    @abstractmethod
    def where(self) -> str:
        """The files or the query, for messages."""


class _Files(Table):
    """Files with the same columns, read one after the other."""

    first: ClassVar[str]
    """How rows are counted."""

    def __init__(self, place: Place, paths: Sequence[Path]) -> None:
        super().__init__(place)
        self.paths = paths
        self._starts = [0]
        schemas = [self._schema(path) for path in paths]
        for path, schema in zip(paths, schemas, strict=True):
            _check_distinct(f"{place.key}: {path}", schema.names)
        self.types = dict(zip(schemas[0].names, schemas[0].types, strict=True))
        for path, schema in zip(paths[1:], schemas[1:], strict=True):
            self._compare(path, schema)
        self.types = {name: _read_as(dtype) for name, dtype in self.types.items()}

    @abstractmethod
    def _schema(self, path: Path) -> Any:
        """Return the columns of a file, a ``pyarrow.Schema``."""

    @abstractmethod
    def _read(self, path: Path, columns: Sequence[str]) -> Iterator[Any]:
        """Yield the record batches of a file."""

    def batches(self, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        schema, first, self._starts = pa.schema([(name, self.types[name]) for name in columns]), 0, [0]
        hint = "write the file again"
        for path in self.paths:
            with unreadable(f"{self.place.key}: {path} cannot be read", hint, *_ERRORS):
                for batch in self._read(path, columns):
                    rows = pa.Table.from_batches([batch]).select(list(columns)).cast(schema)
                    yield first, rows
                    first += len(rows)
            self._starts.append(first)

    def row(self, number: int) -> str:
        file = max(i for i, start in enumerate(self._starts[: len(self.paths)]) if start <= number)
        return self._row(self.paths[file], number - self._starts[file])

    @abstractmethod
    def _row(self, path: Path, number: int) -> str:
        """Return the place of a row of a file, from 0."""

    @property
    def where(self) -> str:
        return str(self.paths[0]) + (f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else "")

    def _compare(self, path: Path, schema: Any) -> None:
        """Refuse a file with other columns than the first; numbers of several widths get the widest type."""
        found = dict(zip(schema.names, schema.types, strict=True))
        for name in {**self.types, **found}:
            if name not in found or name not in self.types:
                has, lacks = (self.paths[0], path) if name in self.types else (path, self.paths[0])
                raise DataError(
                    f"{self.place.key}: {has} has the column {name!r}, and {lacks} has not",
                    hint="give all files of a table the same columns",
                )
            try:
                fields = [pa.schema([("", types[name])]) for types in (self.types, found)]
                common = pa.unify_schemas(fields, promote_options="permissive").types[0]
            except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise DataError(
                    f"{self.place.key}: the column {name!r} holds {self.types[name]} in {self.paths[0]} and "
                    f"{found[name]} in {path}",
                    hint="write both files with the same types",
                ) from error
            self.types = {**self.types, name: common}


class ParquetTable(_Files):
    """Parquet files."""

    def _schema(self, path: Path) -> Any:
        return self._open(path).schema_arrow

    def _read(self, path: Path, columns: Sequence[str]) -> Iterator[Any]:
        return iter(self._open(path).iter_batches(BATCH, columns=list(columns)))

    def _row(self, path: Path, number: int) -> str:
        return f"{path}, row {number} (from 0)"

    def _open(self, path: Path) -> Any:
        problem = f"{self.place.key}: {path} is not a Parquet file, or is damaged"
        with unreadable(problem, f"write the file again, or correct {self.place.key}", *_ERRORS):
            return pa.parquet.ParquetFile(path)


class ArrowTable(_Files):
    """Files of Arrow's IPC format (Feather), mapped into memory."""

    def _schema(self, path: Path) -> Any:
        return self._open(path).schema

    def _read(self, path: Path, columns: Sequence[str]) -> Iterator[Any]:
        reader = self._open(path)
        for number in range(reader.num_record_batches):
            yield from _slices(reader.get_batch(number).select(list(columns)))

    def _row(self, path: Path, number: int) -> str:
        return f"{path}, row {number} (from 0)"

    def _open(self, path: Path) -> Any:
        problem = f"{self.place.key}: {path} is not an Arrow file, or is damaged"
        with unreadable(problem, f"write the file again, or correct {self.place.key}", *_ERRORS):
            return pa.ipc.open_file(pa.memory_map(str(path)))


class TextTable(_Files):
    """CSV and TSV files, also ``.gz``, whose first line has the names of the columns; all columns are strings.

    An empty field is null. Lines without any character are skipped.
    """

    text = True

    def __init__(self, place: Place, paths: Sequence[Path]) -> None:
        self._separators: dict[Path, str] = {}
        self._checked: set[Path] = set()
        super().__init__(place, paths)

    def _schema(self, path: Path) -> Any:
        self._separators[path] = self._separator(path)
        # An empty read is enough: opening parses the first block.
        return self._open(path).schema

    def _read(self, path: Path, columns: Sequence[str]) -> Iterator[Any]:
        # All columns once: a quote that is not closed, in any of them, hides rows.
        is_checked = self._separators[path] != "\t" or path in self._checked
        first = 0
        try:
            for batch in self._open(path, columns if is_checked else None):
                if not is_checked:
                    self._check_quotes(path, first, batch)
                    first += len(batch)
                yield from _slices(batch)
        except pa.ArrowInvalid as error:
            raise self._malformed(path, error) from error
        self._checked.add(path)

    def _check_quotes(self, path: Path, first: int, batch: Any) -> None:
        """Refuse a value with a tab in a tab-separated file; ``first`` is the number of the first row."""
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if (row := pc.index(pc.match_substring(column, "\t"), True).as_py()) >= 0:
                raise open_quote(self._row(path, first + row), name, column[row].as_py(), "a tab")

    def _row(self, path: Path, number: int) -> str:
        return f"{path}, line {self._line(path, number + (0 if self.place.header else 1))}"

    def _line(self, path: Path, record: int) -> int:
        """Return the line, from 1, where a record starts; records are counted from 0, the header included."""
        first, skipped = 1, 0
        with pa.input_stream(str(path), compression="detect") as stream:
            text = io.TextIOWrapper(stream, encoding="utf-8", errors="replace", newline="")
            rows = csv.reader(text, delimiter=self._separators[path])
            # What csv refuses, such as a field above its limit, ends the count of records with several lines.
            with suppress(csv.Error):
                for row in rows:
                    if row and skipped == record:
                        break
                    skipped += bool(row)
                    first = rows.line_num + 1
        return first + record - skipped

    def _open(self, path: Path, columns: Sequence[str] | None = None) -> Any:
        names = list(self.place.header) if self.place.header else None
        known = names or columns
        problem = f"{self.place.key}: {path} cannot be read"
        try:
            with unreadable(problem, "check the file", OSError):
                if known is None:
                    known = self._header(path)
                return pa.csv.open_csv(
                    self._source(path) if names is None else str(path),
                    # One thread: with several, messages do not tell the row.
                    pa.csv.ReadOptions(use_threads=False, column_names=names, block_size=1 << 22),
                    pa.csv.ParseOptions(delimiter=self._separators[path], newlines_in_values=True),
                    pa.csv.ConvertOptions(
                        column_types=dict.fromkeys(known, pa.string()),
                        include_columns=None if columns is None else list(columns),
                        strings_can_be_null=True,
                        null_values=[""],
                    ),
                )
        except pa.ArrowInvalid as error:
            raise self._malformed(path, error) from error

    def _header(self, path: Path) -> list[str]:
        parsing = pa.csv.ParseOptions(delimiter=self._separators[path], newlines_in_values=True)
        options = pa.csv.ReadOptions(use_threads=False), parsing
        return list(pa.csv.open_csv(self._source(path), *options).schema.names)

    def _source(self, path: Path) -> Any:
        """Return what Arrow reads: the file, or a header alone with the line end that Arrow expects."""
        text = b""
        with pa.input_stream(str(path), compression="detect") as stream:
            for size in (1 << 16, None):
                text = text + stream.read(size)
                if not {*b"\r\n"}.isdisjoint(text.lstrip(b"\r\n")):
                    return str(path)
        return pa.BufferReader(text + b"\n")

    def _separator(self, path: Path) -> str:
        """Return the separator: the one that was set, the file type's, or the most frequent one of the first line."""
        if (given := self.place.separator) is not None:
            separator = _SEPARATORS.get(given, given)
            if len(separator) != 1:
                raise DataError(
                    f"{self.place.key}.separator={given!r} was set",
                    hint=f"set one character or {', '.join(_SEPARATORS)}; for others read the file by a query, such as "
                    f"duckdb: \"SELECT * FROM read_csv('{path.name}', delim = '{given}')\"",
                )
            return separator
        if (path.with_suffix("") if path.suffix == ".gz" else path).suffix in _TABBED:
            return "\t"
        failing = unreadable(f"{self.place.key}: {path} cannot be read", "check the file", OSError)
        with failing, pa.input_stream(str(path), compression="detect") as stream:
            head = stream.read(1 << 16)
        if not head.strip():
            raise DataError(f"{self.place.key}: {path} is empty", hint=f"correct {self.place.key}")
        line = head.lstrip(b"\r\n").splitlines()[0].decode(errors="replace")
        return max("\t,;|", key=re.sub('"[^"]*"', "", line).count)

    def _malformed(self, path: Path, error: Exception) -> DataError:
        place, text = f"{self.place.key}: {path}", str(error).splitlines()[0]
        if (found := re.search(r"Row #(\d+): (Expected \d+ columns, got \d+)(?:: (.*))?", text)) is not None:
            row, what, content = found.groups()
            line = self._line(path, int(row) - 1)
            shown = f": {content[:80]!r}" if content else ""
            return DataError(
                f"{place}, line {line}: {what[0].lower()}{what[1:]}{shown}",
                hint="give each row all columns, and put values with a separator in quotes; the separator is "
                f"{self._separators[path]!r}, or what you set with separator: CHARACTER",
            )
        if "invalid UTF8" in text or "UTF-8" in text:
            return DataError(f"{place} is not text in UTF-8: {text}", hint="convert it, for example with iconv")
        return DataError(f"{place} is not a table of text: {text}", hint=f"correct {self.place.key}")


class FrameTable(Table):
    """A ``pyarrow.Table``: a data frame, or the result of a query."""

    def __init__(self, place: Place, frame: Any) -> None:
        super().__init__(place)
        self._frame = frame
        _check_distinct(f"{place.key}: {self.where}", frame.schema.names)
        self.types = {field.name: _read_as(field.type) for field in frame.schema}

    def batches(self, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        schema = pa.schema([(name, self.types[name]) for name in columns])
        for first in range(0, len(self._frame), BATCH):
            yield first, self._frame.slice(first, BATCH).select(list(columns)).cast(schema)

    def row(self, number: int) -> str:
        return f"{self.where}, row {number} (from 0)"

    @property
    def where(self) -> str:
        named = "the query of " if self.place.frame is None else "the frame "
        return f"{named}{self.place.key}"


def _check_distinct(where: str, names: Sequence[str]) -> None:
    """Refuse two columns of one name."""
    for position, name in enumerate(names):
        if name in names[:position]:
            raise DataError(f"{where} has two columns {name!r}", hint="rename one of them")


def open_table(place: Place, root: Path, scratch: Path) -> Table:
    """Open a table.

    Args:
        place: where it is.
        root: the folder of raw files.
        scratch: folder for the result of a query.

    Raises:
        DataError: a file is missing or damaged, or the query fails.
        ConfigError: the engine of the query is not installed.
    """
    if place.frame is not None:
        return FrameTable(place, place.frame)
    if place.duckdb is not None or place.polars is not None:
        return FrameTable(place, _query(place, scratch))
    paths = find_files(f"{place.key}.path", place.path, root)
    endings = {path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix for path in paths}
    for kind, known in ((ParquetTable, (".parquet", ".pq")), (TextTable, _TEXT), (ArrowTable, _ARROW)):
        if endings <= set(known):
            return kind(place, paths)
    raise DataError(
        f"{place.key}: {paths[0]} ends in {sorted(endings)[0] or 'nothing'!r}",
        hint=f"name files of one format: .parquet, {', '.join((*_TEXT, *_ARROW))}",
    )


def in_one_piece(column: Any) -> Any:
    """Return a column as a single array."""
    whole = column.combine_chunks()
    return whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole


def open_quote(where: str, name: str, value: str, mark: str) -> DataError:
    """Return the error for a text with a tab or a line end, ``mark``, that a double quote has probably let in."""
    return DataError(
        f"{where}: the column {name!r} has a value with {mark} in it: {value[:40]!r}",
        hint="is a double quote not closed? Write a double quote within a value twice, and the value in double quotes. "
        f"Values that have {mark} need another format, such as Parquet",
    )


def _read_as(dtype: Any) -> Any:
    """Return the type as which a column is read: of categories that of the values, of views one with all functions."""
    if pa.types.is_dictionary(dtype):
        return _read_as(dtype.value_type)
    if pa.types.is_string_view(dtype):
        return pa.large_string()
    if is_list(dtype) and (pa.types.is_string_view(dtype.value_type) or pa.types.is_dictionary(dtype.value_type)):
        return pa.large_list(_read_as(dtype.value_type))
    return dtype


def is_text(dtype: Any) -> bool:
    """Return whether a type of pyarrow is one of strings."""
    return bool(pa.types.is_string(dtype) or pa.types.is_large_string(dtype))


def is_whole(column: Any) -> Any:
    """Return which floating-point numbers are whole numbers of 64 bits, null where one is missing."""
    return pc.and_(pc.equal(column, pc.round(column)), pc.less(pc.abs(column), 2.0**63))


def is_list(dtype: Any) -> bool:
    """Return whether a type of pyarrow is one of lists."""
    types = pa.types
    return bool(types.is_list(dtype) or types.is_large_list(dtype) or types.is_fixed_size_list(dtype))


def is_date(dtype: Any) -> bool:
    """Return whether a type of pyarrow is one of dates, with or without a time of day."""
    return bool(pa.types.is_date(dtype) or pa.types.is_timestamp(dtype))


def query_files(place: Place) -> list[Path]:
    """Return the files that a query names in quotes, as far as they exist."""
    text = place.duckdb or place.polars or ""
    named = re.findall(r"'([^']+)'", text)
    paths = [Path(path) for name in named if name.strip("*") for path in sorted(glob.glob(name, recursive=True))]
    return [path for path in paths if path.is_file()]


def _query(place: Place, scratch: Path) -> Any:
    """Run a query; return its result, which is in a temporary file mapped into memory."""
    name, text = ("duckdb", place.duckdb) if place.duckdb is not None else ("polars", place.polars)
    engine = require(name, f"{place.key}.{name}", extra="tables")
    try:
        if name == "duckdb":
            with engine.connect() as connection:
                return _mapped(pa.RecordBatchReader.from_stream(connection.sql(text)), scratch)
        table = engine.sql(text, eager=True).to_arrow()
        return _mapped(table.to_reader(), scratch)
    except Exception as error:  # each engine has its own classes
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"{place.key}: the query fails: {reason}", hint=f"correct {place.key}.{name}") from error


def _mapped(reader: Any, scratch: Path) -> Any:
    """Write record batches to an unnamed file and map it; the file is freed with the table."""
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=scratch, suffix=".arrow") as file:
        with pa.ipc.new_file(file, reader.schema) as writer:
            for batch in reader:
                writer.write_batch(batch)
        file.flush()
        return pa.ipc.open_file(pa.memory_map(file.name)).read_all()


def _slices(batch: Any) -> Iterator[Any]:
    for first in range(0, len(batch), BATCH):
        yield batch.slice(first, BATCH)
