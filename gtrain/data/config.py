"""Typed schemas of the configuration group ``data``; light, so that composing a configuration imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import MISSING


@dataclass
class DataConfig:
    """Options that every source takes; ``gtrain.data.module.GraphDataModule`` explains them."""

    _target_: str = MISSING
    root: str = "data"
    store: str = "data/stores"
    num_parts: int | None = None
    partitioner: str = "auto"
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
    num_neighbors: Any = None  # a list, or lists by edge type
    replace: bool = False
    disjoint: bool = False
    subgraph_type: str = "directional"
    temporal_strategy: str | None = None
    time_attr: str | None = None
    weight_attr: str | None = None
    neg_sampling: str | None = None
    neg_sampling_ratio: float = 1.0
    unlabelled: int | None = None
    num_classes: int | None = None
    task: str = "${oc.select:model.task,node}"
    target: str | None = None


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
    self_loops: bool = False


@dataclass
class PlanetoidConfig(DataConfig):
    """Cora, CiteSeer or PubMed."""

    _target_: str = "gtrain.data.sources.pyg.PlanetoidData"
    name: str = "Cora"
    normalize_features: bool = True


@dataclass
class AmazonConfig(DataConfig):
    """Amazon Computers or Photo."""

    _target_: str = "gtrain.data.sources.pyg.AmazonData"
    name: str = "Photo"
    split: str = "per_class"
    largest_component: bool = False


@dataclass
class CoauthorConfig(DataConfig):
    """Coauthor CS or Physics."""

    _target_: str = "gtrain.data.sources.pyg.CoauthorData"
    name: str = "CS"
    split: str = "per_class"
    largest_component: bool = False


@dataclass
class HeterophilousConfig(DataConfig):
    """One of the heterophilous graphs."""

    _target_: str = "gtrain.data.sources.pyg.HeterophilousData"
    name: str = "Minesweeper"


@dataclass
class PyGConfig(DataConfig):
    """Any data set class of ``torch_geometric.datasets``."""

    _target_: str = "gtrain.data.sources.pyg.PyGData"
    name: str = "Planetoid"
    options: Any = None  # a typed dictionary would refuse `data.options={...}`: Hydra closes those


@dataclass
class EdgesConfig(DataConfig):
    """An edge list in text or Parquet files."""

    _target_: str = "gtrain.data.sources.edges.EdgesData"
    split: str = "random"
    path: Any = None  # one name, or a list of them
    edge_sets: Any = None  # a list of what path may be
    ids: str = "auto"
    columns: Any = None  # positions or names
    weight: Any = None
    relation: Any = None
    time: Any = None
    header: bool | None = None
    separator: str | None = None
    comments: str = "#%"
    features: str | None = None
    labels: str | None = None
    num_nodes: int | None = None
    undirected: bool = False
    entities: Any = None  # settings by type
    relations: Any = None  # a list of {name, lhs, rhs}


@dataclass
class KGConfig(DataConfig):
    """A knowledge graph from files of triples."""

    _target_: str = "gtrain.data.sources.kg.KGData"
    task: str = "${oc.select:model.task,link}"
    batch_size: int | None = 1000
    path: str = MISSING
    edge_sets: Any = None  # a list of files, or of lists of them
    unknown: str = "error"
    entities: Any = None  # settings by type
    relations: Any = None  # a list of {name, lhs, rhs}


@dataclass
class LibsvmConfig(DataConfig):
    """Sparse rows with labels from libsvm files."""

    _target_: str = "gtrain.data.sources.libsvm.LibsvmData"
    partitioner: str = "random"
    batch_size: int | None = 512
    val_fraction: float = 0.1
    path: str = MISSING
    test_path: str | None = None
    index_base: str = "auto"
    num_features: int | None = None
    labels: str = "auto"


@dataclass
class PlantedHeteroConfig(DataConfig):
    """A generated heterogeneous graph whose best possible accuracy is known."""

    _target_: str = "gtrain.data.planted.hetero.PlantedHeteroData"
    split: str = "random"
    num_papers: int = 4000
    num_authors: int = 2000
    num_terms: int = 500
    num_writes: int = 12000
    num_cites: int = 12000
    num_mentions: int = 20000
    writes_homophily: float = 0.8
    cites_homophily: float = 0.7
    mentions_homophily: float = 0.4
    num_classes: int = 4
    num_features: int = 64
    num_author_features: int = 16
    feature_signal: float = 1.0
    degree_exponent: float = 3.0
    label_noise: float = 0.1


@dataclass
class PlantedTemporalConfig(DataConfig):
    """Generated events whose best possible AUC is known."""

    _target_: str = "gtrain.data.planted.temporal.PlantedTemporalData"
    split: str = "time"
    task: str = "${oc.select:model.task,link}"
    num_nodes: int = 1000
    num_events: int = 50000
    num_communities: int = 20
    predictability: float = 0.9
    drift: float = 0.5
    time_span: int = 1_000_000
    degree_exponent: float = 3.0


@dataclass
class PlantedKGConfig(DataConfig):
    """A generated knowledge graph whose best possible filtered MRR is known."""

    _target_: str = "gtrain.data.planted.kg.PlantedKGData"
    task: str = "${oc.select:model.task,link}"
    num_entities: int = 1000
    num_relations: int = 10
    num_positions: int = 200
    num_triples: int = 45000
    noise: float = 0.05
    held_out: float = 0.05
    num_types: int = 1
    entities: Any = None  # settings by type
    relations: Any = None  # a list of {name, ...}


@dataclass
class PlantedSparseConfig(DataConfig):
    """Generated rows of sparse features whose best possible accuracy and AUC are known."""

    _target_: str = "gtrain.data.planted.sparse.PlantedSparseData"
    split: str = "random"
    num_rows: int = 20000
    num_features: int = 1000
    features_per_row: int = 20
    zipf_exponent: float = 1.0
    binary: bool = True
    signal: float = 2.0
    positive_rate: float = 0.3


@dataclass
class EntitiesConfig(DataConfig):
    """RDF graphs whose entities are classified."""

    _target_: str = "gtrain.data.sources.entities.EntitiesData"
    unlabelled: int | None = -1
    val_fraction: float = 0.0
    name: str = "AIFB"


@dataclass
class HeCoConfig(DataConfig):
    """The heterogeneous graphs of HeCo."""

    _target_: str = "gtrain.data.sources.heco.HeCoData"
    name: str = "acm"
    path: str | None = None
    per_class: int = 20


@dataclass
class TemporalConfig(DataConfig):
    """Events with times from a text file."""

    _target_: str = "gtrain.data.sources.temporal.TemporalData"
    split: str = "time"
    train_fraction: float = 0.7
    val_fraction: float = 0.15
    task: str = "${oc.select:model.task,link}"
    path: str = MISSING
    time_column: int = 2
    time_scale: float = 1.0
    features: str | None = None
    bipartite: bool = False


@dataclass
class BigGraphConfig(DataConfig):
    """PyTorch-BigGraph's folders."""

    _target_: str = "gtrain.data.sources.biggraph.BigGraphData"
    task: str = "${oc.select:model.task,link}"
    path: str = MISSING
    edges: Any = None  # a folder or a list of folders, here and below
    val_edges: Any = None
    test_edges: Any = None
    entities: Any = None  # settings by type
    relations: Any = None  # a list of {name, lhs, rhs}
    keep_parts: bool | None = None
    joint_types: Any = "${oc.select:model.joint_types,false}"


@dataclass
class PyGPartitionConfig(DataConfig):
    """A folder of PyG's Partitioner."""

    _target_: str = "gtrain.data.sources.pyg_partition.PyGPartitionData"
    split: str = "random"
    path: str = MISSING
    labels: str | None = None


@dataclass
class DGLPartitionConfig(DataConfig):
    """What DGL's partition_graph wrote."""

    _target_: str = "gtrain.data.sources.dgl_partition.DGLPartitionData"
    path: str = MISSING
    features: str | None = "feat"
    labels: str | None = "label"
    edge_weights: str | None = None


@dataclass
class MusaeConfig(DataConfig):
    """Social networks with sparse features."""

    _target_: str = "gtrain.data.sources.musae.MusaeData"
    split: str = "random"
    name: str = "facebook"
    path: str | None = None
    label: str | None = None


@dataclass
class ParquetConfig(DataConfig):
    """Rows of features with a label, from Parquet files."""

    _target_: str = "gtrain.data.sources.parquet.ParquetData"
    partitioner: str = "random"
    batch_size: int | None = 512
    val_fraction: float = 0.1
    path: str = MISSING
    test_path: str | None = None
    label: str = "label"
    ids: str | None = None
    values: str | None = None
    num_features: int | None = None
    dense: list[str] | None = None
    categorical: list[str] | None = None
    buckets: int = 1048576
    nulls: str = "error"


@dataclass
class OGBConfig(DataConfig):
    """Data sets of the Open Graph Benchmark."""

    _target_: str = "gtrain.data.sources.ogb.OGBData"
    name: str = "ogbn-arxiv"
    undirected: bool | None = None


SCHEMAS: dict[str, type[DataConfig]] = {
    "planted": PlantedConfig,
    "planetoid": PlanetoidConfig,
    "amazon": AmazonConfig,
    "coauthor": CoauthorConfig,
    "heterophilous": HeterophilousConfig,
    "pyg": PyGConfig,
    "edges": EdgesConfig,
    "kg": KGConfig,
    "libsvm": LibsvmConfig,
    "planted_hetero": PlantedHeteroConfig,
    "planted_temporal": PlantedTemporalConfig,
    "planted_kg": PlantedKGConfig,
    "planted_sparse": PlantedSparseConfig,
    "entities": EntitiesConfig,
    "heco": HeCoConfig,
    "temporal": TemporalConfig,
    "biggraph": BigGraphConfig,
    "pyg_partition": PyGPartitionConfig,
    "dgl_partition": DGLPartitionConfig,
    "musae": MusaeConfig,
    "parquet": ParquetConfig,
    "ogb": OGBConfig,
}
"""The schema of each option of the group ``data``."""


@cache
def register() -> None:
    """Put the schemas into Hydra's ConfigStore, as the group ``schema/data``; once."""
    from hydra.core.config_store import ConfigStore  # only the command line has a use for Hydra

    for name, schema in SCHEMAS.items():
        ConfigStore.instance().store(group="schema/data", name=name, node=schema, provider="gtrain")
