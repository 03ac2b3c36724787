"""A graph that PyG's Partitioner has cut into parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.config import PyGPartitionConfig
from gtrain.data.module import OUTLINE, file_stamp
from gtrain.data.readers.files import find_file, read_array
from gtrain.data.readers.pyg_partition import (
    NODE,
    EdgeType,
    Meta,
    Rows,
    edge_maps,
    map_files,
    no_file,
    node_maps,
    read_meta,
    read_part,
)
from gtrain.data.sources.given_parts import GivenPartsData
from gtrain.errors import ConfigError, DataError


class PyGPartitionData(GivenPartsData):
    """A folder of ``torch_geometric.distributed.Partitioner``, homogeneous or heterogeneous.

    Nodes and edges get back the order that they had before they were cut; the parts of the folder become the parts of
    the store. ``x`` and ``edge_attr`` are read, times of nodes (``time``) or of edges (``edge_time``), and whatever
    else was added to ``feats`` of the parts, such as ``y`` or ``train_mask``. The Partitioner itself drops labels, so
    name a file of them. Files are loaded without unpickling objects.

    Its settings are those of :class:`~gtrain.data.config.PyGPartitionConfig`.
    """

    name = "pyg_partition"

    settings_type = PyGPartitionConfig
    settings: PyGPartitionConfig

    def __init__(self, settings: PyGPartitionConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        self._check_partitioner()
        self.path = self.settings.path
        self.labels = self.settings.labels
        self._meta: Meta | None = None

    def identity(self) -> dict[str, Any]:
        """Return the stamps of all files."""
        folder = self._read_meta().folder
        files = sorted(file for file in folder.rglob("*") if file.suffix in (".pt", ".json"))
        stamps = [[str(file.relative_to(folder)), *file_stamp(file)[1:]] for file in files]
        labels = None
        if self.labels is not None:
            node_type, name = self._labels_of()
            labels = [node_type, file_stamp(find_file("data.labels", name, self.root))]
        return {"files": stamps, "labels": labels}

    @property
    def origin(self) -> str:
        """Where the graph comes from, for messages."""
        return f"data.path={self.path}"

    @property
    def outline(self) -> dict[str, Any]:  # type: ignore[override]
        """The types of the folder, and the tensors that part 0 has; their contents are not read."""
        meta = self._read_meta()
        nodes, edges = (_names_of(meta, kind) for kind in ("node_feats", "edge_feats"))
        widths = {name: OUTLINE["num_features"] if "x" in nodes.get(name, {}) else None for name in meta.node_types}
        labelled = [name for name in meta.node_types if "y" in nodes.get(name, {})]
        if self.labels is not None:
            labelled = [self._labels_of()[0]]
        y = nodes.get(labelled[0], {}).get("y") if labelled and self.labels is None else None
        facts = {
            **OUTLINE,
            "num_classes": OUTLINE["num_classes"] if labelled else None,
            "multilabel": y is not None and y.dim() == 2 and y.size(1) > 1,
        }
        if meta.is_hetero:
            sizes = dict.fromkeys(meta.node_types, OUTLINE["num_nodes"])
            target = (self.target or labelled[0]) if labelled and self.task == "node" else None
            more: dict[str, Any] = {"sparse_features": [], "target": target, "edge_types": meta.edge_types}
            return {**facts, **more, "num_nodes": sizes, "num_features": widths}
        relations = 2 if any("edge_type" in found for found in edges.values()) else None
        return {**facts, "num_features": widths[NODE], "num_relations": relations}

    def check_inputs(self) -> None:
        """Refuse missing files of the folder, and of labels."""
        super().check_inputs()
        for path in map_files(self._read_meta()):
            if not path.is_file():
                raise no_file(path)

    def given_parts(self) -> int:
        """Return the number of parts of the folder."""
        return self._read_meta().num_parts

    def read(self) -> Data | HeteroData:
        """Read all parts."""
        meta = self._read_meta()
        node_parts, edge_parts = node_maps(meta), edge_maps(meta)
        graph: Data | HeteroData = HeteroData() if meta.is_hetero else Data()
        for node_type, parts in node_parts.items():
            store = graph[node_type] if isinstance(graph, HeteroData) else graph
            store.num_nodes = parts.numel()
            for name, value in _read_nodes(meta, node_type, parts, node_parts).items():
                store[name] = value
        for edge_type in edge_parts:
            store = graph[edge_type] if isinstance(graph, HeteroData) else graph
            for name, value in _read_edges(meta, edge_type, edge_parts, node_parts).items():
                store[name] = value
        self._put_labels(graph, node_parts)
        self.given = node_parts if meta.is_hetero else node_parts[NODE]
        return graph

    def _read_meta(self) -> Meta:
        if self._meta is None:
            named = Path(self.path).expanduser()
            for place in (named, self.root / named):
                if place.is_dir():
                    self._meta = read_meta(place)
                    return self._meta
            raise DataError(
                f"data.path={self.path}: there is no such folder, nor {self.root / named}",
                hint="set data.path to the root folder of PyG's Partitioner",
            )
        return self._meta

    def _labels_of(self) -> tuple[str, str]:
        """Return the node type that has the labels, and their file."""
        meta, labels = self._read_meta(), str(self.labels)
        if not meta.is_hetero:
            return NODE, labels
        node_type, _, name = labels.partition("=")
        if not name or node_type not in meta.node_types:
            raise ConfigError(
                f"data.labels={labels}, and the folder has the node types {', '.join(meta.node_types)}",
                hint=f"set data.labels to TYPE=FILE, such as data.labels={meta.node_types[0]}={name or labels}",
            )
        return node_type, name

    def _put_labels(self, graph: Data | HeteroData, node_parts: dict[str, Tensor]) -> None:
        if self.labels is None:
            return
        node_type, name = self._labels_of()
        path = find_file("data.labels", name, self.root)
        y = read_array("data.labels", path)
        num_nodes = node_parts[node_type].numel()
        if y.dim() == 0 or y.size(0) != num_nodes:
            found = y.size(0) if y.dim() else 0
            raise DataError(
                f"data.labels={path} has {found} rows, and there are {num_nodes} nodes of {node_type}",
                hint="give one row for each node, in the order of the original ids",
            )
        (graph[node_type] if isinstance(graph, HeteroData) else graph).y = y


def _names_of(meta: Meta, kind: str) -> dict[Any, dict[str, Tensor]]:
    """Return the tensors that part 0 has of nodes or of edges, by type and name, mapped."""
    found = read_part(meta, 0, kind, mapped=True)
    return {
        name: {key: value for key, value in (tensors.get("feats") or {}).items() if isinstance(value, Tensor)}
        for name, tensors in found.items()
    }


def _read_nodes(meta: Meta, node_type: str, parts: Tensor, node_parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a node type, one row for each node."""
    rows = Rows(parts.numel(), parts, f"nodes of {node_type}" if meta.is_hetero else "nodes")
    times = None
    for part in range(meta.num_parts):
        path = meta.folder / f"part_{part}" / "node_feats.pt"
        found = read_part(meta, part, "node_feats").get(node_type)
        if found is None:
            continue
        ids = _node_ids(found, node_type, node_parts, path)
        rows.check(ids, part, path)
        for name, value in found.get("feats", {}).items():
            if value is not None:
                rows.put(name, ids, value, path)
        if isinstance(found.get("time"), Tensor):
            if found["time"].size(0) == rows.total:  # the Partitioner saves the times of all nodes with each part
                times = found["time"]
            else:
                rows.put("time", ids, found["time"], path)
    tensors = dict(rows.complete(meta.folder))
    return tensors if times is None else {**tensors, "time": times}


def _node_ids(found: dict[str, Any], node_type: str, node_parts: dict[str, Tensor], path: Path) -> Tensor:
    """Return the ids of a part's nodes within their type; ``global_id`` counts all types."""
    if isinstance(found.get("id"), Tensor):
        return found["id"].long()
    if not isinstance(found.get("global_id"), Tensor):
        raise DataError(f"{path} has no global_id", hint="partition the data anew with PyG 2.5 or later")
    return found["global_id"].long() - _before(node_parts, node_type)


def _read_edges(
    meta: Meta, edge_type: EdgeType, edge_parts: dict[EdgeType, Tensor], node_parts: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of an edge type, one row for each edge, and ``edge_index``."""
    parts = edge_parts[edge_type]
    rows = Rows(parts.numel(), parts, f"edges of {','.join(edge_type)}" if meta.is_hetero else "edges")
    source, _, target = edge_type
    for part in range(meta.num_parts):
        path = meta.folder / f"part_{part}" / "graph.pt"
        graph = read_part(meta, part, "graph").get(edge_type)
        if graph is None:
            continue
        if not all(isinstance(graph.get(name), Tensor) for name in ("row", "col", "edge_id")):
            raise DataError(f"{path} lacks row, col or edge_id", hint="partition the data anew with PyG's Partitioner")
        ids = graph["edge_id"].long() - _before(edge_parts, edge_type)
        rows.check(ids, part, path)
        for name, node_type in (("row", source), ("col", target)):
            _check_ends(graph[name], node_parts[node_type].numel(), f"{path}: {name}")
            rows.put(name, ids, graph[name].long(), path)
        _put_edge_features(rows, read_part(meta, part, "edge_feats").get(edge_type, {}), ids, part, path)
    tensors = dict(rows.complete(meta.folder))
    none = torch.empty(0, dtype=torch.int64)
    if not tensors and rows.total:
        raise DataError(
            f"{meta.folder}: no part has {rows.what}, and there are {rows.total}",
            hint="partition the data anew with PyG's Partitioner",
        )
    return {"edge_index": torch.stack([tensors.pop("row", none), tensors.pop("col", none)]), **tensors}


def _put_edge_features(rows: Rows, found: dict[str, Any], edge_ids: Tensor, part: int, graph: Path) -> None:
    path = graph.with_name("edge_feats.pt")
    ids = edge_ids
    if isinstance(found.get("global_id"), Tensor):
        ids = found["global_id"].long()
        rows.check(ids, part, path)
    for name, value in found.get("feats", {}).items():
        if value is not None:
            rows.put(name, ids, value, path)
    if isinstance(found.get("edge_time"), Tensor):
        rows.put("edge_time", edge_ids, found["edge_time"], path)


def _before(parts: dict[Any, Tensor], wanted: Any) -> int:
    """Return how many nodes, or edges, the types before this one have."""
    names = list(parts)
    return sum(parts[name].numel() for name in names[: names.index(wanted)])


def _check_ends(ends: Tensor, num_nodes: int, where: str) -> None:
    wrong = (ends < 0) | (ends >= num_nodes)
    if wrong.any():
        raise DataError(
            f"{where} names node {int(ends[wrong][0])}, and there are {num_nodes} nodes, 0..{num_nodes - 1}",
            hint="copy the folder again, or partition the data anew",
        )
