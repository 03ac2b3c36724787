"""Compiled kernels that pick edges of columns, uniformly or the last ones.

A sampling step (one hop, one edge type) is a chain of kernels over plain arrays. Each kernel is one loop, so that the
processor can overlap its memory accesses:

1. *spans*: the start and the number of the eligible in-edges of each frontier node (all, or those not later than the
   seed). Span i is ``begin[i], available[i]``.
2. *pick*: choose edges of each span; write their positions in the graph, their sources and their frontier nodes. A
   source is prefetched when its edge is chosen and read some edges later, so that choosing hides the memory latency.
3. *number*: assign local ids to the sources (:mod:`gtrain.graph.sampling.number`).

Only kernels that read sources or weights are specialised by dtype, each on first use. Arrays of a graph are always
read-only views, since numba compiles separate versions for read-only and writable arrays.

The kernels do not check their input: :class:`gtrain.graph.sampling.columns.Columns` and the samplers have.

Letters of shapes: f frontier nodes, e chosen edges, E edges of the graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from gtrain.kernels.memory import prefetch
from gtrain.kernels.random import below, mix, stream

Array = NDArray[Any]

_BEHIND = 128  # edges between the prefetch of a source and its read
_LINEAR = 32  # largest fan-out whose duplicates are found by a linear scan; a larger one uses a hash set


class Spans(NamedTuple):
    """The eligible in-edges of a frontier: those of node i are ``begin[i] .. begin[i] + available[i] - 1``.

    Attributes:
        begin, available: int64 ``[f]``.
    """

    begin: Array
    available: Array


class Streams(NamedTuple):
    """What selects the random stream of each frontier node, see :func:`gtrain.kernels.random.stream`.

    Attributes:
        ids: int64 ``[f]``, the frontier's nodes; ``ids + first_id`` select the streams.
        first_id: the part's first global id, or 0.
        subgraph: int64 ``[f]``, the subgraph of each frontier node; empty if there is only one.
        key: uint64, hash of seed, epoch, batch, hop and edge type.
    """

    ids: Array
    first_id: int
    subgraph: Array
    key: Any


class ChosenEdges(NamedTuple):
    """Where the chosen edges are written, int64 ``[e]`` or longer.

    Attributes:
        position: the edges.
        column: the local id of the frontier node of each edge.
        row: the source of each edge.
    """

    position: Array
    column: Array
    row: Array


@njit(cache=True, nogil=True)
def pick_last(spans: Spans, count: int, indices: Array, target: Array, chosen: ChosenEdges) -> int:
    """Take the last ``count`` edges of each span, all if count < 0; arguments and result as of :func:`pick_uniform`."""
    begin, available = spans
    position, column, row = chosen
    edges = 0
    for i in range(begin.size):
        end = begin[i] + available[i]
        start = begin[i] if count < 0 or available[i] <= count else end - count
        for edge in range(start, end):
            position[edges] = edge
            column[edges] = target[i]
            row[edges] = indices[edge]
            edges += 1
    return edges


@njit(cache=True, nogil=True)
def pick_uniform(
    spans: Spans, streams: Streams, count: int, replace: bool, indices: Array, target: Array, chosen: ChosenEdges
) -> int:
    """Choose ``count`` edges of each span uniformly; without replacement by Floyd's algorithm.

    Source: Bentley & Floyd, "A sample of brilliance", CACM 30(9), 1987: for j = size - count .. size - 1, draw t from
    0 .. j and take t, or j if t was taken before. Every subset of ``count`` edges has the same probability, with one
    draw per edge and no rejection.

    Args:
        spans: the eligible edges of each frontier node.
        streams: the random streams.
        count: at least 0; without ``replace``, a span of at most ``count`` edges is taken whole.
        replace: draw with replacement.
        indices: int32 or int64 ``[E]``, the source of each edge of the graph.
        target: int64 ``[f]``, the local id of each frontier node.
        chosen: written.

    Returns:
        The number of edges written.
    """
    begin, available = spans
    ids, first_id, subgraph, key = streams
    position, column, row = chosen
    edges = done = 0
    address, width = indices.ctypes.data, indices.itemsize
    # At least twice as many slots as entries: probing then ends after about two steps.
    slots = 1
    while slots < 2 * count and count > _LINEAR:
        slots *= 2
    seen = np.empty(slots, np.int64)
    for i in range(begin.size):
        size, first, start = available[i], begin[i], edges
        if size == 0:
            continue
        if size <= count and not replace:
            for j in range(size):
                position[edges + j] = first + j
            edges += size
        else:
            first_number = stream(key, ids[i] + first_id, subgraph[i] if subgraph.size else 0)
            if replace:
                for j in range(count):
                    position[edges + j] = first + below(first_number, j, size)
            elif count <= _LINEAR:
                _floyd(position[edges : edges + count], first, size, first_number)
            else:
                _floyd_hashed(position[edges : edges + count], first, size, first_number, seen)
            edges += count
        # The sources are in random lines of ``indices``: request them now, read them _BEHIND edges later.
        for j in range(start, edges):
            column[j] = target[i]
            prefetch(address + position[j] * width)
        while done < edges - _BEHIND:
            row[done] = indices[position[done]]
            done += 1
    for j in range(done, edges):
        row[j] = indices[position[j]]
    return edges


@njit(cache=True, nogil=True)
def _floyd(out: Array, first: int, size: int, first_number: Any) -> None:
    # Step i draws from the first size - count + i + 1 edges; a duplicate is replaced by the last edge of that range.
    for filled in range(out.size):
        last = size - out.size + filled
        chosen = first + below(first_number, filled, last + 1)
        for j in range(filled):
            if out[j] == chosen:
                chosen = first + last
                break
        out[filled] = chosen


@njit(cache=True, nogil=True)
def _floyd_hashed(out: Array, first: int, size: int, first_number: Any, seen: Array) -> None:
    mask = seen.size - 1
    seen[:] = -1
    for filled in range(out.size):
        last = size - out.size + filled
        chosen = first + below(first_number, filled, last + 1)
        slot = _slot(chosen, mask)
        while seen[slot] != -1 and seen[slot] != chosen:
            slot = (slot + 1) & mask
        if seen[slot] == chosen:
            # Earlier steps drew from smaller ranges, so it is new.
            chosen = first + last
            slot = _slot(chosen, mask)
            while seen[slot] != -1:
                slot = (slot + 1) & mask
        seen[slot] = chosen
        out[filled] = chosen


@njit(cache=True, nogil=True)
def _slot(value: int, mask: int) -> int:
    return np.int64(mix(np.uint64(value)) & np.uint64(mask))  # type: ignore[return-value]
