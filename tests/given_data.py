"""A data module around a graph in memory, for the tests of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_geometric.data import Data, HeteroData

from gtrain.data.batches.loader import SeedLoader
from gtrain.data.module import GraphDataModule


class Given(GraphDataModule):
    """A data module around a graph in memory."""

    name = "given"

    def __init__(self, graph: Data | HeteroData, folder: Path, **options: Any) -> None:
        super().__init__(store=str(folder), **{"split": "random", **options})
        self.graph = graph

    def identity(self) -> dict[str, Any]:
        return {}

    def read(self) -> Data | HeteroData:
        return self.graph.clone()


def opened(module: GraphDataModule) -> GraphDataModule:
    module.prepare_data()
    return module


def batches(module: GraphDataModule, split: str = "train") -> list[Any]:
    return list(SeedLoader(module.open_store(), split, task=module.task, num_negatives=1))
