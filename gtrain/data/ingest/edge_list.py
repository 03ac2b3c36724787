"""Reading an edge list of any size: parsed in one thread, numbered and put away in another."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa

from gtrain.data.ingest.columns import Column
from gtrain.data.ingest.dictionary import Dictionary
from gtrain.data.ingest.format import EdgeFormat
from gtrain.data.ingest.layout import Kinds, text_layout
from gtrain.data.ingest.parquet import ParquetReader, is_parquet
from gtrain.data.ingest.rows import Ints, Keys, Rows, first_true
from gtrain.data.ingest.text import TextReader
from gtrain.errors import DataError

log = logging.getLogger("gtrain")
T = TypeVar("T")

EVERY_SECONDS = 5.0
"""Between two lines of progress."""
MANY = 100_000
"""Edges from which on a rate means something."""

MOST_NODES, NODES_FOR_EACH_EDGE = 1 << 24, 32
"""Integer ids that stand for more nodes than both of these allow are not dense, and are refused."""


@dataclass(frozen=True)
class Limit:
    """How many nodes there are, known before the edges are read.

    Attributes:
        num_nodes: N; None takes the largest id + 1.
        told_by: the option that says so, for messages.
    """

    num_nodes: int | None = None
    told_by: str = "the largest id"


@dataclass(frozen=True)
class EdgeList:
    """An edge list that was read.

    Attributes:
        columns: ``source``, ``target`` (int32 or int64), and where there are any ``edge_type`` (int64),
            ``edge_weight`` (float32), ``edge_time`` (int64), ``edge_set`` (int32).
        num_nodes: the largest id + 1, or the number of names.
        names: the name of each id; None for integer ids.
        relations: the name of each relation; None without, and for integer relations.
        negative_weight: file, line and value of the first negative weight; None without.
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
        """Add the other direction of each edge behind the edges, but for self-loops; nothing is merged."""
        names = list(self.columns)
        for pieces in zip(*(self.columns[name].chunks() for name in names), strict=True):
            piece = dict(zip(names, pieces, strict=True))
            kept = piece["source"] != piece["target"]
            piece["source"], piece["target"] = piece["target"], piece["source"]
            for name, values in piece.items():
                self.columns[name].append(values[kept])


def read_edge_list(
    paths: Sequence[Path],
    options: EdgeFormat,
    folder: Path,
    limit: Limit | None = None,
    edge_sets: Sequence[int] | None = None,
    check_negative: Callable[[str], None] | None = None,
) -> EdgeList:
    """Read the edges of some files, in their order.

    Memory: some tens of MB, and for string ids the dictionary (see
    :class:`~gtrain.data.ingest.dictionary.Dictionary`); columns are in temporary files when they are large.

    Args:
        paths: text or Parquet files of the same kind of ids.
        options: how they are written.
        folder: for temporary files.
        limit: how many nodes there are, for integer ids.
        edge_sets: for each file the set that its edges are of; None: there are no sets.
        check_negative: called with file, line and value of the first negative weight, which it may refuse.

    Raises:
        DataError: names the file and the line that is malformed.
    """
    files = _Files(paths, options)
    sink = _Sink(folder, limit or Limit(), check_negative)
    progress = Progress(paths[0].name if len(paths) == 1 else f"{len(paths)} files", files.total)
    for rows, read, file in ahead(files.rows()):
        sink.add(rows, None if edge_sets is None else edge_sets[file])
        progress.update(sink.num_edges, read)
    if not sink.num_edges:
        where = str(paths[0]) if len(paths) == 1 else f"{paths[0]}, with the {len(paths) - 1} files after it,"
        found = "no lines other than comments" if files.kinds is None else "no edges"
        raise DataError(f"{where} has {found}", hint="name a file with one edge in each line")
    edges = sink.finish()
    if files.comments:
        log.info("left out as comments, by data.comments=%s: %s lines", options.comments, f"{files.comments:,}")
    progress.finish(edges.num_edges, edges.num_nodes)
    return edges


def kind_of_ids(paths: Sequence[Path], options: EdgeFormat) -> str:
    """Return ``int`` or ``string``: what the ids of some files are, by the options or the first file with an edge."""
    if options.ids != "auto":
        return options.ids
    for path in paths:
        if is_parquet(path):
            return ParquetReader(path, options, None).kinds.ids
        layout = text_layout(path, options, None)
        if layout is not None:
            return layout.kinds.ids
    return "int"


class _Files:
    """The files of an edge list, one behind the other.

    Attributes:
        total: bytes of all files.
        comments: comment lines in them.
    """

    def __init__(self, paths: Sequence[Path], options: EdgeFormat) -> None:
        self.paths = paths
        self.options = options
        self.sizes = [path.stat().st_size for path in paths]
        self.total = sum(self.sizes)
        self.comments = 0
        self.kinds: Kinds | None = None

    def rows(self) -> Iterator[tuple[Rows, int, int]]:
        """Yield rows, how many bytes of all files were read by then, and the number of their file."""
        before = 0
        for number, (path, size) in enumerate(zip(self.paths, self.sizes, strict=True)):
            for rows in self._parquet(path) if is_parquet(path) else self._text(path):
                yield rows, before + rows.read, number
            before += size

    def _parquet(self, path: Path) -> Iterator[Rows]:
        reader = ParquetReader(path, self.options, self.kinds)
        self.kinds = self._settle(path, reader.kinds)
        yield from reader.read()

    def _text(self, path: Path) -> Iterator[Rows]:
        layout = text_layout(path, self.options, self.kinds)
        if layout is None:
            return
        self.kinds = self._settle(path, layout.kinds)
        if layout.header and self.options.header is None:
            log.debug("%s, line %d names the columns", path, layout.header)
        reader = TextReader(path, self.options, layout)
        yield from reader.read()
        self.comments += reader.comments

    def _settle(self, path: Path, kinds: Kinds) -> Kinds:
        if self.kinds is not None and self.kinds.weight != kinds.weight:
            raise DataError(
                f"{path} has {'a' if kinds.weight else 'no'} column of weights, and the files before "
                f"have {'one' if self.kinds.weight else 'none'}",
                hint="give all files the same columns, or name the ones to take: data.columns=[0,1]",
            )
        return kinds


class _Sink:
    """Numbers the nodes and relations of rows, and puts the edges away."""

    def __init__(self, folder: Path, limit: Limit, check_negative: Callable[[str], None] | None) -> None:
        self._folder = folder
        self._limit = limit
        self._check_negative = check_negative
        self._columns: dict[str, Column] = {name: Column(folder, np.int32) for name in ("source", "target")}
        self._nodes = Dictionary()
        self._relations = Dictionary()
        self._named = False
        self._largest = -1
        self._where: Callable[[], str] = str
        self._negative_weight: str | None = None

    @property
    def num_edges(self) -> int:
        return len(self._columns["source"])

    def add(self, rows: Rows, edge_set: int | None) -> None:
        if isinstance(rows.ids, Keys):
            self._named = True
            ids = self._nodes.encode(rows.ids)
        else:
            ids = rows.ids
            self._check(ids, rows)
        self._columns["source"].append(ids[0::2])
        self._columns["target"].append(ids[1::2])
        if rows.relation is not None:
            self._append("edge_type", np.int64, self._relation_ids(rows.relation, rows))
        if rows.weight is not None:
            self._append("edge_weight", np.float32, rows.weight)
            negative = first_true(rows.weight < 0) if self._negative_weight is None else None
            if negative is not None:
                self._negative_weight = f"{rows.place(negative)}: the weight is {rows.weight[negative]:g}"
                if self._check_negative is not None:
                    self._check_negative(self._negative_weight)
        if rows.time is not None:
            self._append("edge_time", np.int64, rows.time)
        if edge_set is not None:
            self._append("edge_set", np.int32, np.full(len(ids) // 2, edge_set))

    def finish(self) -> EdgeList:
        """Return what was put away, and free the tables."""
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

    def _relation_ids(self, relations: Keys | Ints, rows: Rows) -> Ints:
        if isinstance(relations, Keys):
            return self._relations.encode(relations)
        wrong = first_true(relations < 0)
        if wrong is not None:
            raise DataError(
                f"{rows.place(wrong)}: the relation is {relations[wrong]}, and relations count from 0",
                hint="number the relations 0, 1, 2..., or name another column in data.relation",
            )
        return relations

    def _check(self, ids: Ints, rows: Rows) -> None:
        """Check the ids' range, and remember where the largest is."""
        if not ids.size:
            return
        limit = self._limit.num_nodes
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or (limit is not None and highest >= limit):
            edges = ids.reshape(-1, 2)
            wrong = (edges < 0) if lowest < 0 else (edges >= (limit or 0))
            row = int(wrong.any(axis=1).argmax())
            node = edges[row][wrong[row]][0]
            there = "ids start at 0" if limit is None else f"there are {limit} nodes, 0..{limit - 1}"
            raise DataError(
                f"{rows.place(row)}: the edge {edges[row, 0]} -> {edges[row, 1]} names node {node}, and {there} "
                f"({self._limit.told_by})",
                hint="correct the line, or give the right number of nodes; ids that do not count from 0 need "
                "data.ids=string",
            )
        if highest > self._largest:
            self._largest, row = highest, int(ids.argmax()) // 2
            self._where = lambda: rows.place(row)

    def _check_dense(self, num_nodes: int) -> None:
        if self._limit.num_nodes is not None or num_nodes <= max(MOST_NODES, NODES_FOR_EACH_EDGE * self.num_edges):
            return
        raise DataError(
            f"{self._where()}: the id {self._largest} means {num_nodes} nodes, and there are {self.num_edges} edges",
            hint="set data.ids=string to number such ids in order of first appearance, or data.num_nodes if so meant",
        )


class Progress:
    """Logs a line every few seconds: edges read, edges/s, share of the bytes.

    Args:
        name: what is read.
        total: bytes of all files.
    """

    def __init__(self, name: str, total: int) -> None:
        self._name = name
        self._total = total
        self._began = self._said = time.monotonic()

    def update(self, edges: int, read: int) -> None:
        """Say how far it has come, if that was not said lately.

        Args:
            edges: edges read so far.
            read: bytes read so far.
        """
        now = time.monotonic()
        if now - self._said < EVERY_SECONDS:
            return
        self._said = now
        rate, share = edges / (now - self._began), 100 * read / max(1, self._total)
        log.info("reading %s: %s edges, %s edges/s, %.0f %%", self._name, f"{edges:,}", f"{rate:,.0f}", share)

    def finish(self, edges: int, nodes: int) -> None:
        """Say what was read."""
        seconds = time.monotonic() - self._began
        rate = f", {edges / seconds:,.0f} edges/s" if edges >= MANY else ""
        log.info(
            "read %s: %s edges between %s nodes in %.1f s%s", self._name, f"{edges:,}", f"{nodes:,}", seconds, rate
        )


def ahead(items: Iterator[T], depth: int = 3) -> Iterator[T]:
    """Yield the items of an iterator that runs in a thread of its own, up to ``depth`` of them ahead."""
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="gtrain-ingest") as pool:

        def submit() -> Future[T | object]:
            return pool.submit(next, items, end)

        waiting = deque(submit() for _ in range(depth))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(submit())
            yield item  # type: ignore[misc]
