"""Reductions over a block of edges in Triton; the module :mod:`gtrain.engine.kernels.sums` says what they compute."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gtrain.engine.edges import CompressedEdges
from gtrain.engine.kernels.plain import ExtremeState
from gtrain.kernels.device import on_device, sum_type

_MOST_COLUMNS = 256  # of a row, that a program adds
_TILE = 2048  # numbers of a group of edges


def spmm(block: CompressedEdges, x: Tensor, out: Tensor, weight: Tensor | None) -> None:
    """See :func:`gtrain.engine.kernels.sums.spmm`."""
    heads, channels = x.size(1), x.size(2)
    grid, columns, group, warps = _shape(block, heads * channels)
    with on_device(out):
        _spmm[grid](
            *block, x.contiguous(), out, weight, heads * channels, channels, heads, weight is not None, heads == 1,
            sum_type(out), columns, group, num_warps=warps,
        )  # fmt: skip


def sddmm(block: CompressedEdges, a: Tensor, b: Tensor, out: Tensor) -> None:
    """See :func:`gtrain.engine.kernels.sums.sddmm`."""
    heads, channels = a.size(1), a.size(2)
    columns = triton.next_power_of_2(channels)
    with on_device(out):
        _sddmm[(len(block.rows) * heads,)](
            *block, a.contiguous(), b.contiguous(), out, channels, heads, sum_type(out),
            columns, max(1, min(16, _TILE // columns)), num_warps=_warps(columns),
        )  # fmt: skip


def extreme_forward(block: CompressedEdges, x: Tensor, largest: bool, state: ExtremeState) -> None:
    """See :func:`gtrain.engine.kernels.sums.extreme_forward`."""
    grid, columns, group, warps = _shape(block, x.size(1))
    with on_device(x):
        _extreme[grid](*block[:3], x.contiguous(), *state, x.size(1), largest, columns, group, num_warps=warps)


def extreme_backward(block: CompressedEdges, x: Tensor, out: Tensor, share: Tensor, dx: Tensor) -> None:
    """See :func:`gtrain.engine.kernels.sums.extreme_backward`."""
    grid, columns, group, warps = _shape(block, x.size(1))
    rows = (tensor.contiguous() for tensor in (x, out, share))
    with on_device(x):
        _extreme_gradient[grid](*block[:3], *rows, dx, x.size(1), sum_type(dx), columns, group, num_warps=warps)


def _shape(block: CompressedEdges, width: int) -> tuple[tuple[int, int], int, int, int]:
    """Return the grid, the columns of a program, the edges of a group, and the warps of a program."""
    columns = min(triton.next_power_of_2(width), _MOST_COLUMNS)
    group = max(1, min(16, _TILE // columns))
    return (len(block.rows), triton.cdiv(width, columns)), columns, group, _warps(columns)


def _warps(columns: int) -> int:
    return 1 if columns <= 64 else 2


@triton.jit
def _spmm(
    rows, ptr, columns, edges, x, out, weight, width, channels, heads, WEIGHTED: tl.constexpr,
    SINGLE: tl.constexpr, SUM: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Add to some columns of one row."""
    k = tl.program_id(0)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < width
    head = c // channels
    first, last = tl.load(ptr + k), tl.load(ptr + k + 1)
    # Sums of every GROUPth edge, so that the loads of a group do not wait for each other.
    total = tl.zeros([GROUP, COLUMNS], SUM)
    for start in range(first, last, GROUP):
        e = start + tl.arange(0, GROUP)
        here = e < last
        column = tl.load(columns + e, mask=here, other=0).to(tl.int64)
        part = tl.load(x + column[:, None] * width + c[None, :], mask=here[:, None] & inside[None, :], other=0).to(SUM)
        if WEIGHTED:
            at = tl.load(edges + e, mask=here, other=0).to(tl.int64)
            if SINGLE:
                part *= tl.load(weight + at, mask=here, other=0).to(SUM)[:, None]
            else:
                of_head = at[:, None] * heads + head[None, :]
                part *= tl.load(weight + of_head, mask=here[:, None] & inside[None, :], other=0).to(SUM)
        total += part
    if last > first:
        to = out + tl.load(rows + k) * width + c
        old = tl.load(to, mask=inside, other=0).to(SUM)
        tl.store(to, (old + tl.sum(total, 0)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sddmm(
    rows, ptr, columns, edges, a, b, out, channels, heads, SUM: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Set the numbers of one head of one row's edges."""
    k, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    c = tl.arange(0, COLUMNS)
    inside = c < channels
    first, last = tl.load(ptr + k), tl.load(ptr + k + 1)
    own = tl.load(a + (tl.load(rows + k) * heads + h) * channels + c, mask=inside, other=0).to(SUM)
    for start in range(first, last, GROUP):
        e = start + tl.arange(0, GROUP)
        here = e < last
        column = tl.load(columns + e, mask=here, other=0).to(tl.int64)
        at = (column[:, None] * heads + h) * channels + c[None, :]
        other = tl.load(b + at, mask=here[:, None] & inside[None, :], other=0).to(SUM)
        to = tl.load(edges + e, mask=here, other=0).to(tl.int64)
        tl.store(out + to * heads + h, tl.sum(own[None, :] * other, 1).to(out.dtype.element_ty), mask=here)


@triton.jit
def _extreme(
    rows, ptr, columns, x, out, ties, width, LARGEST: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr
) -> None:
    """Merge some columns of one row's messages; a NaN replaces the extreme and remains."""
    k = tl.program_id(0)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < width
    first, last = tl.load(ptr + k), tl.load(ptr + k + 1)
    at = tl.load(rows + k) * width + c
    best = tl.load(out + at, mask=inside, other=0)
    count = tl.load(ties + at, mask=inside, other=0)
    least = float("-inf") if LARGEST else float("inf")
    for start in range(first, last, GROUP):
        e = start + tl.arange(0, GROUP)
        here = (e < last)[:, None] & inside[None, :]
        column = tl.load(columns + e, mask=e < last, other=0).to(tl.int64)
        part = tl.load(x + column[:, None] * width + c[None, :], mask=here, other=least)
        undefined = tl.max((part != part).to(tl.int32), 0) > 0
        if LARGEST:
            new = tl.max(tl.where(part == part, part, least), 0)
            better = (new > best) | undefined
        else:
            new = tl.min(tl.where(part == part, part, least), 0)
            better = (new < best) | undefined
        best = tl.where(undefined, float("nan"), tl.where(better, new, best))
        attained = tl.sum(((part == best[None, :]) & here).to(count.dtype), 0)
        count = tl.where(better, attained, count + attained)
    if last > first:
        tl.store(out + at, best, mask=inside)
        tl.store(ties + at, count, mask=inside)


@triton.jit
def _extreme_gradient(
    rows, ptr, columns, x, out, share, dx, width, SUM: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr
) -> None:
    """Add to some columns of one source's gradient."""
    k = tl.program_id(0)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < width
    first, last = tl.load(ptr + k), tl.load(ptr + k + 1)
    at = tl.load(rows + k) * width + c
    own = tl.load(x + at, mask=inside, other=0)
    total = tl.zeros([COLUMNS], SUM)
    for start in range(first, last, GROUP):
        e = start + tl.arange(0, GROUP)
        here = (e < last)[:, None] & inside[None, :]
        column = tl.load(columns + e, mask=e < last, other=0).to(tl.int64)
        of_target = column[:, None] * width + c[None, :]
        best = tl.load(out + of_target, mask=here, other=0)
        part = tl.load(share + of_target, mask=here, other=0).to(SUM)
        total += tl.sum(tl.where((best == own[None, :]) & here, part, 0), 0)
    if last > first:
        old = tl.load(dx + at, mask=inside, other=0).to(SUM)
        tl.store(dx + at, (old + total).to(dx.dtype.element_ty), mask=inside)
