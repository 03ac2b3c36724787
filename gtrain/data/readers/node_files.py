"""Read the features and labels of an edge list's nodes from separate files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.data.readers.files import find_file, first_true, read_array
from gtrain.data.readers.number_table import COMMENTS, NumberTable, read_named_table, read_table
from gtrain.errors import DataError

GENERATED = ("degree", "constant")
"""Values of ``data.features`` that need no file."""
_ARRAYS = (".npy", ".pt")


@dataclass(frozen=True)
class NodeFiles:
    """The files of the nodes' features and labels.

    Attributes:
        features: ``.npy``, ``.pt`` or text; ``degree``, ``constant`` or None: no file.
        labels: ``.npy``, ``.pt`` or text; None: no labels.
        root: the folder of raw files.
        unlabelled: the label of nodes that the file of labels omits; None: it may omit none.
        numbers: whether labels are numbers to predict, which the file may omit; they are NaN then.
        comments: each of these characters starts a comment line of text.
    """

    features: str | None
    labels: str | None
    root: Path
    unlabelled: int | None
    numbers: bool = False
    comments: str = COMMENTS

    @property
    def features_path(self) -> Path | None:
        """The file of the features."""
        if self.features is None or self.features in GENERATED:
            return None
        return find_file("data.features", self.features, self.root)

    @property
    def labels_path(self) -> Path | None:
        """The file of the labels."""
        return None if self.labels is None else find_file("data.labels", self.labels, self.root)

    def read(self, num_nodes: int | None) -> NumberedNodes:
        """Read the files of nodes with integer ids.

        Args:
            num_nodes: N, if an option sets it.

        Raises:
            DataError: a file is malformed, or the files differ in the number of nodes.
        """
        labels, x = self._labels(), self._features()
        counts = {} if num_nodes is None else {f"data.num_nodes={num_nodes}": num_nodes}
        return NumberedNodes(self, x, labels, self._agreed_count(x, labels, counts))

    def read_named(self, names: pa.LargeStringArray) -> tuple[Tensor | None, Tensor | None]:
        """Return features ``[N, F]`` and labels ``[N]`` of nodes with names.

        Rows of ``.npy`` and ``.pt`` are in the order of the names.

        Raises:
            DataError: a file is malformed, or does not match the nodes.
        """
        x, y = self._features(names), self._labels(names)
        self._agreed_count(x, y, {"data.path": len(names)})
        # Text labels of named nodes are looked up by name.
        assert not isinstance(y, NumberTable)
        return x, y

    def _features(self, names: pa.LargeStringArray | None = None) -> Tensor | None:
        path = self.features_path
        if path is None:
            return None
        if names is not None and path.suffix not in _ARRAYS:
            return self._named_features(path, names)
        x = read_array("data.features", path, self.comments)
        if x.dim() not in (1, 2):
            raise DataError(
                f"data.features={path} has shape {list(x.shape)}; [N, F] is expected",
                hint="save one row of numbers for each node: array.reshape(num_nodes, -1)",
            )
        return (x if x.dim() == 2 else x.unsqueeze(1)).float()

    def _named_features(self, path: Path, names: pa.LargeStringArray) -> Tensor:
        ids, values = read_named_table(path, names, self.comments)
        if len(ids) < len(names):
            missing = np.setdiff1d(np.arange(len(names)), ids)
            raise DataError(
                f"{path} has features for {len(ids)} nodes, and the graph has {len(names)}; "
                f"{names[int(missing[0])].as_py()!r} has none",
                hint="give each node a line: its name and its features",
            )
        x = torch.empty(len(names), values.shape[1])
        x[torch.from_numpy(ids)] = torch.from_numpy(values).float()
        return x

    def _labels(self, names: pa.LargeStringArray | None = None) -> Tensor | NumberTable | None:
        """Return one label per node, or the table of ids and labels."""
        path = self.labels_path
        if path is None:
            return None
        if path.suffix in _ARRAYS:
            labels = read_array("data.labels", path)
            if labels.dim() not in (1, 2):
                raise DataError(
                    f"data.labels={path} has shape {list(labels.shape)}; [N] or [N, C] is expected",
                    hint="save one label for each node, or one row of 0 and 1 for each node",
                )
            return labels.flatten().float() if self.numbers and labels.numel() == len(labels) else labels
        if names is not None:
            return self._named_labels(path, names)
        integers = 0 if self.numbers else None
        table = read_table(path, integers=integers, header=True, widths=(1, 2), comments=self.comments)
        return table if len(table.columns) == 2 else torch.from_numpy(self.converted(table.columns[0]))

    def _agreed_count(
        self, x: Tensor | None, labels: Tensor | NumberTable | None, counts: dict[str, int]
    ) -> int | None:
        """Return N after checking that all files agree on it; None if only the largest id determines it.

        Args:
            x: features ``[N, F]``.
            labels: labels ``[N]``, or a table, which may omit nodes.
            counts: N by the setting that states it; empty if none does.
        """
        rows = {f"data.features={self.features}": x, f"data.labels={self.labels}": labels}
        counts = counts | {key: value.size(0) for key, value in rows.items() if isinstance(value, Tensor)}
        if not counts:
            return None
        (first, num_nodes), *others = counts.items()
        for other, count in others:
            if count != num_nodes:
                raise DataError(
                    f"{other} has {count} rows, and {first} says that there are {num_nodes} nodes",
                    hint=f"give {other.split('=')[0]} one row for each node, or correct {first.split('=')[0]}",
                )
        return num_nodes

    def _named_labels(self, path: Path, names: pa.LargeStringArray) -> Tensor:
        ids, values = read_named_table(path, names, self.comments)
        labels = values[:, 0]
        if values.shape[1] != 1:
            raise DataError(
                f"{path} has {values.shape[1]} numbers after a name; a label is one",
                hint="write lines of a name and a label: the classes are 0, 1, 2...",
            )
        return self.fill_unlabelled(path, ids, self.converted(labels), len(names))

    def converted(self, labels: NDArray[Any]) -> NDArray[Any]:
        """Return labels as float32 if they are numbers to predict, else as int64.

        Raises:
            DataError: a class has a fraction.
        """
        if self.numbers:
            return labels.astype(np.float32)
        if (row := first_true(labels != np.rint(labels))) is not None:
            raise DataError(
                f"data.labels={self.labels} has the label {labels[row]:.10g}; a class is a whole number",
                hint="number the classes 0, 1, 2..., or set data.label_kind=number to predict the number",
            )
        return labels.astype(np.int64)

    def fill_unlabelled(self, path: Path, ids: NDArray[Any], labels: NDArray[Any], num_nodes: int) -> Tensor:
        """Return one label per node, ``unlabelled`` for nodes that are not among ``ids``."""
        if len(ids) < num_nodes and self.unlabelled is None and not self.numbers:
            raise DataError(
                f"{path} has labels for {len(ids)} nodes, and the graph has {num_nodes}",
                hint="if the others have no label, set data.unlabelled=-1",
            )
        y = torch.full((num_nodes,), torch.nan if self.numbers else self.unlabelled or 0)
        return y.index_copy_(0, torch.from_numpy(ids), torch.from_numpy(labels))


@dataclass(frozen=True)
class NumberedNodes:
    """Features and labels of nodes with integer ids.

    Attributes:
        files: the files that they were read from.
        x: features, ``[N, F]``, or None.
        labels: one label per node, or a table of ids and labels, or None.
        num_nodes: N; None if only the largest id determines it.
    """

    files: NodeFiles
    x: Tensor | None
    labels: Tensor | NumberTable | None
    num_nodes: int | None

    def count(self, edge_nodes: int, most: Callable[[int], int]) -> int:
        """Return N: what the files say, else the largest id of the edges and of the table of labels, plus 1.

        Args:
            edge_nodes: the largest id of the edges, plus 1.
            most: returns the largest plausible N, given the number of labels.

        Raises:
            DataError: an id exceeds the limit; names the line.
        """
        if self.num_nodes is not None or not isinstance(self.labels, NumberTable):
            return self.num_nodes or edge_nodes
        ids = self.labels.columns[0]
        if (row := first_true(ids >= max(most(len(ids)), edge_nodes))) is not None:
            raise DataError(
                f"{self.labels.path}, line {self.labels.line(row)}: a label for node {ids[row]:.20g}, and the edges "
                f"name the nodes 0..{edge_nodes - 1}",
                hint="correct the line, or set data.num_nodes if the id is right",
            )
        return max(edge_nodes, int(np.fmax.reduce(ids, initial=-1)) + 1)  # without NaN, which y refuses

    def y(self, num_nodes: int) -> Tensor | None:
        """Return one label for each of N nodes.

        Raises:
            DataError: a line labels an unknown node or labels a node twice, or nodes have no label.
        """
        if not isinstance(self.labels, NumberTable):
            return self.labels
        table, ids = self.labels, self.labels.columns[0].astype(np.int64)
        if (row := first_true(ids != table.columns[0])) is not None:
            raise DataError(
                f"{table.path}, line {table.line(row)}: {table.columns[0][row]:.10g} is not the id of a node",
                hint="write lines of an id and a label",
            )
        labels = self.files.converted(table.columns[1])
        if (row := first_true((ids < 0) | (ids >= num_nodes))) is not None:
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
                f"{table.path}, line {second}: node {node} already has a label, in line {first}",
                hint="delete one of the two lines",
            )
        return self.files.fill_unlabelled(table.path, ids, labels, num_nodes)


def generate_features(features: str, targets: Iterable[NDArray[Any]], num_nodes: int) -> Tensor:
    """Return generated features ``[N, 1]``: log(1 + in-degree), or ones.

    Args:
        features: ``degree`` or ``constant``.
        targets: the target of each edge, in blocks.
        num_nodes: N.
    """
    if features == "constant":
        return torch.ones(num_nodes, 1)
    degree = np.zeros(num_nodes, dtype=np.int64)
    for block in targets:
        degree += np.bincount(block, minlength=num_nodes)
    return torch.from_numpy(degree).float().log1p().unsqueeze(1)
