"""Read PyTorch-BigGraph's folders: counts and names of entities and relations, edges by bucket, bags of features."""

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
from numpy.typing import NDArray

from gtrain.data.ingest.columns import Column
from gtrain.data.readers.files import Ints, first_true, require
from gtrain.errors import DataError, unreadable

_COUNT = re.compile(r"entity_count_(.+)_(\d+)\.txt")
_IMPORT_HINT = "write the folder again with PyTorch-BigGraph's importer"


def read_counts(folder: Path) -> dict[str, Ints]:
    """Return the number of entities in each partition of each entity type, from ``entity_count_<type>_<part>.txt``.

    Raises:
        DataError: the files are missing or malformed, or types have different numbers of partitions.
    """
    by_type: dict[str, dict[int, int]] = {}
    for path in sorted(folder.iterdir()):
        if match := _COUNT.fullmatch(path.name):
            by_type.setdefault(match[1], {})[int(match[2])] = _read_count(path)
    if not by_type:
        raise DataError(
            f"{folder} has no entity_count_<type>_<part>.txt",
            hint="set data.path to the folder that PyTorch-BigGraph's configuration calls entity_path",
        )
    for entity, counts in by_type.items():
        missing = sorted(set(range(max(counts) + 1)) - set(counts))
        if missing:
            raise DataError(
                f"{folder} has no entity_count_{entity}_{missing[0]}.txt, but has partition {max(counts)} of {entity}",
                hint=f"copy all files of the folder, or {_IMPORT_HINT}",
            )
    partitioned = {entity: len(counts) for entity, counts in by_type.items() if len(counts) > 1}
    if len(set(partitioned.values())) > 1:
        listed = ", ".join(f"{entity} in {number}" for entity, number in partitioned.items())
        raise DataError(
            f"{folder}: entity types are in different numbers of partitions: {listed}",
            hint="partition all types alike, or leave a type in one partition; PyTorch-BigGraph also requires this",
        )
    return {entity: np.array([counts[part] for part in range(len(counts))]) for entity, counts in by_type.items()}


def read_relation_count(folder: Path) -> int | None:
    """Return the number of dynamic relations from ``dynamic_rel_count.txt``; None without that file."""
    path = folder / "dynamic_rel_count.txt"
    return _read_count(path) if path.is_file() else None


def read_entity_names(folder: Path, entity: str, counts: Ints) -> list[str] | None:
    """Return the names of a type's entities, partition by partition; None without files of names."""
    paths = [folder / f"entity_names_{entity}_{part}.json" for part in range(counts.size)]
    exists = [path.is_file() for path in paths]
    if not any(exists):
        return None
    if not all(exists):
        raise DataError(
            f"{folder} has no {paths[exists.index(False)].name}, but has {paths[exists.index(True)].name}",
            hint="copy all files of the folder, or delete all entity_names files to go without names",
        )
    return [name for path, count in zip(paths, counts.tolist(), strict=True) for name in read_names(path, count)]


def read_names(path: Path, count: int) -> list[str]:
    """Return the names in a file.

    Raises:
        DataError: the file does not hold a list of ``count`` strings.
    """
    hint = "copy the file again, or delete all names files to go without names"
    with unreadable(f"{path} is not JSON", hint, ValueError):  # of JSON, or of UTF-8
        names = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(names, list) or len(names) != count or not all(isinstance(name, str) for name in names):
        content = f"{len(names)} names" if isinstance(names, list) else f"a {type(names).__name__}"
        raise DataError(
            f"{path} has {content}; a list of {count} strings is expected",
            hint="copy the counts and the names of the same import, or delete all names files to go without names",
        )
    return names


def _read_count(path: Path) -> int:
    text = path.read_text(errors="replace").strip()
    if re.fullmatch(r"\d{1,18}", text) is None:
        raise DataError(f"{path} holds {text[:30]!r}; one count is expected", hint="write the number alone")
    return int(text)


@dataclass(frozen=True)
class EdgeBags:
    """The bags of features on one side (``lhs`` or ``rhs``) of a file's edges: ``<side>d_offsets``, ``<side>d_data``.

    Attributes:
        offsets: edge e has the features ``data[offsets[e]:offsets[e + 1]]``, ``[E + 1]``.
        data: feature ids.
    """

    offsets: Ints
    data: Ints

    @classmethod
    def read(cls, file: Any, side: str, edges: slice) -> EdgeBags | None:
        """Return the bags of some edges; None if the file has no features on this side."""
        if f"{side}d_data" not in file or not len(file[f"{side}d_data"]):
            return None
        offsets = np.asarray(file[f"{side}d_offsets"][edges.start : edges.stop + 1], dtype=np.int64)
        if not len(offsets):
            return cls(offsets, offsets)
        # Malformed offsets may descend: check() reports them.
        data = np.asarray(file[f"{side}d_data"][offsets[0] : max(offsets[0], offsets[-1])], dtype=np.int64)
        return cls(offsets - offsets[0], data)

    def check(self, path: object, side: str, num_edges: int, num_features: int) -> None:
        """Check the bags of a file's edges.

        Raises:
            DataError: the offsets do not match the edges, or a feature is unknown.
        """
        offsets = self.offsets
        if len(offsets) != num_edges + 1 or offsets[-1] != len(self.data) or (np.diff(offsets) < 0).any():
            raise DataError(
                f"{path}: {side}d_offsets do not match its edges and {len(self.data)} features", hint=_IMPORT_HINT
            )
        if (position := first_true((self.data < 0) | (self.data >= num_features))) is not None:
            raise DataError(
                f"{path}: {side}d_data has the feature {self.data[position]}; the {num_features} features are "
                f"0..{num_features - 1}",
                hint="name entities and edges of the same import (data.path, data.edges)",
            )


@dataclass
class DistinctBags:
    """The distinct bags of features of one type, each of which becomes an entity.

    Attributes:
        num_features: number of features.
        bags: the features of each entity.
    """

    num_features: int
    bags: list[Ints] = field(default_factory=list)
    _entities: dict[bytes, int] = field(default_factory=dict)

    def number(self, edges: EdgeBags, rows: Ints) -> Ints:
        """Return the entities of the edges ``rows``; new bags get the next numbers."""
        entities = np.empty(len(rows), dtype=np.int64)
        for position, row in enumerate(rows.tolist()):
            bag = edges.data[edges.offsets[row] : edges.offsets[row + 1]]
            entities[position] = self._entities.setdefault(bag.tobytes(), len(self.bags))
            if entities[position] == len(self.bags):
                self.bags.append(bag)
        return entities


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
class BucketFile:
    """One file of edges.

    Attributes:
        path: the file.
        source_part: partition of the left-hand sides, from the file's name.
        target_part: partition of the right-hand sides.
        num_edges: number of edges.
        weighted: whether the edges have weights.
    """

    path: Path
    source_part: int
    target_part: int
    num_edges: int
    weighted: bool


class EdgeReader:
    """Reads folders of buckets into columns with global ids.

    Args:
        counts: number of entities in each partition of each type.
        relations: one for each value of ``rel``, or one for all.
        num_relations: number of values of ``rel``; None: any.
        bags: the distinct bags of each featurized type, which reading fills; ``counts`` has its number of features.
        first_ids: the first global id of each type; None: 0.
        check_negative: called with the location of the first negative weight.
    """

    def __init__(
        self,
        counts: dict[str, Ints],
        relations: Sequence[Relation],
        num_relations: int | None,
        bags: dict[str, DistinctBags] | None = None,
        first_ids: dict[str, int] | None = None,
        check_negative: Callable[[str], None] | None = None,
    ) -> None:
        self.relations = relations
        self.num_relations = num_relations
        self._bags, self._first_ids = bags or {}, first_ids or {}
        self._check_negative = check_negative
        self.negative_weight: str | None = None  # file, edge and value of the first
        self._types = {side: [getattr(relation, side) for relation in relations] for side in ("lhs", "rhs")}
        self._sizes = {side: [counts[name] for name in names] for side, names in self._types.items()}

    @property
    def num_partitions(self) -> tuple[int, int]:
        """Number of partitions of the left-hand and of the right-hand sides."""
        left, right = (max(sizes.size for sizes in side) for side in self._sizes.values())
        return left, right

    def read(self, folders: Sequence[Path], scratch: Path) -> dict[str, Column]:
        """Read all edges, a block at a time.

        Args:
            folders: folders of buckets.
            scratch: folder for temporary files, which hold large columns.

        Returns:
            ``source`` and ``target`` (int32 or int64), ``rel`` (int64), ``weight`` (float32) if the edges have weights,
            and with several folders ``set`` (int32), the number of the folder; all ``[E]``.
        """
        buckets = [
            (number, bucket)
            for number, folder in enumerate(folders)
            for bucket in find_buckets(folder, *self.num_partitions)
        ]
        weighted = {bucket.weighted for _, bucket in buckets}
        if len(weighted) > 1:
            unweighted = next(bucket for _, bucket in buckets if not bucket.weighted)
            raise DataError(
                f"{unweighted.path} has no weights, but other files do", hint="give all edges weights, or none of them"
            )
        dtypes: dict[str, Any] = {"source": np.int32, "target": np.int32, "rel": np.int64}
        dtypes |= {"weight": np.float32} if True in weighted else {}
        dtypes |= {"set": np.int32} if len(folders) > 1 else {}
        columns = {name: Column(scratch, dtype) for name, dtype in dtypes.items()}
        for number, bucket in buckets:
            for begin in range(0, bucket.num_edges, BLOCK_EDGES):
                block = self._read_block(bucket, begin, min(begin + BLOCK_EDGES, bucket.num_edges))
                block["set"] = np.full(len(block["rel"]), number)
                for name, column in columns.items():
                    column.append(block[name])
        return columns

    def _read_block(self, bucket: BucketFile, begin: int, end: int) -> dict[str, Any]:
        edges, bags = read_bucket(bucket, begin, end)
        weight = edges.get("weight")
        if weight is not None and self.negative_weight is None and (row := first_true(weight < 0)) is not None:
            self.negative_weight = f"{bucket.path}, edge {begin + row} (from 0): the weight is {weight[row]:g}"
            if self._check_negative is not None:
                self._check_negative(self.negative_weight)
        limit = np.iinfo(np.int64).max if self.num_relations is None else self.num_relations
        self._check_range(bucket, "rel", edges["rel"], np.array(limit), "relations", begin)
        # A single relation stands for all values of rel.
        relation = edges["rel"] if len(self.relations) > 1 else np.zeros_like(edges["rel"])
        return {
            **edges,
            "source": self._global_ids(bucket, "lhs", edges["lhs"], relation, bags.get("lhs"), begin),
            "target": self._global_ids(bucket, "rhs", edges["rhs"], relation, bags.get("rhs"), begin),
        }

    def _global_ids(
        self, bucket: BucketFile, side: str, offset: Ints, relation: Ints, bags: EdgeBags | None, begin: int
    ) -> Ints:
        """Convert offsets within partitions to global ids; a type in one partition occurs in all buckets."""
        part, types = bucket.source_part if side == "lhs" else bucket.target_part, self._types[side]
        featurized = np.array([name in self._bags for name in types])[relation]
        if bags is not None and not featurized.any():
            raise DataError(
                f"{bucket.path} has {side}d_data (bags of features), but {types[0]} is not featurized",
                hint=f"set data.entities.{types[0]}.featurized=true, with model=kg; or give each entity an id",
            )
        # by relation: number of entities in the bucket's partition of its type, and the global id of the first
        parts = [sizes[: part + 1] for sizes in self._sizes[side]]
        size = np.array([sizes[-1] for sizes in parts])
        first = np.array(
            [sizes[:-1].sum() + self._first_ids.get(name, 0) for sizes, name in zip(parts, types, strict=True)]
        )
        # A featurized end has no id in the file: the loop below numbers its bag.
        offset = np.where(featurized, 0, offset)
        self._check_range(bucket, side, offset, size[relation], "entities in that partition", begin)
        ids: Ints = offset + first[relation]
        for number in np.unique(relation[featurized]).tolist():
            name, rows = types[number], np.flatnonzero(relation == number)
            if bags is None:
                raise DataError(
                    f"{bucket.path} has no {side}d_data, but {name} is featurized",
                    hint=f"remove data.entities.{name}.featurized, or write the features with the edges",
                )
            bags.check(bucket.path, side, len(relation), self._bags[name].num_features)
            ids[rows] = self._bags[name].number(bags, rows)
        return ids

    def _check_range(self, bucket: BucketFile, name: str, values: Ints, limit: Ints, elements: str, begin: int) -> None:
        if (row := first_true((values < 0) | (values >= limit))) is not None:
            count = int(np.broadcast_to(limit, values.shape)[row])
            rule = "ids are not negative" if values[row] < 0 else f"the {count} {elements} are 0..{count - 1}"
            raise DataError(
                f"{bucket.path}: edge {begin + row} has {name} {values[row]}; {rule}",
                hint="name entities, edges and relations of the same import (data.path, data.edges, data.relations)",
            )


def find_buckets(folder: Path, sources: int, targets: int) -> list[BucketFile]:
    """Return a folder's files of edges, one for each pair of partitions, after checking their headers.

    Args:
        folder: an edge path of PyTorch-BigGraph.
        sources: number of partitions of the left-hand sides.
        targets: number of partitions of the right-hand sides.
    """
    parts = {(int(m[1]), int(m[2])): path for path in folder.iterdir() if (m := _BUCKET.fullmatch(path.name))}
    if not parts:
        raise DataError(f"{folder} has no edges_<lhs>_<rhs>.h5", hint="set data.edges to the folder that holds them")
    needed = {(i, j) for i in range(sources) for j in range(targets)}
    arithmetic = (
        f"there are {sources} partitions of left-hand and {targets} of right-hand sides: {sources} x {targets} = "
        f"{len(needed)} buckets"
    )
    if missing := sorted(needed - set(parts)):
        raise DataError(
            f"{folder} has no edges_{missing[0][0]}_{missing[0][1]}.h5, and {arithmetic}",
            hint="copy all files of the folder; a bucket without edges also has a file",
        )
    if extra := sorted(set(parts) - needed):
        raise DataError(
            f"{folder} has {parts[extra[0]].name}, and {arithmetic}",
            hint="name edges and entities of the same import (data.edges, data.path)",
        )
    return [_inspect(path, i, j) for (i, j), path in sorted(parts.items())]


def read_bucket(
    bucket: BucketFile, begin: int = 0, end: int | None = None
) -> tuple[dict[str, NDArray[Any]], dict[str, EdgeBags]]:
    """Return edges ``begin`` to ``end`` of a file as it stores them; None: to the last.

    Returns:
        Offsets within partitions ``lhs`` and ``rhs``, relations ``rel``, and ``weight`` (float32) if the file has
        weights, all ``[E]``; and the features of the ends, by ``lhs`` and ``rhs``, if the file has any.
    """
    rows = slice(begin, bucket.num_edges if end is None else end)
    count = rows.stop - rows.start
    with _opened(bucket.path) as file:
        columns: dict[str, NDArray[Any]] = {name: np.empty(count, np.int64) for name in ("lhs", "rel", "rhs")}
        columns |= {"weight": np.empty(count, np.float32)} if bucket.weighted else {}
        if count:
            # h5py refuses to read nothing (its issue 870).
            for name, column in columns.items():
                file[name].read_direct(column, np.s_[rows])
        bags = {side: bags for side in ("lhs", "rhs") if (bags := EdgeBags.read(file, side, rows)) is not None}
    if bucket.weighted and (row := first_true(~np.isfinite(columns["weight"]))) is not None:
        raise DataError(
            f"{bucket.path}: the weight of edge {begin + row} is {columns['weight'][row]}",
            hint="give each edge a finite weight",
        )
    return columns, bags


def require_h5py() -> ModuleType:
    """Return the module ``h5py``.

    Raises:
        ConfigError: it is not installed.
    """
    return require("h5py", "data=biggraph", extra="hdf5")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    h5py = require_h5py()
    hint = "copy the file again, or write it again"
    with unreadable(f"{path} cannot be read as HDF5", hint), h5py.File(path, "r") as file:
        yield file


def _inspect(path: Path, source_part: int, target_part: int) -> BucketFile:
    """Check a file's version, and the names and lengths of its datasets."""
    with _opened(path) as file:
        version = file.attrs.get("format_version")
        if version != FORMAT_VERSION:
            newer = isinstance(version, np.integer) and version > FORMAT_VERSION
            hint = "export it in the format that PyTorch-BigGraph 1.0 writes" if newer else _IMPORT_HINT
            raise DataError(f"{path}: format_version is {version}; gtrain reads {FORMAT_VERSION}", hint=hint)
        lengths = {}
        for name in ("rel", "lhs", "rhs", *(["weight"] if "weight" in file else [])):
            if name not in file:
                datasets = ", ".join(file) or "none"
                raise DataError(f"{path} has no dataset {name!r}; it has {datasets}", hint=_IMPORT_HINT)
            if file[name].dtype.kind not in ("iuf" if name == "weight" else "iu") or file[name].ndim != 1:
                raise DataError(
                    f"{path}: {name} is {file[name].dtype} of shape {list(file[name].shape)}; one row of "
                    f"{'numbers' if name == 'weight' else 'integers'} is expected",
                    hint=_IMPORT_HINT,
                )
            lengths[name] = len(file[name])
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError(f"{path}: the datasets have different lengths: {listed}", hint=_IMPORT_HINT)
    return BucketFile(path, source_part, target_part, lengths["rel"], "weight" in lengths)
