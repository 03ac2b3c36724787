"""The arrays of HeCo's data sets, from one file or from the folder of its repository."""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gtrain.data.table import read_table
from gtrain.errors import DataError
from gtrain.graph.tables import csr_tensor


class Arrays(ABC):
    """The arrays of one data set, by name."""

    @abstractmethod
    def array(self, name: str) -> Any:
        """Return an array; DataError where there is none."""

    @abstractmethod
    def where(self, name: str) -> str:
        """Return where an array is kept, for messages."""

    @abstractmethod
    def pairs(self, edge: str) -> Tensor:
        """Return the ids of source and target, int64 ``[2, E]``."""

    @abstractmethod
    def features(self, letter: str) -> Tensor | None:
        """Return the features of a node type as a CSR tensor; None where there are none."""


class OneFile(Arrays):
    """All arrays in one ``.npz``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._arrays = load_npz(path)

    def array(self, name: str) -> Any:
        if name not in self._arrays:
            raise DataError(
                f"{self._path} has no array {name!r}; it has {', '.join(list(self._arrays)[:12])}",
                hint="set data.path to the file of this data set, or correct data.name",
            )
        return self._arrays[name]

    def where(self, name: str) -> str:
        return f"{self._path}, {name}"

    def pairs(self, edge: str) -> Tensor:
        index = torch.from_numpy(self.array(f"edge_{edge}").astype(np.int64))
        if index.dim() != 2 or index.size(0) != 2 or (index.numel() and int(index.min()) < 0):
            raise DataError(
                f"{self.where(f'edge_{edge}')}: it should be ids from 0, [2, E], and has shape {list(index.shape)}",
                hint="write the array again: sources in row 0, targets in row 1",
            )
        return index

    def features(self, letter: str) -> Tensor | None:
        names = [f"{letter}_feat_{part}" for part in ("data", "indices", "indptr", "shape")]
        if not any(name in self._arrays for name in names):
            return None
        return _csr(dict(zip(("data", "indices", "indptr", "shape"), map(self.array, names), strict=True)))


class Folder(Arrays):
    """A file for each array, as in HeCo's repository."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def array(self, name: str) -> Any:
        path = self._path / f"{name}.npy"
        try:
            return np.load(path)
        except (OSError, ValueError, EOFError) as err:
            raise DataError(
                f"{path} cannot be read: {err}", hint="copy the whole folder of the data set again"
            ) from err

    def where(self, name: str) -> str:
        return str(self._path / f"{name}.npy")

    def pairs(self, edge: str) -> Tensor:
        path = self._path / f"{edge}.txt"
        if not path.is_file():
            raise DataError(f"there is no {path}", hint="copy the whole folder of the data set again")
        table = read_table(path, integers=2, header=False, widths=(2,))
        negative = (table.columns[0] < 0) | (table.columns[1] < 0)
        if negative.any():
            raise DataError(f"{path}, line {table.line(int(negative.argmax()))}: a negative id", hint="ids start at 0")
        return torch.from_numpy(np.stack(table.columns).astype(np.int64, copy=False))

    def features(self, letter: str) -> Tensor | None:
        path = self._path / f"{letter}_feat.npz"
        return _csr(load_npz(path)) if path.is_file() else None


def load_npz(path: Path) -> dict[str, Any]:
    """Return the arrays of an ``.npz`` file, without unpickling.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as err:
        raise DataError(f"{path} cannot be read: {err}", hint="copy or download the file again") from err


def _csr(parts: dict[str, Any]) -> Tensor:
    """Return a matrix that scipy saved, in rows (csr) or as coordinates (coo)."""
    rows, columns = (int(size) for size in parts["shape"])
    if "indptr" in parts:
        crow, col, values = parts["indptr"], parts["indices"], parts["data"]
    else:
        order = np.lexsort((parts["col"], parts["row"]))
        crow = np.concatenate([[0], np.cumsum(np.bincount(parts["row"], minlength=rows))])
        col, values = parts["col"][order], parts["data"][order]
    arrays = [np.ascontiguousarray(a, dtype) for a, dtype in ((crow, "i8"), (col, "i8"), (values, "f4"))]
    crow, col, values = (torch.from_numpy(array) for array in arrays)
    return csr_tensor(crow, col, values, (rows, columns))
