"""Rows of features with labels, from Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from torch_geometric.data import Data

from gtrain.data.config import ParquetConfig
from gtrain.data.module import file_stamp
from gtrain.data.readers.files import candidates, find_file, first_true
from gtrain.data.readers.parquet import (
    BatchSource,
    Entries,
    FeatureLayout,
    LabelColumn,
    ParquetFiles,
    check_label,
    column_names,
    dense_entries,
    hashed_entries,
    list_entries,
)
from gtrain.data.sources.feature_rows import RowColumns, RowData
from gtrain.errors import ConfigError, DataError


class ParquetData(RowData[ParquetConfig]):
    """Rows of sparse features with a label, from Parquet files.

    Rows are the nodes of a graph without edges; ``x`` is a sparse CSR tensor, whose columns are, in this order, the
    ``dense`` columns, ``num_features`` for the ``ids``, and ``buckets`` for each ``categorical`` column. A value of a
    categorical column becomes a 1 in the bucket ``hash(value) % buckets``; the hash is
    :func:`~gtrain.data.readers.parquet.hash_strings` salted with the column's name, and whole numbers are hashed as
    their decimal digits. Features of a row that fall into the same column are summed.

    Its settings are those of :class:`~gtrain.data.config.ParquetConfig`.
    """

    name = "parquet"

    def __init__(self, settings: ParquetConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        given = self.settings
        self._dense, self._categorical = list(given.dense or []), list(given.categorical or [])
        if given.values is not None and given.ids is None:
            raise ConfigError(
                f"data.values={given.values}, and data.ids is not set", hint="name the column of ids: data.ids="
            )
        if given.label in (given.ids, given.values, *self._dense, *self._categorical):
            raise ConfigError(f"data.label={given.label} is a feature too", hint="remove the label from the features")

    def identity(self) -> dict[str, Any]:
        """Return the stamps of the files and the options that control how they are read."""
        keys = ("label", "ids", "values", "num_features", "buckets", "nulls")
        options = {**{key: getattr(self.settings, key) for key in keys}, "public": self.public_identity()}
        files = {key: [file_stamp(file) for file in files] for key, files in self._files().items()}
        return {**files, **options, "dense": self._dense, "categorical": self._categorical}

    def check_files(self) -> None:
        """Refuse missing files, and columns that the files' schemas lack or have with other types."""
        table, source = self._open_files().schema.empty_table(), self._source_of(0)
        self._blocks(table, source)
        if self._has_labels:
            check_label(table[self.settings.label].type, self.settings.label, source)

    def _source_of(self, first_row: int) -> BatchSource:
        return BatchSource(self.origin, self.settings.nulls == "zero", first_row)

    def read(self) -> Data:
        """Read the named columns; read the ids twice if ``num_features`` is not set.

        One batch of rows is in memory; the entries are in temporary files in ``store`` and may exceed the memory.
        """
        files = self._open_files()
        layout = self._layout(files)
        labels, entries = LabelColumn(self.settings.label, self.unlabelled_value), RowColumns(self.store)
        for first_row, table in files.read(self._columns):
            source = self._source_of(first_row)
            labels.append(table[self.settings.label] if self._has_labels else _no_labels(len(table)), source)
            counts, ids, values = layout.rows(self._blocks(table, source), len(table))
            entries.add_rows(counts)
            entries.add_entries(ids, values)
        y, label_values = labels.classes(*self.known_classes)
        return self.rows_as_graph(entries.tensor(layout.width), y, files.counts["path"], label_values)

    def numbering(self) -> dict[str, Any]:
        """Return the columns in the order of their features."""
        buckets = self.settings.buckets if self._categorical else None
        return {
            "dense": self._dense,
            "ids": self.settings.ids,
            "categorical": self._categorical,
            "buckets": buckets,
        }

    def _files(self) -> dict[str, list[Path]]:
        """Return the files of ``path`` and of ``test_path``."""
        named = {"path": self.settings.path, "test_path": self.settings.test_path}
        files = {}
        for key, name in named.items():
            if name is not None:
                folder = next((path for path in candidates(name, self.root) if path.is_dir()), None)
                paths = sorted(folder.rglob("*.parquet")) if folder else [find_file(f"data.{key}", name, self.root)]
                if not paths:
                    raise DataError(f"data.{key}={name}: the folder has no *.parquet", hint=f"correct data.{key}")
                files[key] = paths
        return files

    @property
    def _columns(self) -> list[str]:
        """The named columns, the label first."""
        label = self.settings.label if self._has_labels else None
        named = (label, self.settings.ids, self.settings.values, *self._dense, *self._categorical)
        return list(dict.fromkeys(name for name in named if name))

    @property
    def _has_labels(self) -> bool:
        """Whether the files have the column of labels, which rows for a trained model may lack."""
        return not self.applied or self.settings.label in column_names(self._files()["path"][0])

    def _open_files(self) -> ParquetFiles:
        files = self._files()
        if self._columns == [self.settings.label]:
            first = files["path"][0]
            raise ConfigError(
                f"no column of features is named; {first} has {', '.join(column_names(first))}",
                hint="set data.dense=[...], data.categorical=[...] or data.ids=...",
            )
        named = {"path": self.settings.path, "test_path": str(self.settings.test_path)}
        return ParquetFiles(files, named, self._columns)

    def _layout(self, files: ParquetFiles) -> FeatureLayout:
        """Return the first column of ``x`` of each block: dense columns, ids, categories."""
        widths, ids = [1] * len(self._dense), self.settings.ids
        if ids is not None and (width := self._num_ids) is not None:
            widths.append(width)
        elif ids is not None:
            batches = ((table, self._source_of(first_row)) for first_row, table in files.read([ids]))
            largest = (int(list_entries(table, ids, None, source)[1].max(initial=0)) for table, source in batches)
            widths.append(max(largest, default=0) + 1)
        layout = FeatureLayout([*widths, *[self.settings.buckets] * len(self._categorical)])
        if layout.width * len(files) >= 2**63:
            raise DataError(
                f"{self.origin}: {len(files)} rows with {layout.width} columns of features exceed 64 bits",
                hint="number the ids from 0 without gaps, or hash them: data.categorical with data.buckets",
            )
        return layout

    @property
    def _num_ids(self) -> int | None:
        """The number of feature ids: the setting, or that of a trained model; None: the largest id + 1."""
        if self.settings.num_features is not None or self.trained is None:
            return self.settings.num_features
        return int(self.trained["num_features"]) - len(self._dense) - self.settings.buckets * len(self._categorical)

    def _blocks(self, table: Any, source: BatchSource) -> list[Entries]:
        """Return the entries of each block of columns of ``x``."""
        blocks = [dense_entries(table, name, source) for name in self._dense]
        ids, limit = self.settings.ids, self._num_ids
        if ids is not None:
            rows, columns, values = list_entries(table, ids, self.settings.values, source)
            if limit is not None and (position := first_true(columns >= limit)) is not None:
                raise DataError(
                    f"{self.origin}: the column {ids!r} has the id {columns[position]} in row "
                    f"{source.first_row + rows[position]} (rows count from 0), and data.num_features={limit}",
                    hint="raise data.num_features, or set it to null to take the largest id",
                )
            blocks.append((rows, columns, values))
        return [*blocks, *(hashed_entries(table, name, self.settings.buckets, source) for name in self._categorical)]


def _no_labels(count: int) -> Any:
    """Return a column of labels of rows that have none."""
    return pa.chunked_array([pa.nulls(count, pa.int64())])
