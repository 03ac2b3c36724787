"""A graph from an edge list, with features and labels from files of their own."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from gtrain.data.files import find_file, read_array
from gtrain.data.module import CommonOptions, GraphDataModule, file_stamp
from gtrain.data.table import Table, read_table
from gtrain.errors import ConfigError, DataError

GENERATED = ("degree", "constant")


class EdgesData(GraphDataModule):
    """A graph from an edge list: one edge for each line, ``source target`` or ``source target weight``.

    Ids are integers from 0. Columns are separated by commas, semicolons, tabs or spaces; lines that begin with ``#`` or
    ``%`` are comments, a first line of names is skipped, and ``.gz`` files are unpacked. File names are taken as they
    are, or below ``root``.

    Args:
        path: the edge list. A third column becomes ``edge_weight`` (float32).
        features: ``.npy``, ``.pt`` (a plain tensor) or text, one row for each node; or ``degree`` (one column,
            log(1 + in-degree)) or ``constant`` (one column of ones); None means no ``x``.
        labels: ``.npy``, ``.pt`` or text, one label for each line, or ``id label``; None means no ``y``, which is
            enough for a store, but not for training on node labels.
        num_nodes: N; None takes the rows of the features, or else of the labels, or else the largest id + 1.
        undirected: whether each line stands for both directions; edges listed twice are merged, their weights averaged.
        **common: see :class:`~gtrain.data.module.GraphDataModule`; the split is random unless it is set.
    """

    name = "edges"

    def __init__(
        self,
        *,
        path: str,
        features: str | None = None,
        labels: str | None = None,
        num_nodes: int | None = None,
        undirected: bool = False,
        **common: Unpack[CommonOptions],
    ) -> None:
        options: CommonOptions = {"split": "random", **common}
        super().__init__(**options)
        if self.split.kind == "public":
            raise ConfigError("data.split=public, and an edge list has no masks", hint="set data.split=random")
        if num_nodes is not None and num_nodes < 1:
            raise ConfigError(f"data.num_nodes={num_nodes} is too small", hint="set 1 or more, or null")
        self.path = path
        self.features = features
        self.labels = labels
        self.num_nodes = num_nodes
        self.undirected = undirected

    def identity(self) -> dict[str, Any]:
        """Return the stamps of the files, and how they are read."""
        stamps = {"path": file_stamp(find_file("data.path", self.path, self.root))}
        if self.features is not None and self.features not in GENERATED:
            stamps["features"] = file_stamp(find_file("data.features", self.features, self.root))
        if self.labels is not None:
            stamps["labels"] = file_stamp(find_file("data.labels", self.labels, self.root))
        generated = self.features if self.features in GENERATED else None
        options = {"generated": generated, "num_nodes": self.num_nodes, "undirected": self.undirected}
        return {**stamps, **options}

    @property
    def origin(self) -> str:
        """Where the graph comes from, for messages."""
        files = {"path": self.path, "features": self.features, "labels": self.labels}
        return ", ".join(f"data.{key}={file}" for key, file in files.items() if file is not None)

    def read(self) -> Data:
        """Read the files."""
        table = read_table(find_file("data.path", self.path, self.root), integers=2, header=True, widths=(2, 3))
        x, labels = self._read_features(), self._read_labels()
        num_nodes = self._count_nodes(table, x, labels)
        _check_ids(table, num_nodes, self._counted_by(x, labels))
        edge_index = torch.from_numpy(np.stack(table.columns[:2]).astype(np.int64, copy=False))
        weight = torch.from_numpy(table.columns[2].astype(np.float32)) if len(table.columns) == 3 else None
        if self.undirected:
            edge_index, weight = _both_directions(edge_index, weight, num_nodes)
        data = Data(edge_index=edge_index, num_nodes=num_nodes)
        if weight is not None:
            data.edge_weight = weight
        if self.features is not None:
            data.x = x if x is not None else _generated(self.features, edge_index, num_nodes)
        if labels is not None:
            data.y = self._spread(labels, num_nodes) if isinstance(labels, Table) else labels
        return data

    def _read_features(self) -> Tensor | None:
        if self.features is None or self.features in GENERATED:
            return None
        path = find_file("data.features", self.features, self.root)
        x = read_array("data.features", path)
        if x.dim() not in (1, 2):
            raise DataError(
                f"data.features={path} has shape {list(x.shape)}, and [N, F] is expected",
                hint="save one row of numbers for each node: array.reshape(num_nodes, -1)",
            )
        return x.reshape(x.size(0), -1).float()

    def _read_labels(self) -> Tensor | Table | None:
        """Return one label for each node, or the table of ids and labels."""
        if self.labels is None:
            return None
        path = find_file("data.labels", self.labels, self.root)
        if path.suffix in (".npy", ".pt"):
            labels = read_array("data.labels", path)
            if labels.dim() not in (1, 2):
                raise DataError(
                    f"data.labels={path} has shape {list(labels.shape)}, and [N] or [N, C] is expected",
                    hint="save one label for each node, or one row of 0 and 1 for each node",
                )
            return labels
        table = read_table(path, integers=None, header=True, widths=(1, 2))
        return table if len(table.columns) == 2 else torch.from_numpy(table.columns[0].astype(np.int64))

    def _count_nodes(self, table: Table, x: Tensor | None, labels: Tensor | Table | None) -> int:
        """Return N, checking that features and labels have that many rows."""
        rows = {f"data.features={self.features}": x, f"data.labels={self.labels}": labels}
        counts = {key: value.size(0) for key, value in rows.items() if isinstance(value, Tensor)}
        if self.num_nodes is not None:
            counts = {f"data.num_nodes={self.num_nodes}": self.num_nodes, **counts}
        if not counts:
            ids = labels.columns[0] if isinstance(labels, Table) else table.columns[0][:0]
            return 1 + max(int(column.max(initial=-1)) for column in (*table.columns[:2], ids))
        (first, num_nodes), *others = counts.items()
        for other, count in others:
            if count != num_nodes:
                key = first.split("=")[0]
                raise DataError(
                    f"{other} has {count} rows, and {first} says that there are {num_nodes} nodes",
                    hint=f"give {other.split('=')[0]} one row for each node, or correct {key}",
                )
        return num_nodes

    def _counted_by(self, x: Tensor | None, labels: Tensor | Table | None) -> str:
        """Return the option that told how many nodes there are."""
        if self.num_nodes is not None:
            return f"data.num_nodes={self.num_nodes}"
        if x is not None:
            return f"data.features={self.features}"
        return f"data.labels={self.labels}" if labels is not None else "the largest id"

    def _spread(self, table: Table, num_nodes: int) -> Tensor:
        """Turn ``id label`` lines into one label for each node."""
        ids, labels = (torch.from_numpy(column.astype(np.int64)) for column in table.columns)
        outside = ((ids < 0) | (ids >= num_nodes)).nonzero()
        if outside.numel():
            row = int(outside[0])
            raise DataError(
                f"{table.path}, line {table.line(row)}: a label for node {int(ids[row])}, and the graph has "
                f"{num_nodes} nodes, 0..{num_nodes - 1}",
                hint="ids start at 0; correct the line, or give the right number of nodes",
            )
        counts = torch.bincount(ids, minlength=num_nodes)
        if counts.max() > 1:
            node = int(counts.argmax())
            first, second = (table.line(int(row)) for row in (ids == node).nonzero()[:2])
            raise DataError(
                f"{table.path}, line {second}: a second label for node {node}, which has one in line {first}",
                hint="delete one of the two lines",
            )
        missing = int((counts == 0).sum())
        if missing and self.unlabelled is None:
            raise DataError(
                f"{table.path} has labels for {len(ids)} nodes, and the graph has {num_nodes}",
                hint="if the others have no label, set data.unlabelled=-1",
            )
        return torch.full((num_nodes,), self.unlabelled or 0).index_copy_(0, ids, labels)


def _check_ids(table: Table, num_nodes: int, counted_by: str) -> None:
    source, target = table.columns[:2]
    for limit, wrong in ((0, (source < 0) | (target < 0)), (num_nodes, (source >= num_nodes) | (target >= num_nodes))):
        if wrong.any():
            row = int(wrong.argmax())
            node = min(int(source[row]), int(target[row])) if limit == 0 else max(int(source[row]), int(target[row]))
            raise DataError(
                f"{table.path}, line {table.line(row)}: the edge {source[row]} -> {target[row]} names node {node}, and "
                f"there are {num_nodes} nodes, 0..{num_nodes - 1} ({counted_by})",
                hint="ids start at 0; correct the line, or give the right number of nodes",
            )


def _both_directions(edge_index: Tensor, weight: Tensor | None, num_nodes: int) -> tuple[Tensor, Tensor | None]:
    if weight is None:
        return to_undirected(edge_index, num_nodes=num_nodes), None
    both: tuple[Tensor, Tensor] = to_undirected(edge_index, weight, num_nodes=num_nodes, reduce="mean")
    return both


def _generated(kind: str, edge_index: Tensor, num_nodes: int) -> Tensor:
    if kind == "constant":
        return torch.ones(num_nodes, 1)
    return torch.bincount(edge_index[1], minlength=num_nodes).float().log1p().unsqueeze(1)
