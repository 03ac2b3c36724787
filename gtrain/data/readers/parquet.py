"""Read Parquet files as one table, batch by batch: convert columns to entries of a sparse matrix, and labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.data.readers.files import Ints, first_true
from gtrain.data.sources.feature_rows import among_unlabelled, number_labels
from gtrain.errors import DataError, unreadable
from gtrain.kernels.splitmix import mix

_OFFSET, _PRIME = 0xCBF29CE484222325, 0x100000001B3  # of FNV-1a in 64 bits
_MASK = 2**64 - 1


def hash_strings(strings: Any, salt: str) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each string.

    FNV-1a (Fowler, Noll and Vo) over the UTF-8 bytes of ``salt``, a zero byte and the string, then the finaliser of
    SplitMix64 (Steele et al. 2014), which spreads similar strings over all bits.

    Args:
        strings: a pyarrow array of strings without nulls, ``[N]``.
        salt: makes the hashes of equal strings differ between columns, such as the column's name.

    Returns:
        uint64 ``[N]``.
    """
    strings = pc.cast(strings, pa.large_binary())
    lengths = pc.binary_length(strings).to_numpy(zero_copy_only=False).astype(np.int64)
    # Longest first: the strings that have a byte at a given position are then a prefix of the order.
    order = np.argsort(-lengths, kind="stable")
    starts = np.frombuffer(strings.buffers()[1], np.int64, len(strings), 8 * strings.offset)[order]
    text = np.frombuffer(strings.buffers()[2] or b"\0", np.uint8)
    state = np.full(len(strings), _fnv1a(salt.encode() + b"\0"), np.uint64)
    # Number of strings longer than each length.
    counts = len(strings) - np.cumsum(np.bincount(lengths, minlength=1))
    for position, count in enumerate(counts):
        state[:count] = (state[:count] ^ text[starts[:count] + position]) * np.uint64(_PRIME)
    hashes = np.empty_like(state)
    hashes[order] = mix(state)
    return hashes


def _fnv1a(text: bytes) -> int:
    value = _OFFSET
    for byte in text:
        value = ((value ^ byte) * _PRIME) & _MASK
    return value


Entries = tuple[Ints, Ints, NDArray[np.float32]]
"""Rows (ascending), columns (from 0 within the block) and values of a block of the matrix, ``[K]`` each."""


@dataclass(frozen=True)
class BatchSource:
    """The origin of a batch of rows, and the treatment of missing values.

    Attributes:
        where: the files, for messages.
        zero: whether missing values count as 0; else they are an error.
        first_row: number of the batch's first row.
    """

    where: str
    zero: bool
    first_row: int = 0

    def check_missing(self, column: str, missing: NDArray[np.bool_]) -> None:
        """Refuse missing values, unless they count as 0."""
        if missing.any() and not self.zero:
            raise DataError(
                f"{self.where}: the column {column!r} has no value (null or NaN) in {self.rows(missing)}",
                hint="fill in the values, or set data.nulls=zero to count them as 0",
            )

    def rows(self, wrong: NDArray[np.bool_]) -> str:
        """Return the first of the wrong rows and their number, for messages."""
        row, seen = self.first_row + int(wrong.argmax()), self.first_row + len(wrong)
        return f"row {row}, and in {int(wrong.sum())} of the first {seen} rows (rows count from 0)"

    def wrong_type(self, column: str, actual: Any, expected: str) -> DataError:
        """Return the error for a column of another type."""
        return DataError(
            f"{self.where}: the column {column!r} holds {actual}, and {expected} were expected",
            hint="name another column, or convert this one",
        )


class FeatureLayout:
    """The blocks of columns of ``x``, side by side.

    Args:
        widths: number of columns of each block.

    Attributes:
        width: number of columns of all blocks.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self._starts = np.concatenate([[0], np.cumsum(widths, dtype=np.int64)])
        self.width = sum(widths)

    def rows(self, blocks: Sequence[Entries], count: int) -> tuple[Ints, Ints, NDArray[np.float32]]:
        """Merge the entries of ``count`` rows; entries in the same column of a row are summed.

        Returns:
            The number of entries of each row, int64 ``[count]``, their columns (ascending in each row) and values.
        """
        pairs = zip(blocks, self._starts, strict=False)
        keys = np.concatenate([rows * self.width + columns + start for (rows, columns, _), start in pairs])
        keys, entry = np.unique(keys, return_inverse=True)
        values = np.bincount(entry, np.concatenate([block[2] for block in blocks]), len(keys))
        counts = np.bincount(keys // self.width, minlength=count)
        return counts, keys % self.width, values.astype(np.float32)


def dense_entries(table: Any, name: str, source: BatchSource) -> Entries:
    """Return the nonzero values of a numeric column."""
    column = table[name]
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)):
        raise source.wrong_type(name, column.type, "numbers")
    values = pc.cast(column, pa.float64(), safe=False).to_numpy().astype(np.float64)  # a null becomes NaN
    source.check_missing(name, np.isnan(values))
    values = _finite(np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf), name, source)
    rows = np.flatnonzero(values)
    return rows, np.zeros_like(rows), values[rows].astype(np.float32)


def list_entries(table: Any, ids: str, values: str | None, source: BatchSource) -> Entries:
    """Return the entries of a column of lists of ids, with values from a second column of lists, or ones."""
    rows, flat = _flatten(table, ids, source)
    if not pa.types.is_integer(flat.type):
        raise source.wrong_type(ids, table[ids].type, "lists of whole numbers")
    if flat.null_count:
        raise source.wrong_type(ids, "lists with nulls", "lists of whole numbers")
    written = flat.to_numpy(zero_copy_only=False)
    # Unsigned ids of 2**63 and more become negative, which the next check refuses.
    columns = written.astype(np.int64)
    if (position := first_true(columns < 0)) is not None:
        value, row = written[position], source.first_row + rows[position]
        raise DataError(
            f"{source.where}: the column {ids!r} has the {'negative ' if value < 0 else ''}id {value} in row {row} "
            "(rows count from 0)",
            hint="number features from 0, below 2^63",
        )
    if values is None:
        return rows, columns, np.ones(len(columns), np.float32)
    value_rows, flat = _flatten(table, values, source)
    if not np.array_equal(rows, value_rows):
        counts = [np.bincount(listed, minlength=len(table)) for listed in (rows, value_rows)]
        row = int((counts[0] != counts[1]).argmax())
        raise DataError(
            f"{source.where}: row {source.first_row + row} has {counts[0][row]} {ids!r} and "
            f"{counts[1][row]} {values!r}",
            hint="give each id one value; rows count from 0",
        )
    if not (pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type)):
        raise source.wrong_type(values, table[values].type, "lists of numbers")
    numbers = pc.cast(flat, pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float64)
    missing = np.zeros(len(table), dtype=bool)
    missing[rows[np.isnan(numbers)]] = True
    source.check_missing(values, missing)
    return rows, columns, _finite(np.where(np.isnan(numbers), 0.0, numbers), values, source, rows).astype(np.float32)


def hashed_entries(table: Any, name: str, buckets: int, source: BatchSource) -> Entries:
    """Return a 1 in the bucket of each value of a categorical column; a missing value has no entry."""
    column = table[name].combine_chunks()
    if not (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type) or _is_text(column.type)):
        raise source.wrong_type(name, column.type, "strings or whole numbers")
    coded = pc.dictionary_encode(column)
    coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
    codes = pc.fill_null(pc.cast(coded.indices, pa.int64()), -1).to_numpy(zero_copy_only=False)
    source.check_missing(name, codes < 0)
    rows = np.flatnonzero(codes >= 0)
    hashes = hash_strings(pc.cast(coded.dictionary, pa.large_string()), name) % np.uint64(buckets)
    return rows, hashes.astype(np.int64)[codes[rows]], np.ones(len(rows), np.float32)


def _is_text(arrow_type: Any) -> bool:
    return bool(pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type))


def _flatten(table: Any, name: str, source: BatchSource) -> tuple[Ints, Any]:
    """Return the row of each element of a column of lists, and the elements."""
    column = table[name].combine_chunks()
    if pa.types.is_fixed_size_list(column.type):
        column = pc.cast(column, pa.large_list(column.type.value_type))
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise source.wrong_type(name, column.type, "lists")
    source.check_missing(name, pc.is_null(column).to_numpy(zero_copy_only=False))
    counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return np.repeat(np.arange(len(column)), counts), pc.list_flatten(column)


def _finite(
    values: NDArray[np.float64], name: str, source: BatchSource, rows: Ints | None = None
) -> NDArray[np.float64]:
    if (position := first_true(~(np.abs(values) <= np.finfo(np.float32).max))) is not None:
        row = source.first_row + (position if rows is None else int(rows[position]))
        raise DataError(
            f"{source.where}: the column {name!r} has {values[position]} in row {row}, which is not finite in 32 bits",
            hint="correct the value; rows count from 0",
        )
    return values


def check_label(arrow_type: Any, name: str, source: BatchSource) -> None:
    """Refuse a column whose type labels cannot have. Numbers with fractions are refused only when they are read.

    Raises:
        DataError: names the column and its type.
    """
    types = pa.types
    allowed = (types.is_null, types.is_integer, types.is_floating, types.is_boolean, _is_text)
    if not any(matches(arrow_type) for matches in allowed):
        raise source.wrong_type(name, arrow_type, "whole numbers or strings")


class LabelColumn:
    """Collects a column of labels (whole numbers, booleans or strings) batch by batch, 9 bytes per row.

    Args:
        name: name of the column.
        unlabelled: the label of rows without a label; None: each row has one.
    """

    def __init__(self, name: str, unlabelled: int | None) -> None:
        self._name, self._unlabelled = name, unlabelled
        self._labels: list[NDArray[np.int64]] = []
        self._labelled: list[NDArray[np.bool_]] = []
        self._texts: dict[str, int] | None = None

    def append(self, column: Any, source: BatchSource) -> None:
        """Append a batch of rows.

        Args:
            column: a ``pyarrow.ChunkedArray``.
            source: its origin.

        Raises:
            DataError: a row has no label, or the column holds other values.
        """
        missing = pc.is_null(column, nan_is_null=True)
        if self._unlabelled is None and pc.any(missing).as_py():
            raise DataError(
                f"{source.where}: the column {self._name!r} has no label (null or NaN) in "
                f"{source.rows(missing.to_numpy())}",
                hint="remove these rows, or set data.unlabelled=-1 to have them in no split",
            )
        known = pc.filter(column, pc.invert(missing))
        check_label(column.type, self._name, source)
        whole = pa.types.is_floating(known.type) and pc.all(pc.equal(known, pc.round(known))).as_py() is not False
        if whole or pa.types.is_boolean(known.type):
            known = pc.cast(known, pa.int64())
        labelled = ~missing.to_numpy()
        if _is_text(known.type):
            labels = self._number_texts(known)
        elif pa.types.is_integer(known.type):
            labels = known.to_numpy().astype(np.int64)
            labelled[labelled] = labels != self._unlabelled
            labels = labels[labels != self._unlabelled]
        else:
            raise source.wrong_type(self._name, column.type, "whole numbers or strings")
        self._labels.append(labels)
        self._labelled.append(labelled)

    def classes(self, num_classes: int | None, known: list[Any] | None = None) -> tuple[Tensor, list[Any] | None]:
        """Number the labels in the order of their values; see :func:`~gtrain.data.sources.feature_rows.number_labels`.

        Returns:
            The class of each row, int64 ``[N]``, and the label that each class stands for.
        """
        labels, labelled = np.concatenate(self._labels), np.concatenate(self._labelled)
        if self._texts is None:
            classes, values = number_labels(labels, num_classes, known)
        else:
            ranks, values = number_labels(np.array(list(self._texts)), num_classes, known)
            classes = ranks[torch.from_numpy(labels)]
        return among_unlabelled(classes, labelled, self._unlabelled), values

    def _number_texts(self, texts: Any) -> NDArray[np.int64]:
        """Number strings in the order of first occurrence."""
        self._texts = {} if self._texts is None else self._texts
        coded = pc.dictionary_encode(texts).combine_chunks()
        coded = coded.chunk(0) if isinstance(coded, pa.ChunkedArray) else coded
        numbers = [self._texts.setdefault(text, len(self._texts)) for text in coded.dictionary.to_pylist()]
        codes: NDArray[np.int64] = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        return np.array(numbers, np.int64)[codes]


BATCH_VALUES = 1 << 20
"""Approximate limit of the numbers and strings of a batch."""
BATCH_BYTES = 1 << 25
"""Approximate limit of a batch in bytes."""
_READ_BYTES = 1 << 20
"""Bytes of a column that are read at once; without this limit pyarrow reads a whole row group into memory."""
_ERRORS = pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OSError


class ParquetFiles:
    """Reads the named columns of several files, one file after the other, one batch of rows at a time.

    A column with different types in different files gets a common type; a column of pandas' categories gets the type of
    their values.

    Args:
        files: the files by the option that names them (``path``, ``test_path``), at least one each.
        named: the values of these options, for messages.
        columns: names of the columns.

    Attributes:
        counts: number of rows by option.
        schema: the schema of the columns, a ``pyarrow.Schema``.

    Raises:
        DataError: a file is not a Parquet file or lacks a column, or the files' types are incompatible.
    """

    def __init__(self, files: Mapping[str, Sequence[Path]], named: Mapping[str, str], columns: Sequence[str]) -> None:
        self._files = [(key, file) for key, paths in files.items() for file in paths]
        self._named = dict(named)
        self.counts = dict.fromkeys(files, 0)
        schemas: dict[str, list[Any]] = {key: [] for key in files}
        for key, file in self._files:
            opened = _opened(key, file)
            schemas[key].append(_select(opened.schema_arrow, file, columns))
            self.counts[key] += opened.metadata.num_rows
        for key, count in self.counts.items():
            if not count:
                raise DataError(f"data.{key}={named[key]} has no rows", hint=f"correct data.{key}")
        by_option = [self._unify(key, entries) for key, entries in schemas.items()]
        problem = "data.path and data.test_path have columns of different types"
        with unreadable(problem, "write both with the same types of columns", *_ERRORS):
            self.schema = pa.unify_schemas(by_option, promote_options="permissive")

    def __len__(self) -> int:
        return sum(self.counts.values())

    def read(self, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield the number of the first row of each batch, and the batch as a ``pyarrow.Table``.

        Args:
            columns: some of the columns.

        Raises:
            DataError: a file is damaged.
        """
        first_row = 0
        schema = pa.schema([self.schema.field(name) for name in columns])
        for key, file in self._files:
            opened = _opened(key, file)
            with self._reading(key):
                for batch in opened.iter_batches(_batch_rows(opened.metadata), columns=list(columns)):
                    table = pa.Table.from_batches([batch]).select(list(columns)).cast(schema)
                    yield first_row, table
                    first_row += len(table)

    def _unify(self, key: str, schemas: list[Any]) -> Any:
        with self._reading(key):
            return pa.unify_schemas(schemas, promote_options="permissive")

    def _reading(self, key: str) -> AbstractContextManager[None]:
        hint = "write the files again, with the same types of columns in all of them"
        return unreadable(f"data.{key}={self._named[key]} cannot be read", hint, *_ERRORS)


def column_names(file: Path, key: str = "path") -> list[str]:
    """Return the names of a file's columns."""
    return _opened(key, file).schema_arrow.names


def _opened(key: str, file: Path) -> Any:
    try:
        return pa.parquet.ParquetFile(file, pre_buffer=False, buffer_size=_READ_BYTES)
    except _ERRORS as err:
        raise DataError(
            f"{file} is not a Parquet file, or is damaged: {str(err).splitlines()[0].rpartition(': ')[2]}",
            hint=f"write the file again, or correct data.{key}",
        ) from err


def _select(schema: Any, file: Path, columns: Sequence[str]) -> Any:
    """Return the schema of the named columns."""
    if missing := [name for name in columns if name not in schema.names]:
        raise DataError(
            f"{file} has no column {missing[0]!r}; it has {', '.join(schema.names)}",
            hint="correct data.label, data.ids, data.values, data.dense or data.categorical",
        )
    types = {name: schema.field(name).type for name in columns}
    return pa.schema([(name, t.value_type if pa.types.is_dictionary(t) else t) for name, t in types.items()])


def _batch_rows(metadata: Any) -> int:
    """Return the number of rows of a batch, which the row group with the largest rows limits."""
    limit = BATCH_VALUES
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = [group.column(position) for position in range(group.num_columns)]
        values = sum(column.num_values for column in columns)
        nbytes = sum(column.total_uncompressed_size for column in columns)
        rows = max(1, group.num_rows)
        limit = min(limit, BATCH_VALUES * rows // max(1, values), BATCH_BYTES * rows // max(1, nbytes))
    return max(1, limit)
