"""GAT's attention over blocks of edges, by an online softmax, so that blocks may come in any order.

Forward (Veličković et al., "Graph Attention Networks", ICLR 2018, equations 1 to 4), for the edges j -> i of a target,

    z_ij = source[j] + target[i],      l_ij = leaky_relu(z_ij),      p_ij = exp(l_ij - top_i)
    out_i = sum_j m_ij p_ij x_j / total_i,      total_i = sum_j p_ij,      lse_i = top_i + log(total_i)

with ``m_ij`` the dropout of the coefficient, 0 or 1 / (1 - p). Each block's maximum, total and weighted sum are merged
into the running ones: when a block raises ``top_i``, ``total_i`` and ``out_i`` are multiplied by ``exp(old - new)``
(Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3; flash attention does the same).

Backward (Dao et al., "FlashAttention", 2022, appendix B.2): with ``a_ij = exp(l_ij - lse_i)``, the gradient ``g_i`` of
the output and ``delta_i = <g_i, out_i>``, which stands for the sum over the target's other edges,

    dx_j += a_ij m_ij g_i,      q_ij = a_ij (m_ij <g_i, x_j> - delta_i) leaky_relu'(z_ij)
    dsource[j] += q_ij,         dtarget[i] += q_ij

so a block needs no other block. The forward pass walks edges by target and the backward pass by source: each adds to
rows that only its own thread writes.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from gtrain.engine.edges import CompressedEdges
from gtrain.engine.kernels import plain
from gtrain.engine.kernels.plain import AttentionGradients, AttentionInputs, AttentionState, TargetGradients
from gtrain.engine.kernels.rows import add_scaled, data, dot_and_add_scaled, prefetch_row, scale_by
from gtrain.engine.kernels.sums import row_dots
from gtrain.engine.kernels.threads import as_numpy, form_for, row_ranges, run_over_rows, runs_compiled
from gtrain.engine.precision import sum_dtype
from gtrain.kernels.exponential import exp_all
from gtrain.kernels.options import FAST, inlined
from gtrain.kernels.random import GOLDEN, mix
from gtrain.kernels.threads import run_in_threads
from gtrain.nn.dropout import NO_DROPOUT, Mask

EDGE_GROUP = 256
"""Edges whose exponentials are computed in one go."""
_LOW, _SHIFT_32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_LOGIT, _LSE, _DELTA, _GRADIENT = range(4)  # rows of a target in ``packed``


class KernelDropout(NamedTuple):
    """What compiled loops need of :class:`gtrain.nn.dropout.Mask`; a threshold of 0 means no dropout."""

    stream: np.uint64
    threshold: int
    scale: float

    @staticmethod
    def of(mask: Mask) -> KernelDropout:
        """Return the same dropout for compiled loops."""
        return KernelDropout(np.uint64(mask.stream), mask.threshold, mask.scale)


def attention_state(num_targets: int, x: Tensor) -> AttentionState:
    """Return the state before the first block, for sources like ``x`` ``[S, H, C]``."""
    heads = (num_targets, x.size(1))
    exact = partial(x.new_full, dtype=sum_dtype(x.dtype))
    return AttentionState(exact((num_targets, *x.shape[1:]), 0), exact(heads, float("-inf")), exact(heads, 0))


def attention_forward(block: CompressedEdges, inputs: AttentionInputs, state: AttentionState) -> None:
    """Merge a block into ``state``.

    Args:
        block: edges by target.
        inputs: of the block's sources and all targets; their dropout applies to ``state.out``, not to ``state.total``.
        state: changed in place.
    """
    if runs_compiled(inputs[1:3], state, inputs[:1]):
        run_over_rows(block, _forward, *inputs[:4], state, KernelDropout.of(inputs.dropout))
    else:
        form_for(inputs.x).attention_forward(block, inputs, state)


def attention_finish(state: AttentionState) -> Tensor:
    """Divide ``state.out`` by the total, in place, and return the logarithm of the sum of exponentials ``[T, H]``.

    Targets without edges get 0 and -inf.
    """
    if not runs_compiled([], state):
        return plain.attention_finish(state)
    lse = torch.empty_like(state.top)
    _finish(*map(as_numpy, [state, lse]))
    return lse


def attention_backward(
    block: CompressedEdges, inputs: AttentionInputs, saved: TargetGradients, gradients: AttentionGradients
) -> None:
    """Add the gradients of a block.

    Args:
        block: edges by source.
        inputs: as in the forward pass.
        saved: of the targets.
        gradients: added to in place.
    """
    if not runs_compiled([*inputs[1:3], *saved[:2]], gradients, [inputs.x, saved.gradient]):
        return form_for(inputs.x).attention_backward(block, inputs, saved, gradients)
    # a target's four numbers for a head share a cache line; threads meet at targets, so each has a copy to add to
    packed = torch.stack([inputs.target, saved.lse, saved.delta, torch.zeros_like(saved.delta)], dim=1)  # [T, 4, H]
    ranges = row_ranges(block, per_thread=1)
    copies = [packed, *(packed.clone() for _ in ranges[1:])]
    x, source, _, slope, _ = inputs
    arrays = [as_numpy(value) for value in (block, x, source, saved.gradient)]
    dx, dsource, dropout = as_numpy(gradients.x), as_numpy(gradients.source), KernelDropout.of(inputs.dropout)
    run_in_threads(
        [
            partial(_backward, *arrays, as_numpy(copy), slope, dx, dsource, dropout, first, last)  # type: ignore[call-arg]
            for copy, (first, last) in zip(copies, ranges, strict=False)
        ]
    )
    for copy in copies:
        gradients.target.add_(copy[:, _GRADIENT])
    return None


def load_attention(edge: CompressedEdges, dtype: torch.dtype) -> None:
    """Compile both passes for one dtype, or load them from the cache; see :func:`.sums.load_sums`."""
    rows, logits = torch.zeros(1, 1, 1, dtype=dtype), torch.zeros(1, 1, dtype=sum_dtype(dtype))
    inputs, state = AttentionInputs(rows, logits, logits, 0.2, NO_DROPOUT), attention_state(1, rows)
    attention_forward(edge, inputs, state)
    for gradient in (rows, state.out):
        row_dots(gradient, state.out, logits.clone(), 0, 1)
    saved = TargetGradients(attention_finish(state), torch.zeros_like(logits), torch.zeros_like(state.out))
    gradients = AttentionGradients(torch.zeros_like(state.out), torch.zeros_like(logits), torch.zeros_like(logits))
    attention_backward(edge, inputs, saved, gradients)


# ---------------------------------------------------------------------------- compiled loops
#
# Edges are taken in groups of EDGE_GROUP, whatever rows they belong to, in three passes: their logits, row by row; all
# exponentials at once, which vectorise over the whole group; then the rows of x. A row with more edges than a group is
# merged piece by piece, as blocks are.


@inlined(fastmath=FAST)
def _logits(
    logit: Any, peak: Any, columns: Any, low: int, high: int, end: int, source: Any, target: Any, i: int, slope: Any,
    heads: int,
) -> None:  # fmt: skip
    """Set ``logit`` (edges, heads) of edges ``low .. high-1`` of target i, and raise ``peak`` (heads,) to their max."""
    for e in range(low, high):
        prefetch_row(source, columns, e, end, heads)
        j, at = columns[e] * heads, (e - low) * heads
        for h in range(heads):
            z = source[j + h] + target[i * heads + h]
            z = z if z > 0 else z * slope
            logit[at + h] = z
            peak[h] = z if z > peak[h] else peak[h]


@inlined(fastmath=FAST)
def raise_top(top: Any, total: Any, out: Any, i: int, peak: Any, heads: int, channels: int) -> None:
    """Merge ``peak`` (heads,) into the maximum of row i; afterwards it is finite, to be subtracted from logits."""
    for h in range(heads):
        at, new = i * heads + h, peak[h]
        old = top[at]
        if new > old:
            top[at] = new
            if total[at] != 0:
                # Before the row's first edge there is nothing to rescale.
                factor = np.exp(old - new)
                total[at] *= factor
                scale_by(out, at * channels, factor, channels)
        elif new == -np.inf:
            # All logits are -inf too, and their exponentials 0.
            peak[h] = 0


@inlined()
def fill_masks(mask: Any, edges: Any, start: int, count: int, heads: int, dropout: Any, scale: Any) -> None:
    """Set ``mask`` (count, heads) to the dropout of ``count`` edges, whose ids ``edges`` holds from ``start`` on.

    The random numbers are those of :func:`gtrain.nn.dropout_kernels.fill_words`, whose buffer would cost a tenth more.
    """
    words, threshold = (heads + 1) // 2, dropout.threshold
    for e in range(count):
        first, at = dropout.stream + np.uint64(edges[start + e]) * np.uint64(words) * GOLDEN, e * heads
        for w in range(words):
            word = mix(first + np.uint64(w) * GOLDEN)
            mask[at + 2 * w] = scale if np.int64(word & _LOW) >= threshold else 0
            if 2 * w + 1 < heads:
                mask[at + 2 * w + 1] = scale if np.int64(word >> _SHIFT_32) >= threshold else 0


@inlined(fastmath=FAST)
def add_group(
    out: Any, total: Any, part: Any, mask: Any, target_of: Any, x: Any, columns: Any, start: int, stop: int, end: int,
    heads: int, channels: int, drops: bool,
) -> None:  # fmt: skip
    """Add exponentials ``part`` (edges, heads) of a group to ``total``, and the rows of ``x`` times them to ``out``.

    Dropout, if it ``drops``, applies to the weighted sum only: PyG drops coefficients after the softmax, so the total
    counts all edges.
    """
    width = heads * channels
    for e in range(start, stop):
        prefetch_row(x, columns, e, end, width)
        i, j = target_of[e - start], columns[e]
        for h in range(heads):
            at = (e - start) * heads + h
            p = part[at]
            total[i * heads + h] += p
            if drops:
                p *= mask[at]
            add_scaled(out, i * width + h * channels, x, j * width + h * channels, p, channels)


@njit(cache=True, nogil=True, fastmath=FAST)
def _forward(
    block: Any, x: Any, source: Any, target: Any, slope: float, state: Any, dropout: Any, first: int, last: int
) -> None:
    """Rows ``first .. last-1`` of :func:`attention_forward`."""
    heads, channels = x.shape[1], x.shape[2]
    rows, ptr, slope, scale = block.rows, block.ptr, source.dtype.type(slope), source.dtype.type(dropout.scale)
    end = ptr[last]
    # (sources, heads, channels), (sources, heads), (targets, heads)
    flat, left, right = data(x), data(source), data(target)
    column, position = data(block.columns), data(block.edges)
    sums, peaks, totals = data(state.out), data(state.top), data(state.total)
    scratch, targets = np.empty((2 * EDGE_GROUP + 1, heads), source.dtype), np.empty(EDGE_GROUP, np.int64)
    part, mask, peak = data(scratch), data(scratch[EDGE_GROUP:]), data(scratch[2 * EDGE_GROUP :])
    row, start = first, ptr[first]
    while start < end:
        # In the loop, so that the array outlives the pointer: numba frees an array after its last use.
        stop, low, target_of = min(start + EDGE_GROUP, end), start, data(targets)
        while low < stop:
            high, i = min(ptr[row + 1], stop), rows[row]
            logit = data(scratch[low - start :])
            for h in range(heads):
                peak[h] = peaks[i * heads + h]
            _logits(logit, peak, column, low, high, end, left, right, i, slope, heads)
            raise_top(peaks, totals, sums, i, peak, heads, channels)
            for e in range(high - low):
                target_of[low - start + e] = i
                for h in range(heads):
                    logit[e * heads + h] -= peak[h]
            low = high
            # A row that continues in the next group is visited again there; its maximum may rise once more.
            row += high == ptr[row + 1]
        # All arguments are at most 0, because the row's maximum was subtracted: nothing overflows.
        exp_all(part, (stop - start) * heads)
        if dropout.threshold > 0:
            fill_masks(mask, position, start, stop - start, heads, dropout, scale)
        add_group(
            sums, totals, part, mask, target_of, flat, column, start, stop, end, heads, channels, dropout.threshold > 0
        )
        start = stop


@njit(cache=True, nogil=True, fastmath=FAST)
def _finish(state: Any, lse: Any) -> None:
    """Compiled :func:`attention_finish`; sets ``lse`` (targets, heads)."""
    heads, channels = state.out.shape[1], state.out.shape[2]
    flat = data(state.out)
    for i in range(state.out.shape[0]):
        for h in range(heads):
            s = state.total[i, h]
            lse[i, h] = state.top[i, h] + np.log(s)
            # A target without edges keeps the zeros of the initial state.
            if s != 0:
                scale_by(flat, (i * heads + h) * channels, 1 / s, channels)


@inlined(fastmath=FAST)
def _exponents(
    part: Any, steep: Any, columns: Any, low: int, high: int, end: int, source: Any, j: int, packed: Any, slope: Any,
    heads: int,
) -> None:  # fmt: skip
    """Set ``part`` (edges, heads) to ``logit - lse`` of edges ``low .. high-1`` of source j, ``steep`` to its slope."""
    for e in range(low, high):
        prefetch_row(packed, columns, e, end, 4 * heads)
        i, at = columns[e] * heads * 4, (e - low) * heads
        for h in range(heads):
            z = source[j * heads + h] + packed[i + h]
            # leaky_relu'(0) is the slope, as in torch.
            negative = not z > 0
            logit = z * slope if negative else z
            steep[at + h] = slope if negative else 1
            # -inf - lse is NaN where all logits of a target are -inf.
            part[at + h] = logit if logit == -np.inf else logit - packed[i + _LSE * heads + h]


@njit(cache=True, nogil=True, fastmath=FAST)
def _backward(
    block: Any, x: Any, source: Any, gradient: Any, packed: Any, slope: float, dx: Any, dsource: Any, dropout: Any,
    first: int, last: int,
) -> None:  # fmt: skip
    """Rows ``first .. last-1`` of :func:`attention_backward`.

    ``packed`` (targets, 4, heads) holds of each target its part of the logit, lse and delta, and receives the gradient
    of the logit.
    """
    heads, channels = x.shape[1], x.shape[2]
    rows, ptr, slope, scale = block.rows, block.ptr, source.dtype.type(slope), source.dtype.type(dropout.scale)
    width, end = heads * channels, ptr[last]
    # (sources, heads, channels), (sources, heads), (targets, heads, channels), (targets, 4, heads)
    flat, left, grad, target = data(x), data(source), data(gradient), data(packed)
    column, position = data(block.columns), data(block.edges)
    # (sources, heads, channels), (sources, heads)
    total, of_source = data(dx), data(dsource)
    scratch, source_of = np.empty((3 * EDGE_GROUP, heads), source.dtype), np.empty(EDGE_GROUP, np.int64)
    part, mask, steep = data(scratch), data(scratch[EDGE_GROUP:]), data(scratch[2 * EDGE_GROUP :])
    row, start = first, ptr[first]
    # Without dropout the mask is 1, so that the loop below has no branch.
    for k in range(EDGE_GROUP * heads):
        mask[k] = 1
    while start < end:
        stop, low = min(start + EDGE_GROUP, end), start
        while low < stop:
            high, at = min(ptr[row + 1], stop), low - start
            source_of[at : at + high - low] = rows[row]
            parts, steeps = data(scratch[at:]), data(scratch[2 * EDGE_GROUP + at :])
            _exponents(parts, steeps, column, low, high, end, left, rows[row], target, slope, heads)
            low = high
            row += high == ptr[row + 1]
        exp_all(part, (stop - start) * heads)
        if dropout.threshold > 0:
            fill_masks(mask, position, start, stop - start, heads, dropout, scale)
        for e in range(start, stop):
            prefetch_row(grad, column, e, end, width)
            i, j = np.int64(column[e]), source_of[e - start]
            for h in range(heads):
                at = (e - start) * heads + h
                a, m = part[at], mask[at]
                to, of = j * width + h * channels, i * width + h * channels
                # One pass over the target's gradient row serves both the inner product and the gradient of the source's
                # row.
                inner = dot_and_add_scaled(total, flat, to, grad, of, a * m, channels)
                # The mask stands with <g, x> only: delta is the inner product with the output, which has the mask
                # already.
                q = a * (m * inner - target[(i * 4 + _DELTA) * heads + h]) * steep[at]
                of_source[j * heads + h] += q
                target[(i * 4 + _GRADIENT) * heads + h] += q
        start = stop
