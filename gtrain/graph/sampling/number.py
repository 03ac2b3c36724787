"""Compiled kernels that gather the chosen edges' sources and assign local ids to nodes in order of discovery.

Tables are not cleared between batches. The dense table (4 bytes per node of the graph, the faster one) stores
``first + local_id``, where ``first`` exceeds all entries of earlier batches, so that smaller entries count as empty.
The hash map by (node, subgraph), for disjoint subgraphs and for graphs too large for the dense table, stores each local
id with its *turn*, the number of the batch that wrote it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from gtrain.kernels.memory import prefetch
from gtrain.kernels.random import slot_of

Array = NDArray[Any]

_LOCAL = np.int64(0xFFFFFFFF)
_AHEAD = 32  # edges


class NodeMap(NamedTuple):
    """The batch's nodes in order of discovery, and an open-addressing hash map from (node, subgraph) to local ids.

    Attributes:
        slots: int64 ``[2**n, 2]``: the key ``node * width + subgraph``, and ``turn << 32 | local_id``.
        turn: number of the current batch, 1 .. 2**31 - 1; slots with another turn are free.
        width: number of subgraphs.
        node: int64, global ids; has room for nodes to come.
        subgraph: int64, the subgraph of each node; has the same room.
    """

    slots: Array
    turn: int
    width: int
    node: Array
    subgraph: Array


@njit(cache=True, nogil=True)
def gather(indices: Array, position: Array, out: Array) -> None:
    """Write the source of each chosen edge: ``out = indices[position]``; position and out ``[e]``, indices ``[E]``."""
    for j in range(position.size):
        out[j] = indices[position[j]]


@njit(cache=True, nogil=True)
def number_dense(table: Array, first: int, nodes: Array, count: int, row: Array) -> int:
    """Replace global ids by local ids; append new nodes to ``nodes``.

    Args:
        table: int32, one entry per node of the graph: ``first + local_id``.
        first: above every entry of earlier batches, and above 0.
        nodes: int64 ``[n]`` or longer, the batch's nodes in order of discovery, with capacity for e more.
        count: number of nodes so far.
        row: int64 ``[e]``, on entry global ids, on return local ids.

    Returns:
        The new number of nodes.
    """
    address = table.ctypes.data
    for j in range(row.size):
        if j + _AHEAD < row.size:
            # Four bytes per entry. Rows ahead of j are still global ids.
            prefetch(address + row[j + _AHEAD] * 4)
        node = row[j]
        entry = table[node]
        # An entry below ``first`` is from an earlier batch: the node is new.
        if entry >= first:
            row[j] = entry - first
        else:
            table[node] = first + count
            nodes[count] = node
            row[j] = count
            count += 1
    return count


@njit(cache=True, nogil=True)
def number_hashed(nodes: NodeMap, count: int, row: Array, column: Array, subgraph: Array) -> int:
    """Do the same as :func:`number_dense` within each subgraph, with a hash map.

    Args:
        nodes: has room for e more.
        count, row: see :func:`number_dense`.
        column: int64 ``[e]``, the local id of each edge's target.
        subgraph: int64, the subgraph of each target by local id; ``nodes.subgraph`` itself if both ends of the edges
            have the same type.
    """
    slots, turn, width = nodes.slots, nodes.turn, nodes.width
    mask = slots.shape[0] - 1
    for j in range(row.size):
        node, owner = row[j], subgraph[column[j]]
        key = node * width + owner
        slot = slot_of(key, mask)
        # A slot with another turn is free. Linear probing needs no deletion: a whole batch expires at once.
        while slots[slot, 1] >> 32 == turn and slots[slot, 0] != key:
            slot = (slot + 1) & mask
        if slots[slot, 1] >> 32 == turn:
            row[j] = slots[slot, 1] & _LOCAL
        else:
            slots[slot, 0] = key
            slots[slot, 1] = turn << 32 | count
            nodes.node[count] = node
            nodes.subgraph[count] = owner
            row[j] = count
            count += 1
    return count


@njit(cache=True, nogil=True)
def rehash(nodes: NodeMap, count: int) -> None:
    """Insert the batch's first ``count`` nodes into a new hash map, ``nodes.slots``, which is empty."""
    slots, turn, width = nodes.slots, nodes.turn, nodes.width
    mask = slots.shape[0] - 1
    for j in range(count):
        key = nodes.node[j] * width + nodes.subgraph[j]
        slot = slot_of(key, mask)
        while slots[slot, 1] >> 32 == turn:
            slot = (slot + 1) & mask
        slots[slot, 0] = key
        slots[slot, 1] = turn << 32 | j


@njit(cache=True, nogil=True)
def keep_dense(table: Array, first: int, row: Array, column: Array, position: Array) -> int:
    """Drop the edges whose source is not in the batch; compact the others to the front and return their number.

    ``row``, ``column`` and ``position`` are int64 ``[e]``; ``row`` holds global ids on entry and local ids on return.
    """
    size = 0
    for j in range(row.size):
        entry = table[row[j]]
        if entry >= first:
            # In place: size <= j, so nothing is overwritten before it is read.
            row[size], column[size], position[size] = entry - first, column[j], position[j]
            size += 1
    return size


@njit(cache=True, nogil=True)
def keep_hashed(nodes: NodeMap, row: Array, column: Array, position: Array, subgraph: Array) -> int:
    """Do the same as :func:`keep_dense` within each subgraph; ``subgraph`` as in :func:`number_hashed`."""
    slots, turn, width = nodes.slots, nodes.turn, nodes.width
    mask = slots.shape[0] - 1
    size = 0
    for j in range(row.size):
        key = row[j] * width + subgraph[column[j]]
        slot = slot_of(key, mask)
        # The same search as in number_hashed, but a missing key is not inserted.
        while slots[slot, 1] >> 32 == turn and slots[slot, 0] != key:
            slot = (slot + 1) & mask
        if slots[slot, 1] >> 32 == turn:
            row[size], column[size], position[size] = slots[slot, 1] & _LOCAL, column[j], position[j]
            size += 1
    return size
