"""Data of which only the sizes are known: ``gtrain plan`` computes with them, and nothing can train on them."""

from __future__ import annotations

from typing import Any

from torch_geometric.data import Data

from gtrain.data.config import CountsConfig
from gtrain.data.module import GraphDataModule
from gtrain.errors import DataError


class CountedData(GraphDataModule[CountsConfig]):
    """The sizes of a graph, a knowledge graph or rows of sparse features.

    Its settings are those of :class:`~gtrain.data.config.CountsConfig`.
    """

    name = "counts"

    @property
    def outline(self) -> dict[str, Any]:  # type: ignore[override]
        """The facts that a store would state, with the numbers of edges and of training seeds."""
        given, is_link = self.settings, self.task == "link"
        seeds = (given.num_edges if is_link else given.num_nodes) * given.train_fraction
        return {
            "num_nodes": round(given.num_nodes),
            "num_edges": round(given.num_edges),
            "num_seeds": round(given.num_seeds or seeds),
            "num_features": given.num_features,
            "sparse_features": given.features_per_row is not None,
            "features_per_row": given.features_per_row,
            "num_relations": given.num_relations,
            "num_classes": None if is_link else given.num_classes,
            "multilabel": False,
        }

    def identity(self) -> dict[str, Any]:
        """Return the sizes."""
        return self.outline

    def read(self) -> Data:
        """Refuse to train.

        Raises:
            DataError: always.
        """
        raise DataError(
            "data=counts was set; it states the sizes of data that are not here, and only gtrain plan reads them.",
            hint="choose the source of the data, such as data=edges data.path=FILE.",
        )
