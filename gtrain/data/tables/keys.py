"""Keys of nodes: of any type and of one or several columns, mapped to the ids 0, 1, 2, ... and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gtrain.data.ingest.dictionary import Dictionary, Keys, first_true
from gtrain.data.tables.description import Place
from gtrain.data.tables.reading import Table, in_one_piece, is_list, is_whole, open_quote
from gtrain.errors import DataError
from gtrain.graph.store.names import JOINT

Ints = NDArray[np.int64]

_ENDS = (("source", "target"), ("src", "dst"), ("from", "to"), ("head", "tail"))
_LONGEST = 1 << 23
_WHOLE = "^(0|-?[1-9][0-9]{0,17})$"


@dataclass(frozen=True)
class KeyForm:
    """How the names of nodes are written back.

    Attributes:
        columns: names of the key's columns.
        types: type of each, as an alias of Arrow: ``string``, ``int64``, ``uint64``, ``date32`` or a ``timestamp``.
    """

    columns: tuple[str, ...]
    types: tuple[str, ...]


def node_key(table: Table, named: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the columns of a node table's key: those that were named, else ``id``, else the first one.

    No columns were named with ``()``: the nodes are numbered in the order of the rows.

    Raises:
        DataError: the table lacks one of them.
    """
    if named is None:
        return ("id",) if "id" in table.types else (next(iter(table.types)),)
    table.check(named)
    return named


def edge_ends(
    table: Table, source: tuple[str, ...] | None, target: tuple[str, ...] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns of an edge table's ends: those that were named, else a usual pair, else the first two.

    Raises:
        DataError: the table lacks one of them, or has a single column.
    """
    if source is not None and target is not None:
        table.check((*source, *target))
        return source, target
    if source is not None or target is not None:
        named, other = ("source", "target") if source is not None else ("target", "source")
        raise DataError(f"{table.place.key} names the {named} and not the {other}", hint=f"name both: {other}: COLUMN")
    names = list(table.types)
    for pair in (*_ENDS, tuple(names[:2])):
        if len(pair) == 2 and set(pair) <= set(names):
            return (pair[0],), (pair[1],)
    raise DataError(
        f"{table.place.key}: {table.where} has the column {names[0]!r} alone",
        hint="give edges a source and a target",
    )


def key_form(table: Table, columns: Sequence[str]) -> KeyForm:
    """Return how keys of these columns are written back."""
    types = [table.types[name] for name in columns]
    return KeyForm(tuple(columns), tuple(_form(dtype.value_type if is_list(dtype) else dtype) for dtype in types))


def _form(dtype: Any) -> str:
    if pa.types.is_uint64(dtype) or pa.types.is_date32(dtype):
        return str(dtype).partition("[")[0]
    if pa.types.is_timestamp(dtype) and dtype.tz is None:
        return str(dtype)
    return "int64" if pa.types.is_integer(dtype) else "string"


class NodeKeys:
    """Assigns ids to the keys of one node type, in the order of first appearance.

    Args:
        node_type: the type, for messages.
        origin: where its table is; None: nodes are those that edges name.
    """

    def __init__(self, node_type: str, origin: Place | None) -> None:
        self._type, self._origin = node_type, origin
        self._dictionary = Dictionary()
        self._rows: int | None = None
        self._is_text = False
        self._form: KeyForm | None = None

    def __len__(self) -> int:
        return len(self._dictionary) if self._rows is None else self._rows

    def add(self, table: Table, columns: tuple[str, ...]) -> None:
        """Add the keys of a node table, whose row i gets the id i; without columns, the rows.

        Raises:
            DataError: a key is missing, or occurs twice; names both rows.
        """
        if not columns:
            names = list(table.types)[:1]
            self._rows = sum(len(batch) for _, batch in table.batches(names))
            return
        self._form, self._is_text = key_form(table, columns), table.text
        for first, batch in table.batches(columns):
            rows = np.arange(first, first + len(batch))
            ids = self._dictionary.encode(Keys.interleaved(texts(batch, columns, table, rows)))
            row = first_true(ids != rows)
            if row is not None:
                earlier, key = int(ids[row]), _shown(batch, columns, row)
                raise DataError(
                    f"{table.row(first + row)}: the key {key} occurs twice, first in {table.row(earlier)}",
                    hint=f"give each node of {self._origin.key if self._origin else self._type} one row",
                )

    def find(self, table: Table, columns: tuple[str, ...], batch: Any, rows: Ints) -> Ints:
        """Return the ids of the nodes that a batch of rows names.

        Args:
            table: the table of the rows.
            columns: the columns with the key; none: nodes are the table's rows.
            batch: rows of the table.
            rows: their numbers.

        Raises:
            DataError: a key is missing, or not in the node table; names file, row and value.
        """
        if not columns:
            return rows
        if self._form is None:
            self._form, self._is_text = key_form(table, columns), table.text
        if len(columns) != len(self._form.columns):
            raise DataError(
                f"{table.place.key}: nodes {self._type!r} are named by {' and '.join(columns)}, and their key has "
                f"{len(self._form.columns)} columns: {', '.join(self._form.columns)}",
                hint="name as many columns, in the same order",
            )
        if self._origin is None:
            self._join_form(table, columns)
        known = len(self._dictionary)
        ids = self._dictionary.encode(Keys.interleaved(texts(batch, columns, table, rows)))
        if self._origin is not None and (row := first_true(ids >= known)) is not None:
            key, origin = f"{_column_words(columns)} {_shown(batch, columns, row)}", self._origin.key
            if table.place.key == f"{origin}.labels":
                other = f"for new nodes without labels set {table.place.key}=null"
            else:
                other = f"without {origin} the nodes are those that edges name"
            raise DataError(
                f"{table.row(int(rows[row]))}: the {key} is not in the node table {origin}",
                hint=f"add the node to that table, or remove the row; {other}",
            )
        return ids

    def _join_form(self, table: Table, columns: tuple[str, ...]) -> None:
        """Name nodes by strings where edges name them by columns of different types."""
        assert self._form is not None
        known, types = self._form.types, key_form(table, columns).types
        if types != known:
            # Whole numbers of both signs, or of text, are decided by their values.
            self._is_text = self._is_text or table.text or {*known, *types} == {"int64", "uint64"}
            joined = tuple(a if a == b else "string" for a, b in zip(known, types, strict=True))
            self._form = replace(self._form, types=joined)

    def names(self) -> Any:
        """Return the names by id, a ``pyarrow`` array of strings; no further keys can be added or found.

        None if the nodes are rows without a key.
        """
        return self._dictionary.freeze() if self._rows is None else None

    def form(self, names: Any) -> KeyForm | None:
        """Return how these names, all of them, are written back; None if no table has named a node.

        A text file has strings alone: if the names are all whole numbers they are written as ``int64``, unless one has
        another spelling, such as 007. Without a node table, columns of different types give strings.
        """
        form = self._form
        if form is None or not self._is_text or len(form.columns) > 1 or not len(names):
            return form
        whole = all(pc.all(pc.match_substring_regex(part, _WHOLE)).as_py() for part in (names[:100], names))
        return replace(form, types=("int64",)) if whole else form


def texts(batch: Any, columns: Sequence[str], table: Table, rows: Ints) -> Any:
    """Return the keys of some rows as strings: whole numbers in decimal digits, several columns joined.

    Raises:
        DataError: a key is missing or too long.
    """
    joined = None
    for name in columns:
        column = in_one_piece(batch[name])
        missing = pc.is_null(column, nan_is_null=True).to_numpy(zero_copy_only=False)
        if (row := first_true(missing)) is not None:
            raise DataError(
                f"{table.row(int(rows[row]))}: the key {name!r} has no value", hint="give it a value, or remove the row"
            )
        if pa.types.is_floating(column.type):  # pandas turns whole numbers into these if some are missing
            column = _whole(column, name, table, rows)
        strings = _as_text(column, name, table)
        if table.text and (row := first_true(_has(strings, "\n") | _has(strings, "\r"))) is not None:
            raise open_quote(table.row(int(rows[row])), name, strings[row].as_py(), "a line end")
        if len(columns) > 1 and (row := first_true(_has(strings, JOINT))) is not None:
            raise DataError(
                f"{table.row(int(rows[row]))}: the key {name!r} is {strings[row].as_py()!r}, with the character that "
                "joins keys of several columns",
                hint="remove the character U+001F",
            )
        joined = (
            strings
            if joined is None
            else pc.binary_join_element_wise(joined, strings, pa.scalar(JOINT, pa.large_string()))
        )
    lengths = pc.binary_length(joined).to_numpy(zero_copy_only=False)
    if (row := first_true((lengths == 0) | (lengths > _LONGEST))) is not None:
        raise DataError(
            f"{table.row(int(rows[row]))}: the key has {lengths[row]} bytes", hint=f"write a key of 1..{_LONGEST} bytes"
        )
    return joined


def _as_text(column: Any, name: str, table: Table) -> Any:
    hint = "keys are strings, whole numbers or dates"
    if pa.types.is_nested(column.type):
        raise DataError(f"{table.place.key}: the key {name!r} holds {column.type}", hint=hint)
    try:
        return column.cast(pa.large_string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:  # bytes that UTF-8 does not allow
        raise DataError(
            f"{table.place.key}: the key {name!r} of type {column.type} cannot be read: {str(error).splitlines()[0]}",
            hint=hint,
        ) from error


def _has(strings: Any, part: str) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = pc.match_substring(strings, part).to_numpy(zero_copy_only=False).astype(bool)
    return mask


def _whole(column: Any, name: str, table: Table, rows: Ints) -> Any:
    if (row := pc.index(is_whole(column), False).as_py()) >= 0:
        raise DataError(
            f"{table.row(int(rows[row]))}: the key {name!r} is {column[row].as_py()}",
            hint="keys are whole numbers of 64 bits, or strings",
        )
    return column.cast(pa.int64())


def one_row_per_item(table: Table, columns: Sequence[str], batch: Any, rows: Ints) -> tuple[Any, Ints]:
    """Return a batch with one row for each key in a column of lists, and the numbers of these rows.

    Args:
        table: the table of the rows.
        columns: those of the key, which is one; an empty list, or a missing one, has no row.
        batch: rows of the table.
        rows: their numbers.

    Raises:
        DataError: the key has other columns too.
    """
    if len(columns) != 1:
        raise DataError(
            f"{table.place.key}: the key has {len(columns)} columns, {' and '.join(columns)}, of which one has lists",
            hint="write one row for each key, or lists of keys of one column",
        )
    name = columns[0]
    lists = in_one_piece(batch[name])
    parents = pc.list_parent_indices(lists)
    items = batch.take(parents).set_column(batch.column_names.index(name), name, pc.list_flatten(lists))
    return items, rows[parents.to_numpy()]


def has_key(batch: Any, columns: Sequence[str]) -> NDArray[np.bool_]:
    """Return which rows have a value in each of the columns."""
    present = np.ones(len(batch), bool)
    for name in columns:
        present &= ~pc.is_null(batch[name], nan_is_null=True).to_numpy().astype(bool)
    return present


def _shown(batch: Any, columns: Sequence[str], row: int) -> str:
    return " and ".join(repr(batch[name][row].as_py()) for name in columns)


def _column_words(columns: Sequence[str]) -> str:
    return " and ".join(map(repr, columns))
