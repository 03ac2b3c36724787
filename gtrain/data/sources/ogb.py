"""Data sets of the Open Graph Benchmark, read from its raw files."""

from __future__ import annotations

import gzip
import shutil
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.config import OGBConfig
from gtrain.data.module import OUTLINE, GraphDataModule, file_stamp, known_name, log
from gtrain.data.readers.files import first_true, load_tensors
from gtrain.data.readers.number_table import read_table
from gtrain.data.readers.unpickling import NUMPY_GLOBALS
from gtrain.errors import DataError
from gtrain.graph.store.lock import file_lock, made_folder

URL = "https://snap.stanford.edu/ogb/data"


@dataclass(frozen=True)
class OGBEntry:
    """One data set in OGB's table.

    Attributes:
        archive: its ``.zip`` below :data:`URL`, without the ending.
        split: the folder of the published split.
        inverse: whether a raw edge stands for both directions.
        hetero: whether it has several node types.
        features: whether nodes have features.
        relations: whether edges have relations.
        multilabel: whether a node has several labels.
    """

    archive: str
    split: str
    inverse: bool = False
    hetero: bool = False
    features: bool = True
    relations: bool = False
    multilabel: bool = False


MAG: dict[str, int | None] = {"author": None, "field_of_study": None, "institution": None, "paper": 16}
"""The node types of ogbn-mag, and their numbers of features in the outline."""
MAG_EDGES = (
    ("author", "affiliated_with", "institution"),
    ("author", "writes", "paper"),
    ("paper", "cites", "paper"),
    ("paper", "has_topic", "field_of_study"),
)
DATASETS = {
    "ogbn-arxiv": OGBEntry("nodeproppred/arxiv", "time"),
    "ogbn-products": OGBEntry("nodeproppred/products", "sales_ranking", inverse=True),
    "ogbn-proteins": OGBEntry("nodeproppred/proteins", "species", inverse=True, features=False, multilabel=True),
    "ogbn-mag": OGBEntry("nodeproppred/mag", "time", hetero=True),
    "ogbl-ppa": OGBEntry("linkproppred/ppassoc", "throughput", inverse=True),
    "ogbl-collab": OGBEntry("linkproppred/collab", "time", inverse=True),
    "ogbl-ddi": OGBEntry("linkproppred/ddi", "target", inverse=True, features=False),
    "ogbl-citation2": OGBEntry("linkproppred/citation-v2", "time"),
    "ogbl-wikikg2": OGBEntry("linkproppred/wikikg-v2", "time", features=False, relations=True),
}


class OGBData(GraphDataModule[OGBConfig]):
    """A data set of the Open Graph Benchmark (Hu et al. 2020).

    The class reads the files that OGB publishes (``raw/edge.csv.gz``, ``raw/node-feat.csv.gz``, ``split/...``) without
    the package ``ogb``. It searches ``<root>/ogb/ogbn_arxiv`` and ``<root>/ogbn_arxiv``, where the package also stores
    them, and downloads missing files to the first. ``node_year`` becomes ``time`` of the nodes, ``edge_year``
    ``edge_time``, ``edge_weight`` ``edge_weight`` and ``edge_reltype`` ``edge_type``. Link data sets predict edges:
    their validation and test edges become held-out edges; OGB's negative edges are not read.

    Its settings are those of :class:`~gtrain.data.config.OGBConfig`; by keywords, the task is ``link`` for ``ogbl``.
    """

    def __init__(self, settings: OGBConfig | None = None, **keywords: Any) -> None:
        name = known_name("OGB", keywords.get("name") or (settings or OGBConfig()).name, DATASETS)
        if settings is None and name.startswith("ogbl"):
            keywords = {"task": "link", **keywords}
        super().__init__(settings, **keywords)
        self.name = name
        self._entry = DATASETS[name]

    def identity(self) -> dict[str, Any]:
        """Return the data set, the stamps of its files, and ``undirected``."""
        folder = self._find()
        files = sorted([*folder.glob("raw/**/*.csv.gz"), *folder.glob(f"split/{self._entry.split}/**/*.*")])
        stamps = [[str(file.relative_to(folder)), *file_stamp(file)[1:]] for file in files]
        return {"dataset": self.name, "files": stamps, "undirected": self.settings.undirected}

    @property
    def outline(self) -> dict[str, Any]:  # type: ignore[override]
        """The facts of OGB's table, or of the names of the files if they exist."""
        entry, raw = self._entry, self._find() / "raw"
        node = self.task == "node"
        if entry.hetero:
            sizes, edges, labelled = MAG, list(MAG_EDGES), ["paper"]
            if raw.is_dir():
                sizes, edges = _hetero_outline(raw)
                labelled = [name for name in sizes if (raw / "node-label" / name / "node-label.csv.gz").is_file()]
            back = [(target, f"rev_{name}", source) for source, name, target in edges]
            return {
                **OUTLINE,
                "num_nodes": dict.fromkeys(sizes, OUTLINE["num_nodes"]),
                "num_features": sizes,
                "sparse_features": [],
                "num_classes": OUTLINE["num_classes"] if node and labelled else None,
                "target": labelled[0] if node and labelled else None,
                "edge_types": tuple(edges if self.settings.undirected is False else [*edges, *back]),
            }
        has = {
            **{"features": entry.features, "relations": entry.relations, "labels": node},
            "multilabel": entry.multilabel,
        }
        if raw.is_dir():
            files = {"features": "node-feat", "relations": "edge_reltype", "labels": "node-label"}
            has |= {name: (raw / f"{file}.csv.gz").is_file() for name, file in files.items()}
            if has["labels"]:
                has["multilabel"] = first_width(raw / "node-label.csv.gz") > 1
        return {
            **OUTLINE,
            "num_features": OUTLINE["num_features"] if has["features"] else None,
            "num_relations": 2 if has["relations"] else None,
            "num_classes": OUTLINE["num_classes"] if has["labels"] and node else None,
            "multilabel": has["multilabel"],
        }

    def check_files(self) -> None:
        """Refuse an incomplete folder of the data set, and edges that are not pairs."""
        folder = self._find()
        raw, split = folder / "raw", folder / "split" / self._entry.split
        if not folder.is_dir():  # it will be downloaded
            return
        needed = [raw / "num-node-list.csv.gz", raw / "edge.csv.gz"]
        if self._entry.hetero:
            needed = [raw / "relations" / "___".join(edge) / "edge.csv.gz" for edge in _hetero_outline(raw)[1]]
        elif self.name.startswith("ogbl"):
            needed += [split / f"{name}.pt" for name in ("valid", "test")]
        else:
            if self.task == "node":
                needed.append(raw / "node-label.csv.gz")
            if self.task != "node" or self.split.kind == "public":
                needed += [split / f"{name}.csv.gz" for name in ("train", "valid", "test")]
        for path in needed:
            if not path.is_file():
                raise missing_file(path)
            if path.name == "edge.csv.gz" and (width := first_width(path)) not in (0, 2):
                raise DataError(f"{path}, line 1: {width} columns, and 2 were expected", hint=DOWNLOAD_HINT)

    def fetch(self) -> None:
        """Download the data set if it is missing."""
        if self._find().is_dir():
            return
        with file_lock(self.store / f"{self.name}.raw.lock", log.info):
            if not self._find().is_dir():
                download(f"{URL}/{self._entry.archive}.zip", self._find())

    def read(self) -> Data | HeteroData:
        """Read the raw files."""
        self.fetch()
        folder = self._find()
        if self._entry.hetero:
            return self._read_hetero(folder)
        raw = folder / "raw"
        num_nodes = int(read_csv(raw / "num-node-list.csv.gz", np.int64)[0, 0])
        data = Data(num_nodes=num_nodes, edge_index=read_edges(raw / "edge.csv.gz", (num_nodes, num_nodes)))
        _read_node_tensors(data, raw, raw)
        _read_edge_tensors(data, raw)
        if self._entry.inverse if self.settings.undirected is None else self.settings.undirected:
            _add_inverse(data)
        split = folder / "split" / self._entry.split
        if self.name.startswith("ogbl"):
            _hold_out(data, split)
        elif self.split.kind == "public":
            data.update(read_masks(split, num_nodes))
        return data

    def _find(self) -> Path:
        """Return the folder of the data set, or where it should be."""
        names = (self.name.replace("-", "_"), self._entry.archive.rpartition("/")[2])
        folders = [base / name for base in (self.root / "ogb", self.root) for name in names]
        return next((folder for folder in folders if (folder / "raw").is_dir()), folders[0])

    def _read_hetero(self, folder: Path) -> HeteroData:
        raw, graph = folder / "raw", HeteroData()
        sizes, edge_types = _node_counts(raw / "num-node-dict.csv.gz"), _edge_types(raw)
        for node_type, size in sizes.items():
            graph[node_type].num_nodes = size
            _read_node_tensors(graph[node_type], raw / "node-feat" / node_type, raw / "node-label" / node_type)
            split = folder / "split" / self._entry.split / node_type
            if "y" in graph[node_type] and self.split.kind == "public" and split.is_dir():
                graph[node_type].update(read_masks(split, size))
        for source, relation, target in edge_types:
            relation_folder = raw / "relations" / "___".join((source, relation, target))
            edges = read_edges(relation_folder / "edge.csv.gz", (sizes[source], sizes[target]))
            graph[source, relation, target].edge_index = edges
            if self.settings.undirected is not False:
                graph[target, f"rev_{relation}", source].edge_index = edges.flip(0)
        return graph


def _hold_out(data: Data, folder: Path) -> None:
    """Read the validation and test edges."""
    for prefix, name in (("val_", "valid"), ("test_", "test")):
        path = folder / f"{name}.pt"
        split = read_split(path)
        data[f"{prefix}edge_index"] = _pairs(split, path)
        for key, tensor, dtype in (
            ("relation", "edge_type", torch.int64),
            ("year", "edge_time", torch.int64),
            ("weight", "edge_weight", torch.float32),
        ):
            if key in split:
                data[f"{prefix}{tensor}"] = torch.as_tensor(split[key]).to(dtype).flatten()


def _edge_types(raw: Path) -> list[tuple[str, str, str]]:
    """Return the edge types, whose node types must be known."""
    path, sizes = raw / "triplet-type-list.csv.gz", _node_counts(raw / "num-node-dict.csv.gz")
    lines = read_lines(path)
    if not lines or any(line.count(",") != 2 for line in lines):
        raise DataError(f"{path} should have lines of source type, relation and target type", hint=DOWNLOAD_HINT)
    edge_types = []
    for line in lines:
        source, relation, target = line.split(",")
        if source not in sizes or target not in sizes:
            raise DataError(f"{path}: {line} names a type that num-node-dict.csv.gz lacks", hint=DOWNLOAD_HINT)
        edge_types.append((source, relation, target))
    return edge_types


def _hetero_outline(raw: Path) -> tuple[dict[str, int | None], list[tuple[str, str, str]]]:
    """Return the node types with a number of features (None without), and the edge types."""
    sizes = _node_counts(raw / "num-node-dict.csv.gz")
    # 16 is a placeholder: before the files are read, only None or not None is known.
    features = {name: 16 if (raw / "node-feat" / name / "node-feat.csv.gz").is_file() else None for name in sizes}
    return features, _edge_types(raw)


def _read_node_tensors(nodes: Any, features: Path, labels: Path) -> None:
    """Read features, labels and years into the storage of a node type."""
    if (x := read_optional(features / "node-feat.csv.gz", np.float32)) is not None:
        nodes["x"] = torch.from_numpy(x)
    if (year := read_optional(features / "node_year.csv.gz", np.int64)) is not None:
        nodes["time"] = torch.from_numpy(year[:, 0].copy())
    if (y := read_optional(labels / "node-label.csv.gz", np.int64)) is not None:
        nodes["y"] = torch.from_numpy(y[:, 0].copy() if y.shape[1] == 1 else y)


def _read_edge_tensors(data: Data, raw: Path) -> None:
    """Read relations, years, weights and features of the edges into the graph."""
    for file, name, dtype in (
        ("edge_reltype", "edge_type", np.int64),
        ("edge_year", "edge_time", np.int64),
        ("edge_weight", "edge_weight", np.float32),
    ):
        if (values := read_optional(raw / f"{file}.csv.gz", dtype)) is not None:
            data[name] = torch.from_numpy(values[:, 0].copy())
    if (features := read_optional(raw / "edge-feat.csv.gz", np.float32)) is not None:
        data.edge_attr = torch.from_numpy(features)


def _add_inverse(data: Data) -> None:
    """Append the reverse of each edge after all edges."""
    for name in [name for name in data.keys() if name.startswith("edge_") and name != "edge_index"]:  # noqa: SIM118
        data[name] = torch.cat([data[name], data[name]])
    edges = data.edge_index
    assert edges is not None  # just read
    data.edge_index = torch.cat([edges, edges.flip(0)], dim=1)


def _pairs(split: dict[str, Any], path: Path) -> Tensor:
    """Return the edges of a split, ``[2, E]``, under any of the names that OGB uses."""
    if "edge" in split:
        return torch.as_tensor(split["edge"]).long().t().contiguous()
    for names in (("source_node", "target_node"), ("head", "tail")):
        if names[0] in split:
            return torch.stack([torch.as_tensor(split[name]).long() for name in names])
    raise DataError(f"{path} holds {', '.join(split)}, but no edges", hint=DOWNLOAD_HINT)


def _node_counts(path: Path) -> dict[str, int]:
    """Return the number of nodes of each type."""
    lines = read_lines(path)
    if len(lines) != 2 or not all(count.isdigit() for count in lines[-1].split(",")):
        raise DataError(f"{path} should have a line of node types and one of their counts", hint=DOWNLOAD_HINT)
    return dict(zip(lines[0].split(","), map(int, lines[1].split(",")), strict=True))


_BLOCK_BYTES = 1 << 24
DOWNLOAD_HINT = "download the data set again"


def missing_file(path: Path) -> DataError:
    """Return the error for a missing file."""
    return DataError(f"{path} is missing", hint="unpack the whole archive of the data set again")


def read_csv(path: Path, dtype: type[np.generic]) -> NDArray[Any]:
    """Read a ``.csv.gz`` of numbers without column names.

    Returns:
        ``[rows, columns]``.

    Raises:
        DataError: names the file and the malformed line.
    """
    integers = np.issubdtype(dtype, np.integer)
    try:
        with gzip.open(path) as file:
            width = file.readline().count(b",") + 1
        names = [str(column) for column in range(width)]
        arrow_type = pa.int64() if integers else pa.from_numpy_dtype(dtype)
        with pa.csv.open_csv(
            pa.input_stream(str(path), compression="gzip"),
            read_options=pa.csv.ReadOptions(column_names=names, block_size=_BLOCK_BYTES),
            convert_options=pa.csv.ConvertOptions(column_types=dict.fromkeys(names, arrow_type), null_values=[]),
        ) as reader:
            blocks = [np.stack([column.to_numpy() for column in batch.columns], axis=1) for batch in reader]
    except FileNotFoundError as err:
        raise missing_file(path) from err
    except pa.ArrowInvalid:
        table = read_table(path, integers=None if integers else 0, header=False)  # its errors name the line
        return np.stack(table.columns, axis=1).astype(dtype)
    except (OSError, EOFError, zlib.error) as err:
        raise DataError(f"{path} cannot be unpacked: {err}", hint=DOWNLOAD_HINT) from err
    return np.concatenate(blocks).astype(dtype, copy=False) if blocks else np.empty((0, width), dtype)


def read_lines(path: Path, limit: int = -1) -> list[str]:
    """Return the lines of a ``.gz``, of its first ``limit`` bytes.

    Raises:
        DataError: the file is missing, or cannot be decompressed.
    """
    try:
        with gzip.open(path) as file:
            return file.read(limit).decode().split()
    except FileNotFoundError as err:
        raise missing_file(path) from err
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as err:
        raise DataError(f"{path} cannot be unpacked: {err}", hint=DOWNLOAD_HINT) from err


def first_width(path: Path) -> int:
    """Return the number of columns in the first line of a ``.csv.gz``; 0 for an empty file."""
    lines = read_lines(path, 1 << 20)
    return lines[0].count(",") + 1 if lines else 0


def read_optional(path: Path, dtype: type[np.generic]) -> NDArray[Any] | None:
    """Read a ``.csv.gz``; None if the data set lacks it."""
    return read_csv(path, dtype) if path.is_file() else None


def read_edges(path: Path, sizes: tuple[int, int]) -> Tensor:
    """Read ``source,target`` lines.

    Args:
        path: the file.
        sizes: number of source nodes and of target nodes.

    Returns:
        int64 ``[2, E]``.

    Raises:
        DataError: names the file, and the line with an unknown id.
    """
    edges = read_csv(path, np.int64)
    if edges.shape[1] != 2:
        raise DataError(f"{path}, line 1: {edges.shape[1]} columns, and 2 were expected", hint=DOWNLOAD_HINT)
    if (row := first_true(((edges < 0) | (edges >= np.array(sizes))).any(axis=1))) is not None:
        raise DataError(
            f"{path}, line {row + 1}: the edge {edges[row, 0]} -> {edges[row, 1]}; there are "
            f"{sizes[0]} source nodes and {sizes[1]} target nodes",
            hint=f"ids start at 0; {DOWNLOAD_HINT}",
        )
    return torch.from_numpy(np.ascontiguousarray(edges.T))


def read_masks(folder: Path, num_nodes: int) -> dict[str, Tensor]:
    """Read the nodes of each split from ``train``, ``valid`` and ``test.csv.gz``.

    Returns:
        ``train_mask``, ``val_mask`` and ``test_mask``, ``[N]`` bool.
    """
    masks = {}
    for split, name in (("train", "train"), ("val", "valid"), ("test", "test")):
        path = folder / f"{name}.csv.gz"
        nodes = read_csv(path, np.int64)[:, 0]
        if (row := first_true((nodes < 0) | (nodes >= num_nodes))) is not None:
            raise DataError(
                f"{path}, line {row + 1}: the node {nodes[row]}; there are {num_nodes} nodes", hint=DOWNLOAD_HINT
            )
        masks[f"{split}_mask"] = torch.zeros(num_nodes, dtype=torch.bool)
        masks[f"{split}_mask"][torch.from_numpy(nodes)] = True
    return masks


def read_split(path: Path) -> dict[str, Any]:
    """Read ``valid.pt`` or ``test.pt`` of a link data set: arrays and lists by name. Nothing else is unpickled.

    Raises:
        DataError: the file is missing or damaged, or holds other objects.
    """
    if not path.is_file():
        raise missing_file(path)
    with torch.serialization.safe_globals(NUMPY_GLOBALS):
        loaded = load_tensors(path, f"{DOWNLOAD_HINT} from ogb.stanford.edu")
    if not isinstance(loaded, dict):
        raise DataError(f"{path} holds a {type(loaded).__name__}", hint=DOWNLOAD_HINT)
    return loaded


def download(url: str, target: Path) -> None:
    """Download a ``.zip`` and move the folder in it to ``target``.

    Raises:
        DataError: the download failed, or the archive is damaged; tells how to install the data by hand.
    """
    log.info("downloading %s", url)
    with made_folder(target.parent), tempfile.TemporaryDirectory(prefix=".gtrain-", dir=target.parent) as scratch:
        archive = Path(scratch) / "archive.zip"
        try:
            with urllib.request.urlopen(url, timeout=60) as response, archive.open("wb") as file:
                shutil.copyfileobj(response, file, 1 << 20)
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(Path(scratch) / "unpacked")
        except (urllib.error.URLError, OSError, zipfile.BadZipFile) as err:
            raise DataError(
                f"{target} is missing, and {url} could not be downloaded: {err}",
                hint=f"download it on a machine with a network, unpack it, and move the folder with raw and split to "
                f"{target}",
            ) from err
        folders = sorted(raw.parent for raw in (Path(scratch) / "unpacked").rglob("raw") if raw.is_dir())
        if not folders:
            raise DataError(f"{url} holds no folder with raw data", hint=f"move the data set's folder to {target}")
        shutil.move(folders[0], target)
