"""Columns of features: what becomes of each, inferred from its values once and applied alike to later data."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.data.ingest.dictionary import first_true
from gtrain.data.tables.description import ColumnChoice, Features
from gtrain.data.tables.reading import Table, in_one_piece, is_date, is_list, is_text, is_whole
from gtrain.errors import DataError
from gtrain.graph.store.tables import csr_tensor, is_worthwhile

log = logging.getLogger("gtrain")
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

_NUMBERS = ("number", "plain", "date")
UNIQUE_SHARE, UNIQUE_VALUES = 0.5, 100
"""Strings with more distinct values than this share of the rows and this number are text, not categories."""
SIMILAR_SHARE = 0.9
"""Of strings that look like numbers or dates at least this share, those that do not are probably mistakes."""
FAR_DEVIATIONS, FAR_SHARE = 5.0, 0.5
"""Further than this from the mean are at most 1/25 of the numbers of a schema's data. Of other data, such a share is
warned of, and such a share of categories that did not occur."""
_LIKE_NUMBER, _LIKE_DATE = r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$", r"^\d{4}-\d{2}-\d{2}"
_TRUTH, _INTEGER = ("false", "true"), r"^-?\d+$"
_TIME_ZONE, _FURTHER_DIGITS = r":\d{2}.*(Z|[+-]\d{2}(:?\d{2})?)$", r"(\.\d{6})\d+"


@dataclass(frozen=True)
class ColumnSchema:
    """What becomes of a column.

    Attributes:
        name: of the column.
        kind: one of :data:`~gtrain.data.tables.description.KINDS` other than ``ignore``.
        mean: of the numbers (dates: seconds since 1970), which become ``(value - mean) / deviation``.
        deviation: their standard deviation; 1 if they are all equal.
        values: the categories or items with a column of their own, in the order of their columns.
        other: whether one column stands for all other values that occurred.
        missing: whether one column marks rows without a value; else these have the value 0 in all columns.
        width: numbers in a vector, or of an encoder.
        separator: of the items of a list that is written as text.
    """

    name: str
    kind: str
    mean: float = 0.0
    deviation: float = 1.0
    values: tuple[str, ...] = ()
    other: bool = False
    missing: bool = False
    width: int = 0
    separator: str | None = None

    @property
    def num_columns(self) -> int:
        """Number of columns of ``x``."""
        own = 1 if self.kind in _NUMBERS else self.width + len(self.values)
        return own + self.other + self.missing

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> ColumnSchema:
        """Return the schema that :meth:`fields` described."""
        return cls(**{**fields, "values": tuple(fields.get("values", ()))})

    def fields(self) -> dict[str, Any]:
        """Return the attributes that differ from their defaults, as JSON."""
        return {name: value for name, value in asdict(self).items() if value != getattr(ColumnSchema, name, None)}

    @property
    def summary(self) -> str:
        """What a reader wants to know, such as ``mean 3.2, deviation 1.1``."""
        parts = []
        if self.kind in ("number", "date"):
            parts.append(f"mean {self.mean:.6g}, deviation {self.deviation:.6g}")
        if self.kind in ("category", "list"):
            shown = ", ".join(self.values[:5]) + (", ..." if len(self.values) > 5 else "")
            parts.append(f"{len(self.values)} {'values' if self.kind == 'category' else 'items'}: {shown}")
        if self.width:
            parts.append(f"{self.width} numbers")
        return ", ".join([*parts, *(["others together"] if self.other else []), *(["missing"] if self.missing else [])])


@dataclass(frozen=True)
class Block:
    """Some columns of ``x``: dense ``[N, width]``, or the rows and columns of the elements that are 1."""

    dense: Floats | None
    ones: tuple[Ints, Ints] | None
    width: int
    num_rows: int


def feature_columns(table: Table, features: Features, taken: Sequence[str | None]) -> list[str]:
    """Return the columns of features: those that were named, or all that have no other meaning.

    Raises:
        DataError: the table lacks a column that was named.
    """
    table.check([*(features.names or ()), *features.ignore, *features.columns])
    left_out = {*features.ignore, *taken, *(name for name, c in features.columns.items() if c.kind == "ignore")}
    chosen = table.types if features.names is None else features.names
    return [name for name in chosen if name not in left_out]


def infer(table: Table, name: str, choice: ColumnChoice, max_values: int) -> ColumnSchema | None:
    """Return what becomes of a column; None if it is left out, which is logged.

    Args:
        table: the table.
        name: the column.
        choice: what the user said about it.
        max_values: the number of values with a column of their own, unless the user said another one.

    Raises:
        DataError: a value does not suit the kind that the user named.
    """
    column = present(table.column(name), table)
    if choice.kind is None and choice.encoder is None:
        column = as_truth_values(column)
    kind = choice.kind or ("text" if choice.encoder is not None else _kind(column))
    if choice.kind is None and choice.encoder is None and is_text(column.type):
        _warn_of_outliers(column, name, kind, table)
    if choice.kind is None and (reason := _useless(column, kind, choice)) is not None:
        log.warning("%s: the column %r is left out: %s", table.place.key, name, reason)
        return None
    schema = ColumnSchema(name, kind, separator=choice.separator)
    column = _suitable(column, schema, table)
    missing = bool(pc.any(pc.is_null(column, nan_is_null=True)).as_py())
    if kind in _NUMBERS:
        numbers = _numbers(column, schema, table)
        known = numbers[~np.isnan(numbers)]
        if kind == "plain" or ((known == 0) | (known == 1)).all():
            return replace(schema, kind="plain", missing=missing)
        # The deviation of equal numbers is 0 only up to rounding.
        deviation = 1.0 if known.min() == known.max() else float(known.std()) or 1.0
        return replace(schema, mean=float(known.mean()), deviation=deviation, missing=missing)
    if kind in ("category", "list"):
        items = _strings(column, name, table) if kind == "category" else _items(column, schema, table)[1]
        limit = choice.max_values if choice.max_values is not None else max_values
        values, other = _most_frequent(items, limit)
        return replace(schema, values=values, other=other, missing=missing and kind == "category")
    if kind == "vector":
        return replace(schema, width=_vectors(column, schema, table).shape[1])
    return replace(schema, width=_encoded(column, choice, schema, table).shape[1])


def apply(table: Table, schema: ColumnSchema, choice: ColumnChoice) -> Block:
    """Return a column as columns of ``x``.

    A value that did not occur in the data of the schema is in the column of the others, or in none.

    Raises:
        DataError: a value does not suit the schema; names file, row and value.
    """
    column = present(table.column(schema.name), table)
    column = _suitable(as_truth_values(column) if schema.kind in _NUMBERS else column, schema, table)
    null = pc.is_null(column, nan_is_null=True).to_numpy().astype(bool)
    if schema.kind in _NUMBERS:
        scaled = (_numbers(column, schema, table) - schema.mean) / schema.deviation
        if schema.kind != "plain":
            _warn_of_new_values(table, schema, np.abs(scaled[~null]) > FAR_DEVIATIONS, schema.summary)
        parts = [np.where(null, 0.0, scaled), *([null] if schema.missing else [])]
        return Block(np.stack(parts, axis=1).astype(np.float32), None, schema.num_columns, len(column))
    if schema.kind in ("category", "list"):
        if schema.kind == "category":
            rows, items = np.arange(len(column)), _strings(column, schema.name, table)
        else:
            rows, items = _items(column, schema, table)
        items = _spelled(items, schema.values)
        rest = len(schema.values) if schema.other else -1
        found = pc.fill_null(pc.index_in(items, pa.array(schema.values, items.type)), rest)
        numbers = np.asarray(found).astype(np.int64)
        known = pc.is_valid(items).to_numpy(zero_copy_only=False)
        if not schema.other:
            _warn_of_new_values(table, schema, numbers[known] < 0, f"their columns are 0; {schema.summary}")
        chosen = known & (numbers >= 0)
        rows, numbers = rows[chosen], numbers[chosen]
        if schema.missing:
            empty = np.flatnonzero(null)
            rows, numbers = np.append(rows, empty), np.append(numbers, np.full(len(empty), schema.num_columns - 1))
        return Block(None, (rows, numbers), schema.num_columns, len(column))
    if schema.kind == "vector":
        return Block(_vectors(column, schema, table), None, schema.width, len(column))
    return Block(_encoded(column, choice, schema, table), None, schema.width, len(column))


def side_by_side(blocks: Sequence[Block]) -> Tensor:
    """Return blocks of columns as one matrix ``[N, F]``: float32, ``torch.sparse_csr`` where most of it is 0."""
    num_rows = blocks[0].num_rows
    width = sum(block.width for block in blocks)
    entries = sum(len(block.ones[0]) if block.ones is not None else block.width * num_rows for block in blocks)
    starts = np.concatenate([[0], np.cumsum([block.width for block in blocks])])
    if not is_worthwhile((num_rows, width), entries):
        x = np.zeros((num_rows, width), np.float32)
        for block, start in zip(blocks, starts, strict=False):
            if block.ones is None:
                x[:, start : start + block.width] = block.dense
            else:
                x[block.ones[0], start + block.ones[1]] = 1
        return torch.from_numpy(x)
    rows, columns, values = [], [], []
    for block, start in zip(blocks, starts, strict=False):
        if block.dense is not None:
            where = np.nonzero(block.dense)
            values.append(block.dense[where])
        elif block.ones is not None:
            where = block.ones
            values.append(np.ones(len(where[0]), np.float32))
        rows.append(where[0])
        columns.append(where[1] + start)
    keys, first = np.unique(np.concatenate(rows) * width + np.concatenate(columns), return_index=True)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(keys // width, minlength=num_rows))])
    numbers, elements = torch.from_numpy(keys % width), torch.from_numpy(np.concatenate(values)[first])
    return csr_tensor(torch.from_numpy(indptr), numbers, elements, (num_rows, width))


def present(column: Any, table: Table) -> Any:
    """Return a column in which NaN and texts that mean a missing value are null, and texts have no outer blanks."""
    if pa.types.is_floating(column.type) and pc.any(nan := pc.is_nan(column)).as_py():
        return pc.if_else(nan, pa.scalar(None, column.type), column)
    if not is_text(column.type):
        return column
    trimmed = pc.utf8_trim_whitespace(column)
    absent = pc.is_in(trimmed, pa.array(table.place.missing, trimmed.type))
    return pc.if_else(absent, pa.scalar(None, trimmed.type), trimmed)


def as_truth_values(column: Any) -> Any:
    """Return a column of the texts ``true`` and ``false``, in any case, as truth values; others as they are."""
    if not is_text(column.type) or column.null_count == len(column):
        return column
    lower = pc.utf8_lower(column)
    for part in (lower[:100], lower):
        if not set(pc.unique(part).drop_null().to_pylist()) <= set(_TRUTH):
            return column
    return pc.equal(lower, pa.scalar("true", lower.type))


def _spelled(items: Any, values: Sequence[str]) -> Any:
    """Return items with the spelling of known values: another file format may write truth values and numbers in another
    way, such as ``True`` for ``true``, or ``10.0`` for ``10`` beside missing values."""
    if values and {value.lower() for value in values} <= set(_TRUTH):
        for value in values:
            same = pc.equal(pc.utf8_lower(items), pa.scalar(value.lower(), items.type))
            items = pc.if_else(same, pa.scalar(value, items.type), items)
    elif values and all(re.match(_INTEGER, value) for value in values):
        items = pc.replace_substring_regex(items, r"^(-?\d+)\.0+$", r"\1")
    return items


def _kind(column: Any) -> str:
    """Infer the kind of a column."""
    types, dtype = pa.types, column.type
    if types.is_integer(dtype) or types.is_floating(dtype) or types.is_boolean(dtype) or types.is_decimal(dtype):
        return "number"
    if is_date(dtype):
        return "date"
    if is_list(dtype):
        if types.is_nested(dtype.value_type):
            return "ignore"
        return "vector" if types.is_floating(dtype.value_type) else "list"
    if not is_text(dtype):
        return "ignore"
    for kind, convert in (("number", _parsed_numbers), ("date", _parsed_dates)):
        try:
            convert(column)
            return kind
        except pa.ArrowInvalid:
            continue
    distinct, present = pc.count_distinct(column).as_py(), len(column) - column.null_count
    return "text" if distinct > max(UNIQUE_VALUES, UNIQUE_SHARE * present) else "category"


def _warn_of_outliers(column: Any, name: str, kind: str, table: Table) -> None:
    """Log the text because of which a column whose other texts are numbers, or dates, is not of that kind."""
    if kind not in ("category", "text") or column.null_count == len(column):
        return
    for what, pattern, convert in (
        ("number", _LIKE_NUMBER, _parsed_numbers),
        ("date", _LIKE_DATE, _parsed_dates),
    ):
        if pc.mean(pc.match_substring_regex(column, pattern)).as_py() >= SIMILAR_SHARE:
            row = first_wrong(column, convert)
            log.warning(
                "%s: the column %r is taken as %s, because %r is not a %s; correct it, or name it in %s.missing",
                *(table.row(row), name, kind, column[row].as_py(), what, table.place.key),
            )


def _warn_of_new_values(table: Table, schema: ColumnSchema, new: NDArray[np.bool_], known: str) -> None:
    """Log that most values of a column, other than those of the schema's data, tell a model nothing that it learned."""
    if new.size and new.mean() >= FAR_SHARE:
        what = "did not occur in" if schema.kind in ("category", "list") else "are far outside of"
        log.warning(
            "%s: of %d values of the column %r, %d %s the training data (%s); check their unit and spelling",
            *(table.place.key, new.size, schema.name, int(new.sum()), what, known),
        )


def _suitable(column: Any, schema: ColumnSchema, table: Table) -> Any:
    """Return a column whose type suits its kind; one without any value, of Arrow's type null, is cast.

    Raises:
        DataError: the type does not suit.
    """
    dtype, types = column.type, pa.types
    if types.is_null(dtype):
        return column.cast(
            {"vector": pa.list_(pa.float32()), "list": pa.list_(pa.string())}.get(schema.kind, pa.string())
        )
    item = dtype.value_type if is_list(dtype) else None
    expected = {
        "category": ("single values", item is None and not types.is_nested(dtype)),
        "date": ("dates", is_text(dtype) or is_date(dtype) or types.is_integer(dtype)),
        "vector": ("lists of numbers", item is not None and (types.is_integer(item) or types.is_floating(item))),
    }
    what, suits = expected.get(schema.kind, ("", True))
    if not suits:
        raise DataError(
            f"{table.place.key}: the column {schema.name!r} holds {dtype}, and {what} are expected",
            hint=f"set {table.place.key}.columns.{schema.name} to another kind",
        )
    return column


def _useless(column: Any, kind: str, choice: ColumnChoice) -> str | None:
    """Return why a column is left out of the features."""
    if kind == "ignore":
        return f"it holds {column.type}"
    if kind == "text" and choice.encoder is None:
        return "it is text; give it an encoder, or the kind category"
    if column.null_count == len(column):
        return "it has no values"
    if kind == "vector" and not pc.max(pc.list_value_length(column)).as_py():
        return "its lists are empty"
    if kind in ("number", "date", "category") and not column.null_count and pc.count_distinct(column).as_py() < 2:
        return "all its values are equal"
    return None


def _numbers(column: Any, schema: ColumnSchema, table: Table) -> NDArray[np.float64]:
    """Return numbers, or seconds since 1970; NaN where a value is missing."""
    if is_text(column.type):
        convert = _parsed_dates if schema.kind == "date" else _parsed_numbers
        try:
            return convert(column)
        except pa.ArrowInvalid:
            row = first_wrong(column, convert)
            wanted = "a date" if schema.kind == "date" else "a number"
            hint = "write it as 2024-05-31 or 2024-05-31 12:30:00" if schema.kind == "date" else "correct the value"
            raise _wrong(table, schema.name, row, repr(column[row].as_py()), f"is not {wanted}", hint) from None
    if schema.kind == "date":
        return _seconds(column)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)):
        try:
            return column.cast(pa.float64()).to_numpy()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(
                f"{table.place.key}: the column {schema.name!r} holds {column.type}, and numbers are expected",
                hint=f"set {table.place.key}.columns.{schema.name} to another kind",
            ) from error
    values: NDArray[np.float64] = column.cast(pa.float64(), safe=False).to_numpy()
    if (infinite := first_true(np.isinf(values))) is not None:
        raise _wrong(table, schema.name, infinite, values[infinite], "is not finite", "correct the value")
    return values


def _parsed_numbers(column: Any) -> NDArray[np.float64]:
    values: NDArray[np.float64] = column.cast(pa.float64()).to_numpy()
    if np.isinf(values).any():
        raise pa.ArrowInvalid("infinite")
    return values


def _parsed_dates(column: Any) -> NDArray[np.float64]:
    try:
        return _seconds(column.cast(pa.timestamp("us")))
    except pa.ArrowInvalid:
        pass
    # Some have a time zone, or more than six digits of a second.
    column = pc.replace_substring_regex(column, _FURTHER_DIGITS, r"\1")
    zoned = pc.match_substring_regex(column, _TIME_ZONE)
    nothing = pa.scalar(None, column.type)
    with_zone = _seconds(pc.if_else(zoned, column, nothing).cast(pa.timestamp("us", "UTC")))
    without = _seconds(pc.if_else(zoned, nothing, column).cast(pa.timestamp("us")))
    return np.where(np.isnan(with_zone), without, with_zone)


def _seconds(column: Any) -> NDArray[np.float64]:
    """Return dates and times as seconds since 1970; whole numbers are seconds."""
    if pa.types.is_integer(column.type):
        seconds: NDArray[np.float64] = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return seconds
    zone = getattr(column.type, "tz", None)
    micros = column.cast(pa.timestamp("us", zone), safe=False).cast(pa.int64())
    values: NDArray[np.float64] = micros.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False) / 1e6
    return values


def whole_seconds(column: Any, name: str, table: Table, scale: float) -> Tensor:
    """Return a column of times, numbers or dates, as whole numbers.

    Args:
        column: the column.
        name: its name.
        table: its table, for messages.
        scale: factor of the times before they are rounded.

    Returns:
        int64 ``[n]``.

    Raises:
        DataError: a time is missing, or neither a number nor a date.
    """
    times, types = present(column, table), pa.types
    kind = _kind(times)
    # Of text, what is wrong is found by row.
    if kind not in ("number", "date") and not (is_text(times.type) or types.is_null(times.type)):
        raise DataError(
            f"{table.place.key}: {table.where}: the column {name!r} holds {times.type}, and times are expected",
            hint="name a column of numbers, or of dates",
        )
    schema = ColumnSchema(name, kind if kind in ("number", "date") else "date")
    exact = _integers(times) if kind == "number" and scale == 1 else None
    values = _numbers(times, schema, table) * scale if exact is None else exact
    if (row := first_true(np.isnan(values))) is not None:
        raise DataError(f"{table.row(row)}: the column {name!r} has no time", hint="give each row a time")
    if (row := first_true((values >= 2**62) | (values <= -(2**62)))) is not None:
        raise _wrong(table, name, row, values[row], "is too large for a time", "set a smaller data.time_scale")
    return torch.from_numpy(np.round(values).astype(np.int64))


def _integers(column: Any) -> Ints | None:
    """Return whole numbers, which float64 would round above 2^53; None if one is not whole, missing or too large."""
    try:
        return None if column.null_count else np.asarray(column.cast(pa.int64()))
    except pa.ArrowInvalid:
        return None


def _strings(column: Any, name: str, table: Table) -> Any:
    """Return values as strings: whole numbers without a fraction."""
    if pa.types.is_floating(column.type) and pc.all(is_whole(column)).as_py() is not False:
        column = column.cast(pa.int64())
    try:
        return column.cast(pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:  # bytes that UTF-8 does not allow
        raise DataError(
            f"{table.place.key}: the column {name!r} of type {column.type} cannot be read as text: "
            f"{str(error).splitlines()[0]}",
            hint=f"write it as UTF-8, or leave it out: set {table.place.key}.columns.{name} to ignore",
        ) from error


def _items(column: Any, schema: ColumnSchema, table: Table) -> tuple[Ints, Any]:
    """Return the row of each item of a column of lists, and the items as strings."""
    if is_text(column.type):
        if schema.separator is None:
            raise DataError(
                f"{table.place.key}: the column {schema.name!r} holds text, and lists are expected",
                hint=f"say what separates its items: columns: {{{schema.name}: {{kind: list, separator: '|'}}}}",
            )
        column = pc.split_pattern(column, schema.separator)
    if not hasattr(column.type, "value_type") or pa.types.is_nested(column.type.value_type):
        raise DataError(
            f"{table.place.key}: the column {schema.name!r} holds {column.type}, and lists of values are expected",
            hint=f"set {table.place.key}.columns.{schema.name} to another kind",
        )
    whole = in_one_piece(column)
    counts = pc.fill_null(pc.list_value_length(whole), 0).to_numpy(zero_copy_only=False)
    flat = pc.list_flatten(whole)
    items = _strings(flat, schema.name, table)
    if schema.separator is not None:
        items = pc.utf8_trim_whitespace(items)
    if is_text(flat.type):
        # Schemas of earlier releases have them as values.
        absent = pa.array([text for text in table.place.missing if text not in schema.values], items.type)
        items = pc.if_else(pc.is_in(items, absent), pa.scalar(None, items.type), items)
    return np.repeat(np.arange(len(whole)), counts), items


def _most_frequent(items: Any, limit: int) -> tuple[tuple[str, ...], bool]:
    """Return the most frequent values, equally frequent ones in order, and whether there are others."""
    counts = pc.value_counts(items.drop_null())
    values, numbers = counts.field("values").to_pylist(), counts.field("counts").to_pylist()
    ordered = sorted(zip(values, numbers, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple(sorted(value for value, _ in ordered[:limit])), len(ordered) > limit


def _vectors(column: Any, schema: ColumnSchema, table: Table) -> Floats:
    """Return lists of equally many numbers, ``[N, width]``; a missing list is 0."""
    whole = in_one_piece(column)
    if pa.types.is_fixed_size_list(whole.type):
        whole = whole.cast(pa.large_list(whole.type.value_type))
    lengths = pc.fill_null(pc.list_value_length(whole), -1).to_numpy(zero_copy_only=False)
    width = schema.width or int(lengths.max(initial=0))
    if (row := first_true((lengths != width) & (lengths >= 0))) is not None:
        problem = f"has {lengths[row]} numbers, and {width} are expected"
        raise _wrong(table, schema.name, row, "the list", problem, "give each row a list of the same length")
    result = np.zeros((len(whole), width), np.float32)
    result[lengths >= 0] = pc.list_flatten(whole).to_numpy(zero_copy_only=False).reshape(-1, width)
    if (row := first_true(np.asarray(~np.isfinite(result).all(axis=1)))) is not None:
        raise _wrong(table, schema.name, row, "the list", "has a number that is missing or not finite", "correct it")
    return result


def _encoded(column: Any, choice: ColumnChoice, schema: ColumnSchema, table: Table) -> Floats:
    """Return what the user's encoder makes of a column, ``[N, width]``."""
    encoder = choice.encoder
    if not callable(encoder):
        raise DataError(
            f"{table.place.key}: the column {schema.name!r} needs its encoder, which is {encoder!r}",
            hint="encoder: {_target_: your_package.embed, _partial_: true}",
        )
    try:
        result = np.asarray(encoder(column.to_pylist()), dtype=np.float32)
    except Exception as error:  # of the user's function
        raise DataError(
            f"{table.place.key}: the encoder of {schema.name!r} failed: {type(error).__name__}: {error}",
            hint="it gets a list of the column's values, None where one is missing, and returns an array of numbers",
        ) from error
    if result.ndim != 2 or len(result) != len(column) or (schema.width and result.shape[1] != schema.width):
        found, wanted = list(result.shape), f"[{len(column)}, {schema.width or 'd'}]"
        raise DataError(
            f"{table.place.key}: the encoder of {schema.name!r} returned {found}, and {wanted} is expected",
            hint="return an array with one row per value, of the same width for all data",
        )
    return result


def first_wrong(column: Any, convert: Any) -> int:
    """Return the first row that cannot be converted, by halving."""
    first, last = 0, len(column)
    while last - first > 1:
        middle = (first + last) // 2
        try:
            convert(column.slice(first, middle - first))
            first = middle
        except pa.ArrowInvalid:
            last = middle
    return first


def _wrong(table: Table, name: str, row: int, value: Any, problem: str, hint: str) -> DataError:
    return DataError(f"{table.row(row)}: the column {name!r}: {value} {problem}", hint=hint)
