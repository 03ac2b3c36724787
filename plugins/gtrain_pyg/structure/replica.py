"""Copies of edges around a machine's parts: in-edges of nodes of other parts within some hops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gtrain.graph.sampling import Columns
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EdgeType
from gtrain_pyg.ranks.parts import Array, PartBook

_WORD = 64
_BLOCK_EDGES = 1 << 21  # edges handled at a time


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
