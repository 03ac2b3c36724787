"""Compiled loops of the fused attention.

Edges are taken a few hundred at a time, whatever rows they are of: their logits, then all exponentials in one go, then
the rows. A row that is longer is merged piece by piece, as blocks are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gtrain.kernels.exponential import exp_all
from gtrain.kernels.options import FAST
from gtrain.kernels.random import GOLDEN, mix
from gtrain_sar.kernels.lanes import data
from gtrain_sar.kernels.rows import add_scaled, ahead, dot_and_add_scaled, scale_by

EDGES = 256
_LOW, _SHIFT_32 = np.uint64(0xFFFFFFFF), np.uint64(32)


@njit(cache=True, nogil=True, forceinline=True, fastmath=FAST)
def _logits(
    part: Any,
    peak: Any,
    columns: Any,
    low: int,
    high: int,
    end: int,
    source: Any,
    target: Any,
    i: int,
    slope: Any,
    heads: int,
) -> None:
    """Set the logits of a row's edges, and raise ``peak`` to their maximum."""
    for e in range(low, high):
        ahead(source, columns, e, end, heads)
        j, at = columns[e] * heads, (e - low) * heads
        for h in range(heads):
            z = source[j + h] + target[i * heads + h]
            z = z if z > 0 else z * slope
            part[at + h] = z
            peak[h] = z if z > peak[h] else peak[h]


@njit(cache=True, nogil=True, forceinline=True, fastmath=FAST)
def _raise_top(top: Any, total: Any, out: Any, i: int, peak: Any, heads: int, channels: int) -> None:
    """Make ``peak`` a row's running maximum; afterwards it is what to subtract from logits, which is never infinite."""
    for h in range(heads):
        at, new = i * heads + h, peak[h]
        old = top[at]
        if new > old:
            top[at] = new
            if total[at] != 0:
                factor = np.exp(old - new)
                total[at] *= factor
                scale_by(out, at * channels, factor, channels)
        elif new == -np.inf:  # so are all logits: none counts
            peak[h] = 0


@njit(cache=True, nogil=True, fastmath=FAST)
def forward(
    rows: Any,
    ptr: Any,
    columns: Any,
    edges: Any,
    x: Any,
    source: Any,
    target: Any,
    slope: Any,
    out: Any,
    top: Any,
    total: Any,
    stream: Any,
    threshold: int,
    scale: Any,
    scratch: Any,
    first: int,
    last: int,
) -> None:
    """Rows ``first .. last-1`` of a block; see :func:`.attention.attention_forward`.

    ``scratch`` ``[2 * EDGES + 1, H]`` is room for the exponentials and masks of a group of edges, and for maxima.
    """
    heads, channels = x.shape[1], x.shape[2]
    width, end = heads * channels, ptr[last]
    flat, left, right, column, position = data(x), data(source), data(target), data(columns), data(edges)
    sums, peaks, totals = data(out), data(top), data(total)
    part, mask, peak = data(scratch), data(scratch[EDGES:]), data(scratch[2 * EDGES :])
    row, start = first, ptr[first]
    while start < end:
        stop, begin, low = min(start + EDGES, end), row, start
        while low < stop:
            high, i = min(ptr[row + 1], stop), rows[row]
            at = data(scratch[low - start :])
            for h in range(heads):
                peak[h] = peaks[i * heads + h]
            _logits(at, peak, column, low, high, end, left, right, i, slope, heads)
            _raise_top(peaks, totals, sums, i, peak, heads, channels)
            for e in range(high - low):
                for h in range(heads):
                    at[e * heads + h] -= peak[h]
            low = high
            row += high == ptr[row + 1]
        exp_all(part, (stop - start) * heads)
        if threshold > 0:
            masks(mask, position, start, stop - start, heads, stream, threshold, scale)
        k, low = begin, start
        while low < stop:
            high, i = min(ptr[k + 1], stop), rows[k]
            for e in range(low, high):
                ahead(flat, column, e, end, width)
                j = column[e]
                for h in range(heads):
                    at_h = (e - start) * heads + h
                    a = part[at_h]
                    totals[i * heads + h] += a
                    if threshold > 0:
                        a *= mask[at_h]
                    add_scaled(sums, i * width + h * channels, flat, j * width + h * channels, a, channels)
            low = high
            k += 1
        start = stop


@njit(cache=True, nogil=True, fastmath=FAST)
def finish(out: Any, top: Any, total: Any, lse: Any) -> None:
    """Divide by the total; see :func:`.attention.attention_finish`."""
    heads, channels = out.shape[1], out.shape[2]
    flat = data(out)
    for i in range(out.shape[0]):
        for h in range(heads):
            s = total[i, h]
            lse[i, h] = top[i, h] + np.log(s)
            if s != 0:
                scale_by(flat, (i * heads + h) * channels, 1 / s, channels)


@njit(cache=True, nogil=True, forceinline=True, fastmath=FAST)
def _exponents(
    part: Any,
    steep: Any,
    columns: Any,
    low: int,
    high: int,
    end: int,
    own: Any,
    j: int,
    packed: Any,
    slope: Any,
    heads: int,
) -> None:
    """Set ``logit - lse`` of a source's edges, and the slope of each."""
    for e in range(low, high):
        ahead(packed, columns, e, end, 4 * heads)
        i, at = columns[e] * heads * 4, (e - low) * heads
        for h in range(heads):
            z = own[j * heads + h] + packed[i + h]
            negative = not z > 0
            logit = z * slope if negative else z
            steep[at + h] = slope if negative else 1
            part[at + h] = logit if logit == -np.inf else logit - packed[i + heads + h]


@njit(cache=True, nogil=True, fastmath=FAST)
def backward(
    rows: Any,
    ptr: Any,
    columns: Any,
    edges: Any,
    x: Any,
    source: Any,
    grad: Any,
    packed: Any,
    slope: Any,
    dx: Any,
    dsource: Any,
    stream: Any,
    threshold: int,
    scale: Any,
    scratch: Any,
    first: int,
    last: int,
) -> None:
    """Rows ``first .. last-1`` of a block; see :func:`.attention.attention_backward`.

    ``packed`` ``[T, 4, H]`` has of each target its part of the logit, the logarithm of its sum, delta, and receives the
    gradient of the first. ``scratch`` ``[3 * EDGES, H]`` is room for a group of edges.
    """
    heads, channels = x.shape[1], x.shape[2]
    width, end = heads * channels, ptr[last]
    flat, own, gradient, target = data(x), data(source), data(grad), data(packed)
    column, position, total, of_source = data(columns), data(edges), data(dx), data(dsource)
    part, mask, steep = data(scratch), data(scratch[EDGES:]), data(scratch[2 * EDGES :])
    row, start = first, ptr[first]
    for k in range(EDGES * heads):
        mask[k] = 1
    while start < end:
        stop, begin, low = min(start + EDGES, end), row, start
        while low < stop:
            high, at = min(ptr[row + 1], stop), low - start
            steeps = data(scratch[2 * EDGES + at :])
            _exponents(data(scratch[at:]), steeps, column, low, high, end, own, rows[row], target, slope, heads)
            low = high
            row += high == ptr[row + 1]
        exp_all(part, (stop - start) * heads)
        if threshold > 0:
            masks(mask, position, start, stop - start, heads, stream, threshold, scale)
        k, low = begin, start
        while low < stop:
            high, j = min(ptr[k + 1], stop), rows[k]
            for e in range(low, high):
                ahead(gradient, column, e, end, width)
                i = np.int64(column[e])
                for h in range(heads):
                    at = (e - start) * heads + h
                    a, m = part[at], mask[at]
                    to, of = j * width + h * channels, i * width + h * channels
                    inner = dot_and_add_scaled(total, flat, to, gradient, of, a * m, channels)
                    q = a * (m * inner - target[(i * 4 + 2) * heads + h]) * steep[at]
                    of_source[j * heads + h] += q
                    target[(i * 4 + 3) * heads + h] += q
            low = high
            k += 1
        start = stop


@njit(cache=True, nogil=True, forceinline=True)
def masks(part: Any, edges: Any, start: int, count: int, heads: int, stream: Any, threshold: int, scale: Any) -> None:
    """Set what coefficients of ``count`` edges are multiplied by; ``edges`` are their ids."""
    words = (heads + 1) // 2
    for e in range(count):
        first, at = stream + np.uint64(edges[start + e]) * np.uint64(words) * GOLDEN, e * heads
        for w in range(words):
            word = mix(first + np.uint64(w) * GOLDEN)
            part[at + 2 * w] = scale if np.int64(word & _LOW) >= threshold else 0
            if 2 * w + 1 < heads:
                part[at + 2 * w + 1] = scale if np.int64(word >> _SHIFT_32) >= threshold else 0
