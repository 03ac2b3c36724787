"""Rows of features with labels, from Parquet files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import torch
from torch import Tensor
from torch_geometric.data import Data

from gtrain.data.files import find_file
from gtrain.data.module import CommonOptions, GraphDataModule, file_stamp
from gtrain.data.parquet_columns import Entries, Source, dense_entries, hashed_entries, list_entries
from gtrain.data.rows import number_labels, row_masks
from gtrain.errors import ConfigError, DataError
from gtrain.graph.tables import csr_tensor

NULLS = ("error", "zero")


class ParquetData(GraphDataModule):
    """Rows of sparse features with a label, from Parquet files.

    Rows are the nodes of a graph without edges; ``x`` is a sparse CSR tensor, whose columns are, in this order, the
    ``dense`` columns, ``num_features`` for the ``ids``, and ``buckets`` for each ``categorical`` column. A value of a
    categorical column becomes a 1 in the bucket ``hash(value) % buckets``; the hash is that of
    :func:`~gtrain.data.hashing.hash_strings`, salted by the column's name, and whole numbers are hashed as their
    decimal digits. Features of a row that meet in one column are added up.

    Args:
        path: the file that trains, or a folder of them, as it is or below ``root``.
        test_path: the file or folder that tests; None for none.
        label: the column of labels: whole numbers, booleans or strings, numbered by their values.
        ids: a column of lists of feature ids from 0.
        values: a column of lists of their values; None for ones.
        num_features: feature ids are below this; None takes the largest.
        dense: numeric columns.
        categorical: columns of strings or whole numbers that are hashed.
        buckets: columns of ``x`` for each categorical column.
        nulls: what to do with null and NaN features: ``error``, or ``zero``: they count as 0, and a null category has
            no bucket. A null label is an error, unless ``unlabelled`` is set.
        **common: see :class:`~gtrain.data.module.GraphDataModule`; with the public split ``val_fraction`` of ``path``'s
            rows validate, drawn by ``seed``.
    """

    name = "parquet"

    def __init__(
        self,
        *,
        path: str,
        test_path: str | None = None,
        label: str = "label",
        ids: str | None = None,
        values: str | None = None,
        num_features: int | None = None,
        dense: Sequence[str] | None = None,
        categorical: Sequence[str] | None = None,
        buckets: int = 1 << 20,
        nulls: str = "error",
        **common: Unpack[CommonOptions],
    ) -> None:
        options: CommonOptions = {"partitioner": "random", "val_fraction": 0.1, "batch_size": 512, **common}
        super().__init__(**options)
        if nulls not in NULLS:
            raise ConfigError(f"data.nulls={nulls!r} is not known", hint=f"choose one of {', '.join(NULLS)}")
        for key, number in (("buckets", buckets), ("num_features", num_features)):
            if number is not None and number < 1:
                raise ConfigError(f"data.{key}={number} is too small", hint="set 1 or more")
        if values is not None and ids is None:
            raise ConfigError(
                f"data.values={values}, and data.ids is not set", hint="name the column of ids: data.ids="
            )
        if label in (ids, values, *(dense or []), *(categorical or [])):
            raise ConfigError(f"data.label={label} is a feature too", hint="take the label out of the features")
        self.path = path
        self.test_path = test_path
        self.label = label
        self.ids = ids
        self.values = values
        self.num_features = num_features
        self.dense = list(dense or [])
        self.categorical = list(categorical or [])
        self.buckets = buckets
        self.nulls = nulls
        self._label_values: list[Any] | None = None

    def identity(self) -> dict[str, Any]:
        """Return the stamps of the files, and how they are read."""
        keys = ("label", "ids", "values", "num_features", "dense", "categorical", "buckets", "nulls")
        masks = [self.split.val_fraction, self.split.seed] if self.split.kind == "public" else None
        files = {key: [file_stamp(file) for file in files] for key, files in self._files().items()}
        return {**files, **{key: getattr(self, key) for key in keys}, "public": masks}

    @property
    def origin(self) -> str:
        """Where the rows come from, for messages."""
        return f"data.path={self.path}" + (f", data.test_path={self.test_path}" if self.test_path else "")

    def read(self) -> Data:
        """Read the columns that are named."""
        tables = {key: self._table(key, files) for key, files in self._files().items()}
        table = _joined(tables) if len(tables) > 1 else tables["path"]
        source = Source(self.origin, self.nulls == "zero")
        y = self._labels(table, source)
        return Data(
            x=self._features(table, source),
            y=y,
            edge_index=torch.empty(2, 0, dtype=torch.int64),
            num_nodes=len(table),
            **row_masks(len(table), len(tables["path"]), self.split),
        )

    def extra_facts(self) -> dict[str, Any]:
        """Return the label that each class stands for; None where they are numbered so already."""
        return {"label_values": self._label_values}

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

    def _table(self, key: str, files: list[Path]) -> Any:
        """Return the columns that are named, of some files."""
        wanted = [name for name in (self.label, self.ids, self.values, *self.dense, *self.categorical) if name]
        for file in files:
            try:
                there = pa.dataset.dataset(file, format="parquet").schema.names
            except (pa.ArrowInvalid, OSError) as err:
                raise DataError(
                    f"{file} is no Parquet file, or is damaged: {str(err).splitlines()[0].rpartition(': ')[2]}",
                    hint=f"write the file again, or correct data.{key}",
                ) from err
            missing = [name for name in wanted if name not in there]
            if missing:
                raise DataError(
                    f"{file} has no column {missing[0]!r}; it has {', '.join(there)}",
                    hint="correct data.label, data.ids, data.values, data.dense or data.categorical",
                )
        if wanted == [self.label]:
            raise ConfigError(
                f"no column of features is named; {files[0]} has {', '.join(there)}",
                hint="set data.dense=[...], data.categorical=[...] or data.ids=...",
            )
        try:
            table = pa.dataset.dataset(files, format="parquet").to_table(columns=list(dict.fromkeys(wanted)))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OSError) as err:
            raise DataError(
                f"data.{key}={getattr(self, key)} cannot be read: {str(err).splitlines()[0]}",
                hint="write the files again, with the same types of columns in all of them",
            ) from err
        if not len(table):
            raise DataError(f"data.{key}={getattr(self, key)} has no rows", hint=f"correct data.{key}")
        return table

    def _features(self, table: Any, source: Source) -> Tensor:
        blocks: list[tuple[Entries, int]] = [(dense_entries(table, name, source), 1) for name in self.dense]
        if self.ids is not None:
            entries = list_entries(table, self.ids, self.values, source)
            blocks.append((entries, self._width(entries)))
        for name in self.categorical:
            blocks.append((hashed_entries(table, name, self.buckets, source), self.buckets))
        starts = np.concatenate([[0], np.cumsum([width for _, width in blocks])])
        width = int(starts[-1])
        if width * len(table) >= 2**63:
            raise DataError(
                f"{self.origin}: {len(table)} rows with {width} columns of features, which 64 bits do not count",
                hint="number the ids from 0 without gaps, or hash them: data.categorical with data.buckets",
            )
        keys = np.concatenate(
            [rows * width + columns + start for ((rows, columns, _), _), start in zip(blocks, starts, strict=False)]
        )
        keys, entry = np.unique(keys, return_inverse=True)
        values = np.bincount(entry, np.concatenate([block[2] for block, _ in blocks]), len(keys)).astype(np.float32)
        crow = np.concatenate([[0], np.cumsum(np.bincount(keys // width, minlength=len(table)))])
        arrays = torch.from_numpy(crow), torch.from_numpy(keys % width), torch.from_numpy(values)
        return csr_tensor(*arrays, (len(table), width))

    def _width(self, entries: Entries) -> int:
        rows, columns, _ = entries
        if self.num_features is not None and (columns >= self.num_features).any():
            at = int((columns >= self.num_features).argmax())
            raise DataError(
                f"{self.origin}: the column {self.ids!r} has the id {columns[at]} in row {rows[at]} (rows count from "
                f"0), and data.num_features={self.num_features}",
                hint="raise data.num_features, or set it to null to take the largest id",
            )
        return self.num_features or int(columns.max(initial=0)) + 1

    def _labels(self, table: Any, source: Source) -> Tensor:
        column = table[self.label]
        if pa.types.is_dictionary(column.type):  # what pandas calls a category
            column = pc.cast(column, column.type.value_type)
        lacking = pc.is_null(column, nan_is_null=True)
        if self.unlabelled is None and pc.any(lacking).as_py():
            wrong = lacking.to_numpy()
            raise DataError(
                f"{source.where}: the column {self.label!r} has no label (null or NaN) in row {int(wrong.argmax())}, "
                f"and in {int(wrong.sum())} of {len(wrong)} rows (rows count from 0)",
                hint="leave these rows out, or set data.unlabelled=-1 to have them in no split",
            )
        column = pc.if_else(lacking, pa.scalar(None, column.type), column)
        known = pc.drop_null(column)
        if pa.types.is_floating(known.type) and pc.all(pc.equal(known, pc.round(known))).as_py() is not False:
            known = pc.cast(known, pa.int64())
        if pa.types.is_boolean(known.type):
            known = pc.cast(known, pa.int64())
        if not (
            pa.types.is_integer(known.type) or pa.types.is_string(known.type) or pa.types.is_large_string(known.type)
        ):
            raise source.wrong_type(self.label, column.type, "whole numbers or strings")
        labels = known.to_numpy()
        labelled = ~pc.is_null(column).to_numpy()
        if self.unlabelled is not None and pa.types.is_integer(known.type):
            labelled[labelled] = labels != self.unlabelled
            labels = labels[labels != self.unlabelled]
        y = torch.full((len(column),), self.unlabelled if self.unlabelled is not None else 0)
        classes, self._label_values = number_labels(labels, self.num_classes)
        y[torch.from_numpy(labelled)] = classes
        return y


def _joined(tables: dict[str, Any]) -> Any:
    """Return the rows of what trains and of what tests, in this order."""
    try:
        return pa.concat_tables(tables.values(), promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as err:
        raise DataError(
            f"data.path and data.test_path have columns of other types: {str(err).splitlines()[0]}",
            hint="write both with the same types of columns",
        ) from err
