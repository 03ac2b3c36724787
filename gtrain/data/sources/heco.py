"""The heterogeneous graphs of HeCo: ACM, DBLP, AMiner and Freebase."""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from gtrain.data.config import HeCoConfig
from gtrain.data.module import BAGS, OUTLINE, GraphDataModule, file_stamp, known_name
from gtrain.data.readers.files import candidates, first_true, numpy_reason
from gtrain.data.readers.number_table import read_table
from gtrain.errors import DataError
from gtrain.graph.store.tables import csr_tensor


@dataclass(frozen=True)
class HeCoTypes:
    """The node types of one data set, and the letters that stand for them in names of arrays.

    Attributes:
        types: node type by letter; the first has labels.
        edges: letters of the source and the target of each edge list.
    """

    types: Mapping[str, str]
    edges: tuple[str, ...]

    @property
    def labelled(self) -> str:
        """The node type with labels."""
        return next(iter(self.types.values()))


DATASETS = {
    "acm": HeCoTypes({"p": "paper", "a": "author", "s": "subject"}, ("pa", "ps")),
    "dblp": HeCoTypes({"a": "author", "p": "paper", "c": "conference", "t": "term"}, ("pa", "pc", "pt")),
    "aminer": HeCoTypes({"p": "paper", "a": "author", "r": "reference"}, ("pa", "pr")),
    "freebase": HeCoTypes({"m": "movie", "a": "actor", "d": "director", "w": "writer"}, ("ma", "md", "mw")),
}
SPLITS = ("train", "val", "test")


class HeCoData(GraphDataModule[HeCoConfig]):
    """A heterogeneous graph of Wang et al. 2021 (HeCo), with its published splits.

    The class reads the folder of HeCo's repository (``pa.txt``, ``p_feat.npz``, ``labels.npy``, ``train_20.npy``...),
    or one ``.npz`` of the same arrays (``edge_pa [2, E]``, ``p_feat_data`` with ``_indices``, ``_indptr`` and
    ``_shape``, ``labels``, ``train_20``...). Each list of pairs becomes two edge types, one per direction, both called
    ``to``. Features become sparse CSR tensors; a type without a file of features has none. The node types are those of
    :data:`DATASETS`, and the first has labels.

    Its settings are those of :class:`~gtrain.data.config.HeCoConfig`.
    """

    def __init__(self, settings: HeCoConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        # The letters of HeCo's file names: p_feat.npz has the features of papers, pa.txt pairs of paper and author.
        self._dataset = known_name("HeCo", self.settings.name, DATASETS)
        self._types = DATASETS[self._dataset]
        self.name = f"heco-{self._dataset}"

    def identity(self) -> dict[str, Any]:
        """Return the data set, the stamps of its files, and the published split."""
        path = self._find()
        files = [path] if path.is_file() else sorted([*path.glob("*.txt"), *path.glob("*.np[yz]")])
        per_class = self.settings.per_class if self.split.kind == "public" else None
        return {"dataset": self._dataset, "files": [file_stamp(file) for file in files], "per_class": per_class, **BAGS}

    @property
    def outline(self) -> dict[str, Any]:  # type: ignore[override]
        """The types of the data set; the names of the arrays determine which have features."""
        types, names = self._types.types, array_names(self._find())
        featured = [node_type for letter, node_type in types.items() if f"{letter}_feat" in names]
        ends = [(types[edge[0]], types[edge[1]]) for edge in self._types.edges]
        return {
            **OUTLINE,
            "num_nodes": dict.fromkeys(types.values(), OUTLINE["num_nodes"]),
            # 16 is a placeholder: before the files are read, only None or not None is known.
            "num_features": {node_type: 16 if node_type in featured else None for node_type in types.values()},
            "sparse_features": [],
            "target": self._types.labelled,
            "edge_types": tuple(pair for a, b in ends for pair in ((a, "to", b), (b, "to", a))),
        }

    def check_files(self) -> None:
        """Refuse missing files, and missing arrays of edges, labels and the published split."""
        path = self._find()
        names = array_names(path)
        for name in ("labels", *(f"edge_{edge}" for edge in self._types.edges), *self._split_arrays().values()):
            if name not in names:
                raise missing_array(path, name, names)

    @property
    def origin(self) -> str:
        """Where the graph comes from, for messages."""
        return f"data.path={self.settings.path}" if self.settings.path else f"data.name={self._dataset}"

    def read(self) -> HeteroData:
        """Read the arrays."""
        path, types = self._find(), self._types.types
        arrays: Arrays = ArchiveArrays(path) if path.is_file() else FolderArrays(path)
        pairs = {edge: arrays.pairs(edge) for edge in self._types.edges}
        graph = HeteroData()
        for letter, node_type in types.items():
            ids = [index[edge.index(letter)] for edge, index in pairs.items() if letter in edge and index.numel()]
            num_nodes = max((int(ends.max()) for ends in ids), default=-1) + 1
            # Without features or labels a type has the nodes that its edges name.
            if (x := arrays.features(letter)) is not None:
                graph[node_type].x, num_nodes = x, x.size(0)
            if node_type == self._types.labelled:
                graph[node_type].y = y = arrays.integers("labels")
                num_nodes = y.numel()
            graph[node_type].num_nodes = num_nodes
        labelled = graph[self._types.labelled]
        for split, name in self._split_arrays().items():
            index, num_labels = arrays.integers(name), labelled.y.numel()
            outside = index[(index < 0) | (index >= num_labels)]
            if outside.numel():
                raise DataError(
                    f"{arrays.where(name)}: it names node {int(outside[0])}; there are {num_labels} labels",
                    hint="copy or download the file again",
                )
            labelled[f"{split}_mask"] = torch.zeros(num_labels, dtype=torch.bool).index_fill_(0, index, True)
        for edge, index in pairs.items():
            source, target = types[edge[0]], types[edge[1]]
            graph[source, "to", target].edge_index = index
            graph[target, "to", source].edge_index = index.flip(0)
        return graph

    def _split_arrays(self) -> dict[str, str]:
        """Return the name of the array of each published split; empty if another split is set."""
        splits = SPLITS if self.split.kind == "public" else ()
        return {split: f"{split}_{self.settings.per_class}" for split in splits}

    def _find(self) -> Path:
        """Return the folder or the file."""
        if self.settings.path is not None:
            paths = list(candidates(self.settings.path, self.root))
        else:
            folders = [self.root / "heco", self.root / "hetero" / "heco", self.root]
            paths = [folder / name for folder in folders for name in (f"{self._dataset}.npz", self._dataset)]
        for path in paths:
            if path.is_file() or (path / "labels.npy").is_file():
                return path
        raise DataError(
            f"{self.origin}: found neither {self._dataset}.npz nor a folder with labels.npy at "
            f"{', '.join(map(str, paths))}",
            hint=f"copy the folder data/{self._dataset} of github.com/liun-online/HeCo to {self.root / 'heco'}, "
            "or set data.path",
        )


_FOLDER_HINT = "copy the whole folder of the data set again"
_MATRIX = ("data", "indices", "indptr", "shape")


class Arrays(ABC):
    """The arrays of one data set, by name."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @abstractmethod
    def array(self, name: str) -> Any:
        """Return an array.

        Raises:
            DataError: it is missing or damaged.
        """

    @abstractmethod
    def where(self, name: str) -> str:
        """Return the location of an array, for messages."""

    def integers(self, name: str, dims: int = 1) -> Tensor:
        """Return an array of integers as int64.

        Raises:
            DataError: the array has another dtype or number of dimensions.
        """
        array = self.array(name)
        if array.dtype.kind not in "iu" or array.ndim != dims:
            raise DataError(
                f"{self.where(name)}: it holds {array.dtype} of shape {list(array.shape)}; {dims} dimension"
                f"{'s' * (dims > 1)} of integers are expected",
                hint="write the array again, or copy or download the data set again",
            )
        return torch.from_numpy(array.astype(np.int64))

    @abstractmethod
    def pairs(self, edge: str) -> Tensor:
        """Return the ids of source and target, int64 ``[2, E]``."""

    @abstractmethod
    def features(self, letter: str) -> Tensor | None:
        """Return the features of a node type as a CSR tensor; None for a type without features."""


class ArchiveArrays(Arrays):
    """All arrays in one ``.npz``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._arrays = load_npz(path)

    def array(self, name: str) -> Any:
        if name not in self._arrays:
            raise missing_array(self._path, name, list(self._arrays))
        return self._arrays[name]

    def where(self, name: str) -> str:
        return f"{self._path}, {name}"

    def pairs(self, edge: str) -> Tensor:
        index, where = self.integers(f"edge_{edge}", dims=2), self.where(f"edge_{edge}")
        if index.size(0) != 2:
            raise DataError(
                f"{where}: it has the shape {list(index.shape)}; [2, E] is expected",
                hint="write the array again: sources in row 0, targets in row 1",
            )
        if (column := first_true((index < 0).any(dim=0).numpy())) is not None:
            raise DataError(
                f"{where}: edge {column} has the negative id {int(index[:, column].min())}", hint="number nodes from 0"
            )
        return index

    def features(self, letter: str) -> Tensor | None:
        if not any(f"{letter}_feat_{part}" in self._arrays for part in _MATRIX):
            return None
        matrix = {part: self.array(f"{letter}_feat_{part}") for part in _MATRIX}
        return _csr(matrix, f"{self._path}, {letter}_feat")


class FolderArrays(Arrays):
    """One file per array, as in HeCo's repository."""

    def array(self, name: str) -> Any:
        path = self._path / f"{name}.npy"
        try:
            return np.load(path)
        except FileNotFoundError as err:
            raise DataError(f"{path} is missing", hint=_FOLDER_HINT) from err
        except Exception as err:
            # A garbled file can raise anything in numpy's reader.
            raise DataError(f"{path} cannot be read: {numpy_reason(err)}", hint=_FOLDER_HINT) from err

    def where(self, name: str) -> str:
        return str(self._path / f"{name}.npy")

    def pairs(self, edge: str) -> Tensor:
        path = self._path / f"{edge}.txt"
        if not path.is_file():
            raise DataError(f"{path} is missing", hint=_FOLDER_HINT)
        table = read_table(path, integers=2, header=False, widths=(2,))
        if (row := first_true((table.columns[0] < 0) | (table.columns[1] < 0))) is not None:
            raise DataError(f"{path}, line {table.line(row)}: a negative id", hint="ids start at 0")
        return torch.from_numpy(np.stack(table.columns).astype(np.int64, copy=False))

    def features(self, letter: str) -> Tensor | None:
        path = self._path / f"{letter}_feat.npz"
        return _csr(load_npz(path), str(path)) if path.is_file() else None


def array_names(path: Path) -> list[str]:
    """Return the names of the arrays of a file or a folder, and ``p_feat`` for each type p with features.

    Raises:
        DataError: the file is not a ``.npz``.
    """
    if path.is_dir():
        pairs = [f"edge_{file.stem}" for file in path.glob("*.txt")]
        return [*pairs, *(file.stem for file in path.glob("*.np[yz]"))]
    try:
        with zipfile.ZipFile(path) as file:
            names = [name.removesuffix(".npy") for name in file.namelist()]
    except (zipfile.BadZipFile, OSError) as err:
        raise DataError(
            f"{path} cannot be read: it is not an .npy or .npz file", hint="copy or download the file again"
        ) from err
    return [*names, *dict.fromkeys(name.rpartition("_")[0] for name in names if "_feat_" in name)]


def missing_array(path: Path, name: str, names: Sequence[str]) -> DataError:
    """Return the error for a missing array."""
    if path.is_dir():
        file = path / (f"{name.removeprefix('edge_')}.txt" if name.startswith("edge_") else f"{name}.npy")
        return DataError(f"{file} is missing", hint=_FOLDER_HINT)
    return DataError(
        f"{path} has no array {name!r}; it has {', '.join(names[:12])}",
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
    except Exception as err:
        # A garbled file can raise anything in numpy's reader.
        raise DataError(f"{path} cannot be read: {numpy_reason(err)}", hint="copy or download the file again") from err


def _csr(matrix: dict[str, Any], where: str) -> Tensor:
    """Return a matrix that ``scipy.sparse.save_npz`` wrote, by rows (csr) or by coordinates (coo)."""
    needed = ("shape", "data", *(("indptr", "indices") if "indptr" in matrix else ("row", "col")))
    for name in needed:
        array = matrix.get(name)
        if array is None or array.dtype.kind not in ("iufb" if name == "data" else "iu") or array.ndim != 1:
            content = "missing" if array is None else f"{array.dtype} of shape {list(array.shape)}"
            raise _malformed(where, f"its {name} is {content}")
    if matrix["shape"].size != 2 or matrix["shape"].min() < 0:
        raise _malformed(where, f"its shape is {matrix['shape'].tolist()}")
    rows, columns = (int(size) for size in matrix["shape"])
    if len({matrix[name].size for name in needed if name not in ("shape", "indptr")}) > 1:
        raise _malformed(where, ", ".join(f"{name} has {matrix[name].size} entries" for name in needed[1:]))
    if "indptr" in matrix:  # csr; else coo, whose entries are sorted by row here
        crow, col, values = matrix["indptr"], matrix["indices"], matrix["data"]
    else:
        row = matrix["row"]
        if row.size and not 0 <= row.min() <= row.max() < rows:
            raise _malformed(where, f"its rows are {row.min()}..{row.max()} of {rows}")
        order = np.lexsort((matrix["col"], row))
        crow = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=rows))])
        col, values = matrix["col"][order], matrix["data"][order]
    if crow.size != rows + 1 or crow[0] != 0 or crow[-1] != len(values) or (np.diff(crow) < 0).any():
        raise _malformed(where, f"its indptr does not divide {len(values)} entries among {rows} rows")
    arrays = [np.ascontiguousarray(array, dtype) for array, dtype in ((crow, "i8"), (col, "i8"), (values, "f4"))]
    crow, col, values = (torch.from_numpy(array) for array in arrays)
    return csr_tensor(crow, col, values, (rows, columns))


def _malformed(where: str, reason: str) -> DataError:
    return DataError(f"{where} is not a sparse matrix: {reason}", hint="write it again with scipy.sparse.save_npz")
