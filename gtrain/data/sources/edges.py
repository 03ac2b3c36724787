"""A graph from an edge list of any size, with features and labels from separate files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from gtrain.data.config import EdgesConfig
from gtrain.data.ingest.format import EdgeFormat
from gtrain.data.module import OUTLINE, GraphDataModule, file_stamp
from gtrain.data.readers.entities import feature_stamps, read_features
from gtrain.data.readers.files import FileNames, edge_set_facts, find_edge_sets
from gtrain.data.readers.node_files import GENERATED, NodeFiles, generate_features
from gtrain.data.schema import DataSchema
from gtrain.errors import ConfigError
from gtrain.graph.store.manifest import NODE_TYPE
from gtrain.graph.store.tables import EdgeArrays

if TYPE_CHECKING:
    # This module imports kernels, which only a process that reads needs.
    from gtrain.data.ingest.edge_list import EdgeList

IN_MEMORY_EDGES = 10_000_000
"""The largest number of edges, counting both directions, of a graph that is held in memory."""


class EdgesData(GraphDataModule[EdgesConfig]):
    """A graph from an edge list: one edge per line, ``source target`` or ``source target weight``.

    The edges are in one or several files, text (also ``.gz``) or Parquet. Columns of text are separated by commas,
    semicolons, tabs or spaces; lines that start with ``#`` or ``%`` are comments, and a first line of column names is
    skipped. File names are relative to the working directory or to ``root``. Lists of more than ``IN_MEMORY_EDGES``
    edges stay on disk.

    Its settings are those of :class:`~gtrain.data.config.EdgesConfig`.
    """

    name = "edges"

    def __init__(self, settings: EdgesConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        chosen = self.settings
        self.schema = DataSchema(chosen.entities, chosen.relations)
        one_type = {key: getattr(chosen, key) for key in ("features", "labels", "num_nodes", "undirected")}
        unsuited = [key for key, value in one_type.items() if value not in (None, False)]
        if (self.schema.is_typed or self.schema.featurized) and unsuited:
            raise ConfigError(
                f"data.{unsuited[0]}={one_type[unsuited[0]]} was set with entity types, whose ids start at 0 in each.",
                hint=f"remove data.{unsuited[0]}, or data.relations.",
            )
        self.edge_sets: list[FileNames] = list(chosen.edge_sets or []) if chosen.path is None else [chosen.path]
        self.format = EdgeFormat(
            chosen.ids,
            None if chosen.columns is None else tuple(chosen.columns),
            chosen.weight,
            chosen.relation,
            chosen.time,
            chosen.header,
            chosen.separator,
            chosen.comments,
        )
        is_number = chosen.label_kind == "number"
        self._node_files = NodeFiles(
            chosen.features, chosen.labels, self.root, self.unlabelled, is_number, chosen.comments
        )

    @property
    def outline(self) -> dict[str, Any] | None:  # type: ignore[override]
        """The facts that the settings alone determine: whether the graph has features, labels and relations."""
        if self.schema.has_settings:
            return None
        # The numbers are placeholders: only None or not None is known before the files are read.
        return {
            **OUTLINE,
            "num_features": None if self.settings.features is None else OUTLINE["num_features"],
            "num_relations": None if self.settings.relation is None else 2,
            **self._label_outline(),
        }

    def _label_outline(self) -> dict[str, Any]:
        if self.settings.labels is None:
            return {"num_classes": None}
        if self.number_labels:
            return {"num_classes": None, "label_scale": {"mean": 0.0, "deviation": 1.0}}
        return {"num_classes": OUTLINE["num_classes"]}

    @property
    def number_labels(self) -> frozenset[str]:
        known = self._trained_on_numbers(NODE_TYPE)
        return frozenset([NODE_TYPE] if (self.settings.label_kind == "number" if known is None else known) else [])

    def check_files(self) -> None:
        """Refuse missing files, and columns that the first lines, or the schemas of Parquet files, lack."""
        from gtrain.data.ingest.format import text_layout
        from gtrain.data.ingest.parquet import ParquetReader, is_parquet

        for path in self._files()[0]:
            if is_parquet(path):
                ParquetReader(path, self.format, None)
            else:
                text_layout(path, self.format, None)

    def identity(self) -> dict[str, Any]:
        """Return the stamps of the files and the options that control how they are read."""
        settings = self.settings
        paths, sets = self._files()
        stamps: dict[str, Any] = {"path": [file_stamp(path) for path in paths]}
        if sets is not None:
            stamps["edge_sets"] = sets
        node_files = {"features": self._node_files.features_path, "labels": self._node_files.labels_path}
        stamps |= {key: file_stamp(path) for key, path in node_files.items() if path is not None}
        options = {
            "generated": settings.features if settings.features in GENERATED else None,
            "num_nodes": settings.num_nodes,
            "undirected": settings.undirected,
            **({} if settings.label_kind == "class" else {"label_kind": settings.label_kind}),
        }
        stamps |= feature_stamps(self.schema, self.root)
        return {**stamps, **options, **asdict(self.format), **self.schema.identity()}

    @property
    def origin(self) -> str:
        """Where the graph comes from, for messages."""
        path = self.settings.path if self.settings.path is not None else self.edge_sets
        files = {"path": path, "features": self.settings.features, "labels": self.settings.labels}
        return ", ".join(f"data.{key}={file}" for key, file in files.items() if file is not None)

    def read(self) -> Data | EdgeArrays:
        """Read the files; data that is too large for memory stays on disk."""
        from gtrain.data.ingest.edge_list import NodeLimit, id_type, most_nodes, read_edge_list

        (paths, sets), options = self._files(), self.format
        if id_type(paths, options) == "string":
            if self.settings.num_nodes is not None:
                raise ConfigError(
                    f"data.num_nodes={self.settings.num_nodes} was set, but the ids are names: the edges name the "
                    "nodes",
                    hint="remove data.num_nodes, or set data.ids=int",
                )
            edges = read_edge_list(paths, options, self.store, None, sets, self.check_negative)
            x, y = self._node_files.read_named(edges.names)
            num_nodes = edges.num_nodes
        else:
            nodes = self._node_files.read(self.settings.num_nodes)
            limit = NodeLimit(nodes.num_nodes, self._counted_by(nodes.labels))
            edges = read_edge_list(paths, options, self.store, limit, sets, self.check_negative)
            num_nodes = nodes.count(edges.num_nodes, lambda labels: most_nodes(edges.num_edges + labels))
            x, y = nodes.x, nodes.y(num_nodes)
        names = {"node": edges.names, "relation": edges.relations}
        tensors = {"x": x, "y": y}
        if self.schema.is_typed or self.schema.featurized:
            from gtrain.data.prepare.typed_edges import TypedEdges

            typed = TypedEdges(edges, self.schema, self.store)
            bags, feature_names, self._facts = read_features(self.schema, self.root, typed.counts, typed.names_of)
            num_nodes, names = typed.num_nodes, {**typed.names, "relation": edges.relations, **feature_names}
            tensors |= bags
            self._facts |= {**self.schema.facts(typed.counts, typed.ends), "num_relations": len(typed.ends)}
        self._names = {node_type: strings for node_type, strings in names.items() if strings is not None}
        self._facts |= {"negative_weight": edges.negative_weight} if edges.negative_weight is not None else {}
        self._facts |= edge_set_facts(self.edge_sets)
        return self._graph(edges, num_nodes, {name: tensor for name, tensor in tensors.items() if tensor is not None})

    def _files(self) -> tuple[list[Path], list[int] | None]:
        """Return all files, and the number of each file's edge set; see :func:`find_edge_sets`."""
        key = "data.path" if self.settings.path is not None else "data.edge_sets"
        return find_edge_sets(key, self.edge_sets, self.root)

    def _counted_by(self, labels: object) -> str:
        """Return the option that determines the number of nodes, for messages."""
        if self.settings.num_nodes is not None:
            return f"data.num_nodes={self.settings.num_nodes}"
        if self._node_files.features_path is not None:
            return f"data.features={self.settings.features}"
        return f"data.labels={self.settings.labels}" if isinstance(labels, Tensor) else "the largest id"

    def _graph(self, edges: EdgeList, num_nodes: int, tensors: dict[str, Tensor]) -> Data | EdgeArrays:
        undirected, features = self.settings.undirected, self.settings.features
        if edges.num_edges * (2 if undirected else 1) <= IN_MEMORY_EDGES:
            graph = _in_memory(edges, num_nodes, undirected)
            if features in GENERATED:
                tensors["x"] = generate_features(features, [graph.edge_index[1].numpy()], num_nodes)
            graph.update(tensors)
            return graph
        if undirected:
            edges.append_reversed()
        if features in GENERATED:
            tensors["x"] = generate_features(features, edges.columns["target"].chunks(), num_nodes)
        columns = {name: column.array() for name, column in edges.columns.items()}
        return EdgeArrays(num_nodes, columns.pop("source"), columns.pop("target"), columns, dict(tensors))


def _in_memory(edges: EdgeList, num_nodes: int, undirected: bool) -> Data:
    """Return the edges as a ``Data``; merges duplicate edges of an undirected graph without times."""
    merged = undirected and "edge_time" not in edges.columns
    if undirected and not merged:
        edges.append_reversed()
    columns = {name: column.array() for name, column in edges.columns.items()}
    ends = [columns.pop(name).astype(np.int64, copy=False) for name in ("source", "target")]
    data = Data(edge_index=torch.from_numpy(np.stack(ends)), num_nodes=num_nodes)
    data.update({name: torch.from_numpy(np.array(values)) for name, values in columns.items()})
    if merged and "edge_weight" in data:
        data.edge_index, data.edge_weight = to_undirected(
            data.edge_index, data.edge_weight, num_nodes=num_nodes, reduce="mean"
        )
    elif merged:
        data.edge_index = to_undirected(data.edge_index, num_nodes=num_nodes)
    return data
