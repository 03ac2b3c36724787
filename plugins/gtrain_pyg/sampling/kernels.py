"""Compiled kernels of sampling over parts; those that choose edges are :mod:`gtrain.graph.sampling`'s."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from gtrain.kernels.memory import count_bits

Array = NDArray[Any]

INT32_LIMIT = int(np.iinfo(np.int32).max)
_ONE = np.uint64(1)


def narrow(limit: int) -> np.dtype[Any]:
    """int32 where numbers below ``limit`` fit in, else int64."""
    return np.dtype(np.int32 if limit <= INT32_LIMIT else np.int64)


@njit(cache=True, nogil=True)
def by_owner(
    nodes: Array, first: int, offsets: Array, owner: Array, bounds: Array, target: Array, local: Array
) -> None:
    """Group a frontier by the parts that own its nodes; within a part the order stays (a counting sort).

    Args:
        nodes: int64 ``[f]``, global ids.
        first: the local id of the first; the others follow.
        offsets: int64 ``[P + 1]``.
        owner: int16 ``[f]``, memory that is overwritten.
        bounds: int64 ``[P + 1]``, written: part p has the places ``bounds[p] .. bounds[p+1]-1`` of the new order.
        target: int64 ``[f]``, written: the local id of each one.
        local: int64 ``[f]``, written: its number within its part.
    """
    parts = offsets.size - 1
    bounds[:] = 0
    for i in range(nodes.size):
        low, high = 0, parts - 1
        while low < high:
            middle = (low + high + 1) // 2
            if offsets[middle] <= nodes[i]:
                low = middle
            else:
                high = middle - 1
        owner[i] = low
        bounds[low + 1] += 1
    for part in range(parts):
        bounds[part + 1] += bounds[part]
    for i in range(nodes.size):
        part = owner[i]
        place = bounds[part]
        bounds[part] += 1
        target[place] = first + i
        local[place] = nodes[i] - offsets[part]
    for part in range(parts - 1, 0, -1):
        bounds[part] = bounds[part - 1]
    bounds[0] = 0


@njit(cache=True, nogil=True)
def spread(counts: Array, target: Array, column_out: Array) -> None:
    """Write the target of each edge, where the i-th frontier node, ``target[i]``, has ``counts[i]`` edges."""
    edge = 0
    for i in range(counts.size):
        for _ in range(counts[i]):
            column_out[edge] = target[i]
            edge += 1


@njit(cache=True, nogil=True)
def count(column: Array, counts: Array) -> None:
    """Count the chosen edges of each frontier node.

    Args:
        column: ``[e]``, places in the frontier.
        counts: written, ``[f]``.
    """
    counts[:] = 0
    for j in range(column.size):
        counts[column[j]] += 1


@njit(cache=True, nogil=True)
def rows_of(nodes: Array, bits: Array, before: Array, rows: Array) -> int:
    """The row of each node in a replica, -1 where it has none; returns how many have one.

    Args:
        nodes: int64 ``[f]``, numbers within the part.
        bits: see :class:`gtrain_pyg.structure.replica.Members`.
        before: likewise.
        rows: int64 ``[f]``, written.
    """
    found = 0
    for i in range(nodes.size):
        word, bit = nodes[i] >> 6, np.uint64(nodes[i] & 63)
        if (bits[word] >> bit) & _ONE:
            rows[i] = before[word] + count_bits(bits[word] & ((_ONE << bit) - _ONE))
            found += 1
        else:
            rows[i] = -1
    return found


@njit(cache=True, nogil=True)
def merge(
    rows: Array,
    shift: Array,
    own_source: Array,
    own_position: Array,
    own_column: Array,
    counts: Array,
    source: Array,
    position: Array,
    target: Array,
    first_edge: int,
    row_out: Array,
    column_out: Array,
    edge_out: Array,
) -> None:
    """Merge the edges of one part that a replica and the part's owner chose, in the order of the frontier.

    Args:
        rows: of the part's frontier nodes, see :func:`rows_of`; those without one the owner was asked about.
        shift: see :class:`gtrain_pyg.structure.replica.Replica`.
        own_source: sources of the edges chosen in the replica, global ids.
        own_position: their positions in the replica's columns.
        own_column: their targets, in the order of ``target``.
        counts: edges of each node that the owner was asked about.
        source: their sources, global ids.
        position: their positions within the part.
        target: the local id of each of the part's frontier nodes.
        first_edge: the global position of the part's first edge.
        row_out: written, global ids of the sources.
        column_out: written, local ids of the targets.
        edge_out: written, global positions.
    """
    edge = asked = own = other = 0
    for i in range(rows.size):
        start = edge
        if rows[i] >= 0:
            while own < own_column.size and own_column[own] == target[i]:
                row_out[edge] = own_source[own]
                edge_out[edge] = first_edge + own_position[own] + shift[rows[i]]
                own += 1
                edge += 1
        else:
            for _ in range(counts[asked]):
                row_out[edge] = source[other]
                edge_out[edge] = first_edge + position[other]
                other += 1
                edge += 1
            asked += 1
        for j in range(start, edge):
            column_out[j] = target[i]
