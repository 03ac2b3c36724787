"""Columns of labels and of splits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.data.ingest.dictionary import first_true
from gtrain.data.prepare.split import MASKS
from gtrain.data.tables.columns import as_truth_values, present
from gtrain.data.tables.reading import Table, in_one_piece, is_text, is_whole
from gtrain.errors import DataError

log = logging.getLogger("gtrain")
Ints = NDArray[np.int64]
Label = int | str

UNLABELLED = -1
"""The class of nodes without a label, and the value in all columns of several labels."""
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""The splits by the words for them, in any case."""
_CODE = "^[+-]?(0[0-9xX]|[0-9]+[eE])"
"""Texts such as 01, 0x1 and 1e0, which are codes and not numbers: 1 is another class. 1.0e+00 of numpy is a number."""


@dataclass(frozen=True)
class Labels:
    """Labels of nodes.

    Attributes:
        y: the class of each node, int64 ``[N]``, or 0 and 1 for each class, float32 ``[N, C]``.
        classes: the label that each class stands for.
    """

    y: Tensor
    classes: list[Label]


def read_labels(
    table: Table,
    name: str,
    rows: Ints,
    num_nodes: int,
    classes: Sequence[Label] | None,
    multilabel: bool | None,
    separator: str | None = None,
) -> Labels:
    """Read a column of labels: whole numbers, truth values or strings, or lists of these.

    Args:
        table: the table.
        name: the column.
        rows: the node of each row of the table, ``[R]``.
        num_nodes: N.
        classes: the classes of a trained model; None: those that occur, in order.
        multilabel: whether a trained model has several labels; None: whether the column has lists.
        separator: of several labels in a text; None: a text is one label.

    Raises:
        DataError: a label is of another type, no class of the model, or a node has two; names file, row and value.
    """
    column = present(table.column(name), table)
    if separator is not None and is_text(column.type):
        column = pc.split_pattern(column, separator)
    if multilabel and pa.types.is_null(column.type):  # without any value
        column = column.cast(pa.list_(pa.string()))
    lists = hasattr(column.type, "value_type")
    if multilabel is not None and multilabel != lists:
        has, expects = ("lists of labels", "one label per node") if lists else ("one label per node", "lists of labels")
        raise DataError(
            f"{table.place.key}: the column {name!r} has {has}, and the checkpoint's model expects {expects}",
            hint="name another column",
        )
    positions, single = np.arange(len(column)), column
    if lists:
        whole = in_one_piece(column)
        counts = pc.fill_null(pc.list_value_length(whole), 0).to_numpy(zero_copy_only=False)
        positions, single = np.repeat(positions, counts), pc.list_flatten(whole)
        single = present(single, table)
    single = _as_trained(single, classes)
    if classes and isinstance(classes[0], str) and is_text(single.type):  # also if those of these data are all numbers
        values = single.cast(pa.string())
    else:
        values = _values(single, name, positions, table)
    known = _ordered(values) if classes is None else list(classes)
    named = pa.array(known) if known else pa.nulls(0, values.type)
    if named.type != values.type:
        named, values = named.cast(pa.string()), values.cast(pa.string())
    numbers = pc.index_in(values, named)
    labelled = pc.is_valid(values).to_numpy(zero_copy_only=False)
    numbers = pc.fill_null(numbers, UNLABELLED).to_numpy(zero_copy_only=False).astype(np.int64)
    if (item := first_true(labelled & (numbers < 0))) is not None:
        raise DataError(
            f"{table.row(int(positions[item]))}: the label {values[item].as_py()!r} is none of the checkpoint's "
            f"{len(known)} classes: {', '.join(map(str, known[:10]))}",
            hint="correct the label, or train again",
        )
    if not lists:
        y = torch.full((num_nodes,), UNLABELLED)
        _check_single(table, name, rows, numbers >= 0, numbers, values, num_nodes)
        y[torch.from_numpy(rows[labelled])] = torch.from_numpy(numbers[labelled])
        return Labels(y, known)
    several = torch.full((num_nodes, len(known)), float(UNLABELLED))
    several[torch.from_numpy(rows[pc.is_valid(column).to_numpy().astype(bool)])] = 0.0
    several[torch.from_numpy(rows[positions[labelled]]), torch.from_numpy(numbers[labelled])] = 1.0
    return Labels(several, known)


def read_numbers(table: Table, name: str, rows: Ints, num_nodes: int) -> Tensor:
    """Read a column of numbers to predict, as numbers or as text.

    Args:
        table: the table.
        name: the column.
        rows: the node of each row of the table, ``[R]``.
        num_nodes: N.

    Returns:
        The number of each node, float32 ``[N]``; NaN for a node without one: the field is missing or NaN.

    Raises:
        DataError: a value is not a number or not finite in 32 bits, or a node has two; names file, row and value.
    """
    column = in_one_piece(present(table.column(name), table))
    types, dtype = pa.types, column.type
    if not (is_text(dtype) or types.is_floating(dtype) or types.is_integer(dtype) or types.is_decimal(dtype)):
        raise DataError(
            f"{table.place.key}: the column {name!r} holds {dtype}, and numbers are expected",
            hint="name a column of numbers, or set label_kind to class",
        )
    values = pc.fill_null(_parsed(column, name, table), np.nan).to_numpy(zero_copy_only=False)
    labelled = ~np.isnan(values)
    if (row := first_true(labelled & ~(np.abs(values) <= np.finfo(np.float32).max))) is not None:
        raise DataError(
            f"{table.row(row)}: the label is {values[row]}",
            hint="give each node a number that is finite in 32 bits, or leave the field empty",
        )
    _check_single(table, name, rows, labelled, values, column, num_nodes)
    y = torch.full((num_nodes,), np.nan)
    y[torch.from_numpy(rows[labelled])] = torch.from_numpy(values[labelled]).float()
    return y


def has_fractions(table: Table, name: str) -> bool:
    """Return whether a column of floating-point numbers has one that is not whole; reads up to the first of them."""
    if not pa.types.is_floating(table.types[name]):
        return False
    for _, batch in table.batches([name]):
        values = pc.drop_null(batch[name]).to_numpy()
        if (np.isfinite(values) & (values != np.round(values))).any():
            return True
    return False


def read_split(table: Table, name: str) -> NDArray[Any]:
    """Return the split of each row, ``train``, ``val``, ``test`` or None, as an array of objects.

    Raises:
        DataError: a value is no split; names file, row and value.
    """
    column = present(table.column(name), table)
    if pa.types.is_nested(column.type):
        raise DataError(
            f"{table.place.key}: the column {name!r} holds {column.type}, and splits are expected",
            hint="name a column with train, val or test in each row",
        )
    values = pc.unique(column).to_pylist()
    splits = {value: None if value is None else SPLITS.get(str(value).lower(), value) for value in values}
    for value, split in splits.items():
        if split not in (None, *SPLITS.values()):
            row = first_true(pc.equal(column, pa.scalar(value, column.type)).to_numpy().astype(bool)) or 0
            raise DataError(
                f"{table.row(row)}: the column {name!r} has {value!r}, which is no split",
                hint="write train, val or test, or leave the field empty for rows in no split",
            )
    return np.array([splits[value] for value in column.to_pylist()], dtype=object)


def masks(splits: NDArray[Any], rows: Ints, num_nodes: int, table: Table) -> dict[str, Tensor]:
    """Return the masks ``[N]`` of the splits of rows.

    Raises:
        DataError: two rows of a node have different splits; names file and rows.
    """
    given = np.flatnonzero(splits != None)  # noqa: E711 - an array of objects
    order = given[np.argsort(rows[given], kind="stable")]
    same = rows[order[1:]] == rows[order[:-1]]
    if (pair := first_true(same & (splits[order[1:]] != splits[order[:-1]]))) is not None:
        first, second = order[pair], order[pair + 1]
        raise DataError(
            f"{table.row(second)}: the node is in the split {splits[second]}, and in {splits[first]} by "
            f"{table.row(first)}",
            hint="give each node one split",
        )
    result = {}
    for mask in MASKS:
        result[mask] = torch.zeros(num_nodes, dtype=torch.bool)
        result[mask][torch.from_numpy(rows[splits == mask.removesuffix("_mask")])] = True
    return result


def rows_of(table: Table, find: Callable[[Any, Ints], Ints], columns: Sequence[str]) -> Ints:
    """Return the node of each row of a table of its own, ``[R]``."""
    found = [find(batch, np.arange(first, first + len(batch))) for first, batch in table.batches(columns)]
    return np.concatenate([np.empty(0, np.int64), *found])


def _as_trained(labels: Any, classes: Sequence[Label] | None) -> Any:
    """Return truth values as a trained model has them, which may have read them from another file format."""
    if not classes:
        return labels
    if isinstance(classes[0], int):
        return as_truth_values(labels)
    spelled = {str(value).lower(): str(value) for value in classes}
    if not pa.types.is_boolean(labels.type) or not set(spelled) <= {"true", "false"}:
        return labels
    return pc.if_else(labels, spelled.get("true", "true"), spelled.get("false", "false"))


def _values(column: Any, name: str, positions: Ints, table: Table) -> Any:
    """Return labels as whole numbers or strings; ``positions`` has the row of each, for messages."""
    types, dtype = pa.types, column.type
    if types.is_null(dtype):
        return column.cast(pa.int64())
    if types.is_boolean(dtype):
        return column.cast(pa.int64())
    if types.is_floating(dtype):
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, dtype), column)
        if (item := pc.index(is_whole(column), False).as_py()) >= 0:
            raise DataError(
                f"{table.row(int(positions[item]))}: the label is {column[item].as_py()}",
                hint="classes are whole numbers or strings; set label_kind to number if it is to be predicted",
            )
        return column.cast(pa.int64())
    if types.is_integer(dtype):
        try:
            return column.cast(pa.int64())
        except pa.ArrowInvalid as error:
            item = first_true(in_one_piece(column).fill_null(0).to_numpy() >= 2**63) or 0
            raise DataError(
                f"{table.row(int(positions[item]))}: the label is {column[item].as_py()}",
                hint="write a class as a string, or below 2^63",
            ) from error
    if is_text(dtype):
        distinct = pc.unique(column).drop_null()
        codes = pc.any(pc.match_substring_regex(distinct, _CODE)).as_py()
        for dtype in (
            () if codes else (pa.int64(), pa.float64())
        ):  # pandas writes whole numbers as 1.0 if some are missing
            try:
                distinct.cast(dtype).cast(pa.int64())
                return column.cast(dtype).cast(pa.int64())
            except pa.ArrowInvalid:
                continue
        _warn_of_numbers(column, name, table)
        return column.cast(pa.string())
    raise DataError(
        f"{table.place.key}: the column {name!r} holds {dtype}, and labels are expected",
        hint="name a column of whole numbers, strings, or lists of these",
    )


def _warn_of_numbers(column: Any, name: str, table: Table) -> None:
    """Log that texts that are all numbers, such as ``2.5``, are taken as classes."""
    distinct = pc.unique(column).drop_null()
    try:
        distinct.cast(pa.float64())
    except pa.ArrowInvalid:
        return
    log.warning(
        "%s: the labels %r are %d different texts of numbers, taken as classes; label_kind: number predicts the number",
        *(table.place.key, name, len(distinct)),
    )


def _parsed(column: Any, name: str, table: Table) -> Any:
    """Return numbers, of text too, as float64."""
    try:
        return column.cast(pa.float64(), safe=False)
    except pa.ArrowInvalid:
        texts = column.to_pylist()
    row = next(row for row, text in enumerate(texts) if text is not None and not _is_number(text))
    raise DataError(
        f"{table.row(row)}: the column {name!r} has {texts[row]!r}, which is not a number",
        hint="correct the label, or set label_kind to class",
    )


def _is_number(text: str) -> bool:
    try:
        pa.scalar(text).cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    return True


def _ordered(values: Any) -> list[Label]:
    return sorted(pc.unique(values).drop_null().to_pylist())


def _check_single(
    table: Table, name: str, rows: Ints, labelled: NDArray[np.bool_], codes: NDArray[Any], values: Any, num_nodes: int
) -> None:
    """Refuse two different labels for a node.

    Args:
        table: the table.
        name: the column of labels.
        rows: the node of each row, ``[R]``.
        labelled: which rows have a label, ``[R]``.
        codes: what is compared, ``[R]``.
        values: the labels, for messages, ``[R]``.
        num_nodes: number of nodes.
    """
    first, chosen = np.full(num_nodes, -1), np.flatnonzero(labelled)
    first[rows[chosen[::-1]]] = chosen[::-1]
    other = chosen[codes[chosen] != codes[first[rows[chosen]]]]
    if other.size:
        row, earlier = int(other[0]), int(first[rows[other[0]]])
        several = "" if codes.dtype.kind == "f" else ", or a list of labels"
        raise DataError(
            f"{table.row(row)}: the label {values[row].as_py()!r}; the same node has the label "
            f"{values[earlier].as_py()!r} in {table.row(earlier)}",
            hint=f"give each node one value of {name!r}{several}",
        )
