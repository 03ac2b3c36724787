"""Rows of sparse features with labels, from libsvm files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from gtrain.data.config import LibsvmConfig
from gtrain.data.module import file_stamp
from gtrain.data.readers.files import find_file, first_true
from gtrain.data.readers.libsvm import LibsvmRows, read_rows
from gtrain.data.sources.feature_rows import RowColumns, RowData, among_unlabelled, number_labels
from gtrain.errors import ConfigError, DataError

MAX_FEATURES = (1 << 31) - 1
"""Limit of the columns: weights are a table with one row per feature, and tables have fewer than 2^31 rows."""
MAX_LABEL_ENTRIES = 1 << 31
"""Entries of the largest matrix of labels, 8 GB."""


class LibsvmData(RowData):
    """Sparse rows with labels: ``label id:value id:value ...`` on each line (Chang and Lin 2011).

    Rows are the nodes of a graph without edges; ``x`` is a sparse CSR tensor. Labels are numbered in the order of their
    values: -1 and +1 become 0 and 1, and 1..C become 0..C-1. Labels 0..C-1, and labels below ``num_classes`` if it is
    set, stay. For rows with several labels, ``1,3,5``, ``y`` is a matrix ``[N, C]`` of zeros and ones, one column per
    label 0..C-1. ``#`` starts a comment.

    Its settings are those of :class:`~gtrain.data.config.LibsvmConfig`.
    """

    name = "libsvm"

    settings_type = LibsvmConfig
    settings: LibsvmConfig

    def __init__(self, settings: LibsvmConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        num_features = self.settings.num_features
        if num_features is not None and num_features < 1:
            raise ConfigError(f"data.num_features={num_features} is too small", hint="set 1 or more, or null")
        if num_features is not None and num_features > MAX_FEATURES:
            raise ConfigError(
                f"data.num_features={num_features} was set; {MAX_FEATURES} is the most",
                hint="number the features without gaps, or hash their ids to fewer",
            )
        self._first_feature: int | None = None

    def identity(self) -> dict[str, Any]:
        """Return the stamps of the files and the options that control how they are read."""
        options = {key: getattr(self.settings, key) for key in ("index_base", "num_features", "labels")}
        options["index_base"] = str(options["index_base"])  # the integer 0 gives the same store
        stamps = {key: file_stamp(file) for key, file in self._files().items()}
        return {**stamps, **options, "public": self.public_identity()}

    def _files(self) -> dict[str, Path]:
        named = {"path": self.settings.path, "test_path": self.settings.test_path}
        return {key: find_file(f"data.{key}", name, self.root) for key, name in named.items() if name is not None}

    def read(self) -> Data:
        """Read the files; the entries are in temporary files in ``store`` and may exceed the memory."""
        files = [read_rows(file, self.store) for file in self._files().values()]
        if all(rows.highest is None for rows in files):
            raise DataError(
                f"{self.origin}: no row has a feature",
                hint="write each line as label id:value id:value ...; tables of numbers are for data=parquet",
            )
        x, (y, label_values) = self._features(files), self._labels(files)
        return self.rows_as_graph(x, y, len(files[0]), label_values)

    def numbering(self) -> dict[str, Any]:
        """Return the feature id of the first column."""
        return {"the first feature id": self._first_feature}

    def _features(self, files: list[LibsvmRows]) -> Tensor:
        base = 0 if any(rows.lowest == 0 for rows in files) else 1
        if str(self.settings.index_base) != "auto":
            base = int(self.settings.index_base)
        self._first_feature = base
        highest = max(base if rows.highest is None else rows.highest for rows in files)
        width = self.settings.num_features or highest + 1 - base
        entries = RowColumns(self.store)
        for rows in files:
            if base == 1 and rows.lowest == 0:
                raise DataError(
                    f"{_first(rows, 0, 0)}, and data.index_base=1",
                    hint="set data.index_base=0 or auto",
                )
            if rows.highest is not None and rows.highest >= width + base:
                raise DataError(
                    f"{_first(rows, width + base, rows.highest)}, and data.num_features={width} allows "
                    f"{base}..{width + base - 1}",
                    hint="raise data.num_features, or set it to null to take the largest id",
                )
            for ids, values in zip(rows.ids.chunks(), rows.values.chunks(), strict=True):
                entries.add_entries(ids - base, values)
            entries.add_rows(np.diff(rows.row_ptr))
        return entries.tensor(width)

    def _labels(self, files: list[LibsvmRows]) -> tuple[Tensor, list[Any] | None]:
        """Return ``y``, and the label that each class stands for (None: they are equal)."""
        for rows in files:
            if (position := first_true(rows.labels != np.round(rows.labels))) is not None:
                raise DataError(
                    f"{_label(rows, position)} is not a whole number",
                    hint="give each row a class; gtrain does not train regression targets",
                )
            if (position := first_true(np.abs(rows.labels) >= 2**53)) is not None:
                raise DataError(
                    f"{_label(rows, position)} is too large to be a class",
                    hint="number the classes from 0, or correct the line",
                )
        counts = [np.diff(rows.label_ptr) for rows in files]
        several = any((count > 1).any() for count in counts)
        if self.settings.labels == "multi" or (self.settings.labels == "auto" and several):
            return self._label_matrix(files), None
        for rows, count in zip(files, counts, strict=True):
            if (row := first_true(count != 1)) is not None:
                raise DataError(
                    f"{rows.where(row)}: the row has {count[row]} labels, and others one",
                    hint="correct the line, or set data.labels=multi if rows may have any number of labels",
                )
        labels = np.concatenate([rows.labels for rows in files]).astype(np.int64)
        labelled = labels != self.unlabelled
        classes, values = number_labels(labels[labelled], self.num_classes)
        return among_unlabelled(classes, labelled, self.unlabelled), values

    def _label_matrix(self, files: list[LibsvmRows]) -> Tensor:
        """Return the labels as a matrix of zeros and ones, float ``[N, C]``."""
        labels = [rows.labels.astype(np.int64) for rows in files]
        width = self.num_classes or max(int(ids.max(initial=0)) for ids in labels) + 1
        for rows, ids in zip(files, labels, strict=True):
            if (position := first_true((ids < 0) | (ids >= width))) is not None:
                raise DataError(
                    f"{_label(rows, position)}; the labels of rows with several are 0..{width - 1}",
                    hint="number the labels from 0; data.num_classes may be set larger",
                )
        counts = np.concatenate([np.diff(rows.label_ptr) for rows in files])
        if len(counts) * width > MAX_LABEL_ENTRIES:
            rows = max(files, key=lambda rows: rows.labels.max(initial=0))
            raise DataError(
                f"{_label(rows, int(rows.labels.argmax()))} makes a matrix of {len(counts)} rows x {width} labels; "
                f"{MAX_LABEL_ENTRIES} entries are the most",
                hint="number the labels from 0 without gaps",
            )
        y = torch.zeros(len(counts), width)
        y[torch.from_numpy(np.repeat(np.arange(len(counts)), counts)), torch.from_numpy(np.concatenate(labels))] = 1
        return y


def _label(rows: LibsvmRows, position: int) -> str:
    """Return ``file, line n: the label l`` for a position in the labels of all rows."""
    row = int(np.searchsorted(rows.label_ptr, position, side="right")) - 1
    return f"{rows.where(row)}: the label {rows.labels[position]:.16g}"


def _first(rows: LibsvmRows, low: int, high: int) -> str:
    """Return ``file, line n: the feature id i`` for the first feature with an id in ``low..high``."""
    begin = 0
    for ids in rows.ids.chunks():
        if (position := first_true((ids >= low) & (ids <= high))) is not None:
            row = int(np.searchsorted(rows.row_ptr, begin + position, side="right")) - 1
            return f"{rows.where(row)}: the feature id {ids[position]}"
        begin += len(ids)
    raise IndexError(low)
