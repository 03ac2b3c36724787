"""The settings of the data sources, group ``data``. Light: composing a configuration imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from omegaconf import MISSING, DictConfig

from gtrain.errors import ConfigError
from gtrain.settings import Settings, changed, schema, setting

_ENTITIES = "settings by entity type, see [entity types](data.md#entity-types)"
_RELATIONS = "settings of relations, a list, see [entity types](data.md#entity-types)"
_NAMED = "str or list"
_ENTRIES = "list or null"


_WITHOUT_MASKS = ("random", "per_class", "time")
_SHARE: dict[str, Any] = {"least": 0, "most": 1}
_POWER_LAW: dict[str, Any] = {"above": 2, "hint": "the mean of a power law is finite above 2."}
_AT_LEAST_ONE: dict[str, Any] = {"least": 1, "hint": "set 1 or more, or null."}


class DataSettings(Settings):
    """Base of all settings of the group ``data``."""

    group: ClassVar[str] = "data"


_LABEL_KINDS = {"class": "whole numbers, one for each class", "number": "numbers to predict"}


@dataclass
class DataConfig(DataSettings):
    """The settings of every source."""

    _target_: str = MISSING
    root: str = setting("data", "folder of the raw files", follows="${paths.data}", path=True)
    store: str = setting("data/stores", "folder of the partitioned stores", follows="${paths.stores}", path=True)
    remote_store: str | None = setting(
        None,
        "address of a store in an object store, such as `s3://bucket/stores/cora`, which is read instead of the raw "
        "files, see [stores elsewhere](data.md#stores-elsewhere); `gtrain partition` writes the store there",
    )
    num_parts: int | None = setting(
        None,
        "number of parts; null: one per rank, `strategy=ps`: one, `strategy=pbg`: one per partition",
        **_AT_LEAST_ONE,
    )
    partitioner: str = setting(
        "auto",
        "how the graph is partitioned, see [partitioners](data.md#partitioners)",
        words=("auto", "metis", "kaminpar", "random", "file", "ldg", "fennel"),
    )
    partition_path: str | None = setting(
        None,
        "the part of each node, for `data.partitioner=file`: `.npy`, or text with one integer per node",
        path=True,
    )
    split: str = setting(
        "public",
        "how nodes or edges are divided into train, validation and test",
        words={
            "public": "the masks or held-out edges of the data",
            "random": "fractions of the labelled nodes, or of the edges",
            "per_class": "a number of nodes per class; the others test",
            "time": "fractions in the order of time: the earliest train, the latest test",
        },
    )
    split_index: int = setting(0, "index of the published split, if the data has several")
    train_fraction: float = setting(0.6, "`random`, `time`: fraction of the labelled nodes or of the edges to train on")
    val_fraction: float = setting(0.2, "`random`, `time`: fraction to validate on; the rest is the test split")
    train_per_class: int = setting(20, "`per_class`: training nodes per class")
    val_per_class: int = setting(30, "`per_class`: validation nodes per class; the others test")
    normalize_features: bool = setting(False, "scale each row of the features to sum to 1")
    feature_layout: str = setting(
        "auto",
        "how the features of a graph are stored and multiplied, see [features that are mostly 0]"
        "(data.md#features-that-are-mostly-0)",
        words={
            "auto": "as a dense matrix, in CSR form if at most one element in eight is not 0, as in bags of words",
            "dense": "as a dense matrix",
            "sparse": "as a sparse matrix, which a first layer of its own reads",
        },
    )
    seed: int = setting(
        0, "seed of the generated graph, the split, the partitioner and the order of batches", follows="${seed}"
    )
    batch_size: int | None = setting(
        None, "seeds per optimizer step, over all ranks; null: full batch", **_AT_LEAST_ONE
    )
    num_neighbors: Any = setting(
        None,
        "fan-out: neighbours per node and hop for strategies that sample, such as `[15,10]`; -1: all neighbours of "
        "that hop; null: all of every hop; also by edge type, see [sampling](data.md#sampling)",
        type="list of int, or of lists by edge type, or null",
    )
    replace: bool = setting(False, "sample neighbours with replacement")
    disjoint: bool = setting(False, "sample a separate subgraph for each seed")
    subgraph_type: str = setting(
        "directional",
        "which edges a sampled subgraph has",
        words={
            "directional": "the sampled edges",
            "bidirectional": "the sampled edges and their reverses",
            "induced": "all edges between sampled nodes",
        },
    )
    temporal_strategy: str | None = setting(
        None,
        "how to sample among the neighbours that are not later than the seed; null: ignore times",
        words={"uniform": "uniformly", "last": "the latest ones"},
    )
    time_attr: str | None = setting(
        None,
        "tensor with the times of neighbours; null: the first of these that the graph has",
        words={"time": "times of nodes", "edge_time": "times of edges"},
    )
    weight_attr: str | None = setting(
        None, "edge tensor with the sampling weights of neighbours, such as `edge_weight`"
    )
    neg_sampling: str | None = setting(
        None,
        "negative edges in the batch, in the format of PyG's link loaders, for your own link prediction models",
        words={
            "binary": "`edge_label_index` and `edge_label`",
            "triplet": "`src_index`, `dst_pos_index` and `dst_neg_index`",
        },
    )
    neg_sampling_ratio: float = setting(1.0, "negative edges per true edge")
    unlabelled: int | None = setting(None, "value that marks nodes without a label, such as -1; they are in no split")
    num_classes: int | None = setting(None, "number of classes; null: the largest label + 1")
    task: str = setting(
        "node",
        "what the model predicts; set by the model",
        words={"node": "labels of nodes", "link": "edges"},
        follows="${oc.select:model.task,node}",
    )
    target: str | None = setting(
        None,
        "in a heterogeneous graph, the node type or the edge type `source__relation__target` to predict; null: the "
        "only possible one",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.partitioner == "file") != (self.partition_path is not None):
            raise ConfigError(
                f"data.partitioner={self.partitioner} with data.partition_path={self.partition_path}",
                hint="set both data.partitioner=file and data.partition_path=FILE, or neither",
            )
        if self.neg_sampling is not None and self.task != "link":
            raise ConfigError(
                f"data.neg_sampling={self.neg_sampling} was set, and data.task={self.task}.",
                hint="negative edges are for data.task=link; set data.neg_sampling=null",
            )


@dataclass
class MemoryConfig(DataConfig):
    """A graph that a Python program has in memory; see :meth:`~gtrain.data.module.GraphDataModule.from_pyg`."""

    _target_: str = "gtrain.data.sources.memory.MemoryData"
    label_kind: str | None = setting(
        None,
        "what the labels are",
        words={**_LABEL_KINDS, None: "`number` if `y` is of one column of floats and one has a fraction, else `class`"},
    )


@dataclass
class LinkConfig(DataConfig):
    """Settings of sources whose edges are predicted, unless the model says otherwise."""

    task: str = changed(DataConfig, "task", "link", follows="${oc.select:model.task,link}")


@dataclass
class RowConfig(DataConfig):
    """Settings of sources of rows: nodes of a graph without edges."""

    partitioner: str = changed(DataConfig, "partitioner", "random")
    batch_size: int | None = changed(DataConfig, "batch_size", 512)
    val_fraction: float = changed(
        DataConfig, "val_fraction", 0.1, help="fraction of the rows of `path` to validate on, also with `split=public`"
    )


@dataclass
class CountsConfig(DataConfig):
    """Data of which only the sizes are known, for [`gtrain plan`](plan.md); nothing trains on them."""

    _target_: str = "gtrain.data.sources.counts.CountedData"
    num_nodes: float = setting(MISSING, "graph nodes, entities, or rows of sparse features", least=1)
    num_edges: float = setting(0, "directed edges, both directions of an undirected graph", least=0)
    num_features: int | None = setting(None, "columns of the features; null: nodes have none", least=1)
    features_per_row: float | None = setting(
        None, "entries of a row of sparse features that are not 0; null: features are dense", above=0
    )
    num_classes: int | None = changed(DataConfig, "num_classes", 2)
    num_relations: int | None = setting(None, "relations; null: edges have no relation", least=1)
    num_seeds: float | None = setting(
        None, "training nodes, or training edges; null: `data.train_fraction` of all", least=1
    )


@dataclass
class PlantedParameters(DataSettings):
    """The parameters of the random graph of :class:`~gtrain.data.planted.PlantedData`."""

    num_nodes: int = setting(5000, "graph nodes", least=2)
    num_edges: int = setting(
        50000, "directed edges, counting both directions and self-loops; an odd number is reduced by one", least=2
    )
    num_features: int = setting(64, "number of features", least=1)
    num_classes: int = setting(8, "number of classes", least=2)
    homophily: float = setting(
        0.8, "fraction of the edges within a class; with `1/num_classes` edges carry no information", **_SHARE
    )
    degree_exponent: float = setting(
        3.0, "exponent of the degrees' power law, above 2; larger: more even degrees", **_POWER_LAW
    )
    feature_signal: float = setting(
        2.0, "norm of the class means, in standard deviations of the noise; with 0 features carry no information"
    )
    label_noise: float = setting(0.1, "fraction of wrong labels", **_SHARE)
    self_loops: bool = setting(False, "whether each node has a self-loop")


@dataclass
class PlantedConfig(PlantedParameters, DataConfig):  # type: ignore[misc]  # both declare num_classes
    """A generated graph whose best possible accuracy is known."""

    _target_: str = "gtrain.data.planted.PlantedData"
    split: str = changed(
        DataConfig, "split", "random", words=_WITHOUT_MASKS, hint="a planted graph has no masks; set data.split=random."
    )


@dataclass
class PlanetoidConfig(DataConfig):
    """Citation graphs with their public split (Yang et al. 2016)."""

    _target_: str = "gtrain.data.sources.pyg.PlanetoidData"
    name: str = setting("Cora", "`Cora`, `CiteSeer` or `PubMed`")
    normalize_features: bool = changed(DataConfig, "normalize_features", True)


@dataclass
class AmazonConfig(DataConfig):
    """Co-purchase graphs, split by class (Shchur et al. 2018)."""

    _target_: str = "gtrain.data.sources.pyg.AmazonData"
    name: str = setting("Photo", "`Photo` or `Computers`")
    split: str = changed(DataConfig, "split", "per_class")
    largest_component: bool = setting(
        False,
        "remove the nodes outside of the largest connected component, as Shchur et al. 2018 do (163 of Photo's 7,650 "
        "nodes, most of them isolated). The other nodes keep their ids: they are the names in `parquet` and `tsv` "
        "predictions, and the row numbers in `.npy`, whose rows of removed nodes are NaN",
    )


@dataclass
class CoauthorConfig(AmazonConfig):
    """Co-authorship graphs, split by class (Shchur et al. 2018)."""

    _target_: str = "gtrain.data.sources.pyg.CoauthorData"
    name: str = setting("CS", "`CS` or `Physics`")


@dataclass
class HeterophilousConfig(DataConfig):
    """Heterophilous graphs with ten published splits (Platonov et al. 2023)."""

    _target_: str = "gtrain.data.sources.pyg.HeterophilousData"
    name: str = setting("Minesweeper", "`Minesweeper`, `Roman-empire`, `Amazon-ratings`, `Tolokers` or `Questions`")


@dataclass
class PyGConfig(DataConfig):
    """Any class of torch_geometric.datasets that holds a single graph."""

    _target_: str = "gtrain.data.sources.pyg.PyGData"
    name: str = setting("Planetoid", "name of the class")
    # Any, not dict: Hydra rejects new keys in a typed dictionary, and so `data.options={...}`
    options: Any = setting(None, "the class's arguments other than `root`, such as `{name: Cora}`", type="dict or null")


@dataclass
class EdgesConfig(DataConfig):
    """An edge list of any size in text or Parquet files, `source target [weight]` on each line."""

    _target_: str = "gtrain.data.sources.edges.EdgesData"
    split: str = changed(
        DataConfig, "split", "random", words=_WITHOUT_MASKS, hint="an edge list has no masks; set data.split=random."
    )
    path: Any = setting(
        None,
        "files, relative to the working directory or to `root`: a name, glob pattern or folder, or a list of these; "
        "`.gz` files are decompressed. Set either this or `edge_sets`",
        type=f"{_NAMED} or null",
        path=True,
    )
    edge_sets: Any = setting(
        None,
        "edge sets: a list of values as for `path`. `strategy=pbg` trains the sets in turn in each epoch; other "
        "strategies train all edges together",
        type=_ENTRIES,
        path=True,
    )
    ids: str = setting(
        "auto",
        "type of the node ids",
        words={"int": "0 to N-1", "string": "any strings, stored as names", "auto": "detected from the first line"},
    )
    columns: Any = setting(
        None,
        "the columns of source and target, by position from 0 or by name, such as `[src,dst]`; null: the first two. "
        "With null, the third of three columns is the weight, unless another column is set",
        type=_ENTRIES,
    )
    weight: Any = setting(
        None, "column that becomes `edge_weight`, by position or name; null: see `columns`", type="int or str or null"
    )
    relation: Any = setting(
        None, "column that becomes `edge_type`: integers from 0, or names; null: none", type="int or str or null"
    )
    time: Any = setting(None, "column that becomes `edge_time`: integers; null: none", type="int or str or null")
    header: bool | None = setting(None, "whether the first line has the column names; null: detected")
    separator: str | None = setting(
        None, "separator of columns: a character, or `comma`, `semicolon`, `tab`, `space`; null: detected"
    )
    comments: str = setting("#%", 'characters that start a comment line; set `""` if names may start with one of them')
    features: str | None = setting(
        None,
        "file of features: `.npy`, `.pt` (a plain tensor) or text, one row per node, with the node's name first if "
        "nodes have names; or `degree` (log(1 + in-degree)) or `constant` (ones); null: none",
        path=True,
    )
    labels: str | None = setting(
        None,
        "file of labels: `.npy`, `.pt`, or text with `label` or `id label` on each line (`name label` if nodes have "
        "names); null: none",
        path=True,
    )
    label_kind: str = setting("class", "what the labels are", words=_LABEL_KINDS)
    num_nodes: int | None = setting(
        None,
        "number of graph nodes; null: the rows of the features or of the labels, else the largest id + 1",
        **_AT_LEAST_ONE,
    )
    undirected: bool = setting(False, "whether each line means an edge in both directions")
    entities: Any = setting(None, _ENTITIES, type="dict or null")
    relations: Any = setting(None, f"{_RELATIONS}; the name of an integer relation is its digits", type=_ENTRIES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_nodes is not None and self.ids == "string":
            raise ConfigError(
                f"data.num_nodes={self.num_nodes} with data.ids=string, where the nodes are those that the edges name",
                hint="leave data.num_nodes, or set data.ids=int",
            )
        if self.undirected and self.relation is not None:
            raise ConfigError(
                "data.undirected=true with data.relation, and a relation has a direction",
                hint="remove data.undirected, or list the other direction as separate relations",
            )
        if (self.path is None) == (self.edge_sets is None):
            raise ConfigError(
                f"data.path={self.path} and data.edge_sets={self.edge_sets} were set; exactly one of them is needed.",
                hint="set data.path to files, or data.edge_sets to several lists of files.",
            )
        if self.edge_sets is not None and self.undirected:
            raise ConfigError(
                "data.undirected=true was set with data.edge_sets.",
                hint="list both directions, in the set that has them.",
            )


@dataclass
class KGConfig(LinkConfig):
    """A knowledge graph from files of triples: head, relation and tail, separated by tabs."""

    _target_: str = "gtrain.data.sources.kg.KGData"
    batch_size: int | None = changed(DataConfig, "batch_size", 1000)
    path: str = setting(
        MISSING,
        "folder with `train.txt`, `valid.txt` and `test.txt` (or `.tsv`, or compressed as `.gz`), its parent if the "
        "folder is named `raw`, or a `.tar.gz` of it; relative to the working directory or to `root`",
        path=True,
    )
    edge_sets: Any = setting(
        None,
        "edge sets: files of training triples instead of `train.txt`, relative to the working directory or to `path`. "
        "A list with one entry per set: a name, glob pattern or folder, or a list of these. `strategy=pbg` trains the "
        "sets in turn in each epoch; other strategies train all triples together",
        type=_ENTRIES,
        path=True,
    )
    unknown: str = setting(
        "error",
        "validation and test triples with names that do not occur in the training triples",
        words={
            "error": "raise an error",
            "drop": "drop these triples",
            "keep": "keep them; their entities are nodes without training edges",
        },
    )
    entities: Any = setting(None, _ENTITIES, type="dict or null")
    relations: Any = setting(None, _RELATIONS, type=_ENTRIES)


@dataclass
class LibsvmConfig(RowConfig):
    """Sparse rows with labels from libsvm files, `label id:value id:value ...` on each line."""

    _target_: str = "gtrain.data.sources.libsvm.LibsvmData"
    path: str = setting(
        MISSING,
        "file of training rows, relative to the working directory or to `root`; `.gz` is decompressed",
        path=True,
    )
    test_path: str | None = setting(None, "file of test rows; null: none", path=True)
    index_base: str = setting(
        "auto", "the smallest feature id; `auto`: 0 if that id occurs, else 1", words=("auto", "0", "1")
    )
    num_features: int | None = setting(
        None,
        "number of features, below 2^31; null: from the largest id",
        least=1,
        most=2**31 - 1,
        hint="number the features without gaps, or hash their ids to fewer; null takes the largest id.",
    )
    labels: str = setting(
        "auto",
        "labels per row",
        words={"single": "one", "multi": "any number, including none", "auto": "multi if any row has several"},
    )


@dataclass
class PlantedHeteroParameters(DataSettings):
    """The parameters of the random graph of :class:`~gtrain.data.planted.hetero.PlantedHeteroData`."""

    num_papers: int = setting(4000, "papers, which have labels and features; at least `num_classes`")
    num_authors: int = setting(2000, "authors, which have features; at least `num_classes`")
    num_terms: int = setting(500, "terms, which have no features; at least `num_classes`")
    num_writes: int = setting(
        12000, "edges from author to paper, counting one direction; at most half of the possible pairs", least=0
    )
    num_cites: int = setting(12000, "edges from paper to paper; at most half of the possible pairs", least=0)
    num_mentions: int = setting(20000, "edges from paper to term; at most half of the possible pairs", least=0)
    writes_homophily: float = setting(
        0.8,
        "fraction of the `writes` edges within a class, 0 to 1; with `1/num_classes` the relation carries no "
        "information",
        **_SHARE,
    )
    cites_homophily: float = setting(0.7, "fraction of the `cites` edges within a class", **_SHARE)
    mentions_homophily: float = setting(0.4, "fraction of the `mentions` edges within a class", **_SHARE)
    num_classes: int = setting(4, "number of classes, 2 or more", least=2)
    num_features: int = setting(64, "number of features of papers", least=1)
    num_author_features: int = setting(16, "number of features of authors", least=1)
    feature_signal: float = setting(
        1.0,
        "norm of the class means, in standard deviations of the noise; with 0 features carry no information",
        least=0,
        below=math.inf,
    )
    degree_exponent: float = setting(
        3.0, "exponent of the degrees' power law, above 2; larger: more even degrees", **_POWER_LAW
    )
    label_noise: float = setting(0.1, "fraction of wrong labels, 0 to 1", **_SHARE)


@dataclass
class PlantedHeteroConfig(PlantedHeteroParameters, DataConfig):  # type: ignore[misc]  # both declare num_classes
    """A generated heterogeneous graph whose best possible accuracy is known."""

    _target_: str = "gtrain.data.planted.hetero.PlantedHeteroData"
    split: str = changed(PlantedConfig, "split", "random")


@dataclass
class PlantedTemporalParameters(DataSettings):
    """The parameters of the random events of :class:`~gtrain.data.planted.temporal.PlantedTemporalData`."""

    num_nodes: int = setting(1000, "graph nodes, 4 or more", least=4)
    num_events: int = setting(50000, "events: directed edges with times", least=1)
    num_communities: int = setting(20, "communities, from 2 to half the number of nodes", least=2)
    predictability: float = setting(
        0.9, "probability that the target is drawn from the source's community; otherwise from all nodes", **_SHARE
    )
    drift: float = setting(
        0.5,
        "mean number of times that a node changes its community over the time span, 0 to 50",
        least=0,
        most=50,
        hint="nodes move at 50 times at most.",
    )
    time_span: int = setting(
        1_000_000, "times are integers from 0 to `time_span - 1`; at most 2^56", least=1, most=2**56
    )
    degree_exponent: float = setting(3.0, "exponent of the power law of the sources' activity, above 2", **_POWER_LAW)


@dataclass
class PlantedTemporalConfig(PlantedTemporalParameters, LinkConfig):
    """Generated events whose best possible AUC is known."""

    _target_: str = "gtrain.data.planted.temporal.PlantedTemporalData"
    split: str = changed(
        DataConfig, "split", "time", words=_WITHOUT_MASKS, hint="generated events hold none out; set data.split=time."
    )


@dataclass
class PlantedKGParameters(DataSettings):
    """The parameters of the random triples of :class:`~gtrain.data.planted.kg.PlantedKGData`."""

    num_entities: int = setting(1000, "entities, the graph nodes", least=2)
    num_relations: int = setting(10, "relations, each a shift around the ring; at most `num_positions`", least=1)
    num_positions: int = setting(200, "positions of the ring, at most `num_entities`", least=2)
    num_triples: int = setting(
        45000,
        "triples of all splits; those that follow a rule are at most "
        "`num_relations * num_entities * (num_entities // num_positions)`",
        least=3,
    )
    noise: float = setting(0.05, "fraction of random triples, which follow no rule", **_SHARE)
    held_out: float = setting(
        0.05, "fraction to validate on, and the same fraction to test on; above 0, below 0.5", above=0, below=0.5
    )
    num_types: int = setting(
        1, "entity types `type_0`, `type_1`...; relation r joins type r to type r + 1, modulo `num_types`", least=1
    )


@dataclass
class PlantedKGConfig(PlantedKGParameters, LinkConfig):
    """A generated knowledge graph whose best possible filtered MRR is known."""

    _target_: str = "gtrain.data.planted.kg.PlantedKGData"
    split: str = changed(
        DataConfig,
        "split",
        "public",
        words=("public",),
        hint="the generator holds triples out itself, for which the best score is known; set data.split=public, and "
        "data.held_out to the share of val and of test.",
    )
    entities: Any = setting(None, _ENTITIES, type="dict or null")
    relations: Any = setting(None, f"{_RELATIONS}; they are called `shift_<n>`", type=_ENTRIES)


@dataclass
class PlantedSparseParameters(DataSettings):
    """The parameters of the random rows of :class:`~gtrain.data.planted.sparse.PlantedSparseData`."""

    num_rows: int = setting(20000, "number of rows", least=2)
    num_features: int = setting(1000, "number of columns", least=2)
    features_per_row: int = setting(20, "nonzero entries per row, at most half the number of columns", least=1)
    zipf_exponent: float = setting(
        1.0,
        "the r-th most frequent feature occurs in proportion to `r^-zipf_exponent`; 0 or more",
        least=0,
        below=math.inf,
    )
    binary: bool = setting(True, "whether all values are 1; false: standard normal values")
    signal: float = setting(2.0, "standard deviation of the logits, 0 or more", least=0, below=math.inf)
    positive_rate: float = setting(0.3, "expected fraction of label 1, above 0 and below 1", above=0, below=1)


@dataclass
class PlantedSparseConfig(PlantedSparseParameters, DataConfig):
    """Generated rows of sparse features whose best possible accuracy and AUC are known."""

    _target_: str = "gtrain.data.planted.sparse.PlantedSparseData"
    split: str = changed(
        DataConfig, "split", "random", words=_WITHOUT_MASKS, hint="generated rows have no masks; set data.split=random."
    )
    num_classes: int | None = changed(DataConfig, "num_classes", 2)


@dataclass
class EntitiesConfig(DataConfig):
    """RDF graphs whose entities are classified (Schlichtkrull et al. 2018)."""

    _target_: str = "gtrain.data.sources.entities.EntitiesData"
    unlabelled: int | None = changed(DataConfig, "unlabelled", -1)
    val_fraction: float = changed(
        DataConfig, "val_fraction", 0.0, help="fraction of the published training entities to validate on"
    )
    name: str = setting("AIFB", "`AIFB`, `MUTAG`, `BGS` or `AM`")


@dataclass
class HeCoConfig(DataConfig):
    """Heterogeneous graphs with published splits (Wang et al. 2021)."""

    _target_: str = "gtrain.data.sources.heco.HeCoData"
    name: str = setting("acm", "`acm`, `dblp`, `aminer` or `freebase`")
    path: str | None = setting(
        None,
        "the data set's folder in HeCo's repository, or an `.npz` of the same arrays; null: `<name>` or `<name>.npz` "
        "in `<root>/heco`, `<root>/hetero/heco` or `root`",
        path=True,
    )
    per_class: int = setting(20, "training nodes per class", words=(20, 40, 60), hint="choose 20, 40 or 60")


@dataclass
class TemporalConfig(LinkConfig):
    """Events with times from a text file, `source target time` on each line."""

    _target_: str = "gtrain.data.sources.temporal.TemporalData"
    split: str = changed(DataConfig, "split", "time")
    train_fraction: float = changed(DataConfig, "train_fraction", 0.7)
    val_fraction: float = changed(DataConfig, "val_fraction", 0.15)
    path: str = setting(
        MISSING, "the file, relative to the working directory or to `root`; `.gz` is decompressed", path=True
    )
    time_column: int = setting(2, "column of the times, from 0")
    time_scale: float = setting(
        1.0,
        "factor by which times are multiplied before they are rounded to integers: `1000` keeps thousandths",
        above=0,
        hint="set 1, or 1000 for thousandths.",
    )
    features: str | None = setting(None, 'columns that become `edge_attr`, as a slice such as `"4:"`; null: none')
    bipartite: bool = setting(False, "whether sources and targets are disjoint sets of nodes, each with ids from 0")


@dataclass
class BigGraphConfig(LinkConfig):
    """PyTorch-BigGraph's folders: entities and edges by partition."""

    _target_: str = "gtrain.data.sources.biggraph.BigGraphData"
    path: str = setting(
        MISSING,
        "folder of `entity_count_<type>_<part>.txt` (PyTorch-BigGraph's `entity_path`), and optionally files of names "
        "and `dynamic_rel_count.txt`",
        path=True,
    )
    edges: Any = setting(
        None,
        "folder of `edges_<lhs>_<rhs>.h5`, or a list of folders (`edge_paths`), which are edge sets as in "
        "`data=edges`; null: `path`",
        type=f"{_NAMED} or null",
        path=True,
    )
    val_edges: Any = setting(
        None,
        "folder, or list of folders, of edges held out for validation; null: set `split=random`",
        type=f"{_NAMED} or null",
        path=True,
    )
    test_edges: Any = setting(
        None, "folder, or list of folders, of edges held out for test", type=f"{_NAMED} or null", path=True
    )
    entities: Any = setting(None, _ENTITIES, type="dict or null")
    relations: Any = setting(
        None,
        "`[{name: N, lhs: TYPE, rhs: TYPE}]`, as in PyTorch-BigGraph's configuration; required with several entity "
        "types. For `operator`, `weight`, `all_negs` see [entity types](data.md#entity-types)",
        type=_ENTRIES,
    )
    keep_parts: bool | None = setting(
        None,
        "true: the folder's partitions become the parts of the store, which needs as many ranks, or one; with "
        "`strategy=pbg`, `strategy.num_partitions` is then their number. false: the entities are partitioned again, "
        "into any number. null: true with `pbg`",
    )
    joint_types: Any = setting(
        False,
        "true: `model=kg` predicts the edges of all relations; false: the data are a heterogeneous graph",
        type="bool",
        follows="${oc.select:model.joint_types,false}",
    )


@dataclass
class PyGPartitionConfig(DataConfig):
    """A folder of PyG's Partitioner, whose parts become the parts of the store."""

    _target_: str = "gtrain.data.sources.pyg_partition.PyGPartitionData"
    split: str = changed(DataConfig, "split", "random")
    path: str = setting(MISSING, "folder with `META.json`, `part_0`, `part_1`, ...", path=True)
    labels: str | None = setting(
        None,
        "file of labels: `.npy`, `.pt` or text, one row per node; `TYPE=FILE` in a heterogeneous graph; null: `y` in "
        "the parts' `feats`, if present",
        path=True,
    )


@dataclass
class DGLPartitionConfig(DataConfig):
    """The output of DGL's partition_graph, whose parts become the parts of the store."""

    _target_: str = "gtrain.data.sources.dgl_partition.DGLPartitionData"
    path: str = setting(MISSING, "the JSON file of the partitioned graph", path=True)
    features: str | None = setting(
        "feat", "name of the feature that becomes `x` of nodes and `edge_attr` of edges; null: none"
    )
    labels: str | None = setting("label", "name of the node feature that becomes `y`; null: none")
    edge_weights: str | None = setting(None, "name of the edge feature that becomes `edge_weight`; null: none")


@dataclass
class MusaeConfig(DataConfig):
    """Social networks with sparse features: Facebook pages, Twitch (Rozemberczki et al. 2021)."""

    _target_: str = "gtrain.data.sources.musae.MusaeData"
    split: str = changed(
        DataConfig, "split", "random", words=_WITHOUT_MASKS, hint="MUSAE's data have no masks; set data.split=random."
    )
    name: str = setting("facebook", "prefix of the file names, or a country of Twitch, such as `DE`")
    path: str | None = setting(None, "folder of the files; null: `<root>/musae`, or `root`", path=True)
    label: str | None = setting(
        None, "column of the labels; null: the first of `page_type`, `mature` and `ml_target` that exists"
    )


@dataclass
class ParquetConfig(RowConfig):
    """Rows of features with a label, from Parquet files."""

    _target_: str = "gtrain.data.sources.parquet.ParquetData"
    path: str = setting(
        MISSING,
        "file of training rows, or a folder of such files, relative to the working directory or to `root`",
        path=True,
    )
    test_path: str | None = setting(None, "file or folder of test rows; null: none", path=True)
    label: str = setting(
        "label",
        "column of the labels: integers, booleans or strings; classes are numbered in the order of these values",
    )
    ids: str | None = setting(None, "column of lists of feature ids, from 0; null: none")
    values: str | None = setting(None, "column of lists of the values of `ids`; null: ones")
    num_features: int | None = setting(None, "number of feature ids; null: the largest id + 1", **_AT_LEAST_ONE)
    dense: list[str] | None = setting(None, "numeric columns, such as `[price,age]`; null: none")
    categorical: list[str] | None = setting(
        None, "columns of strings or integers, whose values are hashed, such as `[city,user]`; null: none"
    )
    buckets: int = setting(1048576, "columns of `x` per categorical column (hash buckets)", least=1)
    nulls: str = setting(
        "error",
        "null and NaN features",
        words={"error": "raise an error", "zero": "read them as 0; a null category is in no bucket"},
    )


@dataclass
class TableConfig(DataConfig):
    """Settings of sources that read tables."""

    unlabelled: int | None = changed(
        DataConfig,
        "unlabelled",
        None,
        words=(None,),
        hint="an empty field is a missing label in tables; name other texts with missing: [...]",
    )
    max_values: int = setting(
        10000, "values of a category, or items of lists, with a column of their own: the most frequent ones", least=1
    )
    time_scale: float = setting(
        1.0,
        "factor by which times (dates: seconds since 1970) are multiplied before they are rounded to integers",
        above=0,
        hint="set 1, or 1000 for thousandths.",
    )


@dataclass
class TablesConfig(TableConfig):
    """Nodes and edges from tables: Parquet, CSV, TSV and Arrow files, or queries of DuckDB or Polars."""

    _target_: str = "gtrain.data.sources.tables.TablesData"
    split: str = changed(
        DataConfig,
        "split",
        "auto",
        words={
            "auto": "`public` if a table names a column of splits, `random` otherwise",
            **DataConfig.__dataclass_fields__["split"].metadata["words"],
        },
    )
    nodes: Any = setting(
        None,
        "the node table: a file, or its entry, or entries by node type, see [tables](tables.md); null: nodes are those "
        "that edges name",
        type="str, list or dict, or null",
        path=True,
    )
    edges: Any = setting(
        None,
        "the edge table: a file, or its entry, or entries by relation; null: the graph has no edges",
        type="str, list or dict, or null",
        path=True,
    )


@dataclass
class RelBenchConfig(TableConfig):
    """A relational database in RelBench's form: Parquet files with keys and times, and a task."""

    _target_: str = "gtrain.data.sources.relbench.RelBenchData"
    path: str = setting(
        MISSING, "folder with `db/*.parquet` and `tasks/<name>`, relative to the working directory or `root`"
    )
    name: str = setting(MISSING, "name of the task: the folder of `train.parquet`, `val.parquet` and `test.parquet`")
    label: str | None = setting(
        None, "column of the task's labels; null: the only one that is neither a key nor the time"
    )
    label_kind: str | None = setting(
        None,
        "what the labels are",
        words={
            "class": "whole numbers, strings or truth values",
            "number": "numbers to predict",
            None: "`number` if one has a fraction, else `class`",
        },
    )
    columns: Any = setting(
        None,
        "by table, the kinds of its columns, as in [tables](tables.md#features), such as "
        "`{users: {about: ignore}}`; null: inferred",
        type="dict or null",
    )
    split: str = changed(
        DataConfig,
        "split",
        "public",
        words=("public",),
        hint="a task has files for train, val and test; set data.split=public.",
    )
    temporal_strategy: str | None = changed(DataConfig, "temporal_strategy", "uniform")


@dataclass
class OGBConfig(DataConfig):
    """Data sets of the Open Graph Benchmark (Hu et al. 2020), from its raw files."""

    _target_: str = "gtrain.data.sources.ogb.OGBData"
    name: str = setting(
        "ogbn-arxiv",
        "`ogbn-arxiv`, `ogbn-products`, `ogbn-proteins`, `ogbn-mag`, `ogbl-ppa`, `ogbl-collab`, `ogbl-ddi`, "
        "`ogbl-citation2` or `ogbl-wikikg2`",
    )
    undirected: bool | None = setting(
        None,
        "whether to add the reverse of each edge; null: as OGB does, and in `ogbn-mag`, where reverse edges have the "
        "edge types `rev_...`",
    )


SCHEMAS: dict[str, type[DataConfig]] = {
    "planted": PlantedConfig,
    "counts": CountsConfig,
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
    "tables": TablesConfig,
    "relbench": RelBenchConfig,
    "ogb": OGBConfig,
}
"""The dataclass of each option of the group ``data``."""


class _LazySchema:
    """A node of Hydra's ConfigStore that builds its schema when Hydra loads it, which copies the node.

    Building the schemas of all sources up front would delay ``gtrain --help`` by 0.1 s.
    """

    def __init__(self, config: type) -> None:
        self._config = config

    def __deepcopy__(self, memo: dict[int, Any]) -> DictConfig:
        return schema(self._config)


@cache
def register() -> None:
    """Register the settings of each source in Hydra's ConfigStore, as options of ``data`` and of ``schema/data``."""
    from hydra.core.config_store import ConfigStore  # only the command line needs Hydra

    store = ConfigStore.instance()
    for name, config in SCHEMAS.items():
        for group in ("data", "schema/data"):
            store.store(group=group, name=name, node={}, provider="gtrain")
            options = store.repo["data"] if group == "data" else store.repo["schema"]["data"]
            options[f"{name}.yaml"].node = _LazySchema(config)
