"""A graph that PyG's Partitioner has partitioned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.config import PyGPartitionConfig
from gtrain.data.module import file_stamp
from gtrain.data.readers.files import find_file, find_folder, read_array
from gtrain.data.readers.pyg_partition import (
    HINT,
    NODE,
    EdgeType,
    PartitionedRows,
    PartitionMeta,
    read_maps,
    read_meta,
    read_part,
)
from gtrain.data.sources.prepartitioned import PrepartitionedData
from gtrain.errors import ConfigError, DataError


class PyGPartitionData(PrepartitionedData):
    """A folder of ``torch_geometric.distributed.Partitioner``, homogeneous or heterogeneous.

    Nodes and edges keep their order from before the partitioning; the parts of the folder become the parts of the
    store. The class reads ``x`` and ``edge_attr``, times of nodes (``time``) or of edges (``edge_time``), and all other
    tensors in ``feats`` of the parts, such as ``y`` or ``train_mask``. The Partitioner drops labels, so name a file of
    them. Files are loaded without unpickling objects.

    Its settings are those of :class:`~gtrain.data.config.PyGPartitionConfig`.
    """

    name = "pyg_partition"

    settings_type = PyGPartitionConfig
    settings: PyGPartitionConfig

    def __init__(self, settings: PyGPartitionConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        self._check_partitioner()

    def identity(self) -> dict[str, Any]:
        """Return the stamps of all files."""
        folder = self._meta.folder
        files = sorted(file for file in folder.rglob("*") if file.suffix in (".pt", ".json"))
        stamps = [[str(file.relative_to(folder)), *file_stamp(file)[1:]] for file in files]
        node_type, labels = self._labels
        return {"files": stamps, "labels": None if labels is None else [node_type, file_stamp(labels)]}

    @property
    def outline(self) -> dict[str, Any]:  # type: ignore[override]
        """The types of the folder, and the names and shapes of the tensors of part 0."""
        nodes = _shapes(self._meta, "node_feats", self._meta.node_types)
        edges = _shapes(self._meta, "edge_feats", self._meta.edge_types)
        return self._outline(nodes, edges, self._meta.is_hetero, self._labels[0])

    def check_inputs(self) -> None:
        """Refuse missing files of the folder and of labels."""
        super().check_inputs()
        for path in self._meta.map_paths().values():
            if not path.is_file():
                raise DataError(f"{path} is missing", hint=HINT)

    def count_parts(self) -> int:
        """Return the number of parts of the folder."""
        return self._meta.num_parts

    def read(self) -> Data | HeteroData:
        """Read all parts."""
        meta = self._meta
        node_parts, edge_parts = read_maps(meta)
        graph: Data | HeteroData = HeteroData() if meta.is_hetero else Data()
        for node_type, parts in node_parts.items():
            store = graph[node_type] if isinstance(graph, HeteroData) else graph
            store.num_nodes = parts.numel()
            store.update(_read_nodes(meta, node_type, node_parts))
        for edge_type in edge_parts:
            store = graph[edge_type] if isinstance(graph, HeteroData) else graph
            store.update(_read_edges(meta, edge_type, edge_parts, node_parts))
        labelled, path = self._labels
        if labelled is not None and path is not None:
            y, num_nodes = read_array("data.labels", path), node_parts[labelled].numel()
            rows = y.size(0) if y.dim() else 0
            if y.dim() == 0 or rows != num_nodes:
                raise DataError(
                    f"data.labels={path} has {rows} rows, and there are {num_nodes} nodes of {labelled}",
                    hint="give one row for each node, in the order of the original ids",
                )
            (graph[labelled] if isinstance(graph, HeteroData) else graph).y = y
        self.part_of_node = node_parts if meta.is_hetero else node_parts[NODE]
        return graph

    @cached_property
    def _meta(self) -> PartitionMeta:
        hint = "set data.path to the root folder of PyG's Partitioner"
        return read_meta(find_folder("data.path", self.settings.path, self.root, hint))

    @property
    def _labels(self) -> tuple[str | None, Path | None]:
        """The node type with labels in a file, and the file."""
        labels, node_type, name = self.settings.labels, NODE, self.settings.labels
        if labels is None or name is None:
            return None, None
        if self._meta.is_hetero:
            node_type, _, name = labels.partition("=")
            if not name or node_type not in self._meta.node_types:
                types = self._meta.node_types
                raise ConfigError(
                    f"data.labels={labels} was set; the node types of the folder are {', '.join(types)}",
                    hint=f"set data.labels to TYPE=FILE, such as data.labels={types[0]}={name or labels}",
                )
        return node_type, find_file("data.labels", name, self.root)


def _shapes(meta: PartitionMeta, stem: str, types: Sequence[Any]) -> dict[Any, dict[str, tuple[int, ...]]]:
    """Return the shapes of part 0's tensors by type and name, without reading the contents."""
    content = read_part(meta, 0, stem, mapped=True)
    features = {name: content.get(name, {}).get("feats") or {} for name in types}
    return {
        name: {key: tuple(value.shape) for key, value in tensors.items() if isinstance(value, Tensor)}
        for name, tensors in features.items()
    }


def _read_nodes(meta: PartitionMeta, node_type: str, node_parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a node type, with one row per node."""
    rows = PartitionedRows(node_parts[node_type], f"nodes of {node_type}" if meta.is_hetero else "nodes")
    all_times = {}
    for part in range(meta.num_parts):
        path = meta.folder / f"part_{part}" / "node_feats.pt"
        content = read_part(meta, part, "node_feats").get(node_type)
        if content is None:
            continue
        if isinstance(content.get("id"), Tensor):
            ids = content["id"].long()
        elif isinstance(content.get("global_id"), Tensor):  # counts the nodes of all types
            ids = content["global_id"].long() - _first_id(node_parts, node_type)
        else:
            raise DataError(f"{path} has no global_id", hint="partition the data again with PyG 2.5 or later")
        rows.check(ids, part, path)
        for name, value in content.get("feats", {}).items():
            if value is not None:
                rows.put(name, ids, value, path)
        if isinstance(times := content.get("time"), Tensor):
            if times.size(0) == rows.total:  # the Partitioner saves the times of all nodes with each part
                all_times["time"] = times
            else:
                rows.put("time", ids, times, path)
    return {**rows.complete(meta.folder), **all_times}


def _read_edges(
    meta: PartitionMeta, edge_type: EdgeType, edge_parts: dict[EdgeType, Tensor], node_parts: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of an edge type, with one row per edge, and ``edge_index``."""
    elements = f"edges of {','.join(edge_type)}" if meta.is_hetero else "edges"
    rows = PartitionedRows(edge_parts[edge_type], elements)
    source, _, target = edge_type
    for part in range(meta.num_parts):
        path = meta.folder / f"part_{part}" / "graph.pt"
        graph = read_part(meta, part, "graph").get(edge_type)
        if graph is None:
            continue
        if not all(isinstance(graph.get(name), Tensor) for name in ("row", "col", "edge_id")):
            raise DataError(f"{path} lacks row, col or edge_id", hint=HINT)
        edge_ids = graph["edge_id"].long() - _first_id(edge_parts, edge_type)
        rows.check(edge_ids, part, path)
        for name, node_type in (("row", source), ("col", target)):
            ends, num_nodes = graph[name].long(), node_parts[node_type].numel()
            outside = ends[(ends < 0) | (ends >= num_nodes)]
            if outside.numel():
                raise DataError(
                    f"{path}: {name} names node {int(outside[0])}; the {num_nodes} nodes are 0..{num_nodes - 1}",
                    hint=HINT,
                )
            rows.put(name, edge_ids, ends, path)
        path, features = path.with_name("edge_feats.pt"), read_part(meta, part, "edge_feats").get(edge_type, {})
        ids = edge_ids
        if isinstance(features.get("global_id"), Tensor):
            ids = features["global_id"].long()
            rows.check(ids, part, path)
        for name, value in features.get("feats", {}).items():
            if value is not None:
                rows.put(name, ids, value, path)
        if isinstance(features.get("edge_time"), Tensor):
            rows.put("edge_time", edge_ids, features["edge_time"], path)
    tensors = rows.complete(meta.folder)
    if not tensors and rows.total:
        raise DataError(f"{meta.folder}: no part has {rows.elements}; there are {rows.total}", hint=HINT)
    none = torch.empty(0, dtype=torch.int64)
    return {"edge_index": torch.stack([tensors.pop("row", none), tensors.pop("col", none)]), **tensors}


def _first_id(parts: dict[Any, Tensor], type_name: Any) -> int:
    """Return the number of nodes, or edges, of the preceding types."""
    names = list(parts)
    return sum(parts[name].numel() for name in names[: names.index(type_name)])
