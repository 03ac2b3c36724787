"""What sources of rows without edges have in common."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.data.ingest.columns import Column
from gtrain.data.prepare.split import MASKS, SplitOptions
from gtrain.errors import ConfigError
from gtrain.graph.store.tables import csr_tensor


def row_masks(num_rows: int, num_train: int, split: SplitOptions) -> dict[str, Tensor]:
    """Return the public masks of rows from two files: the first trains and validates, the second tests.

    Args:
        num_rows: N, rows of both files.
        num_train: rows of the first file, which come first.
        split: ``val_fraction`` of the first file's rows validate, drawn by ``seed``.

    Returns:
        ``train_mask``, ``val_mask`` and ``test_mask``, ``[N]`` bool; nothing for splits that are no public one.

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


def number_labels(labels: NDArray[Any], num_classes: int | None) -> tuple[Tensor, list[Any] | None]:
    """Number labels of any kind by their values.

    Args:
        labels: whole numbers or strings, ``[N]``.
        num_classes: the number of classes, where it is known; labels within 0..C-1 stay as they are then.

    Returns:
        The classes, int64 ``[N]``, and the label that each class stands for; None where the labels stayed.
    """
    known, classes = np.unique(labels, return_inverse=True)
    if known.size and known.dtype.kind == "i" and known[0] >= 0 and known[-1] < (num_classes or 0):
        return torch.from_numpy(labels.astype(np.int64)), None
    return torch.from_numpy(classes.astype(np.int64)), known.tolist()


def no_label(unlabelled: int | None) -> int | None:
    """What stands for no label beside classes that were numbered: not a number that one of them may have."""
    return None if unlabelled is None else min(unlabelled, -1)


def among_unlabelled(classes: Tensor, labelled: NDArray[np.bool_], unlabelled: int | None) -> Tensor:
    """Return ``y``, int64 ``[N]``: the classes of the rows that are labelled, :func:`no_label` for the others."""
    y = torch.full((len(labelled),), no_label(unlabelled) or 0)
    y[torch.from_numpy(labelled)] = classes
    return y


class RowColumns:
    """Sparse rows that are appended, of which the entries may be more than the memory holds.

    Args:
        folder: where temporary files are made, of 12 bytes an entry.
    """

    def __init__(self, folder: Path) -> None:
        self._counts: list[NDArray[np.int64]] = []
        self._ids, self._values = Column(folder, np.int64), Column(folder, np.float32)

    def add_rows(self, counts: NDArray[np.int64]) -> None:
        """Add rows, as how many entries each has; these may be added before or after."""
        self._counts.append(counts)

    def add_entries(self, ids: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Add entries, row by row: their columns and values.

        Raises:
            DataError: the disk is full.
        """
        self._ids.append(ids)
        self._values.append(values)

    def tensor(self, width: int) -> Tensor:
        """The rows as ``torch.sparse_csr`` ``[N, width]``, over files where they are large; to be read only."""
        counts = np.concatenate([np.empty(0, np.int64), *self._counts])
        crow = np.concatenate([[0], np.cumsum(counts)])
        arrays = torch.from_numpy(crow), _mapped(self._ids), _mapped(self._values)
        return csr_tensor(*arrays, (len(counts), width))


def _mapped(column: Column) -> Tensor:
    """A tensor over a column; it is read and never written."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(column.array())
