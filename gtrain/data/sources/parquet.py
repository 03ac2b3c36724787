"""Rows of features with labels, from Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data

from gtrain.data.config import ParquetConfig
from gtrain.data.module import SPARSE_OUTLINE, GraphDataModule, file_stamp
from gtrain.data.readers.files import find_file
from gtrain.data.readers.parquet import (
    Entries,
    Labels,
    Layout,
    ParquetFiles,
    Source,
    check_label,
    column_names,
    dense_entries,
    hashed_entries,
    list_entries,
)
from gtrain.data.sources.feature_rows import RowColumns, no_label, row_masks
from gtrain.errors import ConfigError, DataError


class ParquetData(GraphDataModule):
    """Rows of sparse features with a label, from Parquet files.

    Rows are the nodes of a graph without edges; ``x`` is a sparse CSR tensor, whose columns are, in this order, the
    ``dense`` columns, ``num_features`` for the ``ids``, and ``buckets`` for each ``categorical`` column. A value of a
    categorical column becomes a 1 in the bucket ``hash(value) % buckets``; the hash is that of
    :func:`~gtrain.data.readers.parquet.hash_strings`, salted by the column's name, and whole numbers are hashed as
    their decimal digits. Features of a row that meet in one column are added up.

    Its settings are those of :class:`~gtrain.data.config.ParquetConfig`.
    """

    name = "parquet"
    outline = SPARSE_OUTLINE

    settings_type = ParquetConfig
    settings: ParquetConfig

    def __init__(self, settings: ParquetConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        given = self.settings
        for key, number in (("buckets", given.buckets), ("num_features", given.num_features)):
            if number is not None and number < 1:
                raise ConfigError(f"data.{key}={number} is too small", hint="set 1 or more")
        if given.values is not None and given.ids is None:
            raise ConfigError(
                f"data.values={given.values}, and data.ids is not set", hint="name the column of ids: data.ids="
            )
        if given.label in (given.ids, given.values, *(given.dense or []), *(given.categorical or [])):
            raise ConfigError(f"data.label={given.label} is a feature too", hint="take the label out of the features")
        self.path = given.path
        self.test_path = given.test_path
        self.label = given.label
        self.ids = given.ids
        self.values = given.values
        self.num_features = given.num_features
        self.dense = list(given.dense or [])
        self.categorical = list(given.categorical or [])
        self.buckets = given.buckets
        self.nulls = given.nulls
        self._label_values: list[Any] | None = None

    def identity(self) -> dict[str, Any]:
        """Return the stamps of the files, and how they are read."""
        keys = ("label", "ids", "values", "num_features", "dense", "categorical", "buckets", "nulls")
        masks = [self.split.val_fraction, self.split.seed] if self.split.kind == "public" else None
        files = {key: [file_stamp(file) for file in files] for key, files in self._files().items()}
        return {**files, **{key: getattr(self, key) for key in keys}, "public": masks}

    def check_inputs(self) -> None:
        """Refuse missing files, and columns that are missing or of other types in the files' schemas."""
        super().check_inputs()
        files, source = self._open_files(), Source(self.origin, self.nulls == "zero")
        table = files.schema.empty_table()
        self._blocks(table, source)
        check_label(table[self.label].type, self.label, source)

    @property
    def origin(self) -> str:
        """Where the rows come from, for messages."""
        return f"data.path={self.path}" + (f", data.test_path={self.test_path}" if self.test_path else "")

    def read(self) -> Data:
        """Read the columns that are named, twice those of ids if ``num_features`` is not set.

        One batch of rows is in memory; entries are then in temporary files in ``store``, and may be more than the
        memory holds.
        """
        files = self._open_files()
        layout = self._layout(files)
        labels, entries = Labels(self.label, self.unlabelled), RowColumns(self.store)
        for first, table in files.read(self._columns):
            source = Source(self.origin, self.nulls == "zero", first)
            labels.append(table[self.label], source)
            counts, ids, values = layout.rows(self._blocks(table, source), len(table))
            entries.add_rows(counts)
            entries.add_entries(ids, values)
        y, self._label_values = labels.classes(self.num_classes)
        return Data(
            x=entries.tensor(layout.width),
            y=y,
            edge_index=torch.empty(2, 0, dtype=torch.int64),
            num_nodes=len(files),
            **row_masks(len(files), files.counts["path"], self.split),
        )

    @property
    def _no_label(self) -> int | None:
        return no_label(self.unlabelled)

    def extra_facts(self) -> dict[str, Any]:
        """Return the label that each class stands for; None where they are numbered so already."""
        return {"label_values": self._label_values}

    def numbering(self) -> dict[str, Any]:
        """Return the columns in the order of their features."""
        buckets = self.buckets if self.categorical else None
        return {"dense": self.dense, "ids": self.ids, "categorical": self.categorical, "buckets": buckets}

    def _files(self) -> dict[str, list[Path]]:
        """Return the files of ``path`` and of ``test_path``."""
        named = {"path": self.path} if self.test_path is None else {"path": self.path, "test_path": self.test_path}
        found = {}
        for key, name in named.items():
            folder = next((place for place in (Path(name).expanduser(), self.root / name) if place.is_dir()), None)
            found[key] = sorted(folder.rglob("*.parquet")) if folder else [find_file(f"data.{key}", name, self.root)]
            if not found[key]:
                raise DataError(f"data.{key}={name}: the folder has no *.parquet", hint=f"correct data.{key}")
        return found

    @property
    def _columns(self) -> list[str]:
        """The columns that are named, the label first."""
        named = (self.label, self.ids, self.values, *self.dense, *self.categorical)
        return list(dict.fromkeys(name for name in named if name))

    def _open_files(self) -> ParquetFiles:
        files = self._files()
        if self._columns == [self.label]:
            first = files["path"][0]
            raise ConfigError(
                f"no column of features is named; {first} has {', '.join(column_names(first))}",
                hint="set data.dense=[...], data.categorical=[...] or data.ids=...",
            )
        return ParquetFiles(files, {"path": self.path, "test_path": str(self.test_path)}, self._columns)

    def _layout(self, files: ParquetFiles) -> Layout:
        """Where each block of columns of ``x`` begins: dense ones, ids, categories."""
        widths = [1] * len(self.dense)
        if self.ids is not None:
            widths.append(self.num_features or self._largest_id(files, self.ids) + 1)
        layout = Layout([*widths, *[self.buckets] * len(self.categorical)])
        if layout.width * len(files) >= 2**63:
            raise DataError(
                f"{self.origin}: {len(files)} rows with {layout.width} columns of features, which 64 bits do not count",
                hint="number the ids from 0 without gaps, or hash them: data.categorical with data.buckets",
            )
        return layout

    def _largest_id(self, files: ParquetFiles, ids: str) -> int:
        largest = 0
        for first, table in files.read([ids]):
            _, columns, _ = list_entries(table, ids, None, Source(self.origin, self.nulls == "zero", first))
            largest = max(largest, int(columns.max(initial=0)))
        return largest

    def _blocks(self, table: Any, source: Source) -> list[Entries]:
        """Return the entries of each block of columns of ``x``."""
        blocks = [dense_entries(table, name, source) for name in self.dense]
        if self.ids is not None:
            blocks.append(list_entries(table, self.ids, self.values, source))
            self._check_ids(blocks[-1], source)
        return [*blocks, *(hashed_entries(table, name, self.buckets, source) for name in self.categorical)]

    def _check_ids(self, entries: Entries, source: Source) -> None:
        rows, columns, _ = entries
        if self.num_features is not None and (columns >= self.num_features).any():
            at = int((columns >= self.num_features).argmax())
            raise DataError(
                f"{self.origin}: the column {self.ids!r} has the id {columns[at]} in row {source.first + rows[at]} "
                f"(rows count from 0), and data.num_features={self.num_features}",
                hint="raise data.num_features, or set it to null to take the largest id",
            )
