"""Run PyG's data set classes without writing to the user's folders, and rename the tensors of their graphs."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, Dataset, HeteroData, TemporalData
from torch_geometric.io import npz

from gtrain.data.readers.unpickling import plain_pickles
from gtrain.errors import ConfigError, DataError, GtrainError
from gtrain.graph.store.tables import csr_tensor
from gtrain.nn.csr import Csr


def tidy_graph(graph: object, name: str) -> Data | HeteroData:
    """Return a graph of PyG with the names that :meth:`~gtrain.data.module.GraphDataModule.read` lists.

    PyG's data sets use various names for tensors of edges. For each edge type:

    - ``edge_label_index`` (MovieLens100K, AmazonBook) becomes ``test_edge_index``;
    - ``rating``, or else ``edge_label`` with a row for each edge, becomes ``edge_rating``; with ``edge_label_index``
      ``edge_label`` becomes ``test_edge_rating``;
    - ``time`` with a row for each edge becomes ``edge_time``;
    - ``train_edge_index``, ``valid_edge_type`` and so on (RelLinkPredDataset) become ``edge_index``,
      ``val_edge_type`` and so on, without the reverse edges that PyG adds;
    - masks with a row for each edge (WordNet18RR) split the edges into training edges and held-out edges;
    - other edge indices (LastFM's negative edges) are dropped.

    A ``TemporalData`` (JODIEDataset) becomes a ``Data`` with ``edge_time`` and ``edge_attr``.

    Args:
        graph: the data set's graph, which is modified.
        name: the data set, for messages.

    Raises:
        DataError: it is not a graph with an edge list.
    """
    if isinstance(graph, TemporalData):
        graph = _from_events(graph)
    if not isinstance(graph, (Data, HeteroData)):
        raise DataError(
            f"{name} is a {type(graph).__name__}, but gtrain reads only Data, HeteroData and TemporalData",
            hint="set data.name to a data set of such a graph, or write its edges to a file and use data=edges",
        )
    stores = graph.edge_stores
    if isinstance(graph, Data) and graph.edge_index is None or not stores:
        raise DataError(
            f"{name} has no edge_index, but gtrain reads only graphs with an edge list",
            hint="set data.name to a data set with edges, or write the edges to a file and use data=edges",
        )
    if isinstance(graph, Data):
        graph.num_nodes = _count_nodes(graph)
    for edges in stores:
        _tidy_edges(edges, edges.num_nodes if isinstance(graph, Data) else None)
    for nodes in graph.node_stores:
        if isinstance(x := nodes.get("x"), Tensor) and x.layout == torch.sparse_coo:
            nodes["x"] = x.to_sparse_csr()
    return graph


def _from_events(events: TemporalData) -> Data:
    data = Data(edge_index=torch.stack([events.src, events.dst]), edge_time=events.t)
    if isinstance(events.msg, Tensor):
        data.edge_attr = events.msg
    return data


def _count_nodes(graph: Data) -> int:
    """Return N; PyG would warn that it infers N from the edges of a graph without features."""
    if "num_nodes" in graph or graph.x is not None:
        return int(graph.num_nodes or 0)
    if isinstance(graph.y, Tensor) and graph.y.dim():
        return graph.y.size(0)
    assert graph.edge_index is not None  # tidy_graph checked it
    return int(graph.edge_index.max()) + 1 if graph.edge_index.numel() else 0


def _tidy_edges(edges: Any, num_nodes: int | None) -> None:
    """Rename the tensors of one edge type.

    Args:
        edges: its storage.
        num_nodes: N where the storage holds nodes too, else None.
    """
    if "train_edge_index" in edges:
        _take_splits(edges)
    if "edge_label_index" in edges:
        edges["test_edge_index"] = edges.pop("edge_label_index")
        label = edges.pop("edge_label", None)
        if label is not None and "rating" in edges:
            edges["test_edge_rating"] = label.to(edges["rating"].dtype)
    rows = edges["edge_index"].size(1)
    for old, new in (("rating", "edge_rating"), ("edge_label", "edge_rating"), ("time", "edge_time")):
        if isinstance(value := edges.get(old), Tensor) and value.shape[:1] == (rows,) and rows != num_nodes:
            edges[new] = edges.pop(old)
    mask = edges.get("train_mask")
    if isinstance(mask, Tensor) and mask.shape == (rows,) and rows != num_nodes:
        _cut_by_masks(edges, rows)
    known = ("edge_index", "val_edge_index", "test_edge_index")
    for name in [name for name in edges if name.endswith("edge_index") and name not in known]:
        del edges[name]


def _take_splits(edges: Any) -> None:
    """Rename ``train_edge_*`` and ``valid_edge_*``, and drop the edges that PyG derives from them."""
    for name in [name for name in edges if name.startswith(("edge_", "train_edge_", "valid_edge_"))]:
        value = edges.pop(name)
        if name.startswith("train_"):
            edges[name.removeprefix("train_")] = value
        elif name.startswith("valid_"):
            edges[name.replace("valid_", "val_", 1)] = value


def _cut_by_masks(edges: Any, rows: int) -> None:
    """Split the edges by masks into training edges and held-out edges."""
    masks = {split: edges.pop(f"{split}_mask", None) for split in ("train", "val", "test")}
    names = [name for name in edges if name.startswith("edge_") and isinstance(edges[name], Tensor)]
    for name in names:
        value, dim = edges[name], int(name == "edge_index")
        if value.size(dim) != rows:
            continue
        for split, mask in masks.items():
            if mask is not None:
                rows_of_split = value[:, mask] if dim else value[mask]
                edges[name if split == "train" else f"{split}_{name}"] = rows_of_split


@contextlib.contextmanager
def sparse_bags() -> Iterator[None]:
    """Let PyG read the bags of words of ``.npz`` files as sparse CSR tensors; alone, it makes them dense."""
    original = npz.parse_npz

    def parse(file: Any, to_undirected: bool = True) -> Data:
        # PyG's code parses the edges and labels; a matrix without columns takes no memory.
        empty = {name: file[f"attr_{name}"][:0] for name in ("data", "indices")}
        rows, columns = (int(size) for size in file["attr_shape"])
        parts = {"attr_data": empty["data"], "attr_indices": empty["indices"], "attr_shape": np.array([rows, 0])}
        parts["attr_indptr"] = np.zeros(rows + 1, np.int64)
        data = original(_Overlaid(parts, file), to_undirected=to_undirected)
        indptr, indices, counts = (torch.from_numpy(file[f"attr_{name}"]) for name in ("indptr", "indices", "data"))
        data.x = _bags(Csr(indices, counts, indptr), columns)
        return data

    npz.parse_npz = parse
    try:
        yield
    finally:
        npz.parse_npz = original


class _Overlaid:
    """The arrays of a file, some of them replaced."""

    def __init__(self, replaced: dict[str, Any], file: Any) -> None:
        self._replaced, self._file = replaced, file

    def __getitem__(self, name: str) -> Any:
        return self._replaced[name] if name in self._replaced else self._file[name]


def _bags(rows: Csr, columns: int) -> Tensor:
    """Return what PyG makes of bags of words, in CSR form: positive counts become 1."""
    assert rows.values is not None
    coo = torch.stack([rows.row_of_entry(), rows.ids.long()])
    size = (rows.num_rows, columns)
    # Equal positions add up, as in scipy's dense matrix; torch checks the indices.
    matrix = torch.sparse_coo_tensor(coo, rows.values, size, check_invariants=True).coalesce().float()
    counts = matrix.values()
    present = counts != 0
    row, column = matrix.indices()[:, present]
    counts = torch.where(counts > 0, torch.ones_like(counts), counts)[present]
    pointers = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(row, minlength=size[0]).cumsum(0)])
    return csr_tensor(pointers, column, counts, size)


_INSTALL = {
    "sklearn": "pip install scikit-learn",
    "sentence_transformers": "pip install sentence-transformers; it downloads a language model, and data.name="
    "MovieLens100K and MovieLens1M do without",
}
"""Hints for missing packages whose name for pip differs."""


class MissingFiles(Exception):
    """Raw files are missing.

    Args:
        files: their expected paths.
    """

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        super().__init__(", ".join(str(file) for file in files))


class _Complete(Exception):
    """All raw files exist, at ``paths``."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths


def probe(cls: type[Dataset], root: Path, options: dict[str, Any], *, skip: Path) -> list[Path]:
    """Return the raw files of a data set under ``root``, without downloading or processing anything.

    Args:
        cls: the data set class.
        root: the folder to pass to PyG.
        options: the class's arguments other than ``root``.
        skip: a folder below ``root`` that holds no raw files.

    Raises:
        MissingFiles: names the missing files.
    """
    if cls.download is Dataset.download:
        # Generated or built in: the class reads no files.
        return []
    with tempfile.TemporaryDirectory(prefix="gtrain-") as scratch:
        mirror(root, Path(scratch), skip=skip)
        try:
            construct(_without_work(cls), scratch, options)
        except MissingFiles as error:
            missing = [file for file in error.files if not file.exists()]
            raise MissingFiles([root / file.relative_to(scratch) for file in missing]) from None
        except _Complete as complete:
            return [Path(path).resolve() for path in complete.paths]
    return []


def download(cls: type[Dataset], root: Path, options: dict[str, Any]) -> None:
    """Let a data set class download its raw files below ``root`` without processing them."""
    with contextlib.suppress(_Complete):
        construct(_without_work(cls, download=True), root, options)


def construct(cls: type[Dataset], root: str | Path, options: dict[str, Any]) -> Dataset:
    """Construct a data set without output and with unpickling restricted; pass ``root`` if the class takes it.

    Raises:
        ConfigError: the class refuses an option or its value.
        DataError: the class needs a package that is not installed.
    """
    parameters = inspect.signature(cls).parameters
    unknown = [name for name in options if name not in parameters]
    if unknown:
        known = ", ".join(name for name in parameters if name not in ("self", "root"))
        raise ConfigError(f"data.options.{unknown[0]} is not an option of {cls.__name__}", hint=f"it takes {known}")
    arguments = {"root": str(root)} if "root" in parameters else {}
    try:
        # PyG reports each step on stderr, and warns before it unpickles files, which plain_pickles restricts
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(), plain_pickles(root):
            warnings.filterwarnings("ignore", message="Weights only load failed")
            return cls(**arguments, **options)
    except (MissingFiles, _Complete, GtrainError, OSError):
        raise
    except ImportError as err:
        package = err.name or str(err)
        raise DataError(
            f"{cls.__name__} needs the package {package!r}, which is not installed",
            hint=_INSTALL.get(package, f"pip install {package}"),
        ) from err
    except (AssertionError, TypeError) as err:
        # PyG's classes refuse values of options with these.
        raise ConfigError(
            f"{cls.__name__} does not accept data.options={options}: {err}",
            hint="correct data.options, such as data.options={name: Cora}; the documentation of "
            f"torch_geometric.datasets.{cls.__name__} lists what it takes",
        ) from err


def mirror(source: Path, target: Path, *, skip: Path) -> None:
    """Link each file of ``source`` in ``target``, except those in PyG's ``processed`` folders and in ``skip``."""
    skipped = skip.resolve()
    for folder, names, files in os.walk(source.resolve()):
        names[:] = [name for name in names if name != "processed" and Path(folder, name) != skipped]
        copy = target / Path(folder).relative_to(source.resolve())
        copy.mkdir(parents=True, exist_ok=True)
        for file in files:
            (copy / file).symlink_to(Path(folder, file))


def _without_work(cls: type[Dataset], *, download: bool = False) -> type[Dataset]:
    """Return a subclass that reports its raw files instead of processing, and by default of downloading, them."""

    def report_missing(self: Dataset) -> None:
        raise MissingFiles([Path(path) for path in self.raw_paths])

    def process(self: Dataset) -> None:
        raise _Complete(self.raw_paths)

    methods: dict[str, Any] = {"process": process, "__init__": cls.__init__}
    if not download:
        methods["download"] = report_missing
    return type(cls.__name__, (cls,), methods)
