"""Compiled kernels that choose edges of columns.

A step of sampling (one hop, one edge type) is a short chain of kernels over plain arrays, each a single loop in which a
processor can overlap its accesses to memory:

1. *spans*: where each frontier node's in-edges begin and how many of them may be chosen: all, or those not later than
   the seed. Span i is ``begin[i], available[i]``.
2. *pick*: choose edges of each span; writes their positions in the graph, their sources and the frontier node that each
   belongs to. Sources are asked for when they are chosen and read some edges later: choosing hides the wait for memory.
3. *number* the sources (:mod:`gtrain.graph.sampling.number`).

The chain keeps specialisations few: only kernels that read sources or weights are compiled by dtype, each when it is
first used. Arrays of a graph are always read-only views, since numba compiles for read-only and writable arrays apart.

The kernels trust their input, which :class:`gtrain.graph.sampling.columns.Columns` and the samplers have checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from gtrain.kernels.memory import prefetch
from gtrain.kernels.random import below, mix, stream

Array = NDArray[Any]

_BEHIND = 128  # edges between asking for a source and reading it
_LINEAR = 32  # up to so many choices of one node are compared one by one, more go through a small hash set


@njit(cache=True, nogil=True)
def pick_last(
    begin: Array, available: Array, count: int, source: Array, target: Array, position: Array, column: Array, row: Array
) -> int:
    """The last ``count`` edges of each span (all where count < 0); returns the number of edges written."""
    edges = 0
    for i in range(begin.size):
        end = begin[i] + available[i]
        start = begin[i] if count < 0 or available[i] <= count else end - count
        for chosen in range(start, end):
            position[edges] = chosen
            column[edges] = target[i]
            row[edges] = source[chosen]
            edges += 1
    return edges


@njit(cache=True, nogil=True)
def pick_uniform(
    begin: Array,
    available: Array,
    ids: Array,
    first_id: int,
    subgraph: Array,
    key: Any,
    count: int,
    replace: bool,
    indices: Array,
    target: Array,
    position: Array,
    column: Array,
    row: Array,
) -> int:
    """Choose ``count`` edges of each span, all equally likely; without replacement by Floyd's algorithm.

    Source: Bentley & Floyd, "A sample of brilliance", CACM 30(9), 1987.

    Args:
        ids: the frontier's nodes, which with ``first_id`` added name the random streams.
        subgraph: the subgraph of each frontier node; empty where there is only one.
        key: uint64, hash of seed, epoch, batch, hop and edge type.
        count: at least 0; spans of at most ``count`` edges are taken whole unless ``replace``.
        indices: the source of each edge of the graph.
        target: the local id of each frontier node.
        position: written, the chosen edges.
        column: written, the local id of the frontier node of each.
        row: written, the source of each.

    Returns:
        The number of edges written.
    """
    edges = done = 0
    address, width = indices.ctypes.data, indices.itemsize
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
            chosen = first + last  # in no earlier step could it be drawn, so it is new
            slot = _slot(chosen, mask)
            while seen[slot] != -1:
                slot = (slot + 1) & mask
        seen[slot] = chosen
        out[filled] = chosen


@njit(cache=True, nogil=True)
def _slot(value: int, mask: int) -> int:
    return np.int64(mix(np.uint64(value)) & np.uint64(mask))  # type: ignore[return-value]
