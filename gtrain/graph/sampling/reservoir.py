"""Compiled kernels that choose edges by weight, or the latest ones by the times of their sources."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from gtrain.kernels.random import stream, unit

Array = NDArray[Any]

_LINEAR = 32  # up to so many choices are compared one by one


@njit(cache=True, nogil=True, error_model="numpy")
def pick_weighted(
    begin: Array,
    available: Array,
    weight: Array,
    ids: Array,
    first_id: int,
    subgraph: Array,
    key: Any,
    count: int,
    replace: bool,
    target: Array,
    position: Array,
    column: Array,
) -> int:
    """Choose edges of each span in proportion to their weights; an edge of weight 0 is never chosen.

    Without replacement the result is that of drawing one after the other from what is left. Arguments and result as of
    :func:`gtrain.graph.sampling.pick.pick_uniform`, and ``count < 0`` takes all edges of positive weight.
    """
    edges, longest = 0, available.max() if available.size else 0
    running = np.empty(longest, np.float64)
    keys = np.empty(max(count, 0), np.float64)
    for i in range(begin.size):
        start, span, out = edges, weight[begin[i] : begin[i] + available[i]], position[edges:]
        positive = _running_sum(span, running)
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
    """Write the running sum; returns how many weights are above 0."""
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
    """Draw one edge by the inverse of the running sum: the first above the target, so none of weight 0."""
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
    """Draw ``count`` distinct edges, fewer than there are.

    Drawing with replacement and dropping what was drawn before is drawing without replacement, and the faster while few
    draws are dropped. Whenever that ends, the remaining edges are those of a reservoir over the weights not yet drawn.
    """
    size = draw = 0
    if count <= _LINEAR and positive > 2 * count:
        while size < count and draw < 4 * count:
            chosen = _proportional(running, first_number, draw)
            draw += 1
            new = True
            for j in range(size):
                new &= out[j] != chosen
            if new:
                out[size] = chosen
                size += 1
    if size == count:
        return
    left = running  # no longer needed
    for j in range(weight.size):
        left[j] = weight[j]
    for j in range(size):
        left[out[j]] = 0.0
    _reservoir(left, count - size, first_number, draw, keys, out[size:])


@njit(cache=True, nogil=True, error_model="numpy")
def _reservoir(weight: Array, count: int, first_number: Any, draw: int, keys: Array, out: Array) -> None:
    """Draw without replacement in one pass with few random numbers: A-ExpJ. At least ``count`` weights are above 0.

    Source: Efraimidis & Spirakis, "Weighted random sampling with a reservoir", IPL 97(5), 2006, with ``-log`` of their
    keys, which is well conditioned for weights of any size: an edge's key is exponential with its weight as the rate,
    the ``count`` smallest stay, and the weight to skip until the next key below the greatest kept, T, is exponential
    with rate T.
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
            lower = -np.expm1(-weight[j] * keys[0])  # probability of a key below the greatest
            heap_sink(keys, out, size, -np.log1p(-unit(first_number, draw + 1) * lower) / weight[j], j)
            draw += 2
            skip = -np.log(unit(first_number, draw)) / keys[0]


@njit(cache=True, nogil=True)
def pick_latest(
    begin: Array,
    available: Array,
    loose_time: Any,
    limit: Any,
    count: int,
    target: Array,
    position: Array,
    column: Array,
) -> int:
    """The ``count`` >= 0 latest edges of each column that are not later than the frontier node's limit.

    Which of several edges of the same time stays at the limit is arbitrary, and always the same.
    """
    edges = 0
    keys = np.empty(count, np.int64)
    for i in range(begin.size):
        size, latest, kept = 0, limit[i], position[edges:]
        for chosen in range(begin[i], begin[i] + available[i]):
            time = loose_time[chosen]
            if time > latest or count == 0:
                continue
            if size < count:
                heap_push(keys, kept, size, ~time, chosen)  # ~ turns the order round and cannot overflow
                size += 1
            elif ~time < keys[0]:
                heap_sink(keys, kept, size, ~time, chosen)
        for j in range(edges, edges + size):
            column[j] = target[i]
        edges += size
    return edges


@njit(cache=True, nogil=True)
def heap_push(keys: Array, values: Array, size: int, key: Any, value: int) -> None:
    """Add an element to a heap of ``size`` elements with the greatest key on top."""
    place = size
    while place > 0 and keys[(place - 1) // 2] < key:
        keys[place], values[place] = keys[(place - 1) // 2], values[(place - 1) // 2]
        place = (place - 1) // 2
    keys[place], values[place] = key, value


@njit(cache=True, nogil=True)
def heap_sink(keys: Array, values: Array, size: int, key: Any, value: int) -> None:
    """Replace the top of a heap."""
    place, child = 0, 1
    while child < size:
        if child + 1 < size and keys[child + 1] > keys[child]:
            child += 1
        if keys[child] <= key:
            break
        keys[place], values[place] = keys[child], values[child]
        place, child = child, 2 * child + 1
    keys[place], values[place] = key, value
