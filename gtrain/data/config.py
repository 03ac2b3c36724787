"""The settings of the data sources, group ``data``; light, so that composing a configuration imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from omegaconf import MISSING, DictConfig

from gtrain.errors import ConfigError
from gtrain.settings import Settings, changed, schema, setting

_LINK = {"default": "link", "follows": "${oc.select:model.task,link}"}
_ENTITIES = "settings by entity type, see [entity types](data.md#entity-types)"
_RELATIONS = "settings of relations, a list, see [entity types](data.md#entity-types)"
_NAMED = "str or list"
_ENTRIES = "list or null"


@dataclass
class DataConfig(Settings):
    """Settings that every source has."""

    group: ClassVar[str] = "data"
    _target_: str = MISSING
    root: str = setting("data", "folder of the raw files", follows="${paths.data}")
    store: str = setting("data/stores", "folder of the partitioned stores", follows="${paths.stores}")
    num_parts: int | None = setting(
        None,
        "parts to cut the graph into; null: one for each rank, with `strategy=ps` one, with `strategy=pbg` one for "
        "each partition",
    )
    partitioner: str = setting(
        "auto",
        "how the graph is cut, see [partitioners](data.md#partitioners)",
        words=("auto", "metis", "random", "file", "ldg", "fennel"),
    )
    partition_path: str | None = setting(
        None, "the part of each node, for `data.partitioner=file`: `.npy`, or text with one integer for each node"
    )
    split: str = setting(
        "public",
        "which nodes, or edges, train, validate and test",
        words={
            "public": "the data's own masks, or its held-out edges",
            "random": "fractions of the labelled nodes, or of the edges",
            "per_class": "a number of nodes of each class; the rest tests",
            "time": "fractions, earliest first: the past trains, the future tests",
        },
    )
    split_index: int = setting(0, "which of several published splits")
    train_fraction: float = setting(0.6, "`random`, `time`: share of the labelled nodes or of the edges that trains")
    val_fraction: float = setting(0.2, "`random`, `time`: share that validates; the rest tests")
    train_per_class: int = setting(20, "`per_class`: nodes of each class that train")
    val_per_class: int = setting(30, "`per_class`: nodes of each class that validate; the rest tests")
    normalize_features: bool = setting(False, "scale each row of the features to the sum 1")
    seed: int = setting(
        0, "of the generated graph, the split, the partitioner and the order of batches", follows="${seed}"
    )
    batch_size: int | None = setting(None, "seeds of one optimizer step over all ranks; null: full batch")
    num_neighbors: Any = setting(
        None,
        "neighbours that strategies that sample draw for each hop, such as `[15,10]`; -1: all; null: all of every hop; "
        "by edge type too, see [sampling](data.md#sampling)",
        type="list of int, or of lists by edge type, or null",
    )
    replace: bool = setting(False, "draw neighbours with replacement")
    disjoint: bool = setting(False, "sample a separate subgraph for each seed")
    subgraph_type: str = setting(
        "directional",
        "edges of a sampled subgraph",
        words={
            "directional": "those that were drawn",
            "bidirectional": "these and the reverse of each",
            "induced": "every edge between nodes that were drawn",
        },
    )
    temporal_strategy: str | None = setting(
        None,
        "selection among the neighbours that are not later than their seed; null: ignore times",
        words={"uniform": "any of them", "last": "the latest of them"},
    )
    time_attr: str | None = setting(
        None,
        "the times of neighbours; null: the first of these that the graph has",
        words={"time": "of nodes", "edge_time": "of edges"},
    )
    weight_attr: str | None = setting(
        None, "edge tensor with the sampling weights of neighbours, such as `edge_weight`"
    )
    neg_sampling: str | None = setting(
        None,
        "false edges in the batch, in the form of PyG's link loaders, for models of your own that predict edges",
        words={
            "binary": "`edge_label_index` and `edge_label`",
            "triplet": "`src_index`, `dst_pos_index` and `dst_neg_index`",
        },
    )
    neg_sampling_ratio: float = setting(1.0, "false edges for each true one")
    unlabelled: int | None = setting(None, "the label of nodes without a label, such as -1; they are in no split")
    num_classes: int | None = setting(None, "number of classes; null: the largest label + 1")
    task: str = setting(
        "node",
        "target of prediction, which the model sets",
        words={"node": "labels of nodes", "link": "edges"},
        follows="${oc.select:model.task,node}",
    )
    target: str | None = setting(
        None,
        "with several types: the node type, or edge type `source,relation,target`, to predict; null: the only one",
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
                hint="false edges are for data.task=link; set data.neg_sampling=null",
            )
        for key in ("num_parts", "batch_size"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"data.{key}={value} is too small", hint="set 1 or more, or null")


@dataclass
class PlantedParameters:
    """What :class:`~gtrain.data.planted.PlantedData` draws a graph from."""

    num_nodes: int = setting(5000, "graph nodes")
    num_edges: int = setting(
        50000, "directed edges, both directions of each counted, and self-loops; an odd number gives one less"
    )
    num_features: int = setting(64, "columns of the features")
    num_classes: int = setting(8, "classes")
    homophily: float = setting(0.8, "share of the edges within a class; `1/num_classes` makes edges useless")
    degree_exponent: float = setting(3.0, "power law of the degrees, above 2; larger: more even")
    feature_signal: float = setting(
        2.0, "distance of class means from 0, in units of the noise; 0 makes features useless"
    )
    label_noise: float = setting(0.1, "share of the labels that are wrong")
    self_loops: bool = setting(False, "whether each node has an edge to itself")


@dataclass
class PlantedConfig(PlantedParameters, DataConfig):  # type: ignore[misc]  # it has a number of classes
    """A generated graph whose best possible accuracy is known."""

    _target_: str = "gtrain.data.planted.PlantedData"
    split: str = changed(DataConfig, "split", "random")


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
        "remove the nodes outside of the largest connected component, as Shchur et al. 2018 do (163 of Photo's "
        "7,650, most of them without an edge). The others keep their ids: in parquet and tsv predictions as names, in "
        "`.npy` as row numbers, with NaN in the rows of removed nodes",
    )


@dataclass
class CoauthorConfig(DataConfig):
    """Co-authorship graphs, split by class (Shchur et al. 2018)."""

    _target_: str = "gtrain.data.sources.pyg.CoauthorData"
    name: str = setting("CS", "`CS` or `Physics`")
    split: str = changed(DataConfig, "split", "per_class")
    largest_component: bool = changed(AmazonConfig, "largest_component", False)


@dataclass
class HeterophilousConfig(DataConfig):
    """Heterophilous graphs with ten published splits (Platonov et al. 2023)."""

    _target_: str = "gtrain.data.sources.pyg.HeterophilousData"
    name: str = setting("Minesweeper", "`Minesweeper`, `Roman-empire`, `Amazon-ratings`, `Tolokers` or `Questions`")


@dataclass
class PyGConfig(DataConfig):
    """Any class of torch_geometric.datasets that holds a single graph."""

    _target_: str = "gtrain.data.sources.pyg.PyGData"
    name: str = setting("Planetoid", "the class")
    # a typed dictionary would refuse `data.options={...}`: Hydra closes those
    options: Any = setting(None, "its arguments other than `root`, such as `{name: Cora}`", type="dict or null")


@dataclass
class EdgesConfig(DataConfig):
    """An edge list of any size in text or Parquet files, `source target [weight]` on each line."""

    _target_: str = "gtrain.data.sources.edges.EdgesData"
    split: str = changed(DataConfig, "split", "random")
    path: Any = setting(
        None,
        "files, as they are or below `root`: a name, glob pattern or folder, or a list of them; `.gz` is unpacked. "
        "This or `edge_sets` must be set",
        type=f"{_NAMED} or null",
    )
    edge_sets: Any = setting(
        None,
        "a list of what `path` may be: `strategy=pbg` trains one set after the other in each epoch; others all "
        "together",
        type=_ENTRIES,
    )
    ids: str = setting(
        "auto",
        "ids of the nodes",
        words={"int": "0 to N-1", "string": "any strings, stored as names", "auto": "detected from the first line"},
    )
    columns: Any = setting(
        None,
        "source and target by position from 0 or by name, such as `[src,dst]`; null: the first two, and a third column "
        "is the weight, if there is no fourth and no other column is set",
        type=_ENTRIES,
    )
    weight: Any = setting(
        None, "column that becomes `edge_weight`, by position or name; null: see `columns`", type="int or str or null"
    )
    relation: Any = setting(
        None, "column that becomes `edge_type`: integers from 0, or names; null: none", type="int or str or null"
    )
    time: Any = setting(None, "column that becomes `edge_time`: integers; null: none", type="int or str or null")
    header: bool | None = setting(None, "whether the first line names the columns; null: detect")
    separator: str | None = setting(None, "a character, or `comma`, `semicolon`, `tab`, `space`; null: detect")
    comments: str = setting("#%", 'characters that begin comment lines; `""` where names may begin with them')
    features: str | None = setting(
        None,
        "`.npy`, `.pt` (a plain tensor) or text, one row for each node, with the name in front for nodes with names; "
        "or `degree` (log(1 + in-degree)), or `constant` (ones); null: none",
    )
    labels: str | None = setting(
        None, "`.npy`, `.pt` or text, one for each line, or `id label`; `name label` for nodes with names; null: none"
    )
    num_nodes: int | None = setting(
        None, "graph nodes; null: rows of the features, or of the labels, or the largest id + 1"
    )
    undirected: bool = setting(False, "each line stands for both directions")
    entities: Any = setting(None, _ENTITIES, type="dict or null")
    relations: Any = setting(None, f"{_RELATIONS}; a relation that is an integer is named by its digits", type=_ENTRIES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split == "public":
            raise ConfigError("data.split=public, and an edge list has no masks", hint="set data.split=random")
        if self.num_nodes is not None and self.num_nodes < 1:
            raise ConfigError(f"data.num_nodes={self.num_nodes} is too small", hint="set 1 or more, or null")
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
class KGConfig(DataConfig):
    """A knowledge graph from files of triples: head, relation and tail, separated by tabs."""

    _target_: str = "gtrain.data.sources.kg.KGData"
    task: str = changed(DataConfig, "task", **_LINK)
    batch_size: int | None = changed(DataConfig, "batch_size", 1000)
    path: str = setting(
        MISSING,
        "the folder with `train.txt`, `valid.txt` and `test.txt` (`.tsv` and `.gz` too), or the one above its `raw`, "
        "or a `.tar.gz` of it, as it is or below `root`",
    )
    edge_sets: Any = setting(
        None,
        "files of triples that train instead of `train.txt`, as they are or below `path`: a list, each entry a set (a "
        "name, pattern or folder, or a list of them). `strategy=pbg` trains one set after the other in each epoch; "
        "others all together",
        type=_ENTRIES,
    )
    unknown: str = setting(
        "error",
        "triples of valid and test with names that train lacks",
        words={
            "error": "are refused",
            "drop": "are dropped",
            "keep": "stay; their entities are nodes without training edges",
        },
    )
    entities: Any = setting(None, _ENTITIES, type="dict or null")
    relations: Any = setting(None, _RELATIONS, type=_ENTRIES)


@dataclass
class LibsvmConfig(DataConfig):
    """Sparse rows with labels from libsvm files, `label id:value id:value ...` on each line."""

    _target_: str = "gtrain.data.sources.libsvm.LibsvmData"
    partitioner: str = changed(DataConfig, "partitioner", "random")
    batch_size: int | None = changed(DataConfig, "batch_size", 512)
    val_fraction: float = changed(
        DataConfig, "val_fraction", 0.1, help="share of `path`'s rows that validates, with `split=public` too"
    )
    path: str = setting(MISSING, "the file that trains, as it is or below `root`; `.gz` is unpacked")
    test_path: str | None = setting(None, "the file that tests; null: none")
    index_base: str = setting(
        "auto", "the smallest feature id; `auto`: 0 if that id occurs, else 1", words=("auto", "0", "1")
    )
    num_features: int | None = setting(None, "columns, fewer than 2^31; null: the largest id")
    labels: str = setting(
        "auto",
        "labels of a row",
        words={"single": "one", "multi": "any number, none too", "auto": "multi if a row has several"},
    )


@dataclass
class PlantedHeteroParameters:
    """What :class:`~gtrain.data.planted.hetero.PlantedHeteroData` draws a graph from."""

    num_papers: int = setting(4000, "papers, which have labels and features; at least `num_classes`")
    num_authors: int = setting(2000, "authors, which have features; at least `num_classes`")
    num_terms: int = setting(500, "terms, which have none; at least `num_classes`")
    num_writes: int = setting(
        12000, "edges author to paper, one direction counted; at most half of the possible pairs, here and below"
    )
    num_cites: int = setting(12000, "edges paper to paper")
    num_mentions: int = setting(20000, "edges paper to term")
    writes_homophily: float = setting(
        0.8, "share of the edges within a class, 0 to 1; `1/num_classes` makes a relation useless"
    )
    cites_homophily: float = setting(0.7, "the same of `cites`")
    mentions_homophily: float = setting(0.4, "the same of `mentions`")
    num_classes: int = setting(4, "classes, 2 or more")
    num_features: int = setting(64, "columns of the papers' features")
    num_author_features: int = setting(16, "columns of the authors' features")
    feature_signal: float = setting(
        1.0, "distance of class means from 0, in units of the noise; 0 makes features useless"
    )
    degree_exponent: float = setting(3.0, "power law of the degrees, above 2; larger: more even")
    label_noise: float = setting(0.1, "share of the labels that are wrong, 0 to 1")


@dataclass
class PlantedHeteroConfig(PlantedHeteroParameters, DataConfig):  # type: ignore[misc]  # the same
    """A generated heterogeneous graph whose best possible accuracy is known."""

    _target_: str = "gtrain.data.planted.hetero.PlantedHeteroData"
    split: str = changed(DataConfig, "split", "random")


@dataclass
class PlantedTemporalParameters:
    """What :class:`~gtrain.data.planted.temporal.PlantedTemporalData` draws events from."""

    num_nodes: int = setting(1000, "graph nodes, 4 or more")
    num_events: int = setting(50000, "directed edges with times")
    num_communities: int = setting(20, "communities, from 2 to half of the nodes")
    predictability: float = setting(
        0.9, "probability that the target is of the source's community; else it is any node"
    )
    drift: float = setting(0.5, "moves of a node over the time span, on average, 0 to 50")
    time_span: int = setting(1_000_000, "times are integers from 0 to `time_span - 1`, at most 2^56")
    degree_exponent: float = setting(3.0, "power law of the sources' activity, above 2")


@dataclass
class PlantedTemporalConfig(PlantedTemporalParameters, DataConfig):
    """Generated events whose best possible AUC is known."""

    _target_: str = "gtrain.data.planted.temporal.PlantedTemporalData"
    split: str = changed(DataConfig, "split", "time")
    task: str = changed(DataConfig, "task", **_LINK)


@dataclass
class PlantedKGParameters:
    """What :class:`~gtrain.data.planted.kg.PlantedKGData` draws triples from."""

    num_entities: int = setting(1000, "graph nodes")
    num_relations: int = setting(10, "relations, shifts of the ring; at most `num_positions`")
    num_positions: int = setting(200, "length of the ring, at most `num_entities`")
    num_triples: int = setting(
        45000,
        "triples of train, val and test; at most `num_relations * num_entities * (num_entities // num_positions)` "
        "allowed ones",
    )
    noise: float = setting(0.05, "share of the triples that no rule allows")
    held_out: float = setting(0.05, "share that validates, and as many test; above 0, below 0.5")
    num_types: int = setting(
        1, "entity types `type_0`, `type_1`...; relation r joins type r to type r + 1, modulo their number"
    )


@dataclass
class PlantedKGConfig(PlantedKGParameters, DataConfig):
    """A generated knowledge graph whose best possible filtered MRR is known."""

    _target_: str = "gtrain.data.planted.kg.PlantedKGData"
    task: str = changed(DataConfig, "task", **_LINK)
    entities: Any = setting(None, _ENTITIES, type="dict or null")
    relations: Any = setting(None, f"{_RELATIONS}; they are called `shift_<n>`", type=_ENTRIES)


@dataclass
class PlantedSparseParameters:
    """What :class:`~gtrain.data.planted.sparse.PlantedSparseData` draws rows from."""

    num_rows: int = setting(20000, "rows")
    num_features: int = setting(1000, "columns")
    features_per_row: int = setting(20, "nonzeros of a row, at most half of the columns")
    zipf_exponent: float = setting(1.0, "a feature of rank r is drawn in proportion to r^-exponent, 0 or more")
    binary: bool = setting(True, "values are 1; false: standard normal")
    signal: float = setting(2.0, "standard deviation of the logits, 0 or more")
    positive_rate: float = setting(0.3, "expected share of label 1, above 0 and below 1")


@dataclass
class PlantedSparseConfig(PlantedSparseParameters, DataConfig):
    """Generated rows of sparse features whose best possible accuracy and AUC are known."""

    _target_: str = "gtrain.data.planted.sparse.PlantedSparseData"
    split: str = changed(DataConfig, "split", "random")


@dataclass
class EntitiesConfig(DataConfig):
    """RDF graphs whose entities are classified (Schlichtkrull et al. 2018)."""

    _target_: str = "gtrain.data.sources.entities.EntitiesData"
    unlabelled: int | None = changed(DataConfig, "unlabelled", -1)
    val_fraction: float = changed(
        DataConfig, "val_fraction", 0.0, help="share of the published training entities that validates"
    )
    name: str = setting("AIFB", "`AIFB`, `MUTAG`, `BGS` or `AM`")


@dataclass
class HeCoConfig(DataConfig):
    """Heterogeneous graphs with published splits (Wang et al. 2021)."""

    _target_: str = "gtrain.data.sources.heco.HeCoData"
    name: str = setting("acm", "`acm`, `dblp`, `aminer` or `freebase`")
    path: str | None = setting(
        None,
        "the data set's folder of HeCo's repository, or one `.npz` of the same arrays; null: `<name>` or `<name>.npz` "
        "in `<root>/heco`, `<root>/hetero/heco` or `root`",
    )
    per_class: int = setting(20, "training nodes of each class", words=(20, 40, 60), hint="choose 20, 40 or 60")


@dataclass
class TemporalConfig(DataConfig):
    """Events with times from a text file, `source target time` on each line."""

    _target_: str = "gtrain.data.sources.temporal.TemporalData"
    split: str = changed(DataConfig, "split", "time")
    train_fraction: float = changed(DataConfig, "train_fraction", 0.7)
    val_fraction: float = changed(DataConfig, "val_fraction", 0.15)
    task: str = changed(DataConfig, "task", **_LINK)
    path: str = setting(MISSING, "the file, as it is or below `root`; `.gz` is unpacked")
    time_column: int = setting(2, "the column of times, counted from 0")
    time_scale: float = setting(
        1.0, "factor of the times before they are rounded to integers: `1000` keeps thousandths"
    )
    features: str | None = setting(None, 'columns that become `edge_attr`, as a slice: `"4:"`; null: none')
    bipartite: bool = setting(False, "sources and targets are different nodes with separate ids from 0")


@dataclass
class BigGraphConfig(DataConfig):
    """PyTorch-BigGraph's folders: entities and edges by partition."""

    _target_: str = "gtrain.data.sources.biggraph.BigGraphData"
    task: str = changed(DataConfig, "task", **_LINK)
    path: str = setting(
        MISSING,
        "folder of `entity_count_<type>_<part>.txt` (`entity_path`), with names and `dynamic_rel_count.txt` if there "
        "are any",
    )
    edges: Any = setting(
        None,
        "folder of `edges_<lhs>_<rhs>.h5`, or a list (`edge_paths`), which are edge sets as of `data=edges`; null: "
        "`path`",
        type=f"{_NAMED} or null",
    )
    val_edges: Any = setting(
        None, "the same of edges held out for validation; without any, `split=random`", type=f"{_NAMED} or null"
    )
    test_edges: Any = setting(None, "the same of edges held out for test", type=f"{_NAMED} or null")
    entities: Any = setting(None, _ENTITIES, type="dict or null")
    relations: Any = setting(
        None,
        "`[{name: N, lhs: TYPE, rhs: TYPE}]`, as in PyTorch-BigGraph's configuration; needed with several types. For "
        "`operator`, `weight`, `all_negs` see [entity types](data.md#entity-types)",
        type=_ENTRIES,
    )
    keep_parts: bool | None = setting(
        None,
        "partitions become the parts of the store, and so need as many ranks, or one. `strategy=pbg` trains them as "
        "they are, and `strategy.num_partitions` is their number; false partitions the entities again, into any "
        "number. "
        "null: with `pbg`",
    )
    joint_types: Any = setting(
        False,
        "edges of all relations are predicted, by `model=kg`; false: a heterogeneous graph",
        type="bool",
        follows="${oc.select:model.joint_types,false}",
    )


@dataclass
class PyGPartitionConfig(DataConfig):
    """A folder of PyG's Partitioner, whose parts become the parts of the store."""

    _target_: str = "gtrain.data.sources.pyg_partition.PyGPartitionData"
    split: str = changed(DataConfig, "split", "random")
    path: str = setting(MISSING, "the folder, with `META.json` and `part_0`, `part_1`, ...")
    labels: str | None = setting(
        None,
        "`.npy`, `.pt` or text, one row for each node; `TYPE=FILE` in a heterogeneous graph; null: `y` of the parts' "
        "`feats`, if it was added",
    )


@dataclass
class DGLPartitionConfig(DataConfig):
    """The output of DGL's partition_graph, whose parts become the parts of the store."""

    _target_: str = "gtrain.data.sources.dgl_partition.DGLPartitionData"
    path: str = setting(MISSING, "the JSON file")
    features: str | None = setting("feat", "features that become `x`, of edges `edge_attr`; null: none")
    labels: str | None = setting("label", "the feature of nodes that becomes `y`; null: none")
    edge_weights: str | None = setting(None, "the feature of edges that becomes `edge_weight`; null: none")


@dataclass
class MusaeConfig(DataConfig):
    """Social networks with sparse features: Facebook pages, Twitch (Rozemberczki et al. 2021)."""

    _target_: str = "gtrain.data.sources.musae.MusaeData"
    split: str = changed(DataConfig, "split", "random")
    name: str = setting("facebook", "prefix of the files' names; or a country of Twitch, such as `DE`")
    path: str | None = setting(None, "the folder; null: `<root>/musae`, or `root`")
    label: str | None = setting(
        None, "the column of labels; null: `page_type`, `mature` or `ml_target`, the first that exists"
    )


@dataclass
class ParquetConfig(DataConfig):
    """Rows of features with a label, from Parquet files."""

    _target_: str = "gtrain.data.sources.parquet.ParquetData"
    partitioner: str = changed(DataConfig, "partitioner", "random")
    batch_size: int | None = changed(DataConfig, "batch_size", 512)
    val_fraction: float = changed(LibsvmConfig, "val_fraction", 0.1)
    path: str = setting(MISSING, "the file that trains, or a folder of them, as it is or below `root`")
    test_path: str | None = setting(None, "the file or folder that tests; null: none")
    label: str = setting("label", "the column of labels: whole numbers, booleans or strings, numbered by their values")
    ids: str | None = setting(None, "a column of lists of feature ids from 0")
    values: str | None = setting(None, "a column of lists of their values; null: ones")
    num_features: int | None = setting(None, "feature ids are below this; null: the largest")
    dense: list[str] | None = setting(None, "numeric columns, such as `[price,age]`")
    categorical: list[str] | None = setting(
        None, "columns of strings or whole numbers that are hashed, such as `[city,user]`"
    )
    buckets: int = setting(1048576, "columns of `x` for each categorical column")
    nulls: str = setting(
        "error",
        "null and NaN features",
        words={"error": "are refused", "zero": "count as 0, and a null category has no bucket"},
    )


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
        None, "add the reverse of each edge; null: where OGB does, and in `ogbn-mag`, as edge types `rev_...`"
    )


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
