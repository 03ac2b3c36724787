"""Base of the sources whose data is already partitioned: the parts of the data become the parts of the store."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gtrain.data.module import OUTLINE, GraphDataModule, S
from gtrain.errors import ConfigError, DataError
from gtrain.graph.partition import AUTO

Assignment = Tensor | dict[str, Tensor]


class PrepartitionedData(GraphDataModule[S]):
    """A graph that another program has partitioned.

    A source overrides :meth:`count_parts`, and sets ``part_of_node`` in :meth:`read`. The job needs one rank per part,
    or a single rank, which joins the parts.
    """

    part_of_node: Assignment | None = None
    """The part of each node (by node type); set by :meth:`read`."""

    @abstractmethod
    def count_parts(self) -> int:
        """Return the number of parts of the data."""

    @property
    def num_parts(self) -> int:
        """Parts of the store: those of the data, or one.

        Raises:
            DataError: the job has another number of ranks.
        """
        available = self.count_parts()
        if self._num_parts is None and self.trainer is None:
            return available
        needed = int(GraphDataModule.num_parts.__get__(self))
        if needed not in (1, available):
            raise DataError(
                f"{self.origin} has {available} parts, and {needed} ranks need one each: {available} != {needed}",
                hint=f"run on {available} ranks, or on one, which joins the parts; or partition the graph again into "
                f"{needed}",
            )
        return needed

    def assignment(self) -> Assignment | None:
        """Return the part of each node; part 0 for all nodes if the store has one part."""
        if self.part_of_node is None or self.num_parts == self.count_parts():
            return self.part_of_node
        if isinstance(self.part_of_node, dict):
            return {name: torch.zeros_like(parts) for name, parts in self.part_of_node.items()}
        return torch.zeros_like(self.part_of_node)

    def _check_partitioner(self) -> None:
        """Refuse any partitioner other than the default."""
        if self.partitioner != AUTO:
            raise ConfigError(
                f"data.partitioner={self.partitioner} was set, but {self.name} keeps the parts of the data",
                hint="remove data.partitioner and data.partition_path",
            )
        self.partitioner = "given"  # the store's manifest says so

    def _outline(
        self,
        nodes: Mapping[str, Mapping[str, Any]],
        edges: Mapping[tuple[str, str, str], Mapping[str, Any]],
        is_hetero: bool,
        labelled: str | None = None,
    ) -> dict[str, Any]:
        """Return the outline of a graph from the shapes of its first part's tensors.

        Args:
            nodes: shapes by name, for each node type.
            edges: shapes by name, for each edge type.
            is_hetero: whether the graph has types.
            labelled: the node type with labels in a separate file; None: the first with a tensor ``y``.
        """
        with_y = next((name for name, shapes in nodes.items() if "y" in shapes), None)
        y: tuple[int, ...] = nodes[with_y]["y"] if with_y is not None and labelled is None else ()
        target = labelled or with_y
        widths = {name: OUTLINE["num_features"] if "x" in shapes else None for name, shapes in nodes.items()}
        facts = {
            **OUTLINE,
            "num_classes": None if target is None else OUTLINE["num_classes"],
            "multilabel": len(y) == 2 and y[1] > 1,
        }
        if not is_hetero:
            relations = 2 if any("edge_type" in shapes for shapes in edges.values()) else None
            return {**facts, "num_features": next(iter(widths.values())), "num_relations": relations}
        return {
            **facts,
            "num_nodes": dict.fromkeys(nodes, OUTLINE["num_nodes"]),
            "num_features": widths,
            "sparse_features": [],
            "target": (self.target or target) if target is not None and self.task == "node" else None,
            "edge_types": tuple(edges),
        }
