"""The labels of a table, taken in a batch of rows at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.data.readers.parquet_columns import Source
from gtrain.data.sources.feature_rows import among_unlabelled, number_labels
from gtrain.errors import DataError


def check_label(kind: Any, name: str, source: Source) -> None:
    """Refuse a column whose type cannot be that of labels; numbers with fractions show as they are read.

    Raises:
        DataError: names the column and its type.
    """
    types = pa.types
    suited = (types.is_integer, types.is_floating, types.is_boolean, types.is_string, types.is_large_string)
    if not (types.is_null(kind) or any(suits(kind) for suits in suited)):
        raise source.wrong_type(name, kind, "whole numbers or strings")


class Labels:
    """A column of whole numbers, booleans or strings, of which 8 bytes a row are kept.

    Args:
        name: of the column.
        unlabelled: what stands for no label; None: each row has one.
    """

    def __init__(self, name: str, unlabelled: int | None) -> None:
        self._name, self._unlabelled = name, unlabelled
        self._labels: list[NDArray[np.int64]] = []
        self._labelled: list[NDArray[np.bool_]] = []
        self._texts: dict[str, int] | None = None

    def append(self, column: Any, source: Source) -> None:
        """Take in a batch of rows.

        Args:
            column: a ``pyarrow.ChunkedArray``.
            source: where it is from.

        Raises:
            DataError: a row has no label, or the column no labels.
        """
        lacking = pc.is_null(column, nan_is_null=True)
        if self._unlabelled is None and pc.any(lacking).as_py():
            raise DataError(
                f"{source.where}: the column {self._name!r} has no label (null or NaN) in "
                f"{source.rows(lacking.to_numpy())}",
                hint="leave these rows out, or set data.unlabelled=-1 to have them in no split",
            )
        known = pc.filter(column, pc.invert(lacking))
        check_label(column.type, self._name, source)
        if pa.types.is_floating(known.type) and pc.all(pc.equal(known, pc.round(known))).as_py() is not False:
            known = pc.cast(known, pa.int64())
        if pa.types.is_boolean(known.type):
            known = pc.cast(known, pa.int64())
        labelled = ~lacking.to_numpy()
        if pa.types.is_string(known.type) or pa.types.is_large_string(known.type):
            labels = self._numbered(known)
        elif pa.types.is_integer(known.type):
            labels = known.to_numpy().astype(np.int64)
            labelled[labelled] = labels != self._unlabelled
            labels = labels[labels != self._unlabelled]
        else:
            raise source.wrong_type(self._name, column.type, "whole numbers or strings")
        self._labels.append(labels)
        self._labelled.append(labelled)

    def classes(self, num_classes: int | None) -> tuple[Tensor, list[Any] | None]:
        """Number the labels by their values; see :func:`~gtrain.data.sources.feature_rows.number_labels`.

        Returns:
            The class of each row, int64 ``[N]``, and the label that each class stands for.
        """
        labels, labelled = np.concatenate(self._labels), np.concatenate(self._labelled)
        if self._texts is None:
            found, values = number_labels(labels, num_classes)
        else:
            ranks, values = number_labels(np.array(list(self._texts)), num_classes)
            found = ranks[torch.from_numpy(labels)]
        return among_unlabelled(found, labelled, self._unlabelled), values

    def _numbered(self, texts: Any) -> NDArray[np.int64]:
        """Number strings as they come."""
        self._texts = {} if self._texts is None else self._texts
        coded = pc.dictionary_encode(texts).combine_chunks()
        coded = coded.chunk(0) if isinstance(coded, pa.ChunkedArray) else coded
        numbers = [self._texts.setdefault(text, len(self._texts)) for text in coded.dictionary.to_pylist()]
        codes: NDArray[np.int64] = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        return np.array(numbers, np.int64)[codes]
