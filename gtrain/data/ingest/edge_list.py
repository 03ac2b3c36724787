"""Read an edge list of any size: one thread parses the files, another numbers the nodes and stores the columns."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from gtrain.data.batches.loader import prefetched
from gtrain.data.ingest.columns import Column
from gtrain.data.ingest.dictionary import Dictionary, EdgeRows, Ints, Keys, first_true
from gtrain.data.ingest.format import EdgeFormat, IdTypes, text_layout
from gtrain.data.ingest.lines import TextReader
from gtrain.data.ingest.parquet import ParquetReader, is_parquet
from gtrain.errors import DataError

log = logging.getLogger("gtrain")

PROGRESS_SECONDS = 5.0
"""Interval between two progress lines."""
MIN_EDGES_FOR_RATE = 100_000
"""Smallest number of edges for which the last line reports a rate."""

MAX_SPARSE_NODES, MAX_NODES_PER_EDGE = 1 << 24, 32
"""Limits of the largest integer id: a number of nodes, and a number per edge. Ids beyond both are rejected: they are
hashes or database keys rather than numbers from 0."""


def most_nodes(num_edges: int) -> int:
    """Return the largest number of nodes that is plausible without ``data.num_nodes``."""
    return max(MAX_SPARSE_NODES, MAX_NODES_PER_EDGE * num_edges)


@dataclass(frozen=True)
class NodeLimit:
    """The number of nodes, as far as it is known before the edges are read.

    Attributes:
        num_nodes: N; None means the largest id + 1.
        option: the option that sets it, for messages.
    """

    num_nodes: int | None = None
    option: str = "the largest id"


@dataclass(frozen=True)
class EdgeList:
    """A parsed edge list.

    Attributes:
        columns: ``source``, ``target`` (int32 or int64), and if the files have them ``edge_type`` (int64),
            ``edge_weight`` (float32), ``edge_time`` (int64), ``edge_set`` (int32).
        num_nodes: the largest id + 1, or the number of names.
        names: the name of each id; None for integer ids.
        relations: the name of each relation; None without relations, and for integer relations.
        negative_weight: file, line and value of the first negative weight; None if no weight is negative.
    """

    columns: dict[str, Column]
    num_nodes: int
    names: pa.LargeStringArray | None
    relations: pa.LargeStringArray | None
    negative_weight: str | None = None

    @property
    def num_edges(self) -> int:
        """E."""
        return len(self.columns["source"])

    def append_reversed(self) -> None:
        """Append the reverse of each edge except self-loops; duplicates are not merged."""
        names = list(self.columns)
        for pieces in zip(*(self.columns[name].chunks() for name in names), strict=True):
            piece = dict(zip(names, pieces, strict=True))
            no_loop = piece["source"] != piece["target"]
            piece["source"], piece["target"] = piece["target"], piece["source"]
            for name, values in piece.items():
                self.columns[name].append(values[no_loop])


def read_edge_list(
    paths: Sequence[Path],
    options: EdgeFormat,
    folder: Path,
    limit: NodeLimit | None = None,
    edge_sets: Sequence[int] | None = None,
    check_negative: Callable[[str], None] | None = None,
) -> EdgeList:
    """Read the edges of several files, in order.

    Memory: tens of MB, and for string ids the dictionary (see
    :class:`~gtrain.data.ingest.dictionary.Dictionary`); large columns are in temporary files.

    Args:
        paths: text or Parquet files with ids of the same type.
        options: the user's settings.
        folder: folder of the temporary files.
        limit: the number of nodes, for integer ids.
        edge_sets: the edge set of each file; None if the graph has no edge sets.
        check_negative: called with file, line and value of the first negative weight; may raise.

    Raises:
        DataError: a line is malformed, or the files hold no edge; the message names file and line.
    """
    files = _FileSequence(paths, options)
    collector = _EdgeCollector(folder, limit or NodeLimit(), check_negative)
    progress = Progress(paths[0].name if len(paths) == 1 else f"{len(paths)} files", files.total)
    for rows, read, file in prefetched(files.rows(), 3, "gtrain-ingest"):
        collector.add(rows, None if edge_sets is None else edge_sets[file])
        progress.update(collector.num_edges, read)
    if not collector.num_edges:
        names = str(paths[0]) if len(paths) == 1 else f"{paths[0]}, with the {len(paths) - 1} files after it,"
        contents = "no lines other than comments" if files.id_types is None else "no edges"
        raise DataError(f"{names} has {contents}", hint="give a file with one edge per line")
    edges = collector.finish()
    if files.comments:
        log.info("skipped as comments (data.comments=%s): %s lines", options.comments, f"{files.comments:,}")
    progress.finish(edges.num_edges, edges.num_nodes)
    return edges


def id_type(paths: Sequence[Path], options: EdgeFormat) -> str:
    """Return the type of the ids, ``int`` or ``string``: the setting, or that of the first file with an edge."""
    if options.ids != "auto":
        return options.ids
    for path in paths:
        if is_parquet(path):
            return ParquetReader(path, options, None).id_types.ids
        layout = text_layout(path, options, None)
        if layout is not None:
            return layout.id_types.ids
    return "int"


class _FileSequence:
    """The files of an edge list, read one after the other.

    Attributes:
        total: bytes of all files.
        comments: comment lines seen so far.
        id_types: the types that the first file with an edge has.
    """

    def __init__(self, paths: Sequence[Path], options: EdgeFormat) -> None:
        self.paths = paths
        self.options = options
        self.sizes = [path.stat().st_size for path in paths]
        self.total = sum(self.sizes)
        self.comments = 0
        self.id_types: IdTypes | None = None

    def rows(self) -> Iterator[tuple[EdgeRows, int, int]]:
        """Yield rows, the bytes of all files read so far, and the index of the rows' file."""
        before = 0
        for number, (path, size) in enumerate(zip(self.paths, self.sizes, strict=True)):
            for rows in self._parquet(path) if is_parquet(path) else self._text(path):
                yield rows, before + rows.read, number
            before += size

    def _parquet(self, path: Path) -> Iterator[EdgeRows]:
        reader = ParquetReader(path, self.options, self.id_types)
        self._set_types(path, reader.id_types)
        yield from reader.read()

    def _text(self, path: Path) -> Iterator[EdgeRows]:
        layout = text_layout(path, self.options, self.id_types)
        if layout is None:
            return
        self._set_types(path, layout.id_types)
        if layout.header and self.options.header is None:
            log.debug("%s, line %d names the columns", path, layout.header)
        reader = TextReader(path, self.options, layout)
        yield from reader.read()
        self.comments += reader.comments

    def _set_types(self, path: Path, id_types: IdTypes) -> None:
        if self.id_types is not None and self.id_types.weight != id_types.weight:
            raise DataError(
                f"{path} has {'a' if id_types.weight else 'no'} column of weights, and the files before "
                f"have {'one' if self.id_types.weight else 'none'}",
                hint="give all files the same columns, or select columns: data.columns=[0,1]",
            )
        self.id_types = id_types


class _EdgeCollector:
    """Numbers nodes and relations, and appends the edges to columns."""

    def __init__(self, folder: Path, limit: NodeLimit, check_negative: Callable[[str], None] | None) -> None:
        self._folder = folder
        self._limit = limit
        self._check_negative = check_negative
        self._columns: dict[str, Column] = {name: Column(folder, np.int32) for name in ("source", "target")}
        self._nodes = Dictionary()
        self._relations = Dictionary()
        self._named = False
        self._largest = -1
        self._largest_location: Callable[[], str] = str
        self._negative_weight: str | None = None

    @property
    def num_edges(self) -> int:
        return len(self._columns["source"])

    def add(self, rows: EdgeRows, edge_set: int | None) -> None:
        if isinstance(rows.ids, Keys):
            self._named = True
            ids = self._nodes.encode(rows.ids)
        else:
            ids = rows.ids
            self._check_range(ids, rows)
        # ids are interleaved: source, target, source, target, ...
        self._columns["source"].append(ids[0::2])
        self._columns["target"].append(ids[1::2])
        if rows.relation is not None:
            self._append("edge_type", np.int64, self._relation_ids(rows.relation, rows))
        if rows.weight is not None:
            self._append("edge_weight", np.float32, rows.weight)
            negative = first_true(rows.weight < 0) if self._negative_weight is None else None
            if negative is not None:
                self._negative_weight = f"{rows.location(negative)}: the weight is {rows.weight[negative]:g}"
                if self._check_negative is not None:
                    self._check_negative(self._negative_weight)
        if rows.time is not None:
            self._append("edge_time", np.int64, rows.time)
        if edge_set is not None:
            self._append("edge_set", np.int32, np.full(len(ids) // 2, edge_set))

    def finish(self) -> EdgeList:
        """Return the edge list, and free the hash tables."""
        names = self._nodes.freeze() if self._named else None
        relations = self._relations.freeze() if len(self._relations) else None
        num_nodes = len(names) if names is not None else self._largest + 1
        if names is None:
            self._check_dense(num_nodes)
        return EdgeList(self._columns, num_nodes, names, relations, self._negative_weight)

    def _append(self, name: str, dtype: type[np.generic], values: np.ndarray) -> None:  # type: ignore[type-arg]
        if name not in self._columns:
            self._columns[name] = Column(self._folder, dtype)
        self._columns[name].append(values)

    def _relation_ids(self, relations: Keys | Ints, rows: EdgeRows) -> Ints:
        if isinstance(relations, Keys):
            return self._relations.encode(relations)
        wrong = first_true(relations < 0)
        if wrong is not None:
            raise DataError(
                f"{rows.location(wrong)}: the relation is {relations[wrong]}, and relations count from 0",
                hint="number the relations 0, 1, 2..., or set data.relation to another column",
            )
        return relations

    def _check_range(self, ids: Ints, rows: EdgeRows) -> None:
        """Raise if an id is out of range, and remember the location of the largest."""
        if not ids.size:
            return
        limit = self._limit.num_nodes
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or (limit is not None and highest >= limit):
            edges = ids.reshape(-1, 2)
            wrong = (edges < 0) if lowest < 0 else (edges >= (limit or 0))
            row = int(wrong.any(axis=1).argmax())
            node = edges[row][wrong[row]][0]
            allowed = "ids start at 0" if limit is None else f"there are {limit} nodes, 0..{limit - 1}"
            raise DataError(
                f"{rows.location(row)}: the edge {edges[row, 0]} -> {edges[row, 1]} names node {node}, and {allowed} "
                f"({self._limit.option})",
                hint="correct the line, or set the right number of nodes; ids that do not count from 0 need "
                "data.ids=string",
            )
        if highest > self._largest:
            # The position only: looking up the line takes long, and is done only if a message needs it.
            self._largest, row = highest, int(ids.argmax()) // 2
            self._largest_location = lambda: rows.location(row)

    def _check_dense(self, num_nodes: int) -> None:
        if self._limit.num_nodes is None and num_nodes > most_nodes(self.num_edges):
            raise DataError(
                f"{self._largest_location()}: the id {self._largest} means {num_nodes} nodes, and there are "
                f"{self.num_edges} edges",
                hint="set data.ids=string to number such ids in order of first appearance, or set data.num_nodes if "
                "the ids are right",
            )


class Progress:
    """Logs a progress line every few seconds: edges, edges/s, percentage of the bytes.

    Args:
        name: name of the input, for the lines.
        total: bytes of all files.
    """

    def __init__(self, name: str, total: int) -> None:
        self._name = name
        self._total = total
        self._start = self._logged = time.monotonic()

    def update(self, edges: int, read: int) -> None:
        """Log the progress, at most once in :data:`PROGRESS_SECONDS`.

        Args:
            edges: edges read so far.
            read: bytes read so far.
        """
        now = time.monotonic()
        if now - self._logged >= PROGRESS_SECONDS:
            self._logged = now
            rate, share = edges / (now - self._start), 100 * read / max(1, self._total)
            log.info("reading %s: %s edges, %s edges/s, %.0f %%", self._name, f"{edges:,}", f"{rate:,.0f}", share)

    def finish(self, edges: int, nodes: int) -> None:
        """Log the totals."""
        seconds = time.monotonic() - self._start
        rate = f", {edges / seconds:,.0f} edges/s" if edges >= MIN_EDGES_FOR_RATE else ""
        log.info(
            "read %s: %s edges between %s nodes in %.1f s%s", self._name, f"{edges:,}", f"{nodes:,}", seconds, rate
        )
