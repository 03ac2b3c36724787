"""A graph from tables of nodes and edges that the user describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from gtrain.data.config import TablesConfig
from gtrain.data.schema import check_type_names
from gtrain.data.tables.description import EdgeDescription, NodeDescription, edge_descriptions, node_descriptions
from gtrain.data.tables.frames import entries, of_networkx
from gtrain.data.tables.graph import TableData
from gtrain.errors import ConfigError


class TablesData(TableData[TablesConfig]):
    """A graph from tables: one row a node or an edge, columns by name, keys of any type.

    Its settings are those of :class:`~gtrain.data.config.TablesConfig`.
    """

    name = "tables"

    def __init__(self, settings: TablesConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        # Both refuse unknown entries.
        labels, edges = [nodes.labels for nodes in self.described_nodes.values()], self.described_edges
        check_type_names([*self.described_nodes, *(end for table in edges for end in table.type[::2])])
        if self.split.kind == "auto":
            named = any(table.split is not None for table in (edges if self.task == "link" else labels))
            self.split = replace(self.split, kind="public" if named else "random")

    def check_files(self) -> None:
        """Refuse settings that name no table, missing files, failing queries and unknown columns."""
        if not self.described_nodes and not self.described_edges:
            raise ConfigError("data=tables has neither data.nodes nor data.edges.", hint="name a file of either.")
        super().check_files()

    @cached_property
    def described_nodes(self) -> dict[str, NodeDescription]:
        """The node tables, by type."""
        return node_descriptions(self.settings.nodes)

    @cached_property
    def described_edges(self) -> list[EdgeDescription]:
        """The edge tables."""
        return edge_descriptions(self.settings.edges, list(self.described_nodes))

    @classmethod
    def of_frames(cls, nodes: Any, edges: Any, settings: Mapping[str, Any]) -> TablesData:
        """Return the data module of frames; see :meth:`~gtrain.data.module.GraphDataModule.from_frames`."""
        return cls(nodes=entries(nodes), edges=entries(edges), **settings)

    @classmethod
    def of_networkx(cls, graph: Any, label: str | None, settings: Mapping[str, Any]) -> TablesData:
        """Return the data module of a graph; see :meth:`~gtrain.data.module.GraphDataModule.from_networkx`."""
        return cls(**of_networkx(graph, label), **settings)
