"""Reading PyTorch-BigGraph's folders: counts and names of entities and relations, edges by bucket, bags of features."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtrain.data.ingest.columns import Column
from gtrain.data.readers.extras import need
from gtrain.errors import DataError, GtrainError
from gtrain.graph.store.tables import csr_tensor

Ints = NDArray[np.int64]

_COUNT = re.compile(r"entity_count_(.+)_(\d+)\.txt")


def read_counts(folder: Path) -> dict[str, Ints]:
    """Return the number of entities in each partition of each entity type, from ``entity_count_<type>_<part>.txt``.

    Raises:
        DataError: there are no such files, one is missing or malformed, or the numbers of partitions do not agree.
    """
    found: dict[str, dict[int, int]] = {}
    for path in sorted(folder.iterdir()):
        if match := _COUNT.fullmatch(path.name):
            found.setdefault(match[1], {})[int(match[2])] = _read_count(path)
    if not found:
        raise DataError(
            f"{folder} has no entity_count_<type>_<part>.txt",
            hint="set data.path to the folder that PyTorch-BigGraph's configuration calls entity_path",
        )
    for entity, counts in found.items():
        missing = sorted(set(range(max(counts) + 1)) - set(counts))
        if missing:
            raise DataError(
                f"{folder} has no entity_count_{entity}_{missing[0]}.txt, and has partition {max(counts)} of {entity}",
                hint="copy all files of the folder, or write it anew with PyTorch-BigGraph's importer",
            )
    numbers = {entity: len(counts) for entity, counts in found.items()}
    partitioned = {entity: number for entity, number in numbers.items() if number > 1}
    if len(set(partitioned.values())) > 1:
        told = ", ".join(f"{entity} in {number}" for entity, number in partitioned.items())
        raise DataError(
            f"{folder}: entity types are in different numbers of partitions: {told}",
            hint="partition all types alike, or leave a type in one partition, as PyTorch-BigGraph demands too",
        )
    return {entity: np.array([counts[part] for part in range(len(counts))]) for entity, counts in found.items()}


def read_relation_count(folder: Path) -> int | None:
    """Return the number of dynamic relations, from ``dynamic_rel_count.txt``; None where there is no such file."""
    path = folder / "dynamic_rel_count.txt"
    return _read_count(path) if path.is_file() else None


def read_entity_names(folder: Path, entity: str, counts: Ints) -> list[str] | None:
    """Return the names of the entities of a type, in the order of partitions; None where there are no such files."""
    paths = [folder / f"entity_names_{entity}_{part}.json" for part in range(counts.size)]
    there = [path.is_file() for path in paths]
    if not any(there):
        return None
    if not all(there):
        raise DataError(
            f"{folder} has no {paths[there.index(False)].name}, and has {paths[there.index(True)].name}",
            hint="copy all files of the folder, or delete all entity_names files to go without names",
        )
    return [name for path, count in zip(paths, counts.tolist(), strict=True) for name in read_names(path, count)]


def read_names(path: Path, count: int) -> list[str]:
    """Return the names in a file, which has to hold ``count`` of them."""
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as err:  # of JSON, or of UTF-8
        raise DataError(
            f"{path} is no JSON: {err}", hint="copy the file again, or delete all names files to go without names"
        ) from err
    if not isinstance(names, list) or len(names) != count or not all(isinstance(name, str) for name in names):
        found = f"{len(names)} names" if isinstance(names, list) else f"a {type(names).__name__}"
        raise DataError(
            f"{path} has {found}, and a list of {count} strings is expected",
            hint="copy the counts and the names of the same import, or delete all names files to go without names",
        )
    return names


def _read_count(path: Path) -> int:
    text = path.read_text(errors="replace").strip()
    if re.fullmatch(r"\d{1,18}", text) is None:
        raise DataError(f"{path} holds {text[:30]!r}, and one count is expected", hint="write the number alone")
    return int(text)


@dataclass(frozen=True)
class EdgeBags:
    """One side's bags of the edges of a file: ``<side>d_offsets`` ``[E + 1]`` and ``<side>d_data``.

    Attributes:
        offsets: edge e has the features ``data[offsets[e]:offsets[e + 1]]``.
        data: feature ids.
    """

    offsets: Ints
    data: Ints

    @classmethod
    def read(cls, file: Any, side: str, edges: slice) -> EdgeBags | None:
        """Return what a file has of some edges; None where it has no features on this side."""
        if f"{side}d_data" not in file or not len(file[f"{side}d_data"]):
            return None
        offsets = np.asarray(file[f"{side}d_offsets"][edges.start : edges.stop + 1], dtype=np.int64)
        if not len(offsets):
            return cls(offsets, offsets)
        data = np.asarray(file[f"{side}d_data"][offsets[0] : max(offsets[0], offsets[-1])], dtype=np.int64)
        return cls(offsets - offsets[0], data)

    def check(self, path: object, side: str, edges: int, features: int) -> None:
        """Check that the bags are those of this many edges.

        Raises:
            DataError: they are not.
        """
        begins = self.offsets
        if len(begins) != edges + 1 or begins[-1] != len(self.data) or (np.diff(begins) < 0).any():
            raise DataError(
                f"{path}: {side}d_offsets are not those of its edges and of {len(self.data)} features",
                hint="write the folder anew with PyTorch-BigGraph's importer",
            )
        wrong = (self.data < 0) | (self.data >= features)
        if wrong.any():
            raise DataError(
                f"{path}: {side}d_data has the feature {self.data[int(wrong.argmax())]}, and there are {features}, "
                f"0..{features - 1}",
                hint="name entities and edges of the same import (data.path, data.edges)",
            )


@dataclass
class BagBook:
    """The different bags of one type.

    Attributes:
        features: how many features there are.
        bags: the features of each entity.
    """

    features: int
    bags: list[Ints] = field(default_factory=list)
    _known: dict[bytes, int] = field(default_factory=dict)

    def number(self, edges: EdgeBags, rows: Ints) -> Ints:
        """Return the entities of some edges."""
        found = np.empty(len(rows), dtype=np.int64)
        for place, row in enumerate(rows.tolist()):
            bag = edges.data[edges.offsets[row] : edges.offsets[row + 1]]
            entity = self._known.setdefault(bag.tobytes(), len(self.bags))
            if entity == len(self.bags):
                self.bags.append(bag)
            found[place] = entity
        return found


def bag_tensor(counts: dict[str, int], books: dict[str, BagBook]) -> Tensor:
    """Return the node tensor ``bag``, ``torch.sparse_csr``: a row for each entity of all types, one after the other."""
    lengths: list[int] = []
    for name, count in counts.items():
        lengths += [len(bag) for bag in books[name].bags] if name in books else [0] * count
    every = [bag for name in counts if name in books for bag in books[name].bags]
    data = np.concatenate([np.empty(0, dtype=np.int64), *every])
    pointer = torch.tensor([0, *lengths]).cumsum(0)
    columns = max(book.features for book in books.values())
    ids = torch.from_numpy(data)
    return csr_tensor(pointer, ids, torch.ones(len(ids)), (len(lengths), columns))


FORMAT_VERSION = 1
BLOCK_EDGES = 1 << 22
"""Edges that are read at a time."""
_BUCKET = re.compile(r"edges_(\d+)_(\d+)\.h5")


@dataclass(frozen=True)
class Relation:
    """A relation type: its name, and the entity types that it joins."""

    name: str
    lhs: str
    rhs: str


@dataclass(frozen=True)
class Bucket:
    """One file of edges.

    Attributes:
        path: the file.
        source_part: partition of the left-hand sides, from the file's name.
        target_part: partition of the right-hand sides.
        num_edges: its edges.
        weighted: whether they have weights.
    """

    path: Path
    source_part: int
    target_part: int
    num_edges: int
    weighted: bool


@dataclass(frozen=True)
class Edges:
    """Edges as a file holds them: offsets within partitions, relations, weights (float32) or None; all ``[E]``.

    ``bags`` are the features of the ends by ``lhs`` and ``rhs``, where there are any.
    """

    source: Ints
    relation: Ints
    target: Ints
    weight: NDArray[np.float32] | None
    bags: dict[str, EdgeBags]


class EdgeReader:
    """Reads folders of buckets into columns with global ids.

    Args:
        counts: entities of each partition of each type.
        relations: one for each value of ``rel``, or one for all.
        num_relations: how many values ``rel`` may have; None means any.
        books: of featurized types, which receive the bags; the count of such a type is that of its features.
        firsts: what is added to the ids of each type; None: nothing.
    """

    def __init__(
        self,
        counts: dict[str, Ints],
        relations: Sequence[Relation],
        num_relations: int | None,
        books: dict[str, BagBook] | None = None,
        firsts: dict[str, int] | None = None,
        check_negative: Callable[[str], None] | None = None,
    ) -> None:
        self.relations = relations
        self._books = books or {}
        self._types = {side: [getattr(relation, side) for relation in relations] for side in ("lhs", "rhs")}
        self._firsts = {
            side: np.array([(firsts or {}).get(name, 0) for name in names]) for side, names in self._types.items()
        }
        self.num_relations = num_relations
        self._check_negative = check_negative
        self.negative_weight: str | None = None  # file, edge and value of the first
        self.sides = {
            "lhs": [counts[relation.lhs] for relation in relations],
            "rhs": [counts[relation.rhs] for relation in relations],
        }

    def read(self, folders: Sequence[Path], place: Path) -> dict[str, Column]:
        """Read all edges, a block at a time.

        Args:
            folders: of buckets.
            place: folder for temporary files, where large columns are.

        Returns:
            ``source`` and ``target`` (int32 or int64), ``rel`` (int64), ``weight`` (float32) where there is one, and
            with several folders ``set`` (int32), the number of the folder; all ``[E]``.
        """
        sources, targets = (max(sizes.size for sizes in side) for side in self.sides.values())
        buckets = [(number, b) for number, folder in enumerate(folders) for b in find_buckets(folder, sources, targets)]
        weighted = {bucket.weighted for _, bucket in buckets}
        if len(weighted) > 1:
            plain = next(bucket for _, bucket in buckets if not bucket.weighted)
            raise DataError(
                f"{plain.path} has no weights, and other files do", hint="give all edges weights, or none of them"
            )
        kinds: dict[str, Any] = {"source": np.int32, "target": np.int32, "rel": np.int64}
        kinds |= {"weight": np.float32} if True in weighted else {}
        kinds |= {"set": np.int32} if len(folders) > 1 else {}
        columns = {name: Column(place, kind) for name, kind in kinds.items()}
        for number, bucket in buckets:
            for begin in range(0, bucket.num_edges, BLOCK_EDGES):
                found = self._read(bucket, begin, min(begin + BLOCK_EDGES, bucket.num_edges))
                found["set"] = np.full(len(found["rel"]), number)
                for name, column in columns.items():
                    column.append(found[name])
        return columns

    def _read(self, bucket: Bucket, begin: int, end: int) -> dict[str, Any]:
        edges = read_bucket(bucket, begin, end)
        if edges.weight is not None and self.negative_weight is None and (edges.weight < 0).any():
            row = int((edges.weight < 0).argmax())
            self.negative_weight = f"{bucket.path}, edge {begin + row} (from 0): the weight is {edges.weight[row]:g}"
            if self._check_negative is not None:
                self._check_negative(self.negative_weight)
        limit = np.iinfo(np.int64).max if self.num_relations is None else self.num_relations
        self._check(bucket, "rel", edges.relation, np.array(limit), "relations", begin)
        kind = edges.relation if len(self.relations) > 1 else np.zeros_like(edges.relation)
        source = self._globalise(bucket, "lhs", edges.source, kind, edges.bags.get("lhs"), begin)
        target = self._globalise(bucket, "rhs", edges.target, kind, edges.bags.get("rhs"), begin)
        found = {"source": source, "target": target, "rel": edges.relation}
        return found if edges.weight is None else {**found, "weight": edges.weight}

    def _globalise(
        self, bucket: Bucket, side: str, offset: Ints, kind: Ints, bags: EdgeBags | None, begin: int
    ) -> Ints:
        """Turn offsets within partitions into ids; a type in one partition is met in all buckets."""
        part = bucket.source_part if side == "lhs" else bucket.target_part
        featurized = np.array([name in self._books for name in self._types[side]])[kind]
        if bags is not None and not featurized.any():
            name = self._types[side][0]
            raise DataError(
                f"{bucket.path} has {side}d_data: its entities are featurized (bags of features), and {name} is not",
                hint=f"set data.entities.{name}.featurized=true, with model=kg; or give each entity an id of its own",
            )
        offset = np.where(featurized, 0, offset)
        own = [min(part, sizes.size - 1) for sizes in self.sides[side]]
        size = np.array([sizes[place] for sizes, place in zip(self.sides[side], own, strict=True)])
        before = np.array([sizes[:place].sum() for sizes, place in zip(self.sides[side], own, strict=True)])
        self._check(bucket, side, offset, size[kind], "entities in that partition", begin)
        ids: Ints = offset + (before + self._firsts[side])[kind]
        for place in np.unique(kind[featurized]).tolist():
            ids[kind == place] = self._entities(bucket, side, self._types[side][place], bags, kind == place)
        return ids

    def _entities(self, bucket: Bucket, side: str, name: str, bags: EdgeBags | None, here: NDArray[np.bool_]) -> Ints:
        """Return the entities of some edges of a featurized type."""
        if bags is None:
            raise DataError(
                f"{bucket.path} has no {side}d_data, and {name} is featurized",
                hint=f"leave data.entities.{name}.featurized out, or write the features with the edges",
            )
        bags.check(bucket.path, side, len(here), self._books[name].features)
        return self._books[name].number(bags, np.flatnonzero(here))

    def _check(self, bucket: Bucket, name: str, values: Ints, limit: Ints, what: str, begin: int) -> None:
        wrong = (values < 0) | (values >= limit)
        if wrong.any():
            row = int(wrong.argmax())
            count = int(np.broadcast_to(limit, values.shape)[row])
            told = "and ids are not negative" if values[row] < 0 else f"and there are {count} {what}, 0..{count - 1}"
            raise DataError(
                f"{bucket.path}: edge {begin + row} has {name} {values[row]}, {told}",
                hint="name entities, edges and relations of the same import (data.path, data.edges, data.relations)",
            )


def find_buckets(folder: Path, sources: int, targets: int) -> list[Bucket]:
    """Return the files of edges in a folder, checked: one for each pair of partitions.

    Args:
        folder: what PyTorch-BigGraph calls an edge path.
        sources: partitions of the left-hand sides.
        targets: partitions of the right-hand sides.
    """
    parts = {(int(m[1]), int(m[2])): path for path in folder.iterdir() if (m := _BUCKET.fullmatch(path.name))}
    if not parts:
        raise DataError(f"{folder} has no edges_<lhs>_<rhs>.h5", hint="set data.edges to the folder that holds them")
    wanted = {(i, j) for i in range(sources) for j in range(targets)}
    told = f"there are {sources} partitions of left-hand and {targets} of right-hand sides: {sources} x {targets}"
    if missing := sorted(wanted - set(parts)):
        raise DataError(
            f"{folder} has no edges_{missing[0][0]}_{missing[0][1]}.h5, and {told} = {len(wanted)} buckets",
            hint="copy all files of the folder; a bucket without edges has a file too",
        )
    if extra := sorted(set(parts) - wanted):
        raise DataError(
            f"{folder} has {parts[extra[0]].name}, and {told} = {len(wanted)} buckets",
            hint="name edges and entities of the same import (data.edges, data.path)",
        )
    return [_inspect(path, i, j) for (i, j), path in sorted(parts.items())]


def read_bucket(bucket: Bucket, begin: int = 0, end: int | None = None) -> Edges:
    """Return edges ``begin`` to ``end`` of a file; None: all."""
    rows = slice(begin, bucket.num_edges if end is None else end)
    count = rows.stop - rows.start
    with _opened(bucket.path) as file:
        columns = {name: np.empty(count, np.int64) for name in ("lhs", "rel", "rhs")}
        weight = np.empty(count, np.float32) if bucket.weighted else None
        if count:  # h5py refuses to read nothing (its issue 870)
            for name, column in columns.items():
                file[name].read_direct(column, np.s_[rows])
            if weight is not None:
                file["weight"].read_direct(weight, np.s_[rows])
        found = {side: EdgeBags.read(file, side, rows) for side in ("lhs", "rhs")}
    bags = {side: some for side, some in found.items() if some is not None}
    if weight is not None and not np.isfinite(weight).all():
        row = int(np.argmin(np.isfinite(weight)))
        raise DataError(
            f"{bucket.path}: the weight of edge {begin + row} is {weight[row]}", hint="give each edge a finite weight"
        )
    return Edges(columns["lhs"], columns["rel"], columns["rhs"], weight, bags)


def require_h5py() -> ModuleType:
    """Return the module ``h5py``.

    Raises:
        ConfigError: it is not installed.
    """
    return need("h5py", "data=biggraph", extra="hdf5")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    h5py = require_h5py()
    try:
        with h5py.File(path, "r") as file:
            yield file
    except GtrainError:
        raise
    except Exception as err:  # h5py has many ways to say that a file is damaged
        raise DataError(
            f"{path} cannot be read as HDF5: {str(err).splitlines()[0] if str(err) else type(err).__name__}",
            hint="copy the file again, or write it anew",
        ) from err


def _inspect(path: Path, source_part: int, target_part: int) -> Bucket:
    """Check a file's outside: version, datasets, lengths."""
    anew = "write the folder anew with PyTorch-BigGraph's importer"
    with _opened(path) as file:
        version = file.attrs.get("format_version")
        if version != FORMAT_VERSION:
            newer = isinstance(version, np.integer) and version > FORMAT_VERSION
            hint = (
                "it is of a newer format: export it in the format that PyTorch-BigGraph 1.0 writes" if newer else anew
            )
            raise DataError(f"{path}: format_version is {version}, and {FORMAT_VERSION} is read", hint=hint)
        lengths = {}
        for name in ("rel", "lhs", "rhs", *(["weight"] if "weight" in file else [])):
            if name not in file:
                raise DataError(f"{path} has no dataset {name!r}; it has {', '.join(file) or 'none'}", hint=anew)
            kind = file[name].dtype.kind
            if kind not in ("iuf" if name == "weight" else "iu") or file[name].ndim != 1:
                raise DataError(
                    f"{path}: {name} is {file[name].dtype} of shape {list(file[name].shape)}, and one row of "
                    f"{'numbers' if name == 'weight' else 'integers'} is expected",
                    hint=anew,
                )
            lengths[name] = len(file[name])
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError(f"{path}: the datasets have different lengths: {told}", hint=anew)
    return Bucket(path, source_part, target_part, lengths["rel"], "weight" in lengths)
