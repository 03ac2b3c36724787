"""Base of the sources of rows: nodes of a graph without edges, with sparse features and a label."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data

from gtrain.data.ingest.columns import Column
from gtrain.data.module import SPARSE_OUTLINE, GraphDataModule, S
from gtrain.data.prepare.split import MASKS, SplitOptions
from gtrain.errors import ConfigError, DataError
from gtrain.graph.store.tables import csr_tensor

ABSENT = -(2**62)
"""The label of rows without one, where no other value means that."""


class RowData(GraphDataModule[S]):
    """Rows of sparse features with labels, from files that train (``path``) and files that test (``test_path``)."""

    outline = SPARSE_OUTLINE
    sparse_rows = True

    def public_identity(self) -> list[Any] | None:
        """Return what the public split depends on; None for other splits."""
        return [self.split.val_fraction, self.split.seed] if self.split.kind == "public" else None

    def rows_as_graph(self, x: Tensor, y: Tensor, num_train: int, label_values: list[Any] | None) -> Data:
        """Return the rows as a graph without edges; set the facts.

        Args:
            x: features, ``torch.sparse_csr`` ``[N, F]``.
            y: labels, int64 ``[N]``, or float ``[N, C]`` of zeros and ones.
            num_train: number of rows in the files that train; these rows are the first.
            label_values: the label that each class stands for; None: they are equal.
        """
        self._facts = {"label_values": label_values}
        masks = row_masks(len(y), num_train, self.split)
        return Data(x=x, y=y, edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=len(y), **masks)

    @property
    def known_classes(self) -> tuple[int | None, list[Any] | None]:
        """The number of classes and the label of each, as far as the settings or a trained model determine them."""
        trained = self.trained or {}
        number = trained.get("num_classes") if self.num_classes is None else self.num_classes
        return number, trained.get("label_values")

    @property
    def unlabelled_value(self) -> int | None:
        """The label of rows without a label; None: each row has one. Rows for a trained model need none."""
        return ABSENT if self.unlabelled is None and self.applied else self.unlabelled

    @property
    def _no_label(self) -> int | None:
        return no_label(self.unlabelled_value)


def row_masks(num_rows: int, num_train: int, split: SplitOptions) -> dict[str, Tensor]:
    """Return the public masks of rows: those of the training files train and validate, the others test.

    Args:
        num_rows: N, all rows.
        num_train: rows of the training files, which come first.
        split: ``val_fraction`` of the training files' rows validate, drawn by ``seed``.

    Returns:
        ``train_mask``, ``val_mask`` and ``test_mask``, ``[N]`` bool; empty for splits other than ``public``.

    Raises:
        ConfigError: no row is left to train on.
    """
    if split.kind != "public":
        return {}
    val = round(split.val_fraction * num_train)
    if not 0 <= val < num_train:
        raise ConfigError(
            f"data.val_fraction={split.val_fraction:g} of {num_train} rows leaves {num_train - val} to train on",
            hint="set data.val_fraction to 0 or more, and below 1",
        )
    masks = {name: torch.zeros(num_rows, dtype=torch.bool) for name in MASKS}
    order = split.permutation(num_train)
    masks["val_mask"][order[:val]] = True
    masks["train_mask"][order[val:]] = True
    masks["test_mask"][num_train:] = True
    return masks


def number_labels(
    labels: NDArray[Any], num_classes: int | None, known: list[Any] | None = None
) -> tuple[Tensor, list[Any] | None]:
    """Number labels in the order of their values.

    Args:
        labels: whole numbers or strings, ``[N]``.
        num_classes: the number of classes, if set; labels within 0..C-1 are not renumbered then.
        known: the label that each class of a trained model stands for; None: the labels determine the classes.

    Returns:
        The classes, int64 ``[N]``, and the label that each class stands for; None without renumbering.

    Raises:
        DataError: a label is none of the model's.
    """
    if known is not None:
        numbers = {label: number for number, label in enumerate(known)}
        others = [label for label in np.unique(labels).tolist() if label not in numbers]
        if others:
            raise DataError(
                f"the label {others[0]!r} is none of the {len(known)} classes of the checkpoint: "
                f"{', '.join(map(str, known[:10]))}",
                hint=f"correct the labels, or set data.unlabelled={others[0]} if it means no label",
            )
        return torch.tensor([numbers[label] for label in labels.tolist()], dtype=torch.int64), known
    values, classes = np.unique(labels, return_inverse=True)
    if values.size and values.dtype.kind == "i" and values[0] >= 0 and values[-1] < (num_classes or 0):
        return torch.from_numpy(labels.astype(np.int64)), None
    return torch.from_numpy(classes.astype(np.int64)), values.tolist()


def no_label(unlabelled: int | None) -> int | None:
    """Return the class of rows without a label: a negative number, which no numbered class has."""
    return None if unlabelled is None else min(unlabelled, -1)


def among_unlabelled(classes: Tensor, labelled: NDArray[np.bool_], unlabelled: int | None) -> Tensor:
    """Return ``y``, int64 ``[N]``: the classes of labelled rows, :func:`no_label` for the others."""
    y = torch.full((len(labelled),), no_label(unlabelled) or 0)
    y[torch.from_numpy(labelled)] = classes
    return y


class RowColumns:
    """Builds a sparse matrix row by row; large columns are in temporary files, so it may exceed the memory.

    Args:
        folder: folder for the temporary files, 12 bytes per entry.
    """

    def __init__(self, folder: Path) -> None:
        self._counts: list[NDArray[np.int64]] = []
        self._ids, self._values = Column(folder, np.int64), Column(folder, np.float32)

    def add_rows(self, counts: NDArray[np.int64]) -> None:
        """Add rows by their numbers of entries; the entries may be added before or after."""
        self._counts.append(counts)

    def add_entries(self, ids: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Add entries, row by row: their column ids and values.

        Raises:
            DataError: the disk is full.
        """
        self._ids.append(ids)
        self._values.append(values)

    def tensor(self, width: int) -> Tensor:
        """Return the rows as a read-only ``torch.sparse_csr`` ``[N, width]``, memory-mapped if they are large."""
        counts = np.concatenate([np.empty(0, np.int64), *self._counts])
        crow = np.concatenate([[0], np.cumsum(counts)])
        return csr_tensor(torch.from_numpy(crow), _mapped(self._ids), _mapped(self._values), (len(counts), width))


def _mapped(column: Column) -> Tensor:
    """Return a read-only tensor over a column."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(column.array())
