"""A graph from the folders of PyTorch-BigGraph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gtrain.data.config import BigGraphConfig
from gtrain.data.module import TRIPLES_OUTLINE, GraphDataModule, file_stamp
from gtrain.data.readers import biggraph as files
from gtrain.data.readers.biggraph import DistinctBags, EdgeReader, Ints, Relation, find_buckets, require_h5py
from gtrain.data.readers.entities import bag_tensor
from gtrain.data.readers.files import edge_set_facts, find_folder
from gtrain.data.schema import DataSchema, type_numbers
from gtrain.data.sources.prepartitioned import PrepartitionedData
from gtrain.errors import ConfigError, DataError
from gtrain.graph.store.entities import feature_kind
from gtrain.graph.store.tables import EdgeArrays

IN_MEMORY_EDGES = 10_000_000
"""The largest number of edges of a graph that is held in memory."""
PREFIXES = {"edges": "", "val_edges": "val_", "test_edges": "test_"}


class BigGraphData(PrepartitionedData[BigGraphConfig]):
    """PyTorch-BigGraph's folders: entities by type and partition, edges in one HDF5 file per bucket.

    Entities keep their order: the entities of partition 0 come first, then those of partition 1, and so on; the id of
    an entity is its offset plus the sizes of the preceding partitions. With one entity type the graph is homogeneous,
    and several relations become ``edge_type``. With several entity types the graph is heterogeneous, with an edge type
    for each relation; or, with ``joint_types``, one graph whose ids count all types. ``weight`` becomes
    ``edge_weight``. Featurized entities need ``joint_types``: each distinct bag of features becomes an entity.

    Its settings are those of :class:`~gtrain.data.config.BigGraphConfig`.
    """

    name = "biggraph"

    def __init__(self, settings: BigGraphConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        given = self.settings
        require_h5py()
        self._edge_folders = {key: _listed(getattr(given, key)) for key in PREFIXES}
        self._edge_folders["edges"] = self._edge_folders["edges"] or [given.path]
        self._relations = None if given.relations is None else [_relation(entry) for entry in given.relations]
        self._entities = {name: entry or {} for name, entry in (given.entities or {}).items()}
        self.schema = DataSchema(given.entities, None)  # until the folders are read
        self._bags: dict[str, DistinctBags] = {}
        if given.keep_parts:
            self._check_partitioner()

    def identity(self) -> dict[str, Any]:
        """Return the stamps of all files, and the relations."""
        stamps = [file_stamp(file) for file in sorted(self._folder.iterdir()) if file.suffix in (".txt", ".json")]
        buckets = {
            key: [file_stamp(file) for folder in folders for file in sorted(folder.glob("edges_*.h5"))]
            for key, folders in self._find_edges().items()
        }
        relations = None if self._relations is None else [vars(relation) for relation in self._relations]
        counts = files.read_counts(self._folder)
        joint = {"joint_types": self._unpartitioned(counts)} if self.settings.joint_types else {}
        if featurized := self._featurized(counts):
            joint["featurized"] = featurized
        keep_parts = bool(self.settings.keep_parts)
        return {"entities": stamps, "edges": buckets, "relations": relations, "keep_parts": keep_parts, **joint}

    @property
    def outline(self) -> dict[str, Any] | None:  # type: ignore[override]
        """The counts of entities and relations.

        None if only the edges determine the entities (of featurized types), or if the model has settings by relation,
        which need the names.
        """
        counts = files.read_counts(self._folder)
        by_relation = any(set(entry) - {"name", "lhs", "rhs"} for entry in self.settings.relations or ())
        if by_relation or self._featurized(counts):
            return None
        reader = self._reader(counts)
        num_relations = reader.num_relations or 2
        totals = {name: int(sizes.sum()) for name, sizes in counts.items()}
        facts = {**TRIPLES_OUTLINE, "num_relations": num_relations, "num_nodes": sum(totals.values())}
        if self._is_joint(counts):
            schema = self._joint_schema(counts, reader.relations)
            return {**facts, **schema.facts(totals, _ends(reader.relations, num_relations))}
        if len(counts) == 1:
            return facts
        edge_types = tuple((relation.lhs, relation.name, relation.rhs) for relation in reader.relations)
        more: dict[str, Any] = {"sparse_features": [], "target": None, "edge_types": edge_types}
        return {**facts, **more, "num_nodes": totals, "num_features": dict.fromkeys(totals)}

    def check_files(self) -> None:
        """Refuse missing folders and files, and files of edges with malformed headers."""
        reader = self._reader(files.read_counts(self._folder))
        for folders in self._find_edges().values():
            for folder in folders:
                find_buckets(folder, *reader.num_partitions)

    @property
    def num_parts(self) -> int:
        """Parts of the store: any number, or with ``keep_parts`` the partitions of the data.

        Raises:
            DataError: the settings or the number of ranks contradict the data.
        """
        if not self.settings.keep_parts:
            return int(GraphDataModule.num_parts.__get__(self))
        available = self.count_parts()
        if self.edge_buckets and self._num_parts not in (None, available):
            raise DataError(
                f"{self.origin} has {available} partitions, and {self.parts_key}={self._num_parts} was set.",
                hint=f"set {self.parts_key}={available}, or data.keep_parts=false to partition the entities again.",
            )
        return super().num_parts

    def count_parts(self) -> int:
        """Return the number of partitions."""
        return max(counts.size for counts in files.read_counts(self._folder).values())

    def read(self) -> Data | HeteroData | EdgeArrays:
        """Read the folders; the edges of a large homogeneous graph stay on disk."""
        counts = files.read_counts(self._folder)
        self._bags = {name: DistinctBags(int(counts[name].sum())) for name in self._featurized(counts)}
        reader = self._reader(counts)
        by_split = {
            PREFIXES[key]: reader.read(folders, self.store) for key, folders in self._find_edges().items() if folders
        }
        if (num_relations := reader.num_relations) is None:
            blocks = [block for columns in by_split.values() for block in columns["rel"].chunks()]
            num_relations = 1 + max((int(block.max(initial=0)) for block in blocks), default=0)
        self._names = self._read_names(counts, num_relations)
        arrays = {prefix: {name: c.array() for name, c in columns.items()} for prefix, columns in by_split.items()}
        self._facts = {"num_relations": num_relations, **edge_set_facts(self._edge_folders["edges"])}
        if self._is_joint(counts):
            self._facts |= self._join_types(counts, reader.relations, arrays, num_relations)
        self._facts |= {} if reader.negative_weight is None else {"negative_weight": reader.negative_weight}
        graph = self._graph(counts, arrays, reader.relations, num_relations)
        if self.settings.keep_parts:
            # The entities of a featurized type are its distinct bags, which are known only now.
            counts |= {name: np.array([len(entry.bags)]) for name, entry in self._bags.items()}
            parts = {entity: _part_of_entity(sizes, self.count_parts()) for entity, sizes in counts.items()}
            self.part_of_node = parts if isinstance(graph, HeteroData) else torch.cat(list(parts.values()))
        return graph

    def _graph(
        self,
        counts: dict[str, Ints],
        arrays: dict[str, dict[str, Any]],
        relations: Sequence[Relation],
        num_relations: int,
    ) -> Data | HeteroData | EdgeArrays:
        totals = self._facts.get("entity_types") or {name: int(sizes.sum()) for name, sizes in counts.items()}
        graph: Data | HeteroData
        if len(counts) > 1 and not self.settings.joint_types:
            graph = HeteroData()
            for entity, total in totals.items():
                graph[entity].num_nodes = total
        else:
            nodes = {}
            if self._bags:
                num_features = max(entry.num_features for entry in self._bags.values())
                nodes["bag"] = bag_tensor(totals, self._bags, num_features)
            num_nodes = sum(totals.values())
            if len(arrays[""]["rel"]) > IN_MEMORY_EDGES:
                return _edge_arrays(num_nodes, arrays, num_relations, nodes)
            graph = Data(num_nodes=num_nodes, **nodes)
        for prefix, columns in arrays.items():
            _put_edges(graph, prefix, columns, relations, num_relations)
        return graph

    def _is_joint(self, counts: dict[str, Ints]) -> bool:
        """Whether ids count several types, or a type is featurized."""
        return bool(self._bags) or (self.settings.joint_types and len(counts) > 1)

    def _unpartitioned(self, counts: dict[str, Ints]) -> list[str]:
        """Return the types that are not partitioned, according to the settings or the data."""
        partitioned = max(sizes.size for sizes in counts.values()) > 1
        featurized = self._featurized(counts)
        return [
            name
            for name, sizes in counts.items()
            if name in featurized
            or self._entities.get(name, {}).get("num_partitions") == 1
            or (partitioned and sizes.size == 1)
        ]

    def _featurized(self, counts: dict[str, Ints]) -> list[str]:
        """Return the featurized types.

        Raises:
            ConfigError: the data lacks a type or partitions it, or ``joint_types`` is not set.
        """
        featurized = [name for name, entry in self._entities.items() if entry.get("featurized")]
        for name in featurized:
            if name not in counts or counts[name].size > 1 or not self.settings.joint_types:
                listed = ", ".join(f"{entity} in {sizes.size}" for entity, sizes in counts.items())
                raise ConfigError(
                    f"data.entities.{name}.featurized was set, and {self.origin} has {listed} partitions.",
                    hint="a featurized type needs one partition and model=kg.",
                )
        return featurized

    def _join_types(
        self,
        counts: dict[str, Ints],
        relations: Sequence[Relation],
        arrays: dict[str, dict[str, Any]],
        num_relations: int,
    ) -> dict[str, Any]:
        """Return the facts about types; set the schema, and make ids count all types if reading did not."""
        self.schema = self._joint_schema(counts, relations)
        totals = {name: int(sizes.sum()) for name, sizes in counts.items()}
        totals |= {name: len(entry.bags) for name, entry in self._bags.items()}
        facts = self.schema.facts(totals, _ends(relations, num_relations))
        if not self._bags:
            return facts
        first_ids = np.cumsum([0, *totals.values()])
        numbers = type_numbers(self.schema.types, [(relation.lhs, relation.rhs) for relation in relations])
        for columns in arrays.values():
            # A single entry of the settings gives the types of all dynamic relations.
            relation_of_edge = columns["rel"] if len(relations) > 1 else np.zeros_like(columns["rel"])
            for side, name in enumerate(("source", "target")):
                columns[name] = columns[name] + first_ids[numbers[side][relation_of_edge]]
        return {**facts, "features": {name: entry.num_features for name, entry in self._bags.items()}}

    def _joint_schema(self, counts: dict[str, Ints], relations: Sequence[Relation]) -> DataSchema:
        """Return the schema of a graph whose ids count all types."""
        unpartitioned = self._unpartitioned(counts)
        entities = {name: {"num_partitions": 1} if name in unpartitioned else {} for name in counts}
        return DataSchema(entities, [vars(relation) for relation in relations])

    @property
    def _folder(self) -> Path:
        return self._find("path", self.settings.path)

    def _find_edges(self) -> dict[str, list[Path]]:
        return {key: [self._find(key, name) for name in names] for key, names in self._edge_folders.items()}

    def _find(self, key: str, name: str) -> Path:
        hint = f"set data.{key} to a folder that PyTorch-BigGraph's importer wrote"
        return find_folder(f"data.{key}", name, self.root, hint)

    def _reader(self, counts: dict[str, Ints]) -> EdgeReader:
        """Return the reader of edges for the relations of the settings or the data.

        Raises:
            ConfigError: the relations do not match the data.
        """
        dynamic, relations = files.read_relation_count(self._folder), self._relations
        if relations is None:
            if len(counts) > 1:
                raise ConfigError(
                    f"{self.origin} has the entity types {', '.join(counts)}, and data.relations is not set",
                    hint="set data.relations as in PyTorch-BigGraph's configuration: [{name: N, lhs: TYPE, rhs: TYPE}]",
                )
            entity = next(iter(counts))
            relations, num_relations = [Relation("edge", entity, entity)], dynamic
        else:
            num_relations = len(relations) if dynamic is None else dynamic
        for relation in relations:
            for entity in (relation.lhs, relation.rhs):
                if entity not in counts:
                    raise ConfigError(
                        f"data.relations: {relation.name!r} joins {relation.lhs} and {relation.rhs}, but {entity} is "
                        "not an entity type of the data",
                        hint=f"the entity types of {self.origin} are {', '.join(counts)}",
                    )
        if dynamic is not None and len(relations) > 1:
            raise ConfigError(
                f"data.relations has {len(relations)} relations, and {self.origin} has dynamic ones "
                "(dynamic_rel_count.txt), which share one entry",
                hint="give one entry, with the entity types of all relations",
            )
        first_ids: dict[str, int] = {}
        if self._is_joint(counts) and not self._bags:
            # Only without featurized types, whose sizes are not known yet.
            totals = [int(sizes.sum()) for sizes in counts.values()]
            first_ids = dict(zip(counts, np.cumsum([0, *totals]).tolist(), strict=False))
        return EdgeReader(counts, relations, num_relations, self._bags, first_ids, self.check_negative)

    def _read_names(self, counts: dict[str, Ints], num_relations: int) -> dict[str, list[str]]:
        """Return the names of entities and relations, by the node type under which a store saves them."""
        names = {entity: files.read_entity_names(self._folder, entity, sizes) for entity, sizes in counts.items()}
        if len(names) == 1 and not self._bags:
            names = {"node": next(iter(names.values()))}
        names = {feature_kind(entity) if entity in self._bags else entity: listed for entity, listed in names.items()}
        path = self._folder / "dynamic_rel_names.json"
        if path.is_file():
            names["relation"] = files.read_names(path, num_relations)
        several = self.settings.joint_types or (len(counts) == 1 and num_relations > 1)
        if "relation" not in names and several and len(self._relations or ()) == num_relations:
            names["relation"] = [relation.name for relation in self._relations or ()]
        return {entity: listed for entity, listed in names.items() if listed is not None}


def _ends(relations: Sequence[Relation], num_relations: int) -> list[tuple[str, str]]:
    """Return the types that each relation joins; one entry applies to all dynamic relations."""
    ends = [(relation.lhs, relation.rhs) for relation in relations]
    return ends * num_relations if len(ends) == 1 else ends


def _put_edges(
    graph: Data | HeteroData, prefix: str, columns: dict[str, Any], relations: Sequence[Relation], num_relations: int
) -> None:
    """Add edges to the graph: of one type, or of an edge type for each relation."""
    tensors = {name: torch.from_numpy(np.array(values)) for name, values in columns.items()}
    typed = isinstance(graph, HeteroData) and len(relations) > 1
    for number, relation in enumerate(relations if isinstance(graph, HeteroData) else relations[:1]):
        store = graph[relation.lhs, relation.name, relation.rhs] if isinstance(graph, HeteroData) else graph
        rows = tensors["rel"] == number if typed else slice(None)
        store[f"{prefix}edge_index"] = torch.stack([tensors[end][rows].long() for end in ("source", "target")])
        if num_relations > 1 and not typed:
            store[f"{prefix}edge_type"] = tensors["rel"]
        if "weight" in tensors:
            store[f"{prefix}edge_weight"] = tensors["weight"][rows]
        if "set" in tensors and not prefix:
            store.edge_set = tensors["set"][rows]


def _edge_arrays(
    num_nodes: int, arrays: dict[str, dict[str, Any]], num_relations: int, nodes: dict[str, Tensor]
) -> EdgeArrays:
    """Return a graph of one type whose edges stay in their memory-mapped columns."""
    names = {"weight": "edge_weight", "set": "edge_set", **({"rel": "edge_type"} if num_relations > 1 else {})}
    tensors = {
        prefix.removesuffix("_"): {names[name]: values for name, values in columns.items() if name in names}
        for prefix, columns in arrays.items()
    }
    held_out = {
        prefix.removesuffix("_"): {"source": columns["source"], "target": columns["target"]}
        for prefix, columns in arrays.items()
        if prefix
    }
    for split, ends in held_out.items():
        ends |= {name: values for name, values in tensors[split].items() if name != "edge_set"}
    return EdgeArrays(num_nodes, arrays[""]["source"], arrays[""]["target"], tensors[""], dict(nodes), held_out)


def _part_of_entity(sizes: Ints, num_parts: int) -> Tensor:
    """Return the part of each entity of a type; an unpartitioned type is distributed evenly."""
    total = int(sizes.sum())
    if sizes.size == num_parts:
        return torch.from_numpy(np.repeat(np.arange(num_parts), sizes))
    return torch.arange(total) * num_parts // max(total, 1)


def _listed(names: str | Sequence[str] | None) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str) else list(names)


def _relation(entry: Mapping[str, Any]) -> Relation:
    missing = [key for key in ("name", "lhs", "rhs") if key not in entry]
    if missing:
        raise ConfigError(
            f"data.relations: {dict(entry)} has no {missing[0]}", hint="give each relation a name, lhs and rhs"
        )
    return Relation(str(entry["name"]), str(entry["lhs"]), str(entry["rhs"]))
