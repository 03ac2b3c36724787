"""Edges from Parquet files, one for each row."""

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
from gtrain.data.ingest.format import EdgeFormat
from gtrain.data.ingest.layout import Kinds
from gtrain.data.ingest.rows import Ints, Keys, Rows, first_true
from gtrain.errors import DataError

BATCH = 1 << 18
MAGIC = b"PAR1"


def is_parquet(path: Path) -> bool:
    """Whether a file is a Parquet file, or is called one."""
    if path.suffix in (".parquet", ".pq"):
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False  # whoever reads it as text says why it cannot be read


class ParquetReader:
    """Reads one Parquet file of an edge list.

    Args:
        path: the file.
        options: which columns to take.
        kinds: what an earlier file of the same list has settled.

    Raises:
        DataError: it is no Parquet file, has no such column, or a column of a type that does not fit.
    """

    def __init__(self, path: Path, options: EdgeFormat, kinds: Kinds | None) -> None:
        self.path = path
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except (pa.ArrowInvalid, OSError) as err:
            raise DataError(
                f"{path} is not a Parquet file, or is damaged: {str(err).splitlines()[0]}",
                hint="write it again, or take .parquet off its name if it is text",
            ) from err
        schema = self._file.schema_arrow
        if not options.chosen and len(schema.names) not in (2, 3):
            raise DataError(
                f"{path} has {len(schema.names)} columns: {', '.join(schema.names)}; 2 or 3 were expected",
                hint="name the ones to take, such as data.columns=[source,target] data.weight=weight",
            )
        self._roles = options.roles(schema.names, path, by_name=True)
        self._names = {role: schema.names[place] for role, place in self._roles.items()}
        types = {role: schema.field(place).type for role, place in self._roles.items()}
        self.kinds = _kinds(types, options.ids) if kinds is None else replace(kinds, weight="weight" in types)
        self._check_types(types)

    def read(self) -> Iterator[Rows]:
        """Yield the edges, some hundred thousand at a time.

        Raises:
            DataError: names the first row that is malformed.
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
                f"{self.path} is damaged behind row {first}: {str(err).splitlines()[0]}", hint="write the file again"
            ) from err

    def _rows(self, batch: pa.RecordBatch, first: int, read: int) -> Rows:
        columns = {role: _Column(self.path, name, batch.column(name), first) for role, name in self._names.items()}
        ends = columns["source"], columns["target"]
        ids: Keys | Ints
        if self.kinds.ids == "int":
            ids = np.stack([end.integers() for end in ends], axis=1).reshape(-1)
        else:
            ids = Keys.interleaved(*(end.strings() for end in ends))
        relation: Keys | Ints | None = None
        if "relation" in columns:
            column = columns["relation"]
            relation = column.integers() if self.kinds.relation == "int" else Keys.interleaved(column.strings())
        return Rows(
            ids=ids,
            relation=relation,
            weight=columns["weight"].weights() if "weight" in columns else None,
            time=columns["time"].integers() if "time" in columns else None,
            read=read,
            place=columns["source"].place,
        )

    def _check_types(self, types: dict[str, pa.DataType]) -> None:
        integers = {"time"} | ({"source", "target"} if self.kinds.ids == "int" else set())
        integers |= {"relation"} if self.kinds.relation == "int" else set()
        for role, kind in types.items():
            if role == "weight":
                fits, wanted, hint = _is_number(kind), "numbers", "name another column in data.weight"
            elif role in integers:
                fits, wanted = pa.types.is_integer(kind), "integers"
                hint = "set data.ids=string" if role in ("source", "target") else f"name another column in data.{role}"
            else:
                fits, wanted = pa.types.is_integer(kind) or _is_string(kind), "strings or integers"
                hint = "name columns of names in data.columns"
            if not fits:
                raise DataError(
                    f"{self.path}: the column {self._names[role]!r} holds {kind}, and {wanted} are expected", hint=hint
                )


class _Column:
    """A column of one batch whose first row is row ``first`` of the file."""

    def __init__(self, path: Path, name: str, values: pa.Array, first: int) -> None:
        self.path = path
        self.name = name
        self.first = first
        if values.null_count:
            row = first_true(values.is_null().to_numpy(zero_copy_only=False))
            raise DataError(
                f"{path}, row {first + (row or 0)} (from 0): the column {name!r} has no value there",
                hint="give each edge a value, or leave the edge out",
            )
        self.values = values

    def place(self, row: int) -> str:
        return f"{self.path}, row {self.first + row} (from 0)"

    def integers(self) -> Ints:
        try:
            return np.asarray(self.values.cast(pa.int64()).to_numpy(zero_copy_only=False))
        except pa.ArrowInvalid as err:
            raise DataError(
                f"{self.path}: the column {self.name!r} has a number of more than 63 bits: {err}",
                hint="set data.ids=string to number such ids in order of first appearance",
            ) from err

    def weights(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        values = np.asarray(self.values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))
        wrong = first_true(~(np.abs(values) <= np.finfo(np.float32).max))
        if wrong is not None:
            raise DataError(
                f"{self.place(wrong)}: the weight is {values[wrong]}",
                hint="give each edge a weight that is finite in 32 bits, or leave the edge out",
            )
        return values.astype(np.float32)

    def strings(self) -> pa.LargeStringArray:
        try:
            strings = self.values.cast(pa.large_string())
            strings.validate(full=True)
        except pa.ArrowInvalid as err:
            raise DataError(
                f"{self.path}: the column {self.name!r} holds bytes that are not UTF-8, in rows {self.first}.."
                f"{self.first + len(self.values) - 1}: {err}",
                hint="write the file again with UTF-8 strings",
            ) from err
        lengths = np.asarray(pyarrow.compute.binary_length(strings).to_numpy(zero_copy_only=False))
        wrong = first_true((lengths == 0) | (lengths > LONGEST_LINE))
        if wrong is not None:
            raise DataError(
                f"{self.place(wrong)}: the name in the column {self.name!r} has {lengths[wrong]} bytes",
                hint=f"write a name of 1..{LONGEST_LINE} bytes there, or leave the edge out",
            )
        return strings


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch of long strings: places in a buffer of keys are int32."""
    if batch.num_rows < 2 or batch.nbytes < 2**29:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _pieces(batch.slice(0, half))
    yield from _pieces(batch.slice(half))


def _kinds(types: dict[str, pa.DataType], ids: str) -> Kinds:
    if ids == "auto":
        ids = "int" if all(pa.types.is_integer(types[end]) for end in ("source", "target")) else "string"
    relation = None
    if "relation" in types:
        relation = "int" if pa.types.is_integer(types["relation"]) else "string"
    return Kinds(ids, relation, "weight" in types)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_string(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_string(kind.value_type)
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_string_view(kind)
    )
