"""Attention whose logits depend on whole rows of both ends of an edge: GATv2, and inner products.

With keys ``k_j`` and values ``v_j`` of the sources, and queries ``q_i`` of the targets,

    l_ij = <w, leaky_relu(k_j + q_i)>, v_j = k_j        (Brody, Alon & Yahav, "How attentive are graph attention
                                                         networks?", 2022, equation 7)
    l_ij = c <k_j, q_i>, c = 1 / sqrt(channels)          (Vaswani et al., "Attention is all you need", 2017, equation 1)

The forward pass is that of :mod:`gtrain.engine.kernels.attention` with these logits: it walks edges by target and
merges blocks by a running maximum. The backward pass, with ``a_ij``, ``m_ij``, ``g_i`` and ``delta_i`` as there and
``e_ij = a_ij (m_ij <g_i, v_j> - delta_i)``, is

    dv_j += a_ij m_ij g_i
    GATv2:          dk_j, dq_i += e_ij w leaky_relu'(k_j + q_i),   dw += e_ij leaky_relu(k_j + q_i)
    inner products: dk_j += c e_ij q_i,   dq_i += c e_ij k_j

in two passes, which both compute the coefficients again: edges by target for ``dq`` and ``dw``, then by source for
``dk`` and ``dv``. Each thread writes to rows of its own, and no number is in memory for each edge.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from gtrain.engine.edges import CompressedEdges
from gtrain.engine.kernels.attention import (
    EDGE_GROUP,
    KernelDropout,
    add_group,
    attention_finish,
    attention_state,
    fill_masks,
    raise_top,
)
from gtrain.engine.kernels.plain import AttentionState, PairGradients, PairInputs, TargetGradients
from gtrain.engine.kernels.rows import (
    add_leaky,
    add_leaky_slopes,
    add_scaled,
    data,
    dot,
    leaky_dot,
    prefetch_row,
)
from gtrain.engine.kernels.threads import as_numpy, form_for, row_ranges, run_in_threads, run_over_rows, runs_compiled
from gtrain.kernels.exponential import exp_all
from gtrain.kernels.options import FAST, inlined
from gtrain.nn.dropout import NO_DROPOUT


class _Rows(NamedTuple):
    """The tensors of :class:`PairInputs`."""

    key: Tensor
    value: Tensor
    query: Tensor
    weight: Tensor


def pair_forward(block: CompressedEdges, inputs: PairInputs, state: AttentionState) -> None:
    """Merge a block into ``state``.

    Args:
        block: edges by target.
        inputs: of the block's sources and all targets; their dropout applies to ``state.out``, not to ``state.total``.
        state: changed in place.
    """
    if runs_compiled(inputs[:4], state):
        dropout = KernelDropout.of(inputs.dropout)
        run_over_rows(block, _forward, _Rows(*inputs[:4]), inputs.factor, state, dropout)
    else:
        form_for(inputs.key).pair_forward(block, inputs, state)


def pair_backward(
    by_target: CompressedEdges,
    by_source: CompressedEdges,
    inputs: PairInputs,
    saved: TargetGradients,
    gradients: PairGradients,
) -> None:
    """Add the gradients of a block.

    Args:
        by_target, by_source: its edges in both orders.
        inputs: as in the forward pass.
        saved: of the targets.
        gradients: added to in place.
    """
    if not runs_compiled([*inputs[:4], *saved], gradients):
        return form_for(inputs.key).pair_backward(by_target, by_source, inputs, saved, gradients)
    rows, saved, sums = _Rows(*map(as_numpy, inputs[:4])), as_numpy(saved), as_numpy(gradients)
    dropout = KernelDropout.of(inputs.dropout)
    for block, at_sources in ((by_target, False), (by_source, True)):
        ranges, edges = row_ranges(block, per_thread=1), as_numpy(block)
        # Threads meet at the weight, so each adds to a copy.
        copies = [gradients.weight, *(torch.zeros_like(gradients.weight) for _ in ranges[1:])]
        each = [sums._replace(weight=as_numpy(copy)) for copy in copies]
        run_in_threads(
            [
                partial(_backward, edges, rows, inputs.factor, saved, own, dropout, at_sources, first, last)
                for own, (first, last) in zip(each, ranges, strict=False)
            ]
        )
        for copy in copies[1:]:
            gradients.weight.add_(copy)
    return None


def load_pairs(edge: CompressedEdges, dtype: torch.dtype) -> None:
    """Compile both passes for one dtype, or load them from the cache; see :func:`.sums.load_sums`."""
    rows = torch.zeros(1, 1, 1, dtype=dtype)
    inputs, state = PairInputs(rows, rows, rows, rows[0], 0.2, NO_DROPOUT), attention_state(1, rows)
    pair_forward(edge, inputs, state)
    row = torch.zeros(1, 1, dtype=dtype)
    saved = TargetGradients(attention_finish(state), row, rows)
    pair_backward(edge, edge, inputs, saved, PairGradients(*map(torch.zeros_like, inputs[:4])))


# ---------------------------------------------------------------------------- compiled loops
#
# As in the module ``attention``, edges are taken in groups whose exponentials are computed at once.


@inlined(fastmath=FAST)
def _logit(
    key: Any, j: int, query: Any, i: int, weight: Any, w: int, factor: Any, additive: bool, channels: int
) -> Any:
    """The logit of one edge and head; ``j``, ``i`` and ``w`` are the positions of the head's channels."""
    if additive:
        return leaky_dot(weight, w, key, j, query, i, factor, channels)
    return factor * dot(key, j, query, i, channels)


@njit(cache=True, nogil=True, fastmath=FAST)
def _forward(block: Any, pair: Any, factor: float, state: Any, dropout: Any, first: int, last: int) -> None:
    """Rows ``first .. last-1`` of :func:`pair_forward`."""
    heads, channels = pair.key.shape[1], pair.key.shape[2]
    kind, additive = pair.key.dtype.type, pair.weight.size > 0
    rows, ptr, factor, scale = block.rows, block.ptr, kind(factor), kind(dropout.scale)
    width, end = heads * channels, ptr[last]
    # (sources, heads, channels) twice, (targets, heads, channels), (heads, channels)
    key, value, query, weight = data(pair.key), data(pair.value), data(pair.query), data(pair.weight)
    column, position = data(block.columns), data(block.edges)
    sums, peaks, totals = data(state.out), data(state.top), data(state.total)
    scratch, targets = np.empty((2 * EDGE_GROUP + 1, heads), kind), np.empty(EDGE_GROUP, np.int64)
    row, start = first, ptr[first]
    while start < end:
        # In the loop, so that the arrays outlive the pointers: numba frees an array after its last use.
        part, mask, peak = data(scratch), data(scratch[EDGE_GROUP:]), data(scratch[2 * EDGE_GROUP :])
        target_of = data(targets)
        stop, low = min(start + EDGE_GROUP, end), start
        while low < stop:
            high, i = min(ptr[row + 1], stop), rows[row]
            for h in range(heads):
                peak[h] = peaks[i * heads + h]
            for e in range(low, high):
                prefetch_row(key, column, e, end, width)
                j = np.int64(column[e])
                target_of[e - start] = i
                for h in range(heads):
                    at = h * channels
                    z = _logit(key, j * width + at, query, i * width + at, weight, at, factor, additive, channels)
                    part[(e - start) * heads + h] = z
                    peak[h] = z if z > peak[h] else peak[h]
            raise_top(peaks, totals, sums, i, peak, heads, channels)
            for e in range(low - start, high - start):
                for h in range(heads):
                    part[e * heads + h] -= peak[h]
            low = high
            # A row that continues in the next group is visited again there; its maximum may rise once more.
            row += high == ptr[row + 1]
        exp_all(part, (stop - start) * heads)
        if dropout.threshold > 0:
            fill_masks(mask, position, start, stop - start, heads, dropout, scale)
        add_group(
            sums, totals, part, mask, target_of, value, column, start, stop, end, heads, channels, dropout.threshold > 0
        )
        start = stop


@njit(cache=True, nogil=True, fastmath=FAST)
def _backward(
    block: Any, pair: Any, factor: float, saved: Any, gradients: Any, dropout: Any, at_sources: bool, first: int,
    last: int,
) -> None:  # fmt: skip
    """Rows ``first .. last-1`` of one pass of :func:`pair_backward`: by source if ``at_sources``, else by target."""
    heads, channels = pair.key.shape[1], pair.key.shape[2]
    kind, additive = pair.key.dtype.type, pair.weight.size > 0
    rows, ptr, factor, scale = block.rows, block.ptr, kind(factor), kind(dropout.scale)
    width, end = heads * channels, ptr[last]
    key, value, query, weight = data(pair.key), data(pair.value), data(pair.query), data(pair.weight)
    # (targets, heads) twice, (targets, heads, channels)
    lse, delta, grad = data(saved.lse), data(saved.delta), data(saved.gradient)
    of_key, of_value, of_query, of_weight = (
        data(gradients.key), data(gradients.value), data(gradients.query), data(gradients.weight),
    )  # fmt: skip
    column, position = data(block.columns), data(block.edges)
    scratch, row_of = np.empty((2 * EDGE_GROUP, heads), kind), np.empty(EDGE_GROUP, np.int64)
    row, start = first, ptr[first]
    # Without dropout the mask is 1, so that the loop below has no branch.
    scratch[EDGE_GROUP:] = 1
    while start < end:
        part, mask = data(scratch), data(scratch[EDGE_GROUP:])
        stop = min(start + EDGE_GROUP, end)
        for e in range(start, stop):
            while e >= ptr[row + 1]:
                row += 1
            row_of[e - start] = rows[row]
            other = np.int64(column[e])
            i, j = (other, rows[row]) if at_sources else (rows[row], other)
            for h in range(heads):
                at = h * channels
                z = _logit(key, j * width + at, query, i * width + at, weight, at, factor, additive, channels)
                # -inf - lse is NaN where all logits of a target are -inf.
                part[(e - start) * heads + h] = z if z == -np.inf else z - lse[i * heads + h]
            if at_sources:
                prefetch_row(query, column, e, end, width)
            else:
                prefetch_row(key, column, e, end, width)
        exp_all(part, (stop - start) * heads)
        if dropout.threshold > 0:
            fill_masks(mask, position, start, stop - start, heads, dropout, scale)
        for e in range(start, stop):
            own, other = row_of[e - start], np.int64(column[e])
            i, j = (other, own) if at_sources else (own, other)
            for h in range(heads):
                at, w = (e - start) * heads + h, h * channels
                to, of = j * width + w, i * width + w
                a, m = part[at], mask[at]
                q = a * (m * dot(grad, of, value, to, channels) - delta[i * heads + h])
                if at_sources:
                    add_scaled(of_value, to, grad, of, a * m, channels)
                    if additive:
                        add_leaky_slopes(of_key, to, weight, w, key, to, query, of, q, factor, channels)
                    else:
                        add_scaled(of_key, to, query, of, q * factor, channels)
                elif additive:
                    add_leaky_slopes(of_query, of, weight, w, key, to, query, of, q, factor, channels)
                    add_leaky(of_weight, w, key, to, query, of, q, factor, channels)
                else:
                    add_scaled(of_query, of, key, to, q * factor, channels)
        start = stop
