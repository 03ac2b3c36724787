"""A graph that PyG's Partitioner has partitioned."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.config import PyGPartitionConfig
from gtrain.data.module import file_stamp
from gtrain.data.readers.files import find_file, find_folder, load_tensors, read_array
from gtrain.data.sources.prepartitioned import PrepartitionedData
from gtrain.errors import ConfigError, DataError, unreadable


class PyGPartitionData(PrepartitionedData[PyGPartitionConfig]):
    """A folder of ``torch_geometric.distributed.Partitioner``, homogeneous or heterogeneous.

    Nodes and edges keep their order from before the partitioning; the parts of the folder become the parts of the
    store. The class reads ``x`` and ``edge_attr``, times of nodes (``time``) or of edges (``edge_time``), and all other
    tensors in ``feats`` of the parts, such as ``y`` or ``train_mask``. The Partitioner drops labels, so name a file of
    them. Files are loaded without unpickling objects.

    Its settings are those of :class:`~gtrain.data.config.PyGPartitionConfig`.
    """

    name = "pyg_partition"

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

    def check_files(self) -> None:
        """Refuse missing files of the folder and of labels."""
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
            if times.size(0) == rows.total:
                # The Partitioner saves the times of all nodes with each part.
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


EdgeType = tuple[str, str, str]

NODE = "node"
EDGE: EdgeType = (NODE, "to", NODE)
"""The types of a homogeneous folder."""

HINT = "copy all files of the folder again, or partition the data again with torch_geometric.distributed.Partitioner"


@dataclass(frozen=True)
class PartitionMeta:
    """The contents of ``META.json``.

    Attributes:
        folder: the folder of the file.
        num_parts: number of parts.
        node_types: node types, ``node`` in a homogeneous folder.
        edge_types: edge types, ``node, to, node`` in a homogeneous folder.
        is_hetero: whether the folder has types.
    """

    folder: Path
    num_parts: int
    node_types: tuple[str, ...]
    edge_types: tuple[EdgeType, ...]
    is_hetero: bool

    def map_paths(self) -> dict[str | EdgeType, Path]:
        """Return the files with the part of each node and of each edge, by type."""
        if not self.is_hetero:
            return {NODE: self.folder / "node_map.pt", EDGE: self.folder / "edge_map.pt"}
        return {name: self.folder / "node_map" / f"{name}.pt" for name in self.node_types} | {
            name: self.folder / "edge_map" / f"{'__'.join(name)}.pt" for name in self.edge_types
        }


def read_meta(folder: Path) -> PartitionMeta:
    """Read and check ``META.json``.

    Raises:
        DataError: it is missing or malformed, or a part is missing.
    """
    path = folder / "META.json"
    if not path.is_file():
        raise DataError(
            f"{folder} has no META.json", hint="set data.path to the root folder of PyG's Partitioner, not to a part"
        )
    with unreadable(f"{path} cannot be read as PyG's Partitioner writes it", HINT, ValueError, KeyError, TypeError):
        content = json.loads(path.read_text())
        hetero = bool(content["is_hetero"])
        nodes = tuple(str(name) for name in content["node_types"]) if hetero else (NODE,)
        edges = tuple((str(s), str(r), str(t)) for s, r, t in content["edge_types"]) if hetero else (EDGE,)
        meta = PartitionMeta(folder, int(content["num_parts"]), nodes, edges, hetero)
    for part in range(meta.num_parts):
        if not (folder / f"part_{part}" / "graph.pt").is_file():
            raise DataError(
                f"{folder} has no part_{part}/graph.pt, and META.json says that there are {meta.num_parts} parts",
                hint=HINT,
            )
    return meta


def read_maps(meta: PartitionMeta) -> tuple[dict[str, Tensor], dict[EdgeType, Tensor]]:
    """Return the part of each node and of each edge, int64, by type."""
    of_nodes: dict[str, Tensor] = {}
    of_edges: dict[EdgeType, Tensor] = {}
    for name, path in meta.map_paths().items():
        parts = _load(path)
        if not isinstance(parts, Tensor) or parts.dim() != 1 or parts.is_floating_point():
            raise DataError(f"{path} is not a row of part numbers", hint=HINT)
        outside = parts[(parts < 0) | (parts >= meta.num_parts)]
        if outside.numel():
            raise DataError(f"{path} names part {int(outside[0])}; there are {meta.num_parts} parts", hint=HINT)
        if isinstance(name, str):
            of_nodes[name] = parts.long()
        else:
            of_edges[name] = parts.long()
    return of_nodes, of_edges


def read_part(meta: PartitionMeta, part: int, stem: str, *, mapped: bool = False) -> dict[Any, dict[str, Any]]:
    """Return the contents of a part's file by type; empty if the file is missing.

    Args:
        meta: the folder.
        part: the part's number.
        stem: ``graph``, ``node_feats`` or ``edge_feats``.
        mapped: whether to memory-map the tensors instead of reading them.

    Raises:
        DataError: the file is damaged or holds other objects, or ``graph`` is missing.
    """
    path = meta.folder / f"part_{part}" / f"{stem}.pt"
    if stem != "graph" and not path.is_file():
        return {}
    content = _load(path, mapped=mapped)
    if not isinstance(content, dict) or (meta.is_hetero and not all(isinstance(v, dict) for v in content.values())):
        raise DataError(f"{path} holds no dictionary of tensors", hint=HINT)
    if meta.is_hetero:
        return content
    return {NODE if stem == "node_feats" else EDGE: content}


def _load(path: Path, *, mapped: bool = False) -> Any:
    if not path.is_file():
        raise DataError(f"{path} is missing", hint=HINT)
    with _containers_only():
        return load_tensors(path, HINT, mapped=mapped)


class PartitionedRows:
    """Tensors with one row per node or edge of a type, assembled from the rows of each part.

    Args:
        parts: the part of each row, ``[rows]``.
        elements: ``nodes`` or ``edges`` and their type, for messages.
    """

    def __init__(self, parts: Tensor, elements: str) -> None:
        self.parts, self.total, self.elements = parts, parts.numel(), elements
        self._tensors: dict[str, Tensor] = {}
        self._filled: dict[str, int] = {}

    def check(self, ids: Tensor, part: int, path: Path) -> None:
        """Check that the ids in a part's file are in range, distinct, and owned by the part."""
        wrong = (ids < 0) | (ids >= self.total)
        if wrong.any():
            raise DataError(f"{path}: id {int(ids[wrong][0])}; there are {self.total} {self.elements}", hint=HINT)
        foreign = ids[self.parts[ids] != part]
        if foreign.numel():
            owner = int(self.parts[foreign[0]])
            raise DataError(
                f"{path} has id {int(foreign[0])} of {self.elements}, which the map assigns to part {owner}", hint=HINT
            )
        if ids.unique().numel() != ids.numel():
            raise DataError(f"{path} has an id of {self.elements} twice", hint=HINT)

    def put(self, name: str, ids: Tensor, value: object, path: Path) -> None:
        """Write the rows ``ids`` of a tensor."""
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.dim() == 0:
            content = f"a {value.layout} tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise DataError(f"{path}: {name} is {content}; a dense tensor is expected", hint=HINT)
        if value.size(0) != ids.numel():
            raise DataError(
                f"{path}: {name} has {value.size(0)} rows, and the part has {ids.numel()} {self.elements}", hint=HINT
            )
        whole = self._tensors.setdefault(name, value.new_zeros((self.total, *value.shape[1:])))
        if (whole.dtype, whole.shape[1:]) != (value.dtype, value.shape[1:]):
            raise DataError(
                f"{path}: a row of {name} is {value.dtype} {list(value.shape[1:])}, and in another part {whole.dtype} "
                f"{list(whole.shape[1:])}",
                hint=HINT,
            )
        whole[ids] = value
        self._filled[name] = self._filled.get(name, 0) + ids.numel()

    def complete(self, folder: Path) -> dict[str, Tensor]:
        """Return the tensors after checking that the parts filled all rows."""
        for name, filled in self._filled.items():
            if filled != self.total:
                raise DataError(
                    f"{folder}: the parts have {name} of {filled} {self.elements}; there are {self.total}", hint=HINT
                )
        return self._tensors


@contextmanager
def _containers_only() -> Iterator[None]:
    """Restrict ``torch.load`` to tensors and plain containers.

    The Partitioner saves a ``defaultdict``, which torch's safe loader constructs but cannot fill, so a plain dictionary
    replaces it. PyG registers safe classes that would take precedence, so the list is cleared first.
    """
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals([(_plain_dict, "collections.defaultdict"), (dict, "builtins.dict")]):
            yield
    finally:
        torch.serialization.add_safe_globals(allowed)


def _plain_dict(*_: object) -> dict[Any, Any]:
    return {}
