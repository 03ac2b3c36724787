"""From the columns of a table to the entries of a sparse matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gtrain.data.readers.hashing import hash_strings
from gtrain.errors import DataError

Ints = NDArray[np.int64]
Entries = tuple[Ints, Ints, NDArray[np.float32]]
"""Rows, columns (from 0 within their block) and values of a block of the matrix; rows ascend."""


@dataclass(frozen=True)
class Source:
    """Where a batch of rows came from, and what to do with what is missing.

    Attributes:
        where: the files, for messages.
        zero: whether missing values count as 0; else they are an error.
        first: number of the batch's first row.
    """

    where: str
    zero: bool
    first: int = 0

    def missing(self, column: str, wrong: NDArray[np.bool_]) -> None:
        """Refuse missing values, unless they count as 0."""
        if wrong.any() and not self.zero:
            raise DataError(
                f"{self.where}: the column {column!r} has no value (null or NaN) in {self.rows(wrong)}",
                hint="fill in the values, or set data.nulls=zero to count them as 0",
            )

    def rows(self, wrong: NDArray[np.bool_]) -> str:
        """Say which of the batch's rows are wrong; those before it were not."""
        return (
            f"row {self.first + int(wrong.argmax())}, and in {int(wrong.sum())} of the first {self.first + len(wrong)} "
            "rows (rows count from 0)"
        )

    def wrong_type(self, column: str, found: Any, wanted: str) -> DataError:
        """Return the error for a column of another type."""
        return DataError(
            f"{self.where}: the column {column!r} holds {found}, and {wanted} were expected",
            hint="name another column, or convert this one",
        )


class Layout:
    """Blocks of columns side by side.

    Args:
        widths: columns of each block.

    Attributes:
        width: of all of them.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self._starts = np.concatenate([[0], np.cumsum(widths, dtype=np.int64)])
        self.width = sum(widths)

    def rows(self, blocks: Sequence[Entries], count: int) -> tuple[Ints, Ints, NDArray[np.float32]]:
        """Put the entries of ``count`` rows in order; those that meet in one place are added up.

        Returns:
            How many entries each row has, int64 ``[count]``, their columns, ascending in each row, and their values.
        """
        pairs = zip(blocks, self._starts, strict=False)
        keys = np.concatenate([rows * self.width + columns + start for (rows, columns, _), start in pairs])
        keys, entry = np.unique(keys, return_inverse=True)
        values = np.bincount(entry, np.concatenate([block[2] for block in blocks]), len(keys))
        counts = np.bincount(keys // self.width, minlength=count)
        return counts, keys % self.width, values.astype(np.float32)


def dense_entries(table: Any, name: str, source: Source) -> Entries:
    """Return the values of a numeric column that are not 0."""
    column = table[name]
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)):
        raise source.wrong_type(name, column.type, "numbers")
    values = pc.cast(column, pa.float64(), safe=False).to_numpy().astype(np.float64)  # a null becomes NaN
    source.missing(name, np.isnan(values))
    values = _finite(np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf), name, source)
    rows = np.flatnonzero(values)
    return rows, np.zeros_like(rows), values[rows].astype(np.float32)


def list_entries(table: Any, ids: str, values: str | None, source: Source) -> Entries:
    """Return the entries of a column of lists of ids, with a column of lists of values, or else ones."""
    rows, flat = _flatten(table, ids, source)
    if not pa.types.is_integer(flat.type):
        raise source.wrong_type(ids, table[ids].type, "lists of whole numbers")
    if flat.null_count:
        raise source.wrong_type(ids, "lists with nulls", "lists of whole numbers")
    written = flat.to_numpy(zero_copy_only=False)
    columns = written.astype(np.int64)  # unsigned ids of 2^63 and more become negative
    if (columns < 0).any():
        at = int((columns < 0).argmax())
        wrong = "negative id" if written[at] < 0 else "id"
        raise DataError(
            f"{source.where}: the column {ids!r} has the {wrong} {written[at]} in row {source.first + rows[at]} "
            "(rows count from 0)",
            hint="number features from 0, below 2^63",
        )
    if values is None:
        return rows, columns, np.ones(len(columns), np.float32)
    value_rows, flat = _flatten(table, values, source)
    if not np.array_equal(rows, value_rows):
        counts = [np.bincount(found, minlength=len(table)) for found in (rows, value_rows)]
        row = int((counts[0] != counts[1]).argmax())
        raise DataError(
            f"{source.where}: row {source.first + row} has {counts[0][row]} {ids!r} and {counts[1][row]} {values!r}",
            hint="give each id one value; rows count from 0",
        )
    if not (pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type)):
        raise source.wrong_type(values, table[values].type, "lists of numbers")
    numbers = pc.cast(flat, pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float64)
    lacking = np.zeros(len(table), dtype=bool)
    lacking[rows[np.isnan(numbers)]] = True
    source.missing(values, lacking)
    return rows, columns, _finite(np.where(np.isnan(numbers), 0.0, numbers), values, source, rows).astype(np.float32)


def hashed_entries(table: Any, name: str, buckets: int, source: Source) -> Entries:
    """Return a one in the bucket of each value of a categorical column; a missing value has none."""
    column = table[name].combine_chunks()
    if not (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type) or _is_text(column.type)):
        raise source.wrong_type(name, column.type, "strings or whole numbers")
    coded = pc.dictionary_encode(column)
    coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
    codes = pc.fill_null(pc.cast(coded.indices, pa.int64()), -1).to_numpy(zero_copy_only=False)
    source.missing(name, codes < 0)
    rows = np.flatnonzero(codes >= 0)
    hashes = hash_strings(pc.cast(coded.dictionary, pa.large_string()), name) % np.uint64(buckets)
    return rows, hashes.astype(np.int64)[codes[rows]], np.ones(len(rows), np.float32)


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _flatten(table: Any, name: str, source: Source) -> tuple[Ints, Any]:
    """Return the row of each element of a column of lists, and the elements."""
    column = table[name].combine_chunks()
    if pa.types.is_fixed_size_list(column.type):
        column = pc.cast(column, pa.large_list(column.type.value_type))
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise source.wrong_type(name, column.type, "lists")
    source.missing(name, pc.is_null(column).to_numpy(zero_copy_only=False))
    counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return np.repeat(np.arange(len(column)), counts), pc.list_flatten(column)


def _finite(values: NDArray[np.float64], name: str, source: Source, rows: Ints | None = None) -> NDArray[np.float64]:
    wrong = ~(np.abs(values) <= np.finfo(np.float32).max)
    if wrong.any():
        at = int(wrong.argmax())
        row = at if rows is None else int(rows[at])
        raise DataError(
            f"{source.where}: the column {name!r} has {values[at]} in row {source.first + row}, and that is not "
            "finite in 32 bits",
            hint="correct the value; rows count from 0",
        )
    return values
