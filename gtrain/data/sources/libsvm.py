"""Rows of sparse features with labels, from libsvm files."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data

from gtrain.data.config import LibsvmConfig
from gtrain.data.module import SPARSE_OUTLINE, GraphDataModule, file_stamp
from gtrain.data.readers.files import find_file
from gtrain.data.readers.libsvm import Rows, read_rows
from gtrain.data.sources.feature_rows import RowColumns, among_unlabelled, no_label, number_labels, row_masks
from gtrain.errors import ConfigError, DataError

BASES = {"auto": None, "0": 0, "1": 1}
MOST_FEATURES = (1 << 31) - 1
"""Columns: weights are a table with a row for each feature, and tables have fewer than 2^31 rows."""
MOST_LABELS = 1 << 31
"""Entries of the largest matrix of labels, 8 GB."""


class LibsvmData(GraphDataModule):
    """Sparse rows with labels: ``label id:value id:value ...`` on each line (Chang and Lin 2011).

    Rows are the nodes of a graph without edges; ``x`` is a sparse CSR tensor. Labels are numbered by their values:
    -1 and +1 become 0 and 1, 1..C become 0..C-1, and 0..C-1 stay, as do those within a ``num_classes`` that is set.
    Rows with several labels, ``1,3,5``, make ``y`` a matrix ``[N, C]`` of zeros and ones, one column for each
    label 0..C-1. ``#`` begins a comment.

    Its settings are those of :class:`~gtrain.data.config.LibsvmConfig`.
    """

    name = "libsvm"
    outline = SPARSE_OUTLINE

    settings_type = LibsvmConfig
    settings: LibsvmConfig

    def __init__(self, settings: LibsvmConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        given = self.settings
        num_features = given.num_features
        if num_features is not None and num_features < 1:
            raise ConfigError(f"data.num_features={num_features} is too small", hint="set 1 or more, or null")
        if num_features is not None and num_features > MOST_FEATURES:
            raise ConfigError(
                f"data.num_features={num_features} was set; {MOST_FEATURES} is the most that is served",
                hint="number the features without gaps, or hash their ids to fewer",
            )
        self.path = given.path
        self.test_path = given.test_path
        self.index_base = str(given.index_base)
        self.num_features = num_features
        self.labels = given.labels
        self._label_values: list[int] | None = None
        self._first_feature: int | None = None

    def identity(self) -> dict[str, Any]:
        """Return the stamps of the files, and how they are read."""
        stamps = {"path": file_stamp(find_file("data.path", self.path, self.root))}
        if self.test_path is not None:
            stamps["test_path"] = file_stamp(find_file("data.test_path", self.test_path, self.root))
        masks = [self.split.val_fraction, self.split.seed] if self.split.kind == "public" else None
        options = {"index_base": self.index_base, "num_features": self.num_features, "labels": self.labels}
        return {**stamps, **options, "public": masks}

    @property
    def origin(self) -> str:
        """Where the rows come from, for messages."""
        return f"data.path={self.path}" + (f", data.test_path={self.test_path}" if self.test_path else "")

    def read(self) -> Data:
        """Read the files; entries are then in temporary files in ``store``, and may be more than the memory holds."""
        files = [read_rows(find_file("data.path", self.path, self.root), self.store)]
        if self.test_path is not None:
            files.append(read_rows(find_file("data.test_path", self.test_path, self.root), self.store))
        if all(rows.highest is None for rows in files):
            raise DataError(
                f"{self.origin}: no row has a feature",
                hint="write each line as label id:value id:value ...; tables of numbers are for data=parquet",
            )
        num_rows = sum(len(rows) for rows in files)
        return Data(
            x=self._features(files),
            y=self._targets(files),
            edge_index=torch.empty(2, 0, dtype=torch.int64),
            num_nodes=num_rows,
            **row_masks(num_rows, len(files[0]), self.split),
        )

    @property
    def _no_label(self) -> int | None:
        return no_label(self.unlabelled)

    def extra_facts(self) -> dict[str, Any]:
        """Return the label that each class stands for; None where they are numbered so already."""
        return {"label_values": self._label_values}

    def numbering(self) -> dict[str, Any]:
        """Return the feature id of the first column."""
        return {"the first feature id": self._first_feature}

    def _features(self, files: list[Rows]) -> Tensor:
        base = BASES[self.index_base]
        if base is None:
            base = 0 if any(rows.lowest == 0 for rows in files) else 1
        self._first_feature = base
        highest = max(base if rows.highest is None else rows.highest for rows in files)
        width = self.num_features or highest + 1 - base
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

    def _targets(self, files: list[Rows]) -> Tensor:
        for rows in files:
            if (odd := rows.labels != np.round(rows.labels)).any():
                row = int(np.searchsorted(rows.label_ptr, odd.argmax(), side="right")) - 1
                raise DataError(
                    f"{rows.where(row)}: the label {rows.labels[odd.argmax()]:g} is not a whole number",
                    hint="give each row a class; regression targets are not served",
                )
            if (large := np.abs(rows.labels) >= 2**53).any():
                row = int(np.searchsorted(rows.label_ptr, large.argmax(), side="right")) - 1
                raise DataError(
                    f"{rows.where(row)}: the label {rows.labels[large.argmax()]:g} is too large to be a class",
                    hint="number the classes from 0, or correct the line",
                )
        counts = [np.diff(rows.label_ptr) for rows in files]
        if self.labels == "single" or (self.labels == "auto" and not any((found > 1).any() for found in counts)):
            return self._classes(files, [found != 1 for found in counts])
        return self._label_matrix(files)

    def _classes(self, files: list[Rows], several: list[NDArray[np.bool_]]) -> Tensor:
        for rows, wrong in zip(files, several, strict=True):
            if wrong.any():
                row = int(wrong.argmax())
                raise DataError(
                    f"{rows.where(row)}: the row has {np.diff(rows.label_ptr)[row]} labels, and others one",
                    hint="correct the line, or set data.labels=multi if rows may have any number of labels",
                )
        labels = np.concatenate([rows.labels for rows in files]).astype(np.int64)
        labelled = labels != self.unlabelled
        classes, self._label_values = number_labels(labels[labelled], self.num_classes)
        return among_unlabelled(classes, labelled, self.unlabelled)

    def _label_matrix(self, files: list[Rows]) -> Tensor:
        labels = [rows.labels.astype(np.int64) for rows in files]
        width = self.num_classes or max(int(found.max(initial=0)) for found in labels) + 1
        for rows, found in zip(files, labels, strict=True):
            if (outside := (found < 0) | (found >= width)).any():
                row = int(np.searchsorted(rows.label_ptr, outside.argmax(), side="right")) - 1
                raise DataError(
                    f"{rows.where(row)}: the label {found[outside.argmax()]}, and several labels a row are numbered "
                    f"0..{width - 1}",
                    hint="number the labels from 0; data.num_classes may be set larger",
                )
        row_of = np.concatenate([np.diff(rows.label_ptr) for rows in files])
        if len(row_of) * width > MOST_LABELS:
            rows = max(files, key=lambda rows: rows.labels.max(initial=0))
            row = int(np.searchsorted(rows.label_ptr, rows.labels.argmax(), side="right")) - 1
            raise DataError(
                f"{rows.where(row)}: the label {width - 1} makes a matrix of {len(row_of)} rows x {width} labels, "
                f"and {MOST_LABELS} entries are the most",
                hint="number the labels from 0 without gaps",
            )
        y = torch.zeros(len(row_of), width)
        y[torch.from_numpy(np.repeat(np.arange(len(row_of)), row_of)), torch.from_numpy(np.concatenate(labels))] = 1
        return y


def _first(rows: Rows, low: int, high: int) -> str:
    """Return ``file, line n: the feature id i`` of the first feature with an id between these, both included."""
    begin = 0
    for ids in rows.ids.chunks():
        found = (ids >= low) & (ids <= high)
        if found.any():
            row = int(np.searchsorted(rows.row_ptr, begin + found.argmax(), side="right")) - 1
            return f"{rows.where(row)}: the feature id {ids[found.argmax()]}"
        begin += len(ids)
    raise IndexError(low)
