"""The arrays of HeCo's data sets, from one file or from the folder of its repository."""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gtrain.data.readers.files import numpy_reason
from gtrain.data.readers.number_table import read_table
from gtrain.errors import DataError
from gtrain.graph.store.tables import csr_tensor


class Arrays(ABC):
    """The arrays of one data set, by name."""

    @abstractmethod
    def array(self, name: str) -> Any:
        """Return an array; DataError where there is none."""

    @abstractmethod
    def where(self, name: str) -> str:
        """Return where an array is kept, for messages."""

    def integers(self, name: str, dims: int = 1) -> Tensor:
        """Return an array of whole numbers as int64; DataError where it is another.

        Args:
            name: of the array.
            dims: how many dimensions it should have.
        """
        found = self.array(name)
        if found.dtype.kind not in "iu" or found.ndim != dims:
            raise DataError(
                f"{self.where(name)}: it holds {found.dtype} of shape {list(found.shape)}, and {dims} dimension"
                f"{'s' * (dims > 1)} of whole numbers were expected",
                hint="write the array again, or copy or download the data set again",
            )
        return torch.from_numpy(found.astype(np.int64))

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
            raise no_array(self._path, name, list(self._arrays))
        return self._arrays[name]

    def where(self, name: str) -> str:
        return f"{self._path}, {name}"

    def pairs(self, edge: str) -> Tensor:
        index = self.integers(f"edge_{edge}", dims=2)
        if index.size(0) != 2:
            raise DataError(
                f"{self.where(f'edge_{edge}')}: it has the shape {list(index.shape)}, and [2, E] was expected",
                hint="write the array again: sources in row 0, targets in row 1",
            )
        if (negative := (index < 0).any(dim=0)).any():
            at = int(negative.byte().argmax())
            raise DataError(
                f"{self.where(f'edge_{edge}')}: edge {at} has the negative id {int(index[:, at].min())}",
                hint="number nodes from 0",
            )
        return index

    def features(self, letter: str) -> Tensor | None:
        names = [f"{letter}_feat_{part}" for part in ("data", "indices", "indptr", "shape")]
        if not any(name in self._arrays for name in names):
            return None
        parts = dict(zip(("data", "indices", "indptr", "shape"), map(self.array, names), strict=True))
        return _csr(parts, f"{self._path}, {letter}_feat")


class Folder(Arrays):
    """A file for each array, as in HeCo's repository."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def array(self, name: str) -> Any:
        path = self._path / f"{name}.npy"
        try:
            return np.load(path)
        except FileNotFoundError as err:
            raise DataError(f"there is no {path}", hint="copy the whole folder of the data set again") from err
        except Exception as err:  # as below
            raise DataError(
                f"{path} cannot be read: {numpy_reason(err)}", hint="copy the whole folder of the data set again"
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
        return _csr(load_npz(path), str(path)) if path.is_file() else None


def names_of(place: Path) -> list[str]:
    """Return the names of the arrays of a file or a folder, and ``p_feat`` of type p with features; reads no array.

    Raises:
        DataError: the file is not a ``.npz``.
    """
    if place.is_dir():
        pairs = [f"edge_{file.stem}" for file in place.glob("*.txt")]
        return [*pairs, *(file.stem for file in place.glob("*.np[yz]"))]
    try:
        with zipfile.ZipFile(place) as file:
            names = [name.removesuffix(".npy") for name in file.namelist()]
    except (zipfile.BadZipFile, OSError) as err:
        raise DataError(
            f"{place} cannot be read: it is no .npy or .npz file", hint="copy or download the file again"
        ) from err
    return [*names, *dict.fromkeys(name.rpartition("_")[0] for name in names if "_feat_" in name)]


def no_array(place: Path, name: str, there: Sequence[str]) -> DataError:
    """Return the error for an array that is missing."""
    if place.is_dir():
        file = place / (f"{name.removeprefix('edge_')}.txt" if name.startswith("edge_") else f"{name}.npy")
        return DataError(f"there is no {file}", hint="copy the whole folder of the data set again")
    return DataError(
        f"{place} has no array {name!r}; it has {', '.join(there[:12])}",
        hint="set data.path to the file of this data set, or correct data.name",
    )


def load_npz(path: Path) -> dict[str, Any]:
    """Return the arrays of an ``.npz`` file, without unpickling.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    except Exception as err:  # numpy's reader of a garbled file may stumble in any way
        raise DataError(f"{path} cannot be read: {numpy_reason(err)}", hint="copy or download the file again") from err


def _csr(parts: dict[str, Any], where: str) -> Tensor:
    """Return a matrix that scipy saved, in rows (csr) or as coordinates (coo)."""
    kinds = {"shape": "iu", "indptr": "iu", "indices": "iu", "row": "iu", "col": "iu", "data": "iufb"}
    needed = ("shape", "data", *(("indptr", "indices") if "indptr" in parts else ("row", "col")))
    for name in needed:
        if name not in parts or parts[name].dtype.kind not in kinds[name] or parts[name].ndim != 1:
            found = f"{parts[name].dtype} of shape {list(parts[name].shape)}" if name in parts else "nothing"
            raise _no_matrix(where, f"its {name} is {found}")
    if parts["shape"].size != 2 or parts["shape"].min() < 0:
        raise _no_matrix(where, f"its shape is {parts['shape'].tolist()}")
    rows, columns = (int(size) for size in parts["shape"])
    if len({parts[name].size for name in needed if name not in ("shape", "indptr")}) > 1:
        raise _no_matrix(where, ", ".join(f"{name} has {parts[name].size} entries" for name in needed[1:]))
    if "row" in needed and parts["row"].size and not 0 <= parts["row"].min() <= parts["row"].max() < rows:
        raise _no_matrix(where, f"its rows are {parts['row'].min()}..{parts['row'].max()} of {rows}")
    if "indptr" in parts:
        crow, col, values = parts["indptr"], parts["indices"], parts["data"]
    else:
        order = np.lexsort((parts["col"], parts["row"]))
        crow = np.concatenate([[0], np.cumsum(np.bincount(parts["row"], minlength=rows))])
        col, values = parts["col"][order], parts["data"][order]
    bounds = np.asarray(crow)
    if bounds.size != rows + 1 or bounds[0] != 0 or bounds[-1] != len(values) or (np.diff(bounds) < 0).any():
        raise _no_matrix(where, f"its indptr does not divide {len(values)} entries among {rows} rows")
    arrays = [np.ascontiguousarray(a, dtype) for a, dtype in ((crow, "i8"), (col, "i8"), (values, "f4"))]
    crow, col, values = (torch.from_numpy(array) for array in arrays)
    return csr_tensor(crow, col, values, (rows, columns))


def _no_matrix(where: str, wrong: str) -> DataError:
    return DataError(f"{where} is no sparse matrix: {wrong}", hint="write it again with scipy.sparse.save_npz")
