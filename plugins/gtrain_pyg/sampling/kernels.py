"""Compiled kernels of sampling over parts. The kernels that choose edges are in :mod:`gtrain.graph.sampling`.

Letters of shapes: f frontier nodes, e edges, P parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from gtrain.kernels.memory import count_bits
from gtrain_pyg.peers import Array

INT32_LIMIT = int(np.iinfo(np.int32).max)
_ONE = np.uint64(1)


class EdgeColumns(NamedTuple):
    """Edges of one type, each array ``[e]``.

    Attributes:
        row: sources.
        column: targets.
        position: positions in the columns that the edges were chosen from, or global edge positions.
    """

    row: Array
    column: Array
    position: Array


class SampleReply(NamedTuple):
    """The edges that the owner of a part chose for the f frontier nodes of one request and edge type.

    Attributes:
        counts: int32 ``[f]``, edges of each frontier node.
        source: int32 or int64 ``[e]``, global ids, frontier node by frontier node.
        position: int32 or int64 ``[e]``, edge positions within the part.
    """

    counts: Array
    source: Array
    position: Array


def index_dtype(limit: int) -> np.dtype[Any]:
    """Return int32 if numbers below ``limit`` fit, else int64."""
    return np.dtype(np.int32 if limit <= INT32_LIMIT else np.int64)


@njit(cache=True, nogil=True)
def group_by_owner(
    nodes: Array, first: int, offsets: Array, owner: Array, bounds: Array, target: Array, local: Array
) -> None:
    """Group a frontier by the parts that own its nodes, in the order of the frontier within a part (counting sort).

    Args:
        nodes: int64 ``[f]``, global ids.
        first: the local id of the first; the others follow.
        offsets: int64 ``[P + 1]``, the first global id of each part.
        owner: int16 or int32 ``[f]``, scratch memory.
        bounds: int64 ``[P + 1]``, written: part p has ``bounds[p] .. bounds[p+1]-1`` of the new order.
        target: int64 ``[f]``, written: the local id of each node, in the new order.
        local: int64 ``[f]``, written: the number of each node within its part, in the new order.
    """
    parts = offsets.size - 1
    bounds[:] = 0
    # Count: bounds[p + 1] becomes the nodes of part p. A binary search, since P is small and offsets stay in cache.
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
    # Scatter: bounds[p] is the next free index of part p, and ends at the first index of part p + 1 ...
    for i in range(nodes.size):
        part = owner[i]
        index = bounds[part]
        bounds[part] += 1
        target[index] = first + i
        local[index] = nodes[i] - offsets[part]
    # ... so that shifting by one restores the bounds.
    for part in range(parts - 1, 0, -1):
        bounds[part] = bounds[part - 1]
    bounds[0] = 0


@njit(cache=True, nogil=True)
def repeat_targets(counts: Array, target: Array, column_out: Array) -> None:
    """Write ``target[i]`` (``[f]``) ``counts[i]`` times: ``numpy.repeat`` into existing memory ``[e]``."""
    edge = 0
    for i in range(counts.size):
        for _ in range(counts[i]):
            column_out[edge] = target[i]
            edge += 1


@njit(cache=True, nogil=True)
def count_edges(column: Array, counts: Array) -> None:
    """Write the number of edges of each frontier node, ``[f]``; ``column`` ``[e]`` has indices in the frontier."""
    counts[:] = 0
    for j in range(column.size):
        counts[column[j]] += 1


@njit(cache=True, nogil=True)
def replica_rows(nodes: Array, bits: Array, before: Array, rows: Array) -> int:
    """Look up the row of each node in a replica, and return the number of nodes that have one.

    The row of a member is its rank: the members in earlier words plus those in lower bits of its own word.

    Args:
        nodes: int64 ``[f]``, numbers within the part.
        bits: uint64 ``[words]``, see :class:`gtrain_pyg.graph_structure.ReplicaIndex`.
        before: int64 ``[words]``, likewise.
        rows: int64 ``[f]``, written; -1 for nodes that are not in the replica.
    """
    members = 0
    for i in range(nodes.size):
        word, bit = nodes[i] >> 6, np.uint64(nodes[i] & 63)
        if (bits[word] >> bit) & _ONE:
            rows[i] = before[word] + count_bits(bits[word] & ((_ONE << bit) - _ONE))
            members += 1
        else:
            rows[i] = -1
    return members


@njit(cache=True, nogil=True)
def merge_edges(
    rows: Array, shift: Array, copied: EdgeColumns, reply: SampleReply, target: Array, first_edge: int, out: EdgeColumns
) -> None:
    """Merge the edges of one part that were chosen in a replica and by the part's owner, in the order of the frontier.

    The order makes a batch independent of what is replicated. Both inputs are in the order of the frontier already, so
    one pass over it suffices.

    Args:
        rows: int64 ``[f]`` of :func:`replica_rows`; the owner chose the edges of nodes with -1.
        shift: int64, see :class:`gtrain_pyg.graph_structure.EdgeReplica`.
        copied: edges chosen in the replica: global ids of sources, local ids of targets, positions in the replica.
        reply: the owner's edges.
        target: int64 ``[f]``, the local id of each frontier node of the part.
        first_edge: the global position of the part's first edge.
        out: written: global ids of the sources, local ids of the targets, global edge positions.
    """
    edge = requested = chosen = received = 0
    for i in range(rows.size):
        start = edge
        if rows[i] >= 0:
            # ``copied`` lists edges by target, so those of this target come next; it may have none.
            while chosen < copied.column.size and copied.column[chosen] == target[i]:
                out.row[edge] = copied.row[chosen]
                out.position[edge] = first_edge + copied.position[chosen] + shift[rows[i]]
                chosen += 1
                edge += 1
        else:
            for _ in range(reply.counts[requested]):
                out.row[edge] = reply.source[received]
                out.position[edge] = first_edge + reply.position[received]
                received += 1
                edge += 1
            requested += 1
        for j in range(start, edge):
            out.column[j] = target[i]
