"""A graph that DGL has cut into parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.config import DGLPartitionConfig
from gtrain.data.module import OUTLINE, file_stamp
from gtrain.data.readers.dgl import Book, DGLGraph, EdgeType, Ranges, read_book, read_graph, read_tensors, tensor_names
from gtrain.data.readers.files import find_file
from gtrain.data.sources.given_parts import GivenPartsData
from gtrain.errors import DataError

ANEW = "copy all files of the folder again, or partition the graph anew with dgl.distributed.partition_graph"


class DGLPartitionData(GivenPartsData):
    """What ``dgl.distributed.partition_graph`` wrote, homogeneous or heterogeneous; DGL itself is not needed.

    The parts of the folder become the parts of the store. Nodes and edges have the ids that DGL gave them: within a
    type, those of part 0 come first, then those of part 1, and so on; the ids of the graph before it was partitioned
    are not in the folder, unless they were kept as a feature. Only a part's own nodes and edges are read, not the
    copies of others that it holds. Features keep their names, but for those named here, and a feature ``orig_id``,
    which becomes ``original_id``; ``*_mask`` become bool.

    Its settings are those of :class:`~gtrain.data.config.DGLPartitionConfig`.
    """

    name = "dgl_partition"

    settings_type = DGLPartitionConfig
    settings: DGLPartitionConfig

    def __init__(self, settings: DGLPartitionConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        given = self.settings
        self._check_partitioner()
        self.path = given.path
        self._named: dict[str, tuple[str | None, str | None]] = {
            "data.features": (given.features, "feat"),
            "data.labels": (given.labels, "label"),
            "data.edge_weights": (given.edge_weights, None),
        }
        self.renamed_nodes = _renamed({given.features: "x", given.labels: "y"})
        self.renamed_edges = _renamed({given.features: "edge_attr", given.edge_weights: "edge_weight"})
        self._book: Book | None = None

    def identity(self) -> dict[str, Any]:
        """Return the stamps of all files, and the names of features."""
        book = self._read_book()
        files = [book.path, *(file for part in book.files for file in part.values())]
        names = {"nodes": self.renamed_nodes, "edges": self.renamed_edges}
        return {"files": [[file.parent.name, *file_stamp(file)] for file in files], "names": names}

    @property
    def origin(self) -> str:
        """Where the graph comes from, for messages."""
        return f"data.path={self.path}"

    @property
    def outline(self) -> dict[str, Any]:  # type: ignore[override]
        """The types of the partition book, and the names and shapes of the tensors of part 0."""
        book = self._read_book()
        nodes = self._shapes(book, "node_feats", {name: r.key for name, r in book.nodes.items()}, self.renamed_nodes)
        edges = self._shapes(book, "edge_feats", {name: r.key for name, r in book.edges.items()}, self.renamed_edges)
        widths = {name: OUTLINE["num_features"] if "x" in found else None for name, found in nodes.items()}
        labelled = [name for name, found in nodes.items() if "y" in found]
        y = nodes[labelled[0]]["y"] if labelled else ()
        classes = OUTLINE["num_classes"] if labelled else None
        facts = {**OUTLINE, "num_classes": classes, "multilabel": len(y) == 2 and y[1] > 1}
        if book.is_hetero:
            sizes = dict.fromkeys(book.nodes, OUTLINE["num_nodes"])
            target = (self.target or labelled[0]) if labelled and self.task == "node" else None
            more: dict[str, Any] = {"sparse_features": [], "target": target, "edge_types": tuple(book.edges)}
            return {**facts, **more, "num_nodes": sizes, "num_features": widths}
        relations = 2 if any("edge_type" in found for found in edges.values()) else None
        return {**facts, "num_features": next(iter(widths.values())), "num_relations": relations}

    def check_inputs(self) -> None:
        """Refuse missing files of the parts, and features that are named and not there."""
        super().check_inputs()
        book = self._read_book()
        for part in book.files:
            for path in part.values():
                if not path.is_file():
                    raise DataError(f"there is no {path}", hint="copy all files that DGL's partition_graph wrote")
        nodes = self._shapes(book, "node_feats", {name: r.key for name, r in book.nodes.items()}, self.renamed_nodes)
        edges = self._shapes(book, "edge_feats", {name: r.key for name, r in book.edges.items()}, self.renamed_edges)
        self._check_named(set().union(*nodes.values()), set().union(*edges.values()))

    def _shapes(
        self, book: Book, kind: str, keys: Mapping[Any, str], renamed: Mapping[str, str]
    ) -> dict[Any, dict[str, tuple[int, ...]]]:
        """Return the shapes of part 0's tensors by type and, under their new names, by name."""
        found: dict[Any, dict[str, tuple[int, ...]]] = {name: {} for name in keys}
        of = {key: name for name, key in keys.items()}
        for path, shape in tensor_names(book.files[0][kind]).items():
            key, _, name = path.rpartition("/")
            if key in of:
                found[of[key]][renamed.get(name, name)] = shape
        return found

    def given_parts(self) -> int:
        """Return the number of parts of the folder."""
        return self._read_book().num_parts

    def read(self) -> Data | HeteroData:
        """Read all parts."""
        book = self._read_book()
        nodes: dict[str, list[dict[str, Tensor]]] = {name: [] for name in book.nodes}
        edges: dict[EdgeType, list[dict[str, Tensor]]] = {name: [] for name in book.edges}
        for part in range(book.num_parts):
            node_features, edge_features = (
                read_tensors(book.files[part][f"{kind}_feats"]) for kind in ("node", "edge")
            )
            graph = read_graph(book.files[part]["part_graph"])
            for node_type, pieces in nodes.items():
                where = book.files[part]["node_feats"]
                pieces.append(_features(node_features, book.nodes[node_type], part, where, self.renamed_nodes))
            for edge_type, pieces in edges.items():
                where = book.files[part]["edge_feats"]
                found = _features(edge_features, book.edges[edge_type], part, where, self.renamed_edges)
                pieces.append({"edge_index": _edge_index(book, edge_type, graph, part), **found})
        return self._assemble(book, nodes, edges)

    def _read_book(self) -> Book:
        if self._book is None:
            self._book = read_book(find_file("data.path", self.path, self.root))
        return self._book

    def _assemble(
        self, book: Book, nodes: dict[str, list[dict[str, Tensor]]], edges: dict[EdgeType, list[dict[str, Tensor]]]
    ) -> Data | HeteroData:
        graph: Data | HeteroData = HeteroData() if book.is_hetero else Data()
        for node_type, pieces in nodes.items():
            store = graph[node_type] if isinstance(graph, HeteroData) else graph
            store.num_nodes = book.nodes[node_type].total
            for name, value in _join(pieces, f"{book.path}: nodes of {node_type}").items():
                store[name] = value.bool() if name.endswith("_mask") else value
            if "x" in store and not store.x.is_floating_point():
                store.x = store.x.float()
        for edge_type, pieces in edges.items():
            store = graph[edge_type] if isinstance(graph, HeteroData) else graph
            for name, value in _join(pieces, f"{book.path}: edges of {','.join(edge_type)}").items():
                store[name] = value
        theirs = {name for pieces in edges.values() for name in pieces[0]} - {"edge_index"}
        self._check_named({name for pieces in nodes.values() for name in pieces[0]}, theirs)
        parts = {node_type: ranges.parts for node_type, ranges in book.nodes.items()}
        self.given = parts if book.is_hetero else next(iter(parts.values()))
        return graph

    def _check_named(self, own: set[str], theirs: set[str]) -> None:
        """Refuse an option that names a feature which no type has; the defaults may be missing.

        Args:
            own: names of the tensors of nodes.
            theirs: of edges.
        """
        there = {"data.features": {"x"} & own | {"edge_attr"} & theirs, "data.labels": {"y"} & own}
        there["data.edge_weights"] = {"edge_weight"} & theirs
        for key, (name, default) in self._named.items():
            if name not in (None, default) and not there[key]:
                raise DataError(
                    f"{self.origin}: {key}={name}, and there is no such feature; the nodes have "
                    f"{', '.join(sorted(own)) or 'none'}, the edges {', '.join(sorted(theirs)) or 'none'}",
                    hint=f"correct {key}",
                )


def _renamed(names: dict[str | None, str]) -> dict[str, str]:
    return {"orig_id": "original_id", **{name: new for name, new in names.items() if name is not None}}


def _features(
    found: dict[str, Tensor], ranges: Ranges, part: int, where: Path, renamed: dict[str, str]
) -> dict[str, Tensor]:
    """Return the tensors of a type in one part, under their new names."""
    count = int(ranges.counts[part])
    tensors = {}
    for key, value in found.items():
        kind, _, name = key.rpartition("/")
        if kind != ranges.key:
            continue
        if value.dim() == 0 or value.size(0) != count:
            rows = value.size(0) if value.dim() else 0
            raise DataError(f"{where}: {key} has {rows} rows, and part {part} has {count} of {kind}", hint=ANEW)
        tensors[renamed.get(name, name)] = value
    return tensors


def _edge_index(book: Book, edge_type: EdgeType, graph: DGLGraph, part: int) -> Tensor:
    """Return the edges of a type that a part owns, in the order of their ids, between ids within node types."""
    path, ranges = book.files[part]["part_graph"], book.edges[edge_type]
    node_ids, edge_ids, inner = (
        _column(kind, name, path)
        for kind, name in ((graph.node_data, "_ID"), (graph.edge_data, "_ID"), (graph.edge_data, "inner_edge"))
    )
    first, last = int(ranges.first[part]), int(ranges.last[part])
    own = ((inner != 0) & (edge_ids >= first) & (edge_ids < last)).nonzero().flatten()
    own = own[edge_ids[own].argsort()]
    if not torch.equal(edge_ids[own], torch.arange(first, last)):
        raise DataError(
            f"{path} has {own.numel()} edges of {ranges.key}, and the ids {first}..{last - 1} are part {part}'s",
            hint=ANEW,
        )
    ends = []
    for node_type, side in ((edge_type[0], graph.source), (edge_type[2], graph.target)):
        ids = book.nodes[node_type].local(node_ids[side[own]])
        if (ids < 0).any():
            wrong = int(node_ids[side[own]][ids < 0][0])
            raise DataError(f"{path}: an edge of {ranges.key} names node {wrong}, which is no {node_type}", hint=ANEW)
        ends.append(ids)
    return torch.stack(ends)


def _column(tensors: dict[str, Tensor], name: str, path: Path) -> Tensor:
    if name not in tensors:
        raise DataError(f"{path} has no {name}; it has {', '.join(tensors) or 'nothing'}", hint=ANEW)
    return tensors[name].long()


def _join(pieces: list[dict[str, Tensor]], what: str) -> dict[str, Tensor]:
    """Join the parts of each tensor."""
    for part, piece in enumerate(pieces):
        for name, value in pieces[0].items():
            if name not in piece:
                raise DataError(f"{what}: part 0 has {name}, and part {part} has not", hint=ANEW)
            if name != "edge_index" and (value.dtype, value.shape[1:]) != (piece[name].dtype, piece[name].shape[1:]):
                told = f"{piece[name].dtype} {list(piece[name].shape[1:])}, and {value.dtype} {list(value.shape[1:])}"
                raise DataError(f"{what}: a row of {name} is {told} in parts {part} and 0", hint=ANEW)
        for name in piece:
            if name not in pieces[0]:
                raise DataError(f"{what}: part {part} has {name}, and part 0 has not", hint=ANEW)
    return {name: torch.cat([piece[name] for piece in pieces], dim=int(name == "edge_index")) for name in pieces[0]}
