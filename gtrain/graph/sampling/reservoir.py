"""Compiled kernels that pick edges by weight, or the latest edges by the times of their sources.

Letters of shapes as in :mod:`gtrain.graph.sampling.pick`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from gtrain.graph.sampling.pick import ChosenEdges, Spans, Streams
from gtrain.kernels.random import stream, unit

Array = NDArray[Any]

_LINEAR = 32  # largest fan-out for which draws are rejected by a linear scan


@njit(cache=True, nogil=True, error_model="numpy")
def pick_weighted(
    spans: Spans, streams: Streams, weight: Array, count: int, replace: bool, target: Array, chosen: ChosenEdges
) -> int:
    """Choose edges of each span with probability proportional to weight; edges of weight 0 are never chosen.

    Without replacement, the distribution is that of successive draws from the remaining edges. Arguments and result as
    of :func:`gtrain.graph.sampling.pick.pick_uniform`, with these differences:

    Args:
        weight: float32 or float64 ``[E]``, or one entry per candidate.
        count: below 0: take all edges of positive weight.
        chosen: ``row`` is not written.
    """
    begin, available = spans
    ids, first_id, subgraph, key = streams
    position, column = chosen.position, chosen.column
    edges, longest = 0, available.max() if available.size else 0
    # float64: a running sum in float32 would lose small weights behind large ones.
    running = np.empty(longest, np.float64)
    keys = np.empty(max(count, 0), np.float64)
    for i in range(begin.size):
        start, span, out = edges, weight[begin[i] : begin[i] + available[i]], position[edges:]
        positive = _running_sum(span, running)
        # The stream of a node does not depend on the draws of other nodes, so nodes may be sampled in any order or
        # process.
        first_number = stream(key, ids[i] + first_id, subgraph[i] if subgraph.size else 0)
        if positive == 0:
            continue
        if count < 0 or (positive <= count and not replace):
            edges += _all_positive(span, out)
        elif replace:
            for j in range(count):
                out[j] = _proportional(running[: span.size], first_number, j)
            edges += count
        else:
            _distinct(span, positive, count, first_number, running[: span.size], keys, out)
            edges += count
        for j in range(start, edges):
            position[j] += begin[i]
            column[j] = target[i]
    return edges


@njit(cache=True, nogil=True)
def _running_sum(weight: Array, out: Array) -> int:
    """Write the running sum, ``(span,)``; return the number of positive weights."""
    total, positive = 0.0, 0
    for j in range(weight.size):
        total += weight[j]
        out[j] = total
        positive += weight[j] > 0
    return positive


@njit(cache=True, nogil=True)
def _all_positive(weight: Array, out: Array) -> int:
    edges = 0
    for j in range(weight.size):
        if weight[j] > 0:
            out[edges] = j
            edges += 1
    return edges


@njit(cache=True, nogil=True)
def _proportional(running: Array, first_number: Any, draw: int) -> int:
    """Draw one edge by inverting the running sum. Taking the first entry above the target excludes weight 0."""
    target = unit(first_number, draw) * running[-1]
    low, high = 0, running.size - 1
    while low < high:
        middle = (low + high) // 2
        if running[middle] > target:
            high = middle
        else:
            low = middle + 1
    return low


@njit(cache=True, nogil=True, error_model="numpy")
def _distinct(
    weight: Array, positive: int, count: int, first_number: Any, running: Array, keys: Array, out: Array
) -> None:
    """Draw ``count`` distinct edges, fewer than have positive weights.

    Drawing with replacement and rejecting duplicates equals drawing without replacement, and is faster while few draws
    are rejected. After ``4 * count`` draws, a reservoir over the weights not yet drawn yields the remaining edges.
    """
    size = draw = 0
    if count <= _LINEAR and positive > 2 * count:
        while size < count and draw < 4 * count:
            chosen = _proportional(running, first_number, draw)
            draw += 1
            new = True
            # At most _LINEAR former draws: comparing with all of them, without a branch, vectorises.
            for j in range(size):
                new &= out[j] != chosen
            if new:
                out[size] = chosen
                size += 1
    if size == count:
        return
    # Reuse the memory: the running sums are not needed any more.
    remaining = running
    for j in range(weight.size):
        remaining[j] = weight[j]
    for j in range(size):
        remaining[out[j]] = 0.0
    # What is left of a sampling without replacement is again one, over the weights that were not drawn.
    _reservoir(remaining, count - size, first_number, draw, keys, out[size:])


@njit(cache=True, nogil=True, error_model="numpy")
def _reservoir(weight: Array, count: int, first_number: Any, draw: int, keys: Array, out: Array) -> None:
    """Draw without replacement in one pass with few random numbers (A-ExpJ), from at least ``count`` positive weights.

    Source: Efraimidis & Spirakis, "Weighted random sampling with a reservoir", IPL 97(5), 2006, with ``-log`` of the
    paper's keys, which is well conditioned for weights of any size: the key of an edge is exponential with its weight
    as the rate, the ``count`` smallest keys stay, and the weight to skip until the next key below the largest key T in
    the heap is exponential with rate T.
    """
    size, skip = 0, 0.0
    for j in range(weight.size):
        if weight[j] <= 0:
            continue
        if size < count:
            heap_push(keys, out, size, -np.log(unit(first_number, draw)) / weight[j], j)
            size += 1
            draw += 1
            if size == count:
                skip = -np.log(unit(first_number, draw)) / keys[0]
            continue
        skip -= weight[j]
        if skip <= 0:
            # The probability of a key below the largest one in the heap.
            lower = -np.expm1(-weight[j] * keys[0])
            heap_sink(keys, out, size, -np.log1p(-unit(first_number, draw + 1) * lower) / weight[j], j)
            draw += 2
            skip = -np.log(unit(first_number, draw)) / keys[0]


@njit(cache=True, nogil=True)
def pick_latest(spans: Spans, source_time: Array, limit: Array, count: int, target: Array, chosen: ChosenEdges) -> int:
    """Take the ``count`` >= 0 latest edges of each span that are not later than the frontier node's limit.

    Of edges of the earliest taken time, the last are taken, and a span's edges are written in their order: in a column
    that is sorted by time these are the edges of :func:`gtrain.graph.sampling.pick.pick_last`. A rank that has a copy
    of some columns, all of them sorted, then samples what the owner does, whose other columns may not be. Arguments and
    result as of :func:`gtrain.graph.sampling.pick.pick_uniform`, with these differences:

    Args:
        source_time: int64 ``[E]``, the time of each edge's source, in any order within a column.
        limit: int64 ``[f]``, the latest time of each frontier node's edges.
        chosen: ``row`` is not written.
    """
    begin, available = spans
    position, column = chosen.position, chosen.column
    edges = 0
    keys = np.empty(count, np.int64)
    for i in range(begin.size):
        size, latest, heap, end = 0, limit[i], position[edges:], begin[i] + available[i]
        # A max-heap of the keys ~time: its top is the earliest of the latest edges so far, the one to replace.
        for edge in range(begin[i], end):
            time = source_time[edge]
            if time > latest or count == 0:
                continue
            if size < count:
                # ~ reverses the order, without overflow.
                heap_push(keys, heap, size, ~time, edge)
                size += 1
            elif ~time < keys[0]:
                heap_sink(keys, heap, size, ~time, edge)
        # The heap says which times are taken. Of equal ones it holds any edges, so the edges are chosen here.
        earliest = ties = 0
        if size:
            earliest = ~keys[0]
            for j in range(size):
                ties += keys[j] == keys[0]
        edges += size
        slot, edge = edges, end
        while slot > edges - size:
            edge -= 1
            time = source_time[edge]
            if time > latest or time < earliest or (time == earliest and ties == 0):
                continue
            ties -= time == earliest
            slot -= 1
            position[slot], column[slot] = edge, target[i]
    return edges


@njit(cache=True, nogil=True)
def heap_push(keys: Array, values: Array, size: int, key: Any, value: int) -> None:
    """Add an element to a binary max-heap of ``size`` elements."""
    slot = size
    while slot > 0 and keys[(slot - 1) // 2] < key:
        keys[slot], values[slot] = keys[(slot - 1) // 2], values[(slot - 1) // 2]
        slot = (slot - 1) // 2
    keys[slot], values[slot] = key, value


@njit(cache=True, nogil=True)
def heap_sink(keys: Array, values: Array, size: int, key: Any, value: int) -> None:
    """Replace the top of a binary max-heap of ``size`` elements."""
    slot, child = 0, 1
    while child < size:
        if child + 1 < size and keys[child + 1] > keys[child]:
            child += 1
        if keys[child] <= key:
            break
        keys[slot], values[slot] = keys[child], values[child]
        slot, child = child, 2 * child + 1
    keys[slot], values[slot] = key, value
