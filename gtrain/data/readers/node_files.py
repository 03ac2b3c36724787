"""Features and labels of the nodes of an edge list, from files of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from gtrain.data.readers.files import find_file, read_array
from gtrain.data.readers.number_table import Table, read_table
from gtrain.errors import DataError

GENERATED = ("degree", "constant")


@dataclass(frozen=True)
class NodeFiles:
    """Where the features and labels of the nodes are.

    Attributes:
        features: ``.npy``, ``.pt`` or text; ``degree``, ``constant`` or None: no file.
        labels: ``.npy``, ``.pt`` or text; None: none.
        root: the folder of raw files.
        unlabelled: the label of nodes that the labels leave out; None where they may not.
    """

    features: str | None
    labels: str | None
    root: Path
    unlabelled: int | None

    @property
    def features_path(self) -> Path | None:
        """The file of the features; None without one."""
        if self.features is None or self.features in GENERATED:
            return None
        return find_file("data.features", self.features, self.root)

    @property
    def labels_path(self) -> Path | None:
        """The file of the labels; None without."""
        return None if self.labels is None else find_file("data.labels", self.labels, self.root)

    def read(self, num_nodes: int | None) -> NumberedNodes:
        """Read the files for nodes that have numbers.

        Args:
            num_nodes: N where an option sets it.

        Raises:
            DataError: a file is malformed, or they differ in the number of nodes.
        """
        labels = self._labels()
        x = self._features()
        return NumberedNodes(self, x, labels, self._count(x, labels, num_nodes))

    def read_named(self, names: pa.LargeStringArray) -> tuple[Tensor | None, Tensor | None]:
        """Return features ``[N, F]`` and labels ``[N]`` for nodes that have names; arrays have the names' order.

        Raises:
            DataError: a file is malformed, or does not fit the nodes.
        """
        x = self._features() if _is_array(self.features_path) else self._named_features(names)
        y = self._labels() if _is_array(self.labels_path) else self._named_labels(names)
        self._count(x, y, None, len(names))
        assert not isinstance(y, Table)  # a text table of labels is one of names here
        return x, y

    def _features(self) -> Tensor | None:
        path = self.features_path
        if path is None:
            return None
        x = read_array("data.features", path)
        if x.dim() not in (1, 2):
            raise DataError(
                f"data.features={path} has shape {list(x.shape)}, and [N, F] is expected",
                hint="save one row of numbers for each node: array.reshape(num_nodes, -1)",
            )
        return (x if x.dim() == 2 else x.unsqueeze(1)).float()

    def _labels(self) -> Tensor | Table | None:
        """Return one label for each node, or the table of ids and labels."""
        path = self.labels_path
        if path is None:
            return None
        if _is_array(path):
            labels = read_array("data.labels", path)
            if labels.dim() not in (1, 2):
                raise DataError(
                    f"data.labels={path} has shape {list(labels.shape)}, and [N] or [N, C] is expected",
                    hint="save one label for each node, or one row of 0 and 1 for each node",
                )
            return labels
        table = read_table(path, integers=None, header=True, widths=(1, 2))
        return table if len(table.columns) == 2 else torch.from_numpy(table.columns[0].astype(np.int64))

    def _count(
        self, x: Tensor | None, labels: Tensor | Table | None, num_nodes: int | None, names: int | None = None
    ) -> int | None:
        """Return N, checking that features and labels have that many rows; None where nothing tells it."""
        counts = {} if num_nodes is None else {f"data.num_nodes={num_nodes}": num_nodes}
        counts |= {} if names is None else {"data.path": names}
        rows = {f"data.features={self.features}": x, f"data.labels={self.labels}": labels}
        counts |= {key: value.size(0) for key, value in rows.items() if isinstance(value, Tensor)}
        if not counts:
            return None
        (first, wanted), *others = counts.items()
        for other, count in others:
            if count != wanted:
                raise DataError(
                    f"{other} has {count} rows, and {first} says that there are {wanted} nodes",
                    hint=f"give {other.split('=')[0]} one row for each node, or correct {first.split('=')[0]}",
                )
        return wanted

    def _named_features(self, names: pa.LargeStringArray) -> Tensor | None:
        from gtrain.data.ingest.named import read_named_table  # kernels: only a process that reads needs them

        path = self.features_path
        if path is None:
            return None
        table = read_named_table(path, names)
        if len(table.ids) < len(names):
            missing = np.setdiff1d(np.arange(len(names)), table.ids)
            raise DataError(
                f"{path} has features for {len(table.ids)} nodes, and the graph has {len(names)}; "
                f"{names[int(missing[0])].as_py()!r} has none",
                hint="give each node a line: its name and its features",
            )
        x = torch.empty(len(names), table.values.shape[1])
        x[torch.from_numpy(table.ids)] = torch.from_numpy(table.values).float()
        return x

    def _named_labels(self, names: pa.LargeStringArray) -> Tensor | None:
        from gtrain.data.ingest.named import read_named_table

        path = self.labels_path
        if path is None:
            return None
        table = read_named_table(path, names)
        values = table.values[:, 0]
        if table.values.shape[1] != 1 or (values != np.rint(values)).any():
            found = f"{table.values.shape[1]} numbers" if table.values.shape[1] > 1 else "a number that is not whole"
            raise DataError(
                f"{path} has {found} behind a name, and a label is one whole number",
                hint="write lines of a name and a label: the classes are 0, 1, 2...",
            )
        return self._spread(path, table.ids, values.astype(np.int64), len(names))

    def _spread(self, path: Path, ids: np.ndarray, labels: np.ndarray, num_nodes: int) -> Tensor:  # type: ignore[type-arg]
        """Return one label for each node; those without one have the label that means none."""
        if len(ids) < num_nodes and self.unlabelled is None:
            raise DataError(
                f"{path} has labels for {len(ids)} nodes, and the graph has {num_nodes}",
                hint="if the others have no label, set data.unlabelled=-1",
            )
        y = torch.full((num_nodes,), self.unlabelled or 0)
        return y.index_copy_(0, torch.from_numpy(ids), torch.from_numpy(labels))


@dataclass(frozen=True)
class NumberedNodes:
    """What the files say of nodes that have numbers.

    Attributes:
        files: the files.
        x: features, ``[N, F]``; None without.
        labels: one label for each node, or a table of ids and labels; None without.
        num_nodes: N; None where only the largest id tells it.
    """

    files: NodeFiles
    x: Tensor | None
    labels: Tensor | Table | None
    num_nodes: int | None

    @property
    def largest_id(self) -> int:
        """The largest id that has a label in a table; -1 without."""
        return int(self.labels.columns[0].max(initial=-1)) if isinstance(self.labels, Table) else -1

    def y(self, num_nodes: int) -> Tensor | None:
        """Return one label for each of N nodes.

        Raises:
            DataError: a line labels no node, or one that has a label, or nodes have none.
        """
        if not isinstance(self.labels, Table):
            return self.labels
        table, (ids, labels) = self.labels, (column.astype(np.int64) for column in self.labels.columns)
        outside = np.flatnonzero((ids < 0) | (ids >= num_nodes))
        if outside.size:
            row = int(outside[0])
            raise DataError(
                f"{table.path}, line {table.line(row)}: a label for node {ids[row]}, and the graph has "
                f"{num_nodes} nodes, 0..{num_nodes - 1}",
                hint="ids start at 0; correct the line, or give the right number of nodes",
            )
        counts = np.bincount(ids, minlength=num_nodes)
        if counts.max() > 1:
            node = int(counts.argmax())
            first, second = (table.line(row) for row in np.flatnonzero(ids == node)[:2].tolist())
            raise DataError(
                f"{table.path}, line {second}: a second label for node {node}, which has one in line {first}",
                hint="delete one of the two lines",
            )
        return self.files._spread(table.path, ids, labels, num_nodes)


def _is_array(path: Path | None) -> bool:
    return path is not None and path.suffix in (".npy", ".pt")


def generated(kind: str, targets: Iterable[np.ndarray], num_nodes: int) -> Tensor:  # type: ignore[type-arg]
    """Return generated features ``[N, 1]``: log(1 + in-degree), or ones.

    Args:
        kind: ``degree`` or ``constant``.
        targets: the target of each edge, in pieces.
        num_nodes: N.
    """
    if kind == "constant":
        return torch.ones(num_nodes, 1)
    degree = np.zeros(num_nodes, dtype=np.int64)
    for piece in targets:
        degree += np.bincount(piece, minlength=num_nodes)
    return torch.from_numpy(degree).float().log1p().unsqueeze(1)
