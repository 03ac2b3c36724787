"""Read edges from Parquet files, one per row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from gtrain.data.ingest.blocks import LONGEST_LINE
from gtrain.data.ingest.dictionary import EdgeRows, Ints, Keys, first_true
from gtrain.data.ingest.format import EdgeFormat, IdTypes
from gtrain.errors import DataError, unreadable

BATCH = 1 << 18
MAGIC = b"PAR1"


def is_parquet(path: Path) -> bool:
    """Return whether the file's name or its first bytes are those of a Parquet file."""
    if path.suffix in (".parquet", ".pq"):
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        # The text reader reports why the file cannot be read.
        return False


class ParquetReader:
    """Reads one Parquet file of an edge list.

    Args:
        path: the file.
        options: the user's settings.
        id_types: types from an earlier file of the same edge list; None for the first.

    Raises:
        DataError: the file is not a Parquet file, or lacks a column, or a column has the wrong type.
    """

    def __init__(self, path: Path, options: EdgeFormat, id_types: IdTypes | None) -> None:
        self.path = path
        hint = "write it again, or remove .parquet from its name if it is text"
        with unreadable(f"{path} is not a Parquet file, or is damaged", hint, pa.ArrowInvalid, OSError):
            self._file = pyarrow.parquet.ParquetFile(path)
        schema = self._file.schema_arrow
        if not options.chosen and len(schema.names) not in (2, 3):
            raise DataError(
                f"{path} has {len(schema.names)} columns: {', '.join(schema.names)}; 2 or 3 were expected",
                hint="select columns, such as data.columns=[source,target] data.weight=weight",
            )
        roles = options.roles(schema.names, path, by_name=True)
        self._names = {role: schema.names[position] for role, position in roles.items()}
        types = {role: schema.field(position).type for role, position in roles.items()}
        if id_types is None:
            id_types = IdTypes.detect(options.ids, {role: pa.types.is_integer(t) for role, t in types.items()})
        self.id_types = replace(id_types, weight="weight" in types)
        self._check_types(types)

    def read(self) -> Iterator[EdgeRows]:
        """Yield the edges, some hundred thousand at a time.

        Raises:
            DataError: a row is malformed; the message names the first such row.
        """
        first, total = 0, max(1, self._file.metadata.num_rows)
        size = self.path.stat().st_size
        columns = list(dict.fromkeys(self._names.values()))
        try:
            for batch in self._file.iter_batches(batch_size=BATCH, columns=columns):
                for piece in _pieces(batch):
                    yield self._rows(piece, first, size * (first + piece.num_rows) // total)
                    first += piece.num_rows
        except (pa.ArrowInvalid, OSError) as err:
            raise DataError(
                f"{self.path} is damaged after row {first}: {str(err).splitlines()[0]}", hint="write the file again"
            ) from err

    def _rows(self, batch: pa.RecordBatch, first: int, read: int) -> EdgeRows:
        columns = {role: _BatchColumn(self.path, name, batch.column(name), first) for role, name in self._names.items()}
        ends = columns["source"], columns["target"]
        ids: Keys | Ints
        # both forms interleave the ends: source, target, source, target, ...
        if self.id_types.ids == "int":
            ids = np.stack([end.integers() for end in ends], axis=1).reshape(-1)
        else:
            ids = Keys.interleaved(*(end.strings() for end in ends))
        relation: Keys | Ints | None = None
        if "relation" in columns:
            column = columns["relation"]
            relation = column.integers() if self.id_types.relation == "int" else Keys.interleaved(column.strings())
        return EdgeRows(
            ids=ids,
            relation=relation,
            weight=columns["weight"].weights() if "weight" in columns else None,
            time=columns["time"].integers() if "time" in columns else None,
            read=read,
            location=columns["source"].location,
        )

    def _check_types(self, types: dict[str, pa.DataType]) -> None:
        integers = {"time"} | ({"source", "target"} if self.id_types.ids == "int" else set())
        integers |= {"relation"} if self.id_types.relation == "int" else set()
        for role, dtype in types.items():
            fits = is_integer = pa.types.is_integer(dtype)
            if role == "weight":
                fits, expected = is_integer or pa.types.is_floating(dtype), "numbers"
                hint = "set data.weight to another column"
            elif role in integers:
                expected = "integers"
                hint = "set data.ids=string" if role in ("source", "target") else f"set data.{role} to another column"
            else:
                fits, expected = is_integer or _is_string(dtype), "strings or integers"
                hint = "set data.columns to columns of names"
            if not fits:
                raise DataError(
                    f"{self.path}: the column {self._names[role]!r} holds {dtype}, and {expected} are expected",
                    hint=hint,
                )


class _BatchColumn:
    """A column of one batch whose first row is row ``first`` of the file."""

    def __init__(self, path: Path, name: str, values: pa.Array, first: int) -> None:
        self.path = path
        self.name = name
        self.first = first
        if values.null_count:
            row = first_true(values.is_null().to_numpy(zero_copy_only=False))
            raise DataError(
                f"{path}, row {first + (row or 0)} (from 0): the column {name!r} has no value",
                hint="give each edge a value, or delete the edge",
            )
        self.values = values

    def location(self, row: int) -> str:
        return f"{self.path}, row {self.first + row} (from 0)"

    def integers(self) -> Ints:
        problem = f"{self.path}: the column {self.name!r} has a number that does not fit int64"
        hint = "set data.ids=string to number such ids in order of first appearance"
        with unreadable(problem, hint, pa.ArrowInvalid):
            return np.asarray(self.values.cast(pa.int64()).to_numpy(zero_copy_only=False))

    def weights(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        values = np.asarray(self.values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))
        # the negated comparison is also true of NaN
        wrong = first_true(~(np.abs(values) <= np.finfo(np.float32).max))
        if wrong is not None:
            raise DataError(
                f"{self.location(wrong)}: the weight is {values[wrong]}",
                hint="give each edge a weight that is finite in 32 bits, or delete the edge",
            )
        return values.astype(np.float32)

    def strings(self) -> pa.LargeStringArray:
        rows = f"rows {self.first}..{self.first + len(self.values) - 1}"
        problem = f"{self.path}: the column {self.name!r} holds bytes that are not UTF-8, in {rows}"
        with unreadable(problem, "write the file again with UTF-8 strings", pa.ArrowInvalid):
            strings = self.values.cast(pa.large_string())
            strings.validate(full=True)
        lengths = np.asarray(pyarrow.compute.binary_length(strings).to_numpy(zero_copy_only=False))
        wrong = first_true((lengths == 0) | (lengths > LONGEST_LINE))
        if wrong is not None:
            raise DataError(
                f"{self.location(wrong)}: the name in the column {self.name!r} has {lengths[wrong]} bytes",
                hint=f"write a name of 1..{LONGEST_LINE} bytes there, or delete the edge",
            )
        return strings


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Halve a batch of long strings until its bytes fit the int32 offsets of :class:`Keys`."""
    if batch.num_rows < 2 or batch.nbytes < 2**29:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _pieces(batch.slice(0, half))
    yield from _pieces(batch.slice(half))


def _is_string(dtype: pa.DataType) -> bool:
    if pa.types.is_dictionary(dtype):
        dtype = dtype.value_type
    return dtype in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view())
