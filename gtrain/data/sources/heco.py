"""The heterogeneous graphs of HeCo: ACM, DBLP, AMiner and Freebase."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from gtrain.data.config import HeCoConfig
from gtrain.data.module import OUTLINE, GraphDataModule, file_stamp
from gtrain.data.readers.heco import Arrays, Folder, OneFile, names_of, no_array
from gtrain.errors import ConfigError, DataError


@dataclass(frozen=True)
class Layout:
    """What the letters of one data set stand for.

    Attributes:
        types: node type by letter; the first is the labelled one.
        edges: letters of the source and the target of each edge list.
    """

    types: Mapping[str, str]
    edges: tuple[str, ...]


LAYOUTS = {
    "acm": Layout({"p": "paper", "a": "author", "s": "subject"}, ("pa", "ps")),
    "dblp": Layout({"a": "author", "p": "paper", "c": "conference", "t": "term"}, ("pa", "pc", "pt")),
    "aminer": Layout({"p": "paper", "a": "author", "r": "reference"}, ("pa", "pr")),
    "freebase": Layout({"m": "movie", "a": "actor", "d": "director", "w": "writer"}, ("ma", "md", "mw")),
}


class HeCoData(GraphDataModule):
    """A heterogeneous graph of Wang et al. 2021 (HeCo), with its published splits.

    Two layouts are read: the folder of HeCo's repository (``pa.txt``, ``p_feat.npz``, ``labels.npy``,
    ``train_20.npy``...), and one ``.npz`` of the same arrays (``edge_pa [2, E]``, ``p_feat_data`` with ``_indices``,
    ``_indptr`` and ``_shape``, ``labels``, ``train_20``...). Each list of pairs becomes two edge types, one for each
    direction, both called ``to``. Features become sparse CSR tensors; types without a file of features have none. The
    types are ``paper``, ``author`` and ``subject`` of ACM, ``author``, ``paper``, ``conference`` and ``term`` of DBLP,
    and the first has labels.

    Its settings are those of :class:`~gtrain.data.config.HeCoConfig`.
    """

    settings_type = HeCoConfig
    settings: HeCoConfig

    def __init__(self, settings: HeCoConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        name, path = self.settings.name, self.settings.path
        if name.lower() not in LAYOUTS:
            near = difflib.get_close_matches(name.lower(), LAYOUTS, n=1)
            raise ConfigError(
                f"data.name={name!r} is not a data set of HeCo",
                hint=f"choose one of {', '.join(LAYOUTS)}" + (f"; did you mean {near[0]}?" if near else ""),
            )
        self._dataset = name.lower()
        self.name = f"heco-{self._dataset}"
        self.path = path
        self.per_class = self.settings.per_class

    def identity(self) -> dict[str, Any]:
        """Return the data set, the stamps of its files, and the published split."""
        place = self._find()
        files = [place] if place.is_file() else sorted([*place.glob("*.txt"), *place.glob("*.np[yz]")])
        per_class = self.per_class if self.split.kind == "public" else None
        return {"dataset": self._dataset, "files": [file_stamp(file) for file in files], "per_class": per_class}

    @property
    def outline(self) -> dict[str, Any]:  # type: ignore[override]
        """The types of the data set; the names of the arrays say which have features."""
        layout, there = LAYOUTS[self._dataset], names_of(self._find())
        sparse = [name for letter, name in layout.types.items() if f"{letter}_feat" in there]
        ends = [(layout.types[edge[0]], layout.types[edge[1]]) for edge in layout.edges]
        return {
            **OUTLINE,
            "num_nodes": dict.fromkeys(layout.types.values(), OUTLINE["num_nodes"]),
            "num_features": {name: 16 if name in sparse else None for name in layout.types.values()},
            "sparse_features": sparse,
            "target": next(iter(layout.types.values())),
            "edge_types": tuple(pair for a, b in ends for pair in ((a, "to", b), (b, "to", a))),
        }

    def check_inputs(self) -> None:
        """Refuse missing files, and missing arrays of edges, labels and the published split."""
        super().check_inputs()
        place = self._find()
        there = names_of(place)
        splits = ("train", "val", "test") if self.split.kind == "public" else ()
        lists = (f"edge_{edge}" for edge in LAYOUTS[self._dataset].edges)
        for name in ("labels", *lists, *(f"{split}_{self.per_class}" for split in splits)):
            if name not in there:
                raise no_array(place, name, there)

    @property
    def origin(self) -> str:
        """Where the graph comes from, for messages."""
        return f"data.path={self.path}" if self.path else f"data.name={self._dataset}"

    def read(self) -> HeteroData:
        """Read the arrays."""
        layout = LAYOUTS[self._dataset]
        place = self._find()
        arrays: Arrays = OneFile(place) if place.is_file() else Folder(place)
        pairs = {edge: arrays.pairs(edge) for edge in layout.edges}
        graph = HeteroData()
        for letter, node_type in layout.types.items():
            x = arrays.features(letter)
            if x is not None:
                graph[node_type].x = x
        labelled = graph[next(iter(layout.types.values()))]
        labelled.y = arrays.integers("labels")
        self._count(graph, layout, pairs)
        for split in ("train", "val", "test") if self.split.kind == "public" else ():
            labelled[f"{split}_mask"] = self._mask(arrays, split, labelled.y.numel())
        for edge, index in pairs.items():
            ends = layout.types[edge[0]], layout.types[edge[1]]
            graph[ends[0], "to", ends[1]].edge_index = index
            graph[ends[1], "to", ends[0]].edge_index = index.flip(0)
        return graph

    def _count(self, graph: HeteroData, layout: Layout, pairs: dict[str, Tensor]) -> None:
        """Give each node type its number of nodes: rows of features, or of labels, or the largest id + 1."""
        for position, (letter, node_type) in enumerate(layout.types.items()):
            rows = graph[node_type].x.size(0) if "x" in graph[node_type] else None
            if position == 0:
                rows = graph[node_type].y.numel()
            ids = [index[edge.index(letter)] for edge, index in pairs.items() if letter in edge]
            largest = max((int(found.max()) for found in ids if found.numel()), default=-1)
            graph[node_type].num_nodes = rows if rows is not None else largest + 1

    def _mask(self, arrays: Arrays, split: str, num_nodes: int) -> Tensor:
        name = f"{split}_{self.per_class}"
        index = arrays.integers(name)
        outside = (index < 0) | (index >= num_nodes)
        if outside.any():
            raise DataError(
                f"{arrays.where(name)}: it names node {int(index[outside][0])}, and there are {num_nodes} labels",
                hint="copy or download the file again",
            )
        return torch.zeros(num_nodes, dtype=torch.bool).index_fill_(0, index, True)

    def _find(self) -> Path:
        """Return the folder or the file."""
        if self.path is not None:
            named = Path(self.path).expanduser()
            places = [named, self.root / named]
        else:
            folders = [self.root / "heco", self.root / "hetero" / "heco", self.root]
            places = [folder / name for folder in folders for name in (f"{self._dataset}.npz", self._dataset)]
        for place in places:
            if place.is_file() or (place / "labels.npy").is_file():
                return place
        where = ", ".join(str(place) for place in places)
        raise DataError(
            f"{self.origin}: there is no {self._dataset}.npz and no folder with labels.npy; looked for {where}",
            hint=f"copy the folder data/{self._dataset} of github.com/liun-online/HeCo to {self.root / 'heco'}, "
            "or set data.path",
        )
