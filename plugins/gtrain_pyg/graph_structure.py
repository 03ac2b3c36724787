"""The edges that a rank reads itself: those of the parts it hosts, and copies of edges around them.

Copied are the in-edges of nodes of other parts within some hops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from gtrain.errors import DataError
from gtrain.graph.sampling import Columns, Rule, spans
from gtrain.graph.sampling.columns import readable
from gtrain.graph.sampling.options import SamplingOptions
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EdgeType, edge_key, safe_name
from gtrain_pyg.peers import Array, Hosting, PartBook, SharedArrays

_WORD = 64
_BLOCK_EDGES = 1 << 21  # edges handled at a time

SORTED_TIME = "edge_time"
"""The edge tensor by which a store sorts its columns."""


@dataclass(frozen=True)
class ReplicaIndex:
    """The nodes of one type and part whose in-edges are copied (members), and the row of each in the replica.

    A bitmap with ranks: row = ``before[word]`` + the members in lower bits of the word. It takes a fifth of a byte per
    node of the part.

    Attributes:
        bits: uint64 ``[words]``, one bit per node of the part.
        before: int64 ``[words]``, members in earlier words.
    """

    bits: Array
    before: Array

    @classmethod
    def of(cls, marks: Array) -> ReplicaIndex:
        """Return the index of the nodes that are marked; bool ``[n]``."""
        padded = np.zeros(-(-max(marks.size, 1) // _WORD) * _WORD, bool)
        padded[: marks.size] = marks
        counts = padded.reshape(-1, _WORD).sum(1)
        bits = np.packbits(padded, bitorder="little").view("<u8").astype(np.uint64)
        return cls(bits, np.cumsum(counts) - counts)

    def nodes(self) -> Array:
        """Return the members in the order of their rows: numbers within the part, ascending."""
        return np.flatnonzero(np.unpackbits(self.bits.astype("<u8").view(np.uint8), bitorder="little"))


@dataclass(frozen=True)
class EdgeReplica:
    """The in-edges of the members of a part that is not hosted.

    Attributes:
        columns: one column per row of :class:`ReplicaIndex`; ``first_target`` is meaningless.
        shift: int64 ``[rows]``; a position in a row's column plus its shift is the position in the part's columns.
    """

    columns: Columns
    shift: Array


def halo_nodes(store: Store, book: PartBook, hosted: tuple[int, ...], hops: int) -> dict[str, Array]:
    """Mark the nodes of other parts within some hops of the hosted parts.

    Args:
        store: the store; the files of all parts are read.
        book: its offsets.
        hosted: the hosted parts.
        hops: 1: the sources of the hosted parts' edges, 2: also the sources of their in-edges, and so on.

    Returns:
        By node type, bool ``[N]`` by global id.
    """
    near = {node_type: np.zeros(book.count(node_type), bool) for node_type in store.node_types}
    hosted_rows = [(marks, slice(*book.range(node_type, part))) for node_type, marks in near.items() for part in hosted]
    for marks, rows in hosted_rows:
        marks[rows] = True
    expanded = {node_type: np.zeros_like(marks) for node_type, marks in near.items()}
    for _ in range(hops):
        frontier = {node_type: marks & ~expanded[node_type] for node_type, marks in near.items()}
        expanded = {node_type: marks.copy() for node_type, marks in near.items()}
        for edge_type in store.edge_types:
            for part in range(book.num_parts):
                targets = np.flatnonzero(frontier[edge_type[2]][slice(*book.range(edge_type[2], part))])
                for sources in _sources(store, edge_type, part, targets):
                    near[edge_type[0]][sources] = True
    for marks, rows in hosted_rows:
        marks[rows] = False
    return near


def copied_edges(store: Store, edge_type: EdgeType, part: int, rows: Array) -> dict[str, Array]:
    """Copy the in-edges of some nodes of a part.

    Args:
        store: the store.
        edge_type: the edge type.
        part: the part.
        rows: the nodes, numbers within the part, ascending.

    Returns:
        ``indptr``, ``indices`` and ``shift``; see :class:`EdgeReplica`.
    """
    starts, shift = _copied_columns(store.edge("indptr", part, edge_type).numpy(), rows)
    indices = copied_tensor(store, edge_type, part, "indices", starts, shift)
    return {"indptr": starts, "indices": indices, "shift": shift}


def copied_tensor(store: Store, edge_type: EdgeType, part: int, name: str, indptr: Array, shift: Array) -> Array:
    """Copy an edge tensor ``[E_p]`` of the edges of a replica, in its order."""
    values = store.edge(name, part, edge_type).numpy()
    copies = np.empty(int(indptr[-1]), values.dtype)
    for edges, positions in _positions(indptr, shift):
        copies[edges] = values[positions]
    return copies


def _copied_columns(indptr: Array, rows: Array) -> tuple[Array, Array]:
    """Return the indptr of some columns, laid end to end, and the shift of each."""
    starts = np.concatenate([[0], np.cumsum(indptr[rows + 1] - indptr[rows])])
    return starts, indptr[rows] - starts[:-1]


def _positions(indptr: Array, shift: Array) -> Iterator[tuple[slice, Array]]:
    """Yield blocks of edges: their range, and their positions in the part's columns."""
    for columns, edges in edge_blocks(indptr, _BLOCK_EDGES):
        lengths = np.diff(indptr[columns.start : columns.stop + 1])
        yield edges, np.arange(edges.start, edges.stop) + np.repeat(shift[columns], lengths)


def _sources(store: Store, edge_type: EdgeType, part: int, rows: Array) -> Iterator[Array]:
    """Yield the sources of the in-edges of some nodes, a block at a time."""
    if not rows.size:
        return
    indptr, indices = (store.edge(name, part, edge_type).numpy() for name in ("indptr", "indices"))
    if rows.size == indptr.size - 1:
        for _, edges in edge_blocks(indptr, _BLOCK_EDGES):
            yield indices[edges]
    else:
        for _, positions in _positions(*_copied_columns(indptr, rows)):
            yield indices[positions]


def edge_blocks(indptr: Array, limit: int) -> Iterator[tuple[slice, slice]]:
    """Yield consecutive ranges of columns, and the ranges of their edges, of at most ``limit`` edges or one column."""
    column, count = 0, indptr.size - 1
    while column < count:
        stop = int(np.searchsorted(indptr, indptr[column] + limit, side="right")) - 1
        stop = min(max(stop, column + 1), count)
        yield slice(column, stop), slice(int(indptr[column]), int(indptr[stop]))
        column = stop


@dataclass(frozen=True)
class SamplingInputs:
    """The tensors that sampling reads besides the edges, and how it chooses; equal on all ranks that take part.

    Attributes:
        replace, temporal: see :class:`gtrain.graph.sampling.Rule`.
        weight, node_time, edge_time: names of tensors, see :class:`gtrain.graph.sampling.options.SamplingOptions`.
    """

    replace: bool = False
    temporal: str | None = None
    weight: str | None = None
    node_time: str | None = None
    edge_time: str | None = None

    @classmethod
    def of(cls, options: SamplingOptions) -> SamplingInputs:
        """Return the inputs of sampling with these options; times only if sampling is temporal."""
        times = (options.node_time, options.edge_time) if options.temporal is not None else ()
        return cls(options.replace, options.temporal, options.weight, *times)

    def rule(self, store: Store, edge_type: EdgeType) -> Rule:
        """Return how an edge type is sampled; a type without times is not sampled by time."""
        return Rule(self.replace, self.temporal if self.has_times(store, edge_type) else None)

    def has_weights(self, store: Store, edge_type: EdgeType) -> bool:
        """Return whether an edge type has the weights."""
        return self.weight is not None and self.weight in store.edge_tensors(edge_type)

    def has_times(self, store: Store, edge_type: EdgeType) -> bool:
        """Return whether an edge type, or its source nodes, have the times."""
        by_node = self.node_time is not None and self.node_time in store.node_tensors(edge_type[0])
        return by_node or (self.edge_time is not None and self.edge_time in store.edge_tensors(edge_type))

    def check(self, store: Store) -> None:
        """Raise unless at least one edge type has the weights, and one has the times.

        Raises:
            DataError: names the tensors that the store has.
        """
        edge_types, edge_tensors = store.edge_types, {name for t in store.edge_types for name in store.edge_tensors(t)}
        if self.weight is not None and self.weight not in edge_tensors:
            raise _missing(f"data.weight_attr={self.weight}", "no edges have", "edge", edge_tensors)
        if self.temporal is None or any(self.has_times(store, edge_type) for edge_type in edge_types):
            return
        setting = f"data.temporal_strategy={self.temporal} with the times {self.node_time or self.edge_time!r}"
        if self.node_time is None:
            raise _missing(setting, "no edges have", "edge", edge_tensors)
        node_tensors = {name for node_type in store.node_types for name in store.node_tensors(node_type)}
        raise _missing(setting, "no source nodes of edges have", "node", node_tensors)


def _missing(setting: str, who: str, level: str, names: set[str]) -> DataError:
    available = ", ".join(sorted(names - {"indices", "edge_id", "orig_id"})) or "none"
    return DataError(
        f"{setting} was set, and {who} a tensor of that name; the {level} tensors are: {available}.",
        hint="choose one of them, or add such a tensor to the source data and prepare it again.",
    )


@dataclass(frozen=True)
class SamplingGraph:
    """The arrays that sampling with some inputs reads.

    Attributes:
        inputs: the inputs.
        rules: by edge type, how it is sampled.
        columns: by edge type and hosted part.
        replicas: by edge type and other part; empty if nothing is copied.
        members: by node type and other part, the nodes whose in-edges are copied; empty likewise.
    """

    inputs: SamplingInputs
    rules: dict[EdgeType, Rule]
    columns: dict[EdgeType, dict[int, Columns]]
    replicas: dict[EdgeType, dict[int, EdgeReplica]]
    members: dict[str, dict[int, ReplicaIndex]]


class GraphStructure:
    """The edges of a store as one rank reads them. Threads may share it.

    Args:
        store: the store.
        book: its offsets.
        hosting: the parts that this rank reads.
        shared: holds computed arrays in memory shared by the machine's ranks; None shares nothing.
        hops: the in-edges of nodes within ``hops`` hops of the hosted parts are copied; None maps the edges of all
            parts, so that sampling sends no request.

    Attributes:
        store, book, hosting: as passed.
        parts: the parts whose columns are mapped.
    """

    def __init__(
        self,
        store: Store,
        book: PartBook,
        hosting: Hosting,
        shared: SharedArrays | None = None,
        *,
        hops: int | None = 0,
    ) -> None:
        self.store, self.book, self.hosting = store, book, hosting
        self.parts = hosting.parts if hops is not None else tuple(range(book.num_parts))
        self._hops = hops if len(self.parts) < book.num_parts else 0
        self._columns = _ColumnReader(store, book, hosting, shared or SharedArrays(hosting.rank))
        self._graphs: dict[SamplingInputs, SamplingGraph] = {}
        self._lock = threading.Lock()

    def graph(self, inputs: SamplingInputs) -> SamplingGraph:
        """Return the arrays that sampling reads; the first call opens or computes them.

        Raises:
            DataError: no edge type has the weights or times, or their values are invalid.
        """
        with self._lock:
            if inputs not in self._graphs:
                inputs.check(self.store)
                self._graphs[inputs] = self._open(inputs)
            return self._graphs[inputs]

    def node_time(self, name: str, node_type: str, ids: Array) -> Array | None:
        """Return the times of nodes, int64 ``[n]``, by global id; None if a node's part is not read here."""
        owner = self.book.owner(node_type, ids)
        if not np.isin(owner, self.parts).all():
            return None

        def times(part: int) -> Array:
            return readable(self.store.node(name, part, node_type).numpy(), name, ("i8",))

        node_times = np.empty(ids.size, np.int64)
        _look_up(times, self.book.offsets[node_type], ids, owner, node_times)
        return node_times

    def _open(self, inputs: SamplingInputs) -> SamplingGraph:
        columns, edge_types = self._columns, self.store.edge_types
        # this rank's part first: other ranks may wait for the arrays that it shares
        parts = sorted(self.parts, key=lambda part: part != self.hosting.rank)
        hosted = {t: {part: columns.hosted(t, part, inputs) for part in parts} for t in edge_types}
        members = columns.members(self._hops) if self._hops else {}
        replicas = {
            t: {part: columns.replica(t, part, inputs, index) for part, index in members[t[2]].items()}
            for t in (edge_types if members else ())
        }
        return SamplingGraph(inputs, {t: inputs.rule(self.store, t) for t in edge_types}, hosted, replicas, members)


class _ColumnReader:
    """Maps columns, and computes the arrays that a store does not have, in memory that the machine's ranks share."""

    def __init__(self, store: Store, book: PartBook, hosting: Hosting, shared: SharedArrays) -> None:
        self._store, self._book, self._hosting, self._shared = store, book, hosting, shared
        # the rank that computes what all ranks of the machine read
        self._maker = hosting.machines[hosting.rank] if len(hosting.parts) > 1 else hosting.rank

    def hosted(self, edge_type: EdgeType, part: int, inputs: SamplingInputs) -> Columns:
        """Map the columns of a part.

        Raises:
            DataError: weights are negative (only the part's owner checks them), or times are not integers.
        """
        indptr, indices = self._edge(edge_type, part, "indptr"), self._edge(edge_type, part, "indices")
        times: dict[str, Array] = {}
        if inputs.has_times(self._store, edge_type):
            if inputs.node_time is not None:
                maker = part if part in self._hosting.parts else self._maker
                times["source_time"] = self._source_times(
                    f"{_key(edge_type)}-{part}", maker, edge_type, inputs, indices
                )
            else:
                name = str(inputs.edge_time)
                times = _edge_times(self._edge(edge_type, part, name), indptr, name)
        weighted = inputs.has_weights(self._store, edge_type)
        columns = Columns(
            indptr,
            indices,
            num_sources=self._book.count(edge_type[0]),
            weight=self._edge(edge_type, part, str(inputs.weight)) if weighted else None,
            first_target=int(self._book.offsets[edge_type[2]][part]),
            checked=True,
            **times,
        )
        if part == self._hosting.rank:
            columns.check_weight()
        return columns

    def members(self, hops: int) -> dict[str, dict[int, ReplicaIndex]]:
        """Return the nodes of other parts whose in-edges are copied, by node type and part."""
        node_types = self._store.node_types
        remote = [part for part in range(self._book.num_parts) if part not in self._hosting.parts]

        def make() -> dict[str, Array]:
            marks = halo_nodes(self._store, self._book, self._hosting.parts, hops)
            arrays: dict[str, Array] = {}
            for i, node_type in enumerate(node_types):
                for part in remote:
                    index = ReplicaIndex.of(marks[node_type][slice(*self._book.range(node_type, part))])
                    arrays |= {f"{i}-{part}-bits": index.bits, f"{i}-{part}-before": index.before}
            return arrays

        arrays = self._shared.arrays(f"members-{hops}", self._maker, make)
        return {
            node_type: {p: ReplicaIndex(arrays[f"{i}-{p}-bits"], arrays[f"{i}-{p}-before"]) for p in remote}
            for i, node_type in enumerate(node_types)
        }

    def replica(self, edge_type: EdgeType, part: int, inputs: SamplingInputs, members: ReplicaIndex) -> EdgeReplica:
        """Return the copied in-edges of a part's members."""
        key = f"{_key(edge_type)}-{part}"
        edges = self._shared.arrays(
            f"replica-{key}", self._maker, lambda: copied_edges(self._store, edge_type, part, members.nodes())
        )

        def tensor(name: str) -> Array:
            def make() -> dict[str, Array]:
                return {"values": copied_tensor(self._store, edge_type, part, name, edges["indptr"], edges["shift"])}

            return self._shared.arrays(f"replica-{safe_name(name)}-of-{key}", self._maker, make)["values"]

        more: dict[str, Array] = {}
        if inputs.has_weights(self._store, edge_type):
            more["weight"] = tensor(str(inputs.weight))
        if inputs.has_times(self._store, edge_type):
            if inputs.node_time is None:
                more |= _edge_times(tensor(str(inputs.edge_time)), edges["indptr"], str(inputs.edge_time))
            else:
                more["source_time"] = self._source_times(
                    f"replica-{key}", self._maker, edge_type, inputs, edges["indices"]
                )
        size = self._book.count(edge_type[0])
        columns = Columns(edges["indptr"], edges["indices"], num_sources=size, checked=True, **more)
        return EdgeReplica(columns, edges["shift"])

    def _edge(self, edge_type: EdgeType, part: int, name: str) -> Array:
        return self._store.edge(name, part, edge_type).numpy()

    def _source_times(self, key: str, maker: int, edge_type: EdgeType, inputs: SamplingInputs, indices: Array) -> Array:
        name = str(inputs.node_time)

        def make() -> dict[str, Array]:
            return {"time": source_times(self._store, self._book, edge_type[0], name, indices)}

        return self._shared.arrays(f"times-{safe_name(name)}-{key}", maker, make)["time"]


def _key(edge_type: EdgeType) -> str:
    return safe_name(edge_key(edge_type))


def _edge_times(times: Array, indptr: Array, name: str) -> dict[str, Array]:
    """Return times of edges as a field of :class:`Columns`: ``edge_time`` if each column is sorted by them."""
    checked = readable(times, name, ("i8",))
    if name == SORTED_TIME or spans.first_unsorted(readable(indptr, "indptr", ("i8",)), checked) < 0:
        return {"edge_time": checked}
    return {"source_time": np.asarray(checked)}


def source_times(store: Store, book: PartBook, node_type: str, name: str, indices: Array) -> Array:
    """Look up the times of edges' sources, of any part.

    Args:
        store: the store; the files of all parts are read.
        book: its offsets.
        node_type: the type of the sources.
        name: of the node tensor.
        indices: ``[e]``, the sources, global ids.

    Returns:
        int64 ``[e]``.

    Raises:
        DataError: times are not integers.
    """
    times = [readable(store.node(name, part, node_type).numpy(), name, ("i8",)) for part in range(store.num_parts)]
    source_time = np.empty(indices.size, np.int64)
    for start in range(0, indices.size, _BLOCK_EDGES):
        block = slice(start, start + _BLOCK_EDGES)
        owner = book.owner(node_type, indices[block])
        _look_up(times.__getitem__, book.offsets[node_type], indices[block], owner, source_time[block])
    return source_time


def _look_up(times: Callable[[int], Array], offsets: Array, ids: Array, owner: Array, out: Array) -> None:
    """Write the time of each global id to ``out``; ``times`` returns those of a part."""
    for part in np.unique(owner).tolist():
        chosen = owner == part
        out[chosen] = times(part)[ids[chosen] - offsets[part]]
