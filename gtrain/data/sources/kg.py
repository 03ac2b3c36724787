"""A knowledge graph from files of triples."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from gtrain.data.config import KGConfig
from gtrain.data.module import TRIPLES_OUTLINE, GraphDataModule, file_stamp, log
from gtrain.data.readers.entities import EntityNames, feature_stamps, read_features
from gtrain.data.readers.files import candidates, edge_set_facts, find_edge_sets, first_true, no_folder
from gtrain.data.readers.triples import COLUMNS, Triples, is_archive, read_archive, read_file, split_files
from gtrain.data.schema import DataSchema
from gtrain.errors import ConfigError, DataError

_PREFIX = {"train": "", "valid": "val_", "test": "test_"}


class KGData(GraphDataModule[KGConfig]):
    """A knowledge graph: a folder or a tar archive of training, validation and test triples.

    Each line of ``train.txt``, ``valid.txt`` and ``test.txt`` has a head, a relation and a tail (any strings),
    separated by tabs; the files may also be ``.tsv`` or ``.gz``. Entities (heads before tails) and relations are
    numbered in the order in which ``train`` first names them; duplicate triples stay. The triples of ``train`` become
    the edges, head to tail, with ``edge_type``; the others become held-out edges. In a graph with entity types, the
    relation determines the types of its head and tail, and equal names of different types are different entities.

    Its settings are those of :class:`~gtrain.data.config.KGConfig`.
    """

    name = "kg"

    def __init__(self, settings: KGConfig | None = None, **keywords: Any) -> None:
        super().__init__(settings, **keywords)
        self.edge_sets = list(self.settings.edge_sets or [])
        if self.settings.edge_sets is not None and not self.edge_sets:
            raise ConfigError("data.edge_sets is an empty list", hint="name a file for each set, or set it to null")
        self.schema = DataSchema(self.settings.entities, self.settings.relations)

    @property
    def outline(self) -> dict[str, Any] | None:  # type: ignore[override]
        """Triples without features; None if settings refer to types or relations, whose names are in the files."""
        return None if self.schema.has_settings else TRIPLES_OUTLINE

    def identity(self) -> dict[str, Any]:
        """Return the stamps of the files and the options that control how they are read."""
        location = self._find()
        files = [location] if location.is_file() else [file for _, file in sorted(self._split_files(location).items())]
        paths, sets = self._set_files(location)
        stamps = {"edge_sets": [file_stamp(path) for path in paths], "set_of_file": sets} if paths else {}
        return {
            "files": [file_stamp(file) for file in files],
            **stamps,
            "unknown": self.settings.unknown,
            **self.schema.identity(),
            **feature_stamps(self.schema, self.root),
        }

    def read(self) -> Data:
        """Read the triples and number their entities and relations."""
        location = self._find()
        paths, sets = self._set_files(location)
        by_split = self._read_triples(location, paths)
        train = by_split["train"]
        every = [triples for files in by_split.values() for triples in files]
        names = EntityNames(every if self.settings.unknown == "keep" else train, self.schema)
        bags, feature_names, feature_facts = read_features(
            self.schema, self.root, names.counts, lambda name: names.entities[name].to_pylist()
        )
        data = Data(num_nodes=sum(names.counts.values()), **bags)
        for split, files in by_split.items():
            edge_index, edge_type = zip(*(self._edges(triples, names) for triples in files), strict=True)
            prefix = _PREFIX[split]
            data[f"{prefix}edge_index"], data[f"{prefix}edge_type"] = torch.cat(edge_index, 1), torch.cat(edge_type)
        if sets is not None:
            counts = torch.tensor([len(triples) for triples in train])
            data.edge_set = torch.tensor(sets, dtype=torch.int32).repeat_interleave(counts)
        self._names = {**names.entities, "relation": names.relations, **feature_names}
        self._facts = {
            "num_relations": len(names.relations),
            **self.schema.facts(names.counts, names.ends),
            **feature_facts,
            **edge_set_facts(self.edge_sets),
        }
        return data

    def _read_triples(self, location: Path, train_files: Sequence[Path]) -> dict[str, list[Triples]]:
        """Return the triples of each split, file by file, train first.

        Args:
            location: the folder or the archive.
            train_files: the files of edge sets, if any, which replace ``train.txt``.

        Raises:
            DataError: a file of the public split is missing.
        """
        if location.is_file():
            by_split = {split: [triples] for split, triples in read_archive(location).items()}
        else:
            by_split = {split: [read_file(file)] for split, file in self._split_files(location).items()}
        if train_files:
            by_split["train"] = [read_file(path) for path in train_files]
        needed = list(_PREFIX) if self.split.kind == "public" else ["train"]
        if missing := [split for split in needed if split not in by_split]:
            files = [triples.where for files in by_split.values() for triples in files]
            listed = ", ".join(name.rpartition(":")[2].rpartition("/")[2] for name in files)
            raise DataError(
                f"{self.origin}: {location} has no {missing[0]}.txt; it has {listed or 'none of the three files'}",
                hint=f"put {missing[0]}.txt there (or .tsv, or .gz), or set data.split=random to split train.txt",
            )
        return {split: by_split[split] for split in _PREFIX if split in by_split}

    def _set_files(self, location: Path) -> tuple[list[Path], list[int] | None]:
        """Return the files of edge sets and the set of each; see :func:`find_edge_sets`."""
        return find_edge_sets("data.edge_sets", self.edge_sets, location.parent if location.is_file() else location)

    def _split_files(self, folder: Path) -> dict[str, Path]:
        """Return the file of each split in a folder, without train if edge sets replace it; empty without train."""
        if not self.edge_sets:
            return split_files(folder)
        files = split_files(folder, needed=("valid",) if self.split.kind == "public" else ())
        return {split: file for split, file in files.items() if split != "train"}

    def _find(self) -> Path:
        """Return the folder or the archive."""
        paths = candidates(self.settings.path, self.root)
        for path in paths:
            if path.is_file() and is_archive(path):
                return path
            if path.is_dir() and (self._split_files(path) or (self.edge_sets and self.split.kind != "public")):
                return path
        for path in paths:
            if path.is_dir():
                files = ", ".join(sorted(file.name + "/" * file.is_dir() for file in path.iterdir())[:5]) or "nothing"
                needed = "valid" if self.edge_sets else "train"
                raise DataError(
                    f"{self.origin}: the folder has no {needed}.txt; it has {files}",
                    hint="set data.path to a folder with train.txt, valid.txt and test.txt (or .tsv, or .gz)",
                )
            if path.is_file():
                raise DataError(
                    f"{self.origin} is a file, but not a .tar.gz",
                    hint="set data.path to the folder with train.txt, valid.txt and test.txt, or to a .tar.gz of it",
                )
        hint = "set data.path to a folder with train.txt, valid.txt and test.txt"
        for folder in (path.parent for path in paths if path.parent.is_dir()):
            if near := difflib.get_close_matches(paths[0].name, [file.name for file in folder.iterdir()], n=3):
                hint += f"; in {folder} there are {', '.join(near)}"
                break
        raise no_folder(self.origin, paths, hint)

    def _edges(self, triples: Triples, names: EntityNames) -> tuple[Tensor, Tensor]:
        """Return ``edge_index [2, T]`` and ``edge_type [T]``; drop or refuse triples with unknown names.

        Raises:
            DataError: a name is unknown, and ``unknown=error``.
        """
        ids = names.encode(triples)
        unknown = (ids < 0).any(axis=0)
        if (row := first_true(unknown)) is not None:
            if self.settings.unknown == "error":
                column = 1 if ids[1, row] < 0 else int((ids[:, row] < 0).argmax())
                role = "relation" if COLUMNS[column] == "relation" else "entity"
                raise DataError(
                    f"{triples.where}, line {triples.line(row)}: the {role} {triples.columns[column][row].as_py()!r} "
                    f"does not occur in train; {int(unknown.sum())} of {len(triples)} triples have such a name",
                    hint="set data.unknown=drop to drop these triples, or data.unknown=keep to score them too",
                )
            log.warning(
                "%s: dropped %d of %d triples, whose names do not occur in train",
                triples.where,
                int(unknown.sum()),
                len(triples),
            )
            ids = ids[:, ~unknown]
        head, relation, tail = torch.from_numpy(ids)
        return torch.stack([head, tail]), relation
