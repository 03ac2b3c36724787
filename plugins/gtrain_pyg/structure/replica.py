"""Copies of the structure around a machine's parts: in-edges of nodes of other parts, within some hops of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtrain.graph.sampling import Columns
from gtrain.graph.store import Store
from gtrain.graph.store.manifest import EdgeType
from gtrain_pyg.ranks.parts import PartBook

Array = NDArray[Any]
_WORD = 64
_PIECE = 1 << 21  # edges handled at a time


@dataclass(frozen=True)
class Members:
    """Some nodes of one type and part, and the row that each one has in a replica. A fifth of a byte for each node.

    Attributes:
        bits: uint64, one bit for each node of the part.
        before: int64, for each word of ``bits`` the members before it.
    """

    bits: Array
    before: Array

    @classmethod
    def of(cls, marks: Array) -> Members:
        """The nodes that are marked; bool ``[n]``."""
        padded = np.zeros(-(-max(marks.size, 1) // _WORD) * _WORD, bool)
        padded[: marks.size] = marks
        counts = padded.reshape(-1, _WORD).sum(1)
        bits = np.packbits(padded, bitorder="little").view("<u8").astype(np.uint64)
        return cls(bits, np.cumsum(counts) - counts)

    def nodes(self) -> Array:
        """The members, numbers within the part, ascending: row by row."""
        return np.flatnonzero(np.unpackbits(self.bits.astype("<u8").view(np.uint8), bitorder="little"))


@dataclass(frozen=True)
class Replica:
    """The in-edges of some nodes of a part that is not hosted.

    Attributes:
        columns: by row, as :class:`Members` numbers them; ``first_target`` is without meaning.
        shift: int64, for each row what to add to a position in these columns to get the position in the part's.
    """

    columns: Columns
    shift: Array


def reached(store: Store, book: PartBook, hosted: tuple[int, ...], hops: int) -> dict[str, Array]:
    """Mark the nodes of other parts within some hops of the hosted parts.

    Args:
        store: the store, whose files of all parts are read.
        book: its offsets.
        hosted: the hosted parts.
        hops: 1: the sources of the hosted parts' edges, 2: the sources of their in-edges too, and so on.

    Returns:
        By node type, bool ``[N]`` by global id.
    """
    found = {name: np.zeros(book.count(name), bool) for name in store.node_types}
    for name, marks in found.items():
        for part in hosted:
            marks[slice(*book.range(name, part))] = True
    done = {name: np.zeros_like(marks) for name, marks in found.items()}
    for _ in range(hops):
        new = {name: marks & ~done[name] for name, marks in found.items()}
        done = {name: marks.copy() for name, marks in found.items()}
        for kind in store.edge_types:
            for part in range(book.num_parts):
                rows = np.flatnonzero(new[kind[2]][slice(*book.range(kind[2], part))])
                for source in _sources(store, kind, part, rows):
                    found[kind[0]][source] = True
    for name, marks in found.items():
        for part in hosted:
            marks[slice(*book.range(name, part))] = False
    return found


def copied_edges(store: Store, kind: EdgeType, part: int, rows: Array) -> dict[str, Array]:
    """Copy the in-edges of some nodes of a part.

    Args:
        store: the store.
        kind: the edge type.
        part: the part.
        rows: the nodes, numbers within the part, ascending.

    Returns:
        ``indptr``, ``indices`` and ``shift``; see :class:`Replica`.
    """
    indptr = store.edge("indptr", part, kind).numpy()
    begin = indptr[rows]
    starts = np.concatenate([[0], np.cumsum(indptr[rows + 1] - begin)])
    shift = begin - starts[:-1]
    return {"indptr": starts, "indices": copied_tensor(store, kind, part, "indices", starts, shift), "shift": shift}


def copied_tensor(store: Store, kind: EdgeType, part: int, name: str, indptr: Array, shift: Array) -> Array:
    """Copy an edge tensor ``[E_p]`` of the edges of a replica, in its order."""
    values = store.edge(name, part, kind).numpy()
    found = np.empty(int(indptr[-1]), values.dtype)
    for rows in _pieces(indptr):
        edges = slice(int(indptr[rows.start]), int(indptr[rows.stop]))
        lengths = np.diff(indptr[rows.start : rows.stop + 1])
        found[edges] = values[np.arange(edges.start, edges.stop) + np.repeat(shift[rows], lengths)]
    return found


def _sources(store: Store, kind: EdgeType, part: int, rows: Array) -> Iterator[Array]:
    """The sources of the in-edges of some nodes, a piece at a time."""
    if not rows.size:
        return
    indptr, indices = (store.edge(name, part, kind).numpy() for name in ("indptr", "indices"))
    if rows.size == indptr.size - 1:
        for start in range(0, indices.size, _PIECE):
            yield indices[start : start + _PIECE]
        return
    begin = indptr[rows]
    lengths = indptr[rows + 1] - begin
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for piece in _pieces(starts):
        edges = np.arange(starts[piece.start], starts[piece.stop])
        yield indices[edges + np.repeat((begin - starts[:-1])[piece], lengths[piece])]


def _pieces(indptr: Array) -> Iterator[slice]:
    """Cut rows so that each piece has a bounded number of edges, or is one row."""
    start, rows = 0, indptr.size - 1
    while start < rows:
        stop = max(start + 1, int(np.searchsorted(indptr, indptr[start] + _PIECE, side="right")) - 1)
        yield slice(start, min(stop, rows))
        start = min(stop, rows)
