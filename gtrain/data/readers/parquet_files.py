"""Parquet files that are read as one table, a batch of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from gtrain.errors import DataError

BATCH_VALUES = 1 << 20
"""Numbers and strings of a batch, about."""
BATCH_BYTES = 1 << 25
"""Their bytes, at most about."""
_READ_BYTES = 1 << 20
"""Of a column that are read from a file at once; else a row group would be in memory whole."""
_ERRORS = pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OSError


class ParquetFiles:
    """The named columns of some files, one behind another; of these, one batch of rows is in memory.

    Columns that have different types in different files have one that holds them all; what pandas calls a category is
    of its values' type.

    Args:
        files: by the option that names them (``path``, ``test_path``), at least one each.
        named: what these options were set to, for messages.
        columns: the columns.

    Attributes:
        counts: rows of the files of each option.
        schema: of the columns, a ``pyarrow.Schema``.

    Raises:
        DataError: a file is none of Parquet's, or lacks a column, or the files do not fit each other.
    """

    def __init__(self, files: Mapping[str, Sequence[Path]], named: Mapping[str, str], columns: Sequence[str]) -> None:
        self._files = [(key, file) for key, paths in files.items() for file in paths]
        self._named = dict(named)
        self.counts = dict.fromkeys(files, 0)
        schemas: dict[str, list[Any]] = {key: [] for key in files}
        for key, file in self._files:
            opened = _opened(key, file)
            schemas[key].append(_chosen(opened.schema_arrow, file, columns))
            self.counts[key] += opened.metadata.num_rows
        for key, count in self.counts.items():
            if not count:
                raise DataError(f"data.{key}={named[key]} has no rows", hint=f"correct data.{key}")
        self.schema = _together({key: self._one(key, found) for key, found in schemas.items()})

    def __len__(self) -> int:
        return sum(self.counts.values())

    def read(self, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield the number of the first row of each batch, and the batch as a ``pyarrow.Table``.

        Args:
            columns: some of the columns.

        Raises:
            DataError: a file is damaged.
        """
        first = 0
        schema = pa.schema([self.schema.field(name) for name in columns])
        for key, file in self._files:
            opened = _opened(key, file)
            try:
                for batch in opened.iter_batches(_rows_of_batch(opened.metadata), columns=list(columns)):
                    table = pa.Table.from_batches([batch]).select(list(columns)).cast(schema)
                    yield first, table
                    first += len(table)
            except _ERRORS as err:
                raise self._unreadable(key, err) from err

    def _one(self, key: str, schemas: list[Any]) -> Any:
        try:
            return pa.unify_schemas(schemas, promote_options="permissive")
        except _ERRORS as err:
            raise self._unreadable(key, err) from err

    def _unreadable(self, key: str, err: Exception) -> DataError:
        return DataError(
            f"data.{key}={self._named[key]} cannot be read: {str(err).splitlines()[0]}",
            hint="write the files again, with the same types of columns in all of them",
        )


def column_names(file: Path, key: str = "path") -> list[str]:
    """Return the names of a file's columns."""
    names: list[str] = _opened(key, file).schema_arrow.names
    return names


def _opened(key: str, file: Path) -> Any:
    try:
        return pa.parquet.ParquetFile(file, pre_buffer=False, buffer_size=_READ_BYTES)
    except _ERRORS as err:
        raise DataError(
            f"{file} is no Parquet file, or is damaged: {str(err).splitlines()[0].rpartition(': ')[2]}",
            hint=f"write the file again, or correct data.{key}",
        ) from err


def _chosen(schema: Any, file: Path, columns: Sequence[str]) -> Any:
    """Return the columns' part of a schema."""
    missing = [name for name in columns if name not in schema.names]
    if missing:
        raise DataError(
            f"{file} has no column {missing[0]!r}; it has {', '.join(schema.names)}",
            hint="correct data.label, data.ids, data.values, data.dense or data.categorical",
        )
    types = {name: schema.field(name).type for name in columns}
    plain = {name: kind.value_type if pa.types.is_dictionary(kind) else kind for name, kind in types.items()}
    return pa.schema([pa.field(name, kind) for name, kind in plain.items()])


def _together(schemas: Mapping[str, Any]) -> Any:
    """Return the schema of what trains and of what tests."""
    try:
        return pa.unify_schemas(list(schemas.values()), promote_options="permissive")
    except _ERRORS as err:
        raise DataError(
            f"data.path and data.test_path have columns of other types: {str(err).splitlines()[0]}",
            hint="write both with the same types of columns",
        ) from err


def _rows_of_batch(metadata: Any) -> int:
    """Return how many rows a batch may have, by the row group whose rows are the largest."""
    most = BATCH_VALUES
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = [group.column(place) for place in range(group.num_columns)]
        values, nbytes = (
            sum(getattr(column, name) for column in columns) for name in ("num_values", "total_uncompressed_size")
        )
        rows = max(1, group.num_rows)
        most = min(most, BATCH_VALUES * rows // max(1, values), BATCH_BYTES * rows // max(1, nbytes))
    return max(1, most)
