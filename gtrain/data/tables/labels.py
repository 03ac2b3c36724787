"""Columns of labels and of splits."""

from __future__ import annotations

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
from gtrain.data.tables.columns import present
from gtrain.data.tables.reading import Table, in_one_piece, is_text
from gtrain.errors import DataError

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


@dataclass(frozen=True)
class Labels:
    """Labels of nodes.

    Attributes:
        y: the class of each node, int64 ``[N]``, or 0 and 1 for each class, float32 ``[N, C]``.
        classes: the label that each class stands for.
        multilabel: whether nodes have several labels.
    """

    y: Tensor
    classes: list[Label]
    multilabel: bool


def read_labels(
    table: Table, name: str, rows: Ints, num_nodes: int, classes: Sequence[Label] | None, multilabel: bool | None
) -> Labels:
    """Read a column of labels: whole numbers, truth values or strings, or lists of these.

    Args:
        table: the table.
        name: the column.
        rows: the node of each row of the table, ``[R]``.
        num_nodes: N.
        classes: the classes of a trained model; None: those that occur, in order.
        multilabel: whether a trained model has several labels; None: whether the column has lists.

    Raises:
        DataError: a label is of another type, no class of the model, or a node has two; names file, row and value.
    """
    column = present(table.column(name), table)
    lists = hasattr(column.type, "value_type")
    if multilabel is not None and multilabel != lists:
        has, expects = ("lists of labels", "one label per node") if lists else ("one label per node", "lists of labels")
        raise DataError(
            f"{table.place.key}: the column {name!r} has {has}, and the checkpoint's model expects {expects}",
            hint="name another column",
        )
    if lists:
        whole = in_one_piece(column)
        counts = pc.fill_null(pc.list_value_length(whole), 0).to_numpy(zero_copy_only=False)
        positions, values = np.repeat(np.arange(len(whole)), counts), _values(pc.list_flatten(whole), name, table)
    else:
        positions, values = np.arange(len(column)), _values(column, name, table)
    known = _ordered(values) if classes is None else list(classes)
    numbers = pc.index_in(values, pa.array(known, values.type) if known else pa.nulls(0, values.type))
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
        _check_single(table, name, rows, numbers, values, num_nodes)
        y[torch.from_numpy(rows[labelled])] = torch.from_numpy(numbers[labelled])
        return Labels(y, known, multilabel=False)
    several = torch.full((num_nodes, len(known)), float(UNLABELLED))
    several[torch.from_numpy(rows[pc.is_valid(column).to_numpy().astype(bool)])] = 0.0
    several[torch.from_numpy(rows[positions[labelled]]), torch.from_numpy(numbers[labelled])] = 1.0
    return Labels(several, known, multilabel=True)


def read_split(table: Table, name: str) -> NDArray[Any]:
    """Return the split of each row, ``train``, ``val``, ``test`` or None, as an array of objects.

    Raises:
        DataError: a value is no split; names file, row and value.
    """
    column = present(table.column(name), table)
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


def masks(splits: NDArray[Any], rows: Ints, num_nodes: int) -> dict[str, Tensor]:
    """Return the masks ``[N]`` of the splits of rows."""
    result = {}
    for mask in MASKS:
        result[mask] = torch.zeros(num_nodes, dtype=torch.bool)
        result[mask][torch.from_numpy(rows[splits == mask.removesuffix("_mask")])] = True
    return result


def rows_of(table: Table, find: Callable[[Any, Ints], Ints], columns: Sequence[str]) -> Ints:
    """Return the node of each row of a table of its own, ``[R]``."""
    found = [find(batch, np.arange(first, first + len(batch))) for first, batch in table.batches(columns)]
    return np.concatenate([np.empty(0, np.int64), *found])


def _values(column: Any, name: str, table: Table) -> Any:
    """Return labels as whole numbers or strings."""
    types, dtype = pa.types, column.type
    if types.is_boolean(dtype):
        return column.cast(pa.int64())
    if types.is_floating(dtype):
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, dtype), column)
        if pc.all(pc.equal(column, pc.round(column))).as_py() is False:
            values = column.to_numpy(zero_copy_only=False)
            row = first_true(~np.isnan(values) & (values != np.round(values))) or 0
            raise DataError(
                f"{table.row(row)}: the label is {values[row]}", hint="labels are classes: whole numbers or strings"
            )
        return column.cast(pa.int64())
    if types.is_integer(dtype):
        return column.cast(pa.int64())
    if is_text(dtype):
        try:
            return column.cast(pa.int64())
        except pa.ArrowInvalid:
            return column.cast(pa.string())
    raise DataError(
        f"{table.place.key}: the column {name!r} holds {dtype}, and labels are expected",
        hint="name a column of whole numbers, strings, or lists of these",
    )


def _ordered(values: Any) -> list[Label]:
    return sorted(pc.unique(values).drop_null().to_pylist())


def _check_single(table: Table, name: str, rows: Ints, numbers: Ints, values: Any, num_nodes: int) -> None:
    """Refuse two different labels for a node."""
    first = np.full(num_nodes, -1)
    labelled = np.flatnonzero(numbers >= 0)
    first[rows[labelled[::-1]]] = labelled[::-1]
    other = labelled[numbers[labelled] != numbers[first[rows[labelled]]]]
    if other.size:
        row, earlier = int(other[0]), int(first[rows[other[0]]])
        raise DataError(
            f"{table.row(row)}: the label {values[row].as_py()!r}; the same node has the label "
            f"{values[earlier].as_py()!r} in {table.row(earlier)}",
            hint=f"give each node one value of {name!r}, or a list of labels",
        )
