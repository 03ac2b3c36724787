"""A knowledge graph from files of triples."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from gtrain.data.config import KGConfig
from gtrain.data.module import TRIPLES_OUTLINE, GraphDataModule, file_stamp, log
from gtrain.data.readers.edge_sets import facts_of_sets, find_sets
from gtrain.data.readers.entities import (
    EntityFeatures,
    EntityNames,
    bag_rows,
    facts_of_features,
    names_of_features,
    read_features,
    stamps_of_features,
)
from gtrain.data.readers.triples import COLUMNS, Triples, is_archive, read_archive, read_file, read_folder, split_files
from gtrain.data.schema import DataSchema
from gtrain.errors import ConfigError, DataError

_PREFIX = {"train": "", "valid": "val_", "test": "test_"}


class KGData(GraphDataModule):
    """A knowledge graph: a folder, or a tar archive, of the triples that train, validate and test.

    Each line of ``train.txt``, ``valid.txt`` and ``test.txt`` is a head, a relation and a tail, which are any strings,
    separated by tabs. ``.tsv`` and ``.gz`` are understood too. Heads, then tails, are numbered in the order in which
    ``train`` first names them, and so are relations; duplicates stay. The triples of ``train`` become the edges,
    head to tail, with ``edge_type``; the others become the held-out edges. An entity of a graph with entity types is
    known by its type and name; which type it is of follows from the relations.

    Its settings are those of :class:`~gtrain.data.config.KGConfig`.
    """

    name = "kg"

    settings_type = KGConfig
    settings: KGConfig

    def __init__(self, settings: KGConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        given = self.settings
        self.path = given.path
        self.edge_sets = list(given.edge_sets or [])
        if given.edge_sets is not None and not self.edge_sets:
            raise ConfigError("data.edge_sets is an empty list", hint="name a file for each set, or set it to null")
        self.unknown = given.unknown
        self.schema = DataSchema(given.entities, given.relations)
        self._names: EntityNames | None = None
        self._features: dict[str, EntityFeatures] = {}

    @property
    def outline(self) -> dict[str, Any] | None:  # type: ignore[override]
        """Triples without features; settings that name types or relations need the names."""
        return None if self.schema.says_more else TRIPLES_OUTLINE

    def identity(self) -> dict[str, Any]:
        """Return the stamps of the files, and how they are read."""
        place = self._find()
        files = [place] if place.is_file() else [file for _, file in sorted(self._split_files(place).items())]
        paths, sets = self._set_files(place)
        stamps = {"edge_sets": [file_stamp(path) for path in paths], "set_of_file": sets} if paths else {}
        return {
            "files": [file_stamp(file) for file in files],
            **stamps,
            "unknown": self.unknown,
            **self.schema.identity(),
            **stamps_of_features(self.schema, self.root),
        }

    @property
    def origin(self) -> str:
        """Where the graph comes from, for messages."""
        return f"data.path={self.path}"

    def read(self) -> Data:
        """Read the triples and number their names."""
        place = self._find()
        paths, sets = self._set_files(place)
        triples = self._triples(place, paths)
        train = triples["train"]
        used = [some for found in triples.values() for some in found] if self.unknown == "keep" else train
        self._names = names = EntityNames(used, self.schema)
        data = Data(num_nodes=sum(names.counts.values()))
        entities = {name: names.entities[name].to_pylist() for name in self.schema.featurized}
        self._features = read_features(self.schema, self.root, entities)
        if self._features:
            data.bag = bag_rows(names.counts, self._features)
        for split, found in triples.items():
            edge_index, edge_type = zip(*(self._edges(some, names) for some in found), strict=True)
            prefix = _PREFIX[split]
            data[f"{prefix}edge_index"], data[f"{prefix}edge_type"] = torch.cat(edge_index, 1), torch.cat(edge_type)
        if sets is not None:
            counts = torch.tensor([len(some) for some in train])
            data.edge_set = torch.tensor(sets, dtype=torch.int32).repeat_interleave(counts)
        return data

    def _triples(self, place: Path, train: Sequence[Path]) -> dict[str, list[Triples]]:
        """Return the triples of each split, train first, file by file; ``train``: the files of edge sets, if any."""
        found = read_archive(place) if place.is_file() else read_folder(self._split_files(place))
        triples = {split: [some] for split, some in found.items()}
        if train:
            triples = {**triples, "train": [read_file(path) for path in train]}
        self._check_splits(place, triples)
        return {split: triples[split] for split in _PREFIX if split in triples}

    def _set_files(self, place: Path) -> tuple[list[Path], list[int] | None]:
        """Return the files of edge sets and the set of each, as :func:`find_sets` does."""
        return find_sets("data.edge_sets", self.edge_sets, place.parent if place.is_file() else place)

    def _split_files(self, place: Path) -> dict[str, Path]:
        """Return the file of each split that a folder has, as it is needed here; none if train is not there."""
        if not self.edge_sets:
            return split_files(place)
        found = split_files(place, needed=("valid",) if self.split.kind == "public" else ())
        return {split: file for split, file in found.items() if split != "train"}

    def names(self) -> dict[str, Any]:
        """Return the names of entities, by type, and relations, as pyarrow arrays of strings."""
        if self._names is None:
            return {}
        return {**self._names.entities, "relation": self._names.relations, **names_of_features(self._features)}

    def extra_facts(self) -> dict[str, Any]:
        """Return how many relations there are, and the entity types."""
        if self._names is None:
            return {}
        return {
            "num_relations": len(self._names.relations),
            **self.schema.facts(self._names.counts, self._names.ends),
            **facts_of_features(self._features),
            **facts_of_sets(self.edge_sets),
        }

    def _find(self) -> Path:
        """Return the folder or the archive."""
        named = Path(self.path).expanduser()
        for place in (named, self.root / named):
            if place.is_file() and is_archive(place):
                return place
            if place.is_dir() and (self._split_files(place) or (self.edge_sets and self.split.kind != "public")):
                return place
        for place in (named, self.root / named):
            if place.is_dir():
                files = ", ".join(sorted(file.name + "/" * file.is_dir() for file in place.iterdir())[:5]) or "nothing"
                wanted = "valid" if self.edge_sets else "train"
                raise DataError(
                    f"data.path={self.path}: the folder has no {wanted}.txt; it has {files}",
                    hint="set data.path to a folder with train.txt, valid.txt and test.txt (.tsv and .gz will do)",
                )
            if place.is_file():
                raise DataError(
                    f"data.path={self.path} is a file, and no .tar.gz",
                    hint="set data.path to the folder with train.txt, valid.txt and test.txt, or to a .tar.gz of it",
                )
        raise DataError(
            f"data.path={self.path}: there is no such folder, nor {self.root / named}",
            hint=f"set data.path to a folder with train.txt, valid.txt and test.txt{_near(named, self.root)}",
        )

    def _check_splits(self, place: Path, triples: Mapping[str, Sequence[Triples]]) -> None:
        wanted = list(_PREFIX) if self.split.kind == "public" else ["train"]
        missing = [split for split in wanted if split not in triples]
        if missing:
            where = [some.where for found in triples.values() for some in found]
            there = ", ".join(name.rpartition(":")[2].rpartition("/")[2] for name in where)
            raise DataError(
                f"data.path={self.path}: {place} has no {missing[0]}.txt; it has {there or 'none of the three files'}",
                hint=f"put {missing[0]}.txt there (.tsv and .gz will do), or set data.split=random to split train.txt",
            )

    def _edges(self, triples: Triples, names: EntityNames) -> tuple[Tensor, Tensor]:
        """Return ``edge_index [2, T]`` and ``edge_type [T]`` of the triples whose names are known."""
        ids = names.encode(triples)
        unknown = (ids < 0).any(axis=0)
        if unknown.any():
            if self.unknown == "error":
                raise self._unknown(triples, ids, unknown)
            count = int(unknown.sum())
            log.warning(
                "%s: %d of %d triples dropped, since train does not know their names",
                triples.where,
                count,
                len(triples),
            )
            ids = ids[:, ~unknown]
        head, relation, tail = torch.from_numpy(ids)
        return torch.stack([head, tail]), relation

    def _unknown(self, triples: Triples, ids: Any, unknown: Any) -> DataError:
        row = int(unknown.argmax())
        column = 1 if ids[1, row] < 0 else int((ids[:, row] < 0).argmax())
        kind = "relation" if COLUMNS[column] == "relation" else "entity"
        name = triples.columns[column][row].as_py()
        return DataError(
            f"{triples.where}, line {triples.line(row)}: the {kind} {name!r} does not occur in train; "
            f"{int(unknown.sum())} of {len(triples)} triples name something that train does not",
            hint="set data.unknown=drop to leave these triples out, or data.unknown=keep to score them all the same",
        )


def _near(named: Path, root: Path) -> str:
    """Return the end of a hint: what lies where the folder was expected, with the nearest names."""
    for folder in (named.parent, (root / named).parent):
        if folder.is_dir():
            near = difflib.get_close_matches(named.name, [file.name for file in folder.iterdir()], n=3)
            if near:
                return f"; in {folder} there are {', '.join(near)}"
    return ""
