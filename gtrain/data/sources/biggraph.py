"""A graph from the folders that PyTorch-BigGraph trains on."""

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
from gtrain.data.readers.biggraph import BagBook, EdgeReader, Ints, Relation, bag_tensor, find_buckets, require_h5py
from gtrain.data.readers.edge_sets import facts_of_sets
from gtrain.data.schema import DataSchema, places
from gtrain.data.sources.given_parts import GivenPartsData
from gtrain.errors import ConfigError, DataError
from gtrain.graph.store.entities import feature_kind
from gtrain.graph.store.tables import EdgeArrays

IN_MEMORY_EDGES = 10_000_000
"""Edges up to which a graph is held in memory as a whole."""
SPLITS = {"edges": "", "val_edges": "val_", "test_edges": "test_"}


class BigGraphData(GivenPartsData):
    """PyTorch-BigGraph's folders: entities by type and partition, edges in HDF5 files, one for each bucket.

    An entity keeps its order: the entities of partition 0 come first, then those of partition 1, and so on, so its id
    is its offset plus the size of the partitions before. With one entity type the graph is homogeneous, and ``rel``
    becomes ``edge_type`` where there is more than one relation; with several it is heterogeneous, an edge type for each
    relation, or with ``joint_types`` one graph whose ids run through all types. ``weight`` becomes ``edge_weight``.
    Featurized entities need ``joint_types``: each different bag of features becomes an entity.

    Its settings are those of :class:`~gtrain.data.config.BigGraphConfig`.
    """

    name = "biggraph"

    settings_type = BigGraphConfig
    settings: BigGraphConfig

    def __init__(self, settings: BigGraphConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        given = self.settings
        require_h5py()
        self.path = given.path
        self.edges = {"edges": _listed(given.edges) or [given.path], "val_edges": _listed(given.val_edges)}
        self.edges["test_edges"] = _listed(given.test_edges)
        self.relations = None if given.relations is None else [_relation(entry) for entry in given.relations]
        self._set_by_name = any(set(entry) - set(vars(_relation(entry))) for entry in given.relations or ())
        self.keep_parts, self.joint_types = bool(given.keep_parts), given.joint_types
        self._entities = given.entities or {}
        self.schema = DataSchema(given.entities, None)  # until the folders were read
        self._facts: dict[str, Any] = {}
        self._books: dict[str, BagBook] = {}
        if given.keep_parts:
            self._check_partitioner()
        self._names: dict[str, Sequence[str]] = {}
        self._num_relations: int | None = None

    def identity(self) -> dict[str, Any]:
        """Return the stamps of all files, and the relations."""
        place = self._folder("data.path", self.path)
        stamps = [file_stamp(file) for file in sorted(place.iterdir()) if file.suffix in (".txt", ".json")]
        buckets = {
            key: [file_stamp(file) for name in names for file in self._bucket_files(key, name)]
            for key, names in self.edges.items()
        }
        relations = None if self.relations is None else [vars(relation) for relation in self.relations]
        counts = files.read_counts(place)
        joint = {"joint_types": self._together(counts)} if self.joint_types else {}
        if featurized := self._featurized(counts):
            joint["featurized"] = featurized
        return {"entities": stamps, "edges": buckets, "relations": relations, "keep_parts": self.keep_parts, **joint}

    @property
    def origin(self) -> str:
        """Where the graph comes from, for messages."""
        return f"data.path={self.path}"

    @property
    def outline(self) -> dict[str, Any] | None:  # type: ignore[override]
        """The counts of entities and relations.

        None where the edges tell the entities (of featurized types), and where the model has settings by relation,
        which need the names.
        """
        place = self._folder("data.path", self.path)
        counts = files.read_counts(place)
        if self._set_by_name or self._featurized(counts):
            return None
        reader = self._reader(place, counts)
        number, totals = reader.num_relations or 2, {name: int(sizes.sum()) for name, sizes in counts.items()}
        facts = {**TRIPLES_OUTLINE, "num_relations": number, "num_nodes": sum(totals.values())}
        if self._is_joint(counts):
            return {**facts, **self._typed(counts, reader.relations).facts(totals, _ends(reader.relations, number))}
        if len(counts) == 1:
            return facts
        edge_types = tuple((relation.lhs, relation.name, relation.rhs) for relation in reader.relations)
        more: dict[str, Any] = {"sparse_features": [], "target": None, "edge_types": edge_types}
        return {**facts, **more, "num_nodes": totals, "num_features": dict.fromkeys(totals)}

    def check_inputs(self) -> None:
        """Refuse folders and files that are missing, and files of edges that cannot be."""
        super().check_inputs()
        place = self._folder("data.path", self.path)
        sides = self._reader(place, files.read_counts(place)).sides.values()
        sources, targets = (max(sizes.size for sizes in side) for side in sides)
        for key, names in self.edges.items():
            for name in names:
                find_buckets(self._folder(f"data.{key}", name), sources, targets)

    @property
    def num_parts(self) -> int:
        """Parts of the store: any number, or with ``keep_parts`` the partitions of the data.

        Raises:
            DataError: another number is wanted.
        """
        if not self.keep_parts:
            return int(GraphDataModule.num_parts.__get__(self))
        given = self.given_parts()
        if self.edge_buckets and self._num_parts not in (None, given):
            raise DataError(
                f"{self.origin} comes in {given} partitions, and {self.parts_key}={self._num_parts} was set.",
                hint=f"set {self.parts_key}={given}, or data.keep_parts=false to cut the entities anew.",
            )
        return super().num_parts

    def given_parts(self) -> int:
        """Return the number of partitions."""
        return max(counts.size for counts in files.read_counts(self._folder("data.path", self.path)).values())

    def read(self) -> Data | HeteroData | EdgeArrays:
        """Read the folders; edges of a homogeneous graph that are too many for memory stay on disk."""
        place = self._folder("data.path", self.path)
        counts = files.read_counts(place)
        self._books = {name: BagBook(int(counts[name].sum())) for name in self._featurized(counts)}
        reader = self._reader(place, counts)
        read = {
            prefix: reader.read([self._folder(f"data.{key}", name) for name in self.edges[key]], self.store)
            for key, prefix in SPLITS.items()
            if self.edges[key]
        }
        if (number := reader.num_relations) is None:
            blocks = [block for found in read.values() for block in found["rel"].chunks()]
            number = 1 + max((int(block.max(initial=0)) for block in blocks), default=0)
        self._num_relations = number
        self._read_names(place, counts, number)
        columns = {prefix: {name: c.array() for name, c in found.items()} for prefix, found in read.items()}
        if self._is_joint(counts):
            self._join(counts, reader.relations, columns, number)
        self._facts |= {} if reader.negative_weight is None else {"negative_weight": reader.negative_weight}
        graph = self._graph(counts, columns, reader.relations, number)
        if self.keep_parts:
            counts |= {name: np.array([len(book.bags)]) for name, book in self._books.items()}
            parts = {entity: _parts(sizes, self.given_parts()) for entity, sizes in counts.items()}
            self.given = parts if isinstance(graph, HeteroData) else torch.cat(list(parts.values()))
        return graph

    def _graph(
        self,
        counts: dict[str, Ints],
        columns: dict[str, dict[str, Any]],
        relations: Sequence[Relation],
        number: int,
    ) -> Data | HeteroData | EdgeArrays:
        totals = self._facts.get("entity_types") or {name: int(sizes.sum()) for name, sizes in counts.items()}
        if len(counts) > 1 and not self.joint_types:
            hetero = HeteroData()
            for entity, total in totals.items():
                hetero[entity].num_nodes = total
            for prefix, found in columns.items():
                _put(hetero, prefix, found, relations, number)
            return hetero
        num_nodes = sum(totals.values())
        nodes = {"bag": bag_tensor(totals, self._books)} if self._books else {}
        if len(columns[""]["rel"]) > IN_MEMORY_EDGES:
            return _arrays(num_nodes, columns, number, nodes)
        graph = Data(num_nodes=num_nodes, **nodes)
        for prefix, found in columns.items():
            _put(graph, prefix, found, relations, number)
        return graph

    def _is_joint(self, counts: dict[str, Ints]) -> bool:
        """Whether ids run through several types, or a type is featurized."""
        return bool(self._books) or (self.joint_types and len(counts) > 1)

    def _firsts(self, counts: dict[str, Ints]) -> dict[str, int]:
        """What is added to ids as they are read: nothing where featurized types have as many as are found."""
        if self._books or not self._is_joint(counts):
            return {}
        totals = [int(sizes.sum()) for sizes in counts.values()]
        return dict(zip(counts, np.cumsum([0, *totals]).tolist(), strict=False))

    def _together(self, counts: dict[str, Ints]) -> list[str]:
        """The types that are not cut: those in one partition, and those of which it is said."""
        said = [name for name, entry in self._entities.items() if (entry or {}).get("num_partitions") == 1]
        several = max(sizes.size for sizes in counts.values()) > 1
        featurized = self._featurized(counts)
        one = [name for name, sizes in counts.items() if several and sizes.size == 1]
        return [name for name in counts if name in (*said, *one, *featurized)]

    def _featurized(self, counts: dict[str, Ints]) -> list[str]:
        """The featurized types.

        Raises:
            ConfigError: there is no such type, it is cut, or ``joint_types`` is not set.
        """
        found = [name for name, entry in self._entities.items() if (entry or {}).get("featurized")]
        for name in found:
            if name not in counts or counts[name].size > 1 or not self.joint_types:
                there = f"data.path={self.path} has {', '.join(f'{n} in {c.size}' for n, c in counts.items())}"
                raise ConfigError(
                    f"data.entities.{name}.featurized was set, and {there} partitions.",
                    hint="features of a type are in one partition, and the model has to be model=kg.",
                )
        return found

    def _join(
        self, counts: dict[str, Ints], relations: Sequence[Relation], columns: dict[str, dict[str, Any]], number: int
    ) -> None:
        """Say which types there are, and let ids run through all of them where they did not before."""
        schema = self.schema = self._typed(counts, relations)
        totals = {name: int(sizes.sum()) for name, sizes in counts.items()}
        totals |= {name: len(book.bags) for name, book in self._books.items()}
        firsts = np.cumsum([0, *totals.values()])
        of = places(schema.types, [(relation.lhs, relation.rhs) for relation in relations])
        for found in columns.values() if self._books else ():
            kind = found["rel"] if len(relations) > 1 else np.zeros_like(found["rel"])
            for side, name in enumerate(("source", "target")):
                found[name] = found[name] + firsts[of[side][kind]]
        self._facts = schema.facts(totals, _ends(relations, number))
        if self._books:
            self._facts["features"] = {name: book.features for name, book in self._books.items()}

    def _typed(self, counts: dict[str, Ints], relations: Sequence[Relation]) -> DataSchema:
        """Return the types, of which some are not cut, and what the relations join."""
        entities = {name: {"num_partitions": 1} if name in self._together(counts) else {} for name in counts}
        return DataSchema(entities, [vars(relation) for relation in relations])

    def names(self) -> Mapping[str, Sequence[str]]:
        """Return the names of entities by type, and of relations, where there are files of them."""
        return self._names

    def extra_facts(self) -> dict[str, Any]:
        """Return how many relations there are, and the entity types of a joint graph."""
        return {"num_relations": self._num_relations, **self._facts, **facts_of_sets(self.edges["edges"])}

    def _folder(self, key: str, name: str) -> Path:
        """Return a folder that was named, as it is or below ``root``."""
        named = Path(name).expanduser()
        for place in (named, self.root / named):
            if place.is_dir():
                return place
        raise DataError(
            f"{key}={name}: there is no such folder, nor {self.root / named}",
            hint=f"set {key} to a folder that PyTorch-BigGraph's importer wrote",
        )

    def _bucket_files(self, key: str, name: str) -> list[Path]:
        return sorted(self._folder(f"data.{key}", name).glob("edges_*.h5"))

    def _reader(self, place: Path, counts: dict[str, Ints]) -> EdgeReader:
        """Settle which relations there are, and between which types."""
        dynamic = files.read_relation_count(place)
        if self.relations is None:
            if len(counts) > 1:
                raise ConfigError(
                    f"data.path={self.path} has the entity types {', '.join(counts)}, and data.relations is not set",
                    hint="set data.relations as in PyTorch-BigGraph's configuration: [{name: N, lhs: TYPE, rhs: TYPE}]",
                )
            only = next(iter(counts))
            relations, number = [Relation("edge", only, only)], dynamic
            return EdgeReader(counts, relations, number, self._books, self._firsts(counts), self.check_negative)
        for relation in self.relations:
            for entity in (relation.lhs, relation.rhs):
                if entity not in counts:
                    raise ConfigError(
                        f"data.relations: {relation.name!r} joins {relation.lhs} and {relation.rhs}, and there is no "
                        f"{entity}",
                        hint=f"the entity types of data.path={self.path} are {', '.join(counts)}",
                    )
        if dynamic is not None and len(self.relations) > 1:
            raise ConfigError(
                f"data.relations has {len(self.relations)} relations, and data.path={self.path} has dynamic ones "
                "(dynamic_rel_count.txt), which share one entry",
                hint="give one entry, with the entity types of all relations",
            )
        number = len(self.relations) if dynamic is None else dynamic
        return EdgeReader(counts, self.relations, number, self._books, self._firsts(counts), self.check_negative)

    def _read_names(self, place: Path, counts: dict[str, Ints], num_relations: int) -> None:
        found = {entity: files.read_entity_names(place, entity, sizes) for entity, sizes in counts.items()}
        if len(found) == 1 and not self._books:
            found = {"node": next(iter(found.values()))}
        found = {feature_kind(kind) if kind in self._books else kind: names for kind, names in found.items()}
        path = place / "dynamic_rel_names.json"
        if path.is_file():
            found["relation"] = files.read_names(path, num_relations)
        elif self._named_relations(counts, num_relations):
            found["relation"] = [relation.name for relation in self.relations or []]
        self._names = {kind: names for kind, names in found.items() if names is not None}

    def _named_relations(self, counts: dict[str, Ints], number: int) -> bool:
        """Whether the configuration has the names of the relations that are numbered in the edges."""
        one = len(counts) == 1 and number > 1
        return self.relations is not None and len(self.relations) == number and (one or self.joint_types)


def _ends(relations: Sequence[Relation], number: int) -> list[tuple[str, str]]:
    """Return the types that each of ``number`` relations joins; one entry stands for all dynamic relations."""
    ends = [(relation.lhs, relation.rhs) for relation in relations]
    return ends * number if len(ends) == 1 else ends


def _put(
    graph: Data | HeteroData, prefix: str, columns: dict[str, Any], relations: Sequence[Relation], number: int
) -> None:
    """Put edges into the graph: of one type, or an edge type for each relation."""
    tensors = {name: torch.from_numpy(np.array(values)) for name, values in columns.items()}
    several = len(relations) > 1
    for place, relation in enumerate(relations):
        store = graph[relation.lhs, relation.name, relation.rhs] if isinstance(graph, HeteroData) else graph
        pick = tensors["rel"] == place if several and isinstance(graph, HeteroData) else slice(None)
        store[f"{prefix}edge_index"] = torch.stack([tensors[end][pick].long() for end in ("source", "target")])
        if number > 1 and not (several and isinstance(graph, HeteroData)):
            store[f"{prefix}edge_type"] = tensors["rel"]
        if "weight" in tensors:
            store[f"{prefix}edge_weight"] = tensors["weight"][pick]
        if "set" in tensors and not prefix:
            store.edge_set = tensors["set"][pick]
        if not isinstance(graph, HeteroData):
            return


def _arrays(num_nodes: int, columns: dict[str, dict[str, Any]], number: int, nodes: dict[str, Tensor]) -> EdgeArrays:
    """The same of one type, the edges where they are."""
    names = {"weight": "edge_weight", "set": "edge_set", **({"rel": "edge_type"} if number > 1 else {})}

    def tensors(found: dict[str, Any]) -> dict[str, Any]:
        return {names[name]: values for name, values in found.items() if name in names}

    held_out = {
        prefix.removesuffix("_"): {"source": found["source"], "target": found["target"], **tensors(found)}
        for prefix, found in columns.items()
        if prefix
    }
    for found in held_out.values():
        found.pop("edge_set", None)
    train = columns[""]
    return EdgeArrays(num_nodes, train["source"], train["target"], tensors(train), dict(nodes), held_out)


def _parts(sizes: Ints, num_parts: int) -> Tensor:
    """Return the part of each entity of a type; a type in one partition is dealt out evenly."""
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
