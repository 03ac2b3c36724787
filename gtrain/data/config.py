"""Typed schemas of the configuration group ``data``; light, so that composing a configuration imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING


@dataclass
class DataConfig:
    """Options that every source takes; ``gtrain.data.module.GraphDataModule`` explains them."""

    _target_: str = MISSING
    root: str = "data"
    store: str = "data/stores"
    num_parts: int | None = None
    partitioner: str = "metis"
    partition_path: str | None = None
    split: str = "public"
    split_index: int = 0
    train_fraction: float = 0.6
    val_fraction: float = 0.2
    train_per_class: int = 20
    val_per_class: int = 30
    normalize_features: bool = False
    seed: int = 0
    batch_size: int | None = None
    num_neighbors: list[int] | None = None
    unlabelled: int | None = None
    num_classes: int | None = None


@dataclass
class PlantedConfig(DataConfig):
    """A generated graph whose best possible accuracy is known."""

    _target_: str = "gtrain.data.planted.PlantedData"
    split: str = "random"
    num_nodes: int = 5000
    num_edges: int = 50000
    num_features: int = 64
    num_classes: int = 8
    homophily: float = 0.8
    degree_exponent: float = 3.0
    feature_signal: float = 2.0
    label_noise: float = 0.1


@dataclass
class PlanetoidConfig(DataConfig):
    """Cora, CiteSeer or PubMed."""

    _target_: str = "gtrain.data.pyg.PlanetoidData"
    name: str = "Cora"
    normalize_features: bool = True


@dataclass
class AmazonConfig(DataConfig):
    """Amazon Computers or Photo."""

    _target_: str = "gtrain.data.pyg.AmazonData"
    name: str = "Photo"
    split: str = "per_class"


@dataclass
class CoauthorConfig(DataConfig):
    """Coauthor CS or Physics."""

    _target_: str = "gtrain.data.pyg.CoauthorData"
    name: str = "CS"
    split: str = "per_class"


@dataclass
class HeterophilousConfig(DataConfig):
    """One of the heterophilous graphs."""

    _target_: str = "gtrain.data.pyg.HeterophilousData"
    name: str = "Minesweeper"


@dataclass
class PyGConfig(DataConfig):
    """Any data set class of ``torch_geometric.datasets``."""

    _target_: str = "gtrain.data.pyg.PyGData"
    name: str = "Planetoid"
    options: Any = None  # a typed dictionary would refuse `data.options={...}`: Hydra closes those


@dataclass
class EdgesConfig(DataConfig):
    """An edge list in a text file."""

    _target_: str = "gtrain.data.edges.EdgesData"
    split: str = "random"
    path: str = MISSING
    features: str | None = None
    labels: str | None = None
    num_nodes: int | None = None
    undirected: bool = False


SCHEMAS: dict[str, type[DataConfig]] = {
    "planted": PlantedConfig,
    "planetoid": PlanetoidConfig,
    "amazon": AmazonConfig,
    "coauthor": CoauthorConfig,
    "heterophilous": HeterophilousConfig,
    "pyg": PyGConfig,
    "edges": EdgesConfig,
}
"""The schema of each option of the group ``data``."""


def register() -> None:
    """Put the schemas into Hydra's ConfigStore, as the group ``schema/data``."""
    from hydra.core.config_store import ConfigStore  # only the command line has a use for Hydra

    for name, schema in SCHEMAS.items():
        ConfigStore.instance().store(group="schema/data", name=name, node=schema, provider="gtrain")
