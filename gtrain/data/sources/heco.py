"""The heterogeneous graphs of HeCo: ACM, DBLP, AMiner and Freebase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import HeteroData

from gtrain.data.config import HeCoConfig
from gtrain.data.module import OUTLINE, GraphDataModule, file_stamp, known_name
from gtrain.data.readers.files import candidates
from gtrain.data.readers.heco import ArchiveArrays, Arrays, FolderArrays, array_names, missing_array
from gtrain.errors import DataError


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


class HeCoData(GraphDataModule):
    """A heterogeneous graph of Wang et al. 2021 (HeCo), with its published splits.

    The class reads the folder of HeCo's repository (``pa.txt``, ``p_feat.npz``, ``labels.npy``, ``train_20.npy``...),
    or one ``.npz`` of the same arrays (``edge_pa [2, E]``, ``p_feat_data`` with ``_indices``, ``_indptr`` and
    ``_shape``, ``labels``, ``train_20``...). Each list of pairs becomes two edge types, one per direction, both called
    ``to``. Features become sparse CSR tensors; a type without a file of features has none. The node types are those of
    :data:`DATASETS`, and the first has labels.

    Its settings are those of :class:`~gtrain.data.config.HeCoConfig`.
    """

    settings_type = HeCoConfig
    settings: HeCoConfig

    def __init__(self, settings: HeCoConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        self._dataset = known_name("HeCo", self.settings.name, DATASETS)
        self._types = DATASETS[self._dataset]
        self.name = f"heco-{self._dataset}"

    def identity(self) -> dict[str, Any]:
        """Return the data set, the stamps of its files, and the published split."""
        path = self._find()
        files = [path] if path.is_file() else sorted([*path.glob("*.txt"), *path.glob("*.np[yz]")])
        per_class = self.settings.per_class if self.split.kind == "public" else None
        return {"dataset": self._dataset, "files": [file_stamp(file) for file in files], "per_class": per_class}

    @property
    def outline(self) -> dict[str, Any]:  # type: ignore[override]
        """The types of the data set; the names of the arrays determine which have features."""
        types, names = self._types.types, array_names(self._find())
        sparse = [node_type for letter, node_type in types.items() if f"{letter}_feat" in names]
        ends = [(types[edge[0]], types[edge[1]]) for edge in self._types.edges]
        return {
            **OUTLINE,
            "num_nodes": dict.fromkeys(types.values(), OUTLINE["num_nodes"]),
            "num_features": {node_type: 16 if node_type in sparse else None for node_type in types.values()},
            "sparse_features": sparse,
            "target": self._types.labelled,
            "edge_types": tuple(pair for a, b in ends for pair in ((a, "to", b), (b, "to", a))),
        }

    def check_inputs(self) -> None:
        """Refuse missing files, and missing arrays of edges, labels and the published split."""
        super().check_inputs()
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
