"""A graph that DGL has partitioned."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.config import DGLPartitionConfig
from gtrain.data.module import file_stamp
from gtrain.data.readers.dgl import (
    DGLGraph,
    EdgeType,
    IdRanges,
    PartitionBook,
    read_book,
    read_graph,
    read_tensors,
    tensor_shapes,
)
from gtrain.data.readers.files import find_file
from gtrain.data.sources.prepartitioned import PrepartitionedData
from gtrain.errors import DataError

_HINT = "copy all files of the folder again, or partition the graph again with dgl.distributed.partition_graph"


class DGLPartitionData(PrepartitionedData[DGLPartitionConfig]):
    """The output of ``dgl.distributed.partition_graph``, homogeneous or heterogeneous; does not need DGL.

    The parts of the folder become the parts of the store. Nodes and edges have the ids that DGL assigned: within a
    type, those of part 0 come first, then those of part 1, and so on; the folder has the original ids only if they were
    saved as a feature. Of each part, only the nodes and edges that it owns are read, not its copies of others. Features
    keep their names, except those that the settings rename, and ``orig_id``, which becomes ``original_id``. Tensors
    ``*_mask`` become bool.

    Its settings are those of :class:`~gtrain.data.config.DGLPartitionConfig`.
    """

    name = "dgl_partition"

    def __init__(self, settings: DGLPartitionConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        given = self.settings
        self._check_partitioner()
        # New names of the tensors of nodes and of edges.
        self._renamed = {
            "node_feats": _new_names({given.features: "x", given.labels: "y"}),
            "edge_feats": _new_names({given.features: "edge_attr", given.edge_weights: "edge_weight"}),
        }

    def identity(self) -> dict[str, Any]:
        """Return the stamps of all files, and the names of features."""
        files = [self._book.path, *(file for part in self._book.files for file in part.values())]
        names = {"nodes": self._renamed["node_feats"], "edges": self._renamed["edge_feats"]}
        return {"files": [[file.parent.name, *file_stamp(file)] for file in files], "names": names}

    @property
    def outline(self) -> dict[str, Any]:  # type: ignore[override]
        """The types of the partition book, and the names and shapes of the tensors of part 0."""
        nodes, edges = self._shapes()
        return self._outline(nodes, edges, self._book.is_hetero)

    def check_files(self) -> None:
        """Refuse missing files, and settings that name missing features."""
        for part in self._book.files:
            for path in part.values():
                if not path.is_file():
                    raise DataError(f"{path} is missing", hint="copy all files that DGL's partition_graph wrote")
        nodes, edges = self._shapes()
        self._check_features(set().union(*nodes.values()), set().union(*edges.values()))

    @cached_property
    def _book(self) -> PartitionBook:
        return read_book(find_file("data.path", self.settings.path, self.root))

    def _shapes(self) -> list[dict[Any, dict[str, tuple[int, ...]]]]:
        """Return the shapes of part 0's tensors by type and new name: of nodes, and of edges."""
        shapes = []
        for file, types in (("node_feats", self._book.nodes), ("edge_feats", self._book.edges)):
            by_key: dict[str, dict[str, tuple[int, ...]]] = {ranges.key: {} for ranges in types.values()}
            for path, shape in tensor_shapes(self._book.files[0][file]).items():
                key, _, name = path.rpartition("/")
                if key in by_key:
                    by_key[key][self._renamed[file].get(name, name)] = shape
            shapes.append({name: by_key[ranges.key] for name, ranges in types.items()})
        return shapes

    def count_parts(self) -> int:
        """Return the number of parts of the folder."""
        return self._book.num_parts

    def read(self) -> Data | HeteroData:
        """Read all parts."""
        book = self._book
        nodes: dict[str, list[dict[str, Tensor]]] = {name: [] for name in book.nodes}
        edges: dict[EdgeType, list[dict[str, Tensor]]] = {name: [] for name in book.edges}
        for part, files in enumerate(book.files):
            graph = read_graph(files["part_graph"])
            for node_type, tensors in self._read_features("node_feats", book.nodes, part).items():
                nodes[node_type].append(tensors)
            for edge_type, tensors in self._read_features("edge_feats", book.edges, part).items():
                edges[edge_type].append({"edge_index": _edge_index(book, edge_type, graph, part), **tensors})
        edge_names = {name for parts in edges.values() for name in parts[0]} - {"edge_index"}
        self._check_features({name for parts in nodes.values() for name in parts[0]}, edge_names)
        part_of_node = {node_type: ranges.parts for node_type, ranges in book.nodes.items()}
        self.part_of_node = part_of_node if book.is_hetero else next(iter(part_of_node.values()))
        return _assemble(book, nodes, edges)

    def _read_features(self, file: str, types: Mapping[Any, IdRanges], part: int) -> dict[Any, dict[str, Tensor]]:
        """Return the tensors of one part, by type and new name."""
        path = self._book.files[part][file]
        tensors: dict[str, dict[str, Tensor]] = {ranges.key: {} for ranges in types.values()}
        counts = {ranges.key: int(ranges.counts[part]) for ranges in types.values()}
        for name_in_file, value in read_tensors(path).items():
            key, _, name = name_in_file.rpartition("/")
            if key not in tensors:
                continue
            rows = value.size(0) if value.dim() else 0
            if value.dim() == 0 or rows != counts[key]:
                raise DataError(
                    f"{path}: {name_in_file} has {rows} rows, and part {part} has {counts[key]} of {key}", hint=_HINT
                )
            tensors[key][self._renamed[file].get(name, name)] = value
        return {name: tensors[ranges.key] for name, ranges in types.items()}

    def _check_features(self, of_nodes: set[str], of_edges: set[str]) -> None:
        """Refuse a setting other than the default that names a feature which no type has.

        Args:
            of_nodes: names of the tensors of nodes.
            of_edges: names of the tensors of edges.
        """
        for key, default, exists in (
            ("features", "feat", "x" in of_nodes or "edge_attr" in of_edges),
            ("labels", "label", "y" in of_nodes),
            ("edge_weights", None, "edge_weight" in of_edges),
        ):
            name = getattr(self.settings, key)
            if name not in (None, default) and not exists:
                raise DataError(
                    f"{self.origin}: data.{key}={name} names a missing feature; the nodes have "
                    f"{', '.join(sorted(of_nodes)) or 'none'}, the edges {', '.join(sorted(of_edges)) or 'none'}",
                    hint=f"correct data.{key}",
                )


def _new_names(names: dict[str | None, str]) -> dict[str, str]:
    return {"orig_id": "original_id", **{name: new for name, new in names.items() if name is not None}}


def _edge_index(book: PartitionBook, edge_type: EdgeType, graph: DGLGraph, part: int) -> Tensor:
    """Return the edges of a type that a part owns, sorted by edge id, as ids within the node types ``[2, E]``."""
    path, ranges = book.files[part]["part_graph"], book.edges[edge_type]
    for tensors, name in ((graph.node_data, "_ID"), (graph.edge_data, "_ID"), (graph.edge_data, "inner_edge")):
        if name not in tensors:
            raise DataError(f"{path} has no {name}; it has {', '.join(tensors) or 'nothing'}", hint=_HINT)
    node_ids, edge_ids = graph.node_data["_ID"].long(), graph.edge_data["_ID"].long()
    first, last = int(ranges.first[part]), int(ranges.last[part])
    inner = graph.edge_data["inner_edge"] != 0
    owned = (inner & (edge_ids >= first) & (edge_ids < last)).nonzero().flatten()
    owned = owned[edge_ids[owned].argsort()]
    if not torch.equal(edge_ids[owned], torch.arange(first, last)):
        raise DataError(
            f"{path} has {owned.numel()} edges of {ranges.key}, and part {part} owns the ids {first}..{last - 1}",
            hint=_HINT,
        )
    ends = []
    for node_type, side in ((edge_type[0], graph.source), (edge_type[2], graph.target)):
        ids = book.nodes[node_type].local(node_ids[side[owned]])
        if (ids < 0).any():
            wrong = int(node_ids[side[owned]][ids < 0][0])
            raise DataError(
                f"{path}: an edge of {ranges.key} names node {wrong}, which is not a {node_type}", hint=_HINT
            )
        ends.append(ids)
    return torch.stack(ends)


def _assemble(
    book: PartitionBook, nodes: dict[str, list[dict[str, Tensor]]], edges: dict[EdgeType, list[dict[str, Tensor]]]
) -> Data | HeteroData:
    """Return the graph from the tensors of each part."""
    graph: Data | HeteroData = HeteroData() if book.is_hetero else Data()
    for node_type, parts in nodes.items():
        store = graph[node_type] if isinstance(graph, HeteroData) else graph
        store.num_nodes = book.nodes[node_type].total
        for name, value in _concatenate(parts, f"{book.path}: nodes of {node_type}").items():
            store[name] = value.bool() if name.endswith("_mask") else value
        if "x" in store and not store.x.is_floating_point():
            store.x = store.x.float()
    for edge_type, parts in edges.items():
        store = graph[edge_type] if isinstance(graph, HeteroData) else graph
        store.update(_concatenate(parts, f"{book.path}: edges of {','.join(edge_type)}"))
    return graph


def _concatenate(parts: list[dict[str, Tensor]], where: str) -> dict[str, Tensor]:
    """Concatenate each tensor over the parts, which must have the same tensors."""
    for part, tensors in enumerate(parts):
        if differing := parts[0].keys() ^ tensors.keys():
            name = min(differing)
            owner, other = (0, part) if name in parts[0] else (part, 0)
            raise DataError(f"{where}: part {owner} has {name}, and part {other} lacks it", hint=_HINT)
        for name, value in parts[0].items():
            row, first_row = ((tensor.dtype, list(tensor.shape[1:])) for tensor in (tensors[name], value))
            if name != "edge_index" and row != first_row:
                shapes = f"{row[0]} {row[1]}, and {first_row[0]} {first_row[1]}"
                raise DataError(f"{where}: a row of {name} is {shapes} in parts {part} and 0", hint=_HINT)
    return {name: torch.cat([tensors[name] for tensors in parts], dim=int(name == "edge_index")) for name in parts[0]}
