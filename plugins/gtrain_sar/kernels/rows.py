"""Loops over the numbers of one row of a tensor: the inner loops of the kernels.

Arrays are pointers to their first item (see :mod:`.lanes`); ``to``, ``at`` and ``start`` are positions in them.
"""

from __future__ import annotations

from typing import Any

from gtrain.kernels.options import inlined
from gtrain_sar.kernels.lanes import (
    fill,
    lane_count,
    load,
    load_some,
    multiply_add,
    plus,
    prefetch,
    store,
    store_some,
    times,
    total,
)

_PREFETCH_EDGES = 8  # how far ahead rows are prefetched


@inlined()
def prefetch_row(x: Any, columns: Any, e: int, end: int, width: int) -> None:
    """Prefetch the row of ``x`` that a later edge reads, if that edge lies before ``end``."""
    if e + _PREFETCH_EDGES < end:
        start = columns[e + _PREFETCH_EDGES] * width
        for c in range(0, width, lane_count(x)):
            prefetch(x, start + c)


@inlined()
def add(out: Any, to: int, x: Any, start: int, count: int) -> None:
    """``out[to:] += x[start:]`` of ``count`` numbers."""
    step = lane_count(x)
    rest = count % step
    for c in range(0, count - rest, step):
        store(out, to + c, plus(load(out, to + c), load(x, start + c)))
    if rest:
        c = count - rest
        store_some(out, to + c, plus(load_some(out, to + c, rest), load_some(x, start + c, rest)), rest)


@inlined()
def add_scaled(out: Any, to: int, x: Any, start: int, factor: Any, count: int) -> None:
    """``out[to:] += factor * x[start:]`` of ``count`` numbers."""
    step = lane_count(x)
    rest, f = count % step, fill(x, factor)
    for c in range(0, count - rest, step):
        store(out, to + c, multiply_add(f, load(x, start + c), load(out, to + c)))
    if rest:
        c = count - rest
        store_some(out, to + c, multiply_add(f, load_some(x, start + c, rest), load_some(out, to + c, rest)), rest)


@inlined()
def scale_by(out: Any, to: int, factor: Any, count: int) -> None:
    """``out[to:] *= factor`` of ``count`` numbers."""
    step = lane_count(out)
    rest, f = count % step, fill(out, factor)
    for c in range(0, count - rest, step):
        store(out, to + c, times(f, load(out, to + c)))
    if rest:
        store_some(out, to + count - rest, times(f, load_some(out, to + count - rest, rest)), rest)


@inlined()
def dot(a: Any, at: int, b: Any, start: int, count: int) -> Any:
    """Inner product of ``count`` numbers of each."""
    step = lane_count(a)
    rest, sums = count % step, fill(a, 0)
    for c in range(0, count - rest, step):
        sums = multiply_add(load(a, at + c), load(b, start + c), sums)
    if rest:
        c = count - rest
        sums = multiply_add(load_some(a, at + c, rest), load_some(b, start + c, rest), sums)
    return total(sums)


@inlined()
def dot_and_add_scaled(out: Any, b: Any, at: int, a: Any, start: int, factor: Any, count: int) -> Any:
    """``out[at:] += factor * a[start:]``; returns the inner product of ``a[start:]`` and ``b[at:]``."""
    step = lane_count(a)
    rest, sums, f = count % step, fill(a, 0), fill(a, factor)
    for c in range(0, count - rest, step):
        row = load(a, start + c)
        sums = multiply_add(row, load(b, at + c), sums)
        store(out, at + c, multiply_add(f, row, load(out, at + c)))
    if rest:
        c = count - rest
        row = load_some(a, start + c, rest)
        sums = multiply_add(row, load_some(b, at + c, rest), sums)
        store_some(out, at + c, multiply_add(f, row, load_some(out, at + c, rest)), rest)
    return total(sums)
