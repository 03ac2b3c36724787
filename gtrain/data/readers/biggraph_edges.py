"""Reading PyTorch-BigGraph's folders: edges by bucket, from HDF5."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.data.ingest.columns import Column
from gtrain.data.readers.biggraph_bags import BagBook, EdgeBags
from gtrain.data.readers.biggraph_files import Ints
from gtrain.data.readers.extras import need
from gtrain.errors import DataError, GtrainError

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
