"""Attention over a block of edges in Triton: that of GAT, and that of GATv2 and of transformers.

The formulas are in :mod:`gtrain.engine.kernels.attention` and :mod:`gtrain.engine.kernels.pairs`. A program computes
one head of one row. The gradients of targets' logits, which edges of several sources add to, are added atomically, so
that their last digits depend on the order; everything else is added in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gtrain.engine.edges import CompressedEdges
from gtrain.engine.kernels.plain import (
    AttentionGradients,
    AttentionInputs,
    AttentionState,
    PairGradients,
    PairInputs,
    TargetGradients,
)
from gtrain.kernels.device import on_device, random_bits, sum_type
from gtrain.nn.dropout import Mask

__all__ = ["attention_backward", "attention_forward", "pair_backward", "pair_forward"]
_TILE = 1024  # numbers of a group of edges
_PROGRAMS = 1 << 11  # that add the gradient of a weight which all targets share


def attention_forward(block: CompressedEdges, inputs: AttentionInputs, state: AttentionState) -> None:
    """See :func:`gtrain.engine.kernels.attention.attention_forward`."""
    x, source, target, slope, dropout = inputs
    heads, channels = x.shape[1:]
    rows = (tensor.contiguous() for tensor in (x, source, target))
    with on_device(x):
        _forward[(len(block.rows) * heads,)](
            *block, *rows, *state, *_numbers(dropout, heads, channels), slope, *_options(dropout, channels, state.out),
            num_warps=_warps(channels),
        )  # fmt: skip


def attention_backward(
    block: CompressedEdges, inputs: AttentionInputs, saved: TargetGradients, gradients: AttentionGradients
) -> None:
    """See :func:`gtrain.engine.kernels.attention.attention_backward`."""
    x, source, target, slope, dropout = inputs
    heads, channels = x.shape[1:]
    tensors = (tensor.contiguous() for tensor in (x, source, target, *saved))
    with on_device(x):
        _backward[(len(block.rows) * heads,)](
            *block, *tensors, *gradients, *_numbers(dropout, heads, channels), slope,
            *_options(dropout, channels, gradients.x), num_warps=_warps(channels),
        )  # fmt: skip


def pair_forward(block: CompressedEdges, inputs: PairInputs, state: AttentionState) -> None:
    """See :func:`gtrain.engine.kernels.pairs.pair_forward`."""
    *tensors, factor, dropout = inputs
    heads, channels = inputs.key.shape[1:]
    with on_device(inputs.key):
        _pair_forward[(len(block.rows) * heads,)](
            *block, *(tensor.contiguous() for tensor in tensors), *state, *_numbers(dropout, heads, channels), factor,
            inputs.weight.numel() > 0, *_options(dropout, channels, state.out), num_warps=_warps(channels),
        )  # fmt: skip


def pair_backward(
    by_target: CompressedEdges,
    by_source: CompressedEdges,
    inputs: PairInputs,
    saved: TargetGradients,
    gradients: PairGradients,
) -> None:
    """See :func:`gtrain.engine.kernels.pairs.pair_backward`."""
    *tensors, factor, dropout = inputs
    heads, channels = inputs.key.shape[1:]
    additive = inputs.weight.numel() > 0
    tensors = [tensor.contiguous() for tensor in (*tensors, *saved)]
    numbers, options = _numbers(dropout, heads, channels), _options(dropout, channels, gradients.query)
    programs = min(len(by_target.rows), _PROGRAMS)
    # One copy for each program: they would wait for each other at a single one.
    weights = torch.zeros((programs, *gradients.weight.shape), dtype=gradients.weight.dtype, device=inputs.key.device)
    with on_device(inputs.key):
        if programs:
            _pair_targets[(programs * heads,)](
                *by_target, *tensors, gradients.query, weights, len(by_target.rows), programs, *numbers, factor,
                additive, *options, num_warps=_warps(channels),
            )  # fmt: skip
            gradients.weight.add_(weights.sum(0))
        _pair_sources[(len(by_source.rows) * heads,)](
            *by_source, *tensors, gradients.key, gradients.value, *numbers, factor, additive, *options,
            num_warps=_warps(channels),
        )  # fmt: skip


def _numbers(dropout: Mask, heads: int, channels: int) -> tuple[int, int, int, int, int]:
    """Return the arguments ``heads``, ``channels``, ``stream``, ``threshold`` and ``words``."""
    return heads, channels, dropout.stream, dropout.threshold, (heads + 1) // 2


def _options(dropout: Mask, channels: int, total: Tensor) -> tuple[Any, ...]:
    """Return the constants ``DROPS``, ``SCALE``, ``SUM``, ``COLUMNS`` and ``GROUP``."""
    columns = triton.next_power_of_2(channels)
    return dropout.threshold > 0, dropout.scale, sum_type(total), columns, max(1, min(16, _TILE // columns))


def _warps(channels: int) -> int:
    return 1 if channels <= 64 else 2 if channels <= 256 else 4


# --------------------------------------------------------------------------------------------------- parts of kernels


@triton.jit
def _masks(edges, e, here, h, stream, threshold, words, SCALE: tl.constexpr, SUM: tl.constexpr):
    """Return the factors of the coefficients of edges: 0 or SCALE."""
    ids = tl.load(edges + e, mask=here, other=0).to(tl.int64)
    return (random_bits(stream, ids, h + tl.zeros_like(ids), words) >= threshold).to(SUM) * SCALE


@triton.jit
def _merge(logit, here, top, total, SUM: tl.constexpr):
    """Merge the logits of a group: return the maximum, the total, the exponentials, and the factor of earlier sums."""
    new = tl.maximum(top, tl.max(tl.where(here, logit, float("-inf")), 0))
    # Rows whose logits are all -inf: subtract 0, so that their exponentials are 0, not NaN.
    base = tl.where(new == float("-inf"), 0.0, new)
    # Before the first edge there is nothing to rescale, and top - base may be NaN.
    factor = tl.where(total == 0, 0.0, tl.exp(tl.where(total == 0, base, top) - base)).to(SUM)
    part = tl.where(here, tl.exp(tl.where(here, logit, base) - base), 0.0).to(SUM)
    return new, total * factor + tl.sum(part, 0), part, factor


@triton.jit
def _store_state(out, top, total, at, channels, c, added, before, sum_before, m, s):
    """Add the weighted sum of a block's rows to what earlier blocks added, and store the maximum and the total."""
    to, inside = out + at * channels + c, c < channels
    earlier = tl.where(sum_before == 0, 0.0, tl.exp(tl.where(sum_before == 0, 0.0, before - m)))
    tl.store(to, tl.load(to, mask=inside, other=0) * earlier + added, mask=inside)
    tl.store(top + at, m)
    tl.store(total + at, s)


@triton.jit
def _coefficients(logit, here, lse):
    """Return ``exp(logit - lse)``, 0 for a logit of -inf."""
    absent = (logit == float("-inf")) | (here == 0)
    return tl.where(absent, 0.0, tl.exp(tl.where(absent, 0.0, logit - lse)))


@triton.jit
def _rows(x, index, h, heads, channels, c, here, SUM: tl.constexpr):
    """Load rows ``[GROUP, COLUMNS]`` of one head."""
    at = (index[:, None] * heads + h) * channels + c[None, :]
    return tl.load(x + at, mask=here[:, None] & (c < channels)[None, :], other=0).to(SUM)


@triton.jit
def _pair_logits(keys, queries, w, FACTOR: tl.constexpr, ADDITIVE: tl.constexpr):
    """Return the slopes of the leaky ReLU at the sums of both ends, its values, and the logits."""
    if ADDITIVE:
        z = keys + queries
        # leaky_relu'(0) is the slope, as in torch.
        slope = tl.where(z > 0, tl.zeros_like(z) + 1.0, tl.zeros_like(z) + FACTOR)
        z = z * slope
        return slope, z, tl.sum(z * w[None, :], 1)
    z = keys * queries
    return z, z, tl.sum(z, 1) * FACTOR


# ------------------------------------------------------------------------------------------------------------ kernels


@triton.jit(do_not_specialize=["stream", "threshold"])
def _forward(
    rows, ptr, columns, edges, x, source, target, out, top, total, heads, channels, stream, threshold, words,
    SLOPE: tl.constexpr, DROPS: tl.constexpr, SCALE: tl.constexpr, SUM: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:  # fmt: skip
    k, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    c = tl.arange(0, COLUMNS)
    first, last = tl.load(ptr + k), tl.load(ptr + k + 1)
    at = tl.load(rows + k) * heads + h
    own = tl.load(target + at).to(SUM)
    before, sum_before = tl.load(top + at), tl.load(total + at)
    m, s = before, sum_before
    added = tl.zeros([COLUMNS], SUM)
    for start in range(first, last, GROUP):
        e = start + tl.arange(0, GROUP)
        here = e < last
        j = tl.load(columns + e, mask=here, other=0).to(tl.int64)
        z = tl.load(source + j * heads + h, mask=here, other=0).to(SUM) + own
        m, s, part, factor = _merge(tl.where(z > 0, z, z * SLOPE), here, m, s, SUM)
        if DROPS:
            part *= _masks(edges, e, here, h, stream, threshold, words, SCALE, SUM)
        added = added * factor + tl.sum(part[:, None] * _rows(x, j, h, heads, channels, c, here, SUM), 0)
    if last > first:
        _store_state(out, top, total, at, channels, c, added, before, sum_before, m, s)


@triton.jit(do_not_specialize=["stream", "threshold"])
def _backward(
    rows, ptr, columns, edges, x, source, target, lse, delta, gradient, dx, dsource, dtarget, heads, channels, stream,
    threshold, words, SLOPE: tl.constexpr, DROPS: tl.constexpr, SCALE: tl.constexpr, SUM: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Rows are sources."""
    k, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    c = tl.arange(0, COLUMNS)
    inside = c < channels
    first, last = tl.load(ptr + k), tl.load(ptr + k + 1)
    at = tl.load(rows + k) * heads + h
    own = tl.load(source + at).to(SUM)
    row = tl.load(x + at * channels + c, mask=inside, other=0).to(SUM)
    added, of_logits = tl.zeros([COLUMNS], SUM), tl.zeros([GROUP], SUM)
    for start in range(first, last, GROUP):
        e = start + tl.arange(0, GROUP)
        here = e < last
        i = tl.load(columns + e, mask=here, other=0).to(tl.int64)
        z = own + tl.load(target + i * heads + h, mask=here, other=0).to(SUM)
        logit = tl.where(z > 0, z, z * SLOPE)
        part = _coefficients(logit, here, tl.load(lse + i * heads + h, mask=here, other=0).to(SUM)).to(SUM)
        grad = _rows(gradient, i, h, heads, channels, c, here, SUM)
        inner, dropped = tl.sum(grad * row[None, :], 1), part
        if DROPS:
            mask = _masks(edges, e, here, h, stream, threshold, words, SCALE, SUM)
            inner, dropped = inner * mask, part * mask
        added += tl.sum(grad * dropped[:, None], 0)
        q = part * (inner - tl.load(delta + i * heads + h, mask=here, other=0).to(SUM))
        # leaky_relu'(0) is the slope, as in torch.
        q = tl.where(z > 0, q, q * SLOPE)
        of_logits += q
        tl.atomic_add(dtarget + i * heads + h, q, mask=here)
    if last > first:
        to = dx + at * channels + c
        tl.store(to, tl.load(to, mask=inside, other=0) + added, mask=inside)
        tl.store(dsource + at, tl.load(dsource + at) + tl.sum(of_logits, 0))


@triton.jit(do_not_specialize=["stream", "threshold"])
def _pair_forward(
    rows, ptr, columns, edges, key, value, query, weight, out, top, total, heads, channels, stream, threshold, words,
    FACTOR: tl.constexpr, ADDITIVE: tl.constexpr, DROPS: tl.constexpr, SCALE: tl.constexpr, SUM: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    k, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    c = tl.arange(0, COLUMNS)
    inside = c < channels
    first, last = tl.load(ptr + k), tl.load(ptr + k + 1)
    at = tl.load(rows + k) * heads + h
    own = tl.load(query + at * channels + c, mask=inside, other=0).to(SUM)[None, :]
    w = tl.load(weight + h * channels + c, mask=inside & ADDITIVE, other=0).to(SUM)
    before, sum_before = tl.load(top + at), tl.load(total + at)
    m, s = before, sum_before
    added = tl.zeros([COLUMNS], SUM)
    for start in range(first, last, GROUP):
        e = start + tl.arange(0, GROUP)
        here = e < last
        j = tl.load(columns + e, mask=here, other=0).to(tl.int64)
        keys = _rows(key, j, h, heads, channels, c, here, SUM)
        _, _, logit = _pair_logits(keys, own, w, FACTOR, ADDITIVE)
        m, s, part, factor = _merge(logit, here, m, s, SUM)
        if DROPS:
            part *= _masks(edges, e, here, h, stream, threshold, words, SCALE, SUM)
        # GATv2's keys are its values.
        values = keys if ADDITIVE else _rows(value, j, h, heads, channels, c, here, SUM)
        added = added * factor + tl.sum(part[:, None] * values, 0)
    if last > first:
        _store_state(out, top, total, at, channels, c, added, before, sum_before, m, s)


@triton.jit(do_not_specialize=["stream", "threshold"])
def _pair_targets(
    rows, ptr, columns, edges, key, value, query, weight, lse, delta, gradient, dquery, dweight, count, programs,
    heads, channels, stream, threshold, words, FACTOR: tl.constexpr, ADDITIVE: tl.constexpr, DROPS: tl.constexpr,
    SCALE: tl.constexpr, SUM: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Gradients of every ``programs``th query, and of the weight by their edges; rows are targets."""
    program, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    c = tl.arange(0, COLUMNS)
    inside = c < channels
    w = tl.load(weight + h * channels + c, mask=inside & ADDITIVE, other=0).to(SUM)
    of_weight = tl.zeros([COLUMNS], SUM)
    for k in range(program, count, programs):
        first, last = tl.load(ptr + k), tl.load(ptr + k + 1)
        at = tl.load(rows + k) * heads + h
        own = tl.load(query + at * channels + c, mask=inside, other=0).to(SUM)[None, :]
        grad = tl.load(gradient + at * channels + c, mask=inside, other=0).to(SUM)[None, :]
        log, dot = tl.load(lse + at).to(SUM), tl.load(delta + at).to(SUM)
        added = tl.zeros([COLUMNS], SUM)
        for start in range(first, last, GROUP):
            e = start + tl.arange(0, GROUP)
            here = e < last
            j = tl.load(columns + e, mask=here, other=0).to(tl.int64)
            keys = _rows(key, j, h, heads, channels, c, here, SUM)
            slope, z, logit = _pair_logits(keys, own, w, FACTOR, ADDITIVE)
            part = _coefficients(logit, here, log).to(SUM)
            inner = tl.sum(grad * (keys if ADDITIVE else _rows(value, j, h, heads, channels, c, here, SUM)), 1)
            if DROPS:
                inner *= _masks(edges, e, here, h, stream, threshold, words, SCALE, SUM)
            q = (part * (inner - dot))[:, None]
            if ADDITIVE:
                of_weight += tl.sum(q * z, 0)
                added += tl.sum(q * slope, 0) * w
            else:
                added += tl.sum(q * keys, 0) * FACTOR
        if last > first:
            to = dquery + at * channels + c
            tl.store(to, tl.load(to, mask=inside, other=0) + added, mask=inside)
    if ADDITIVE:
        tl.store(dweight + (program * heads + h) * channels + c, of_weight, mask=inside)


@triton.jit(do_not_specialize=["stream", "threshold"])
def _pair_sources(
    rows, ptr, columns, edges, key, value, query, weight, lse, delta, gradient, dkey, dvalue, heads, channels, stream,
    threshold, words, FACTOR: tl.constexpr, ADDITIVE: tl.constexpr, DROPS: tl.constexpr, SCALE: tl.constexpr,
    SUM: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Gradients of keys and values; rows are sources."""
    k, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    c = tl.arange(0, COLUMNS)
    inside = c < channels
    first, last = tl.load(ptr + k), tl.load(ptr + k + 1)
    at = (tl.load(rows + k) * heads + h) * channels
    own = tl.load(key + at + c, mask=inside, other=0).to(SUM)[None, :]
    values = own if ADDITIVE else tl.load(value + at + c, mask=inside, other=0).to(SUM)[None, :]
    w = tl.load(weight + h * channels + c, mask=inside & ADDITIVE, other=0).to(SUM)
    of_key, of_value = tl.zeros([COLUMNS], SUM), tl.zeros([COLUMNS], SUM)
    for start in range(first, last, GROUP):
        e = start + tl.arange(0, GROUP)
        here = e < last
        i = tl.load(columns + e, mask=here, other=0).to(tl.int64)
        queries = _rows(query, i, h, heads, channels, c, here, SUM)
        slope, _, logit = _pair_logits(own, queries, w, FACTOR, ADDITIVE)
        part = _coefficients(logit, here, tl.load(lse + i * heads + h, mask=here, other=0).to(SUM)).to(SUM)
        grad = _rows(gradient, i, h, heads, channels, c, here, SUM)
        inner, dropped = tl.sum(grad * values, 1), part
        if DROPS:
            mask = _masks(edges, e, here, h, stream, threshold, words, SCALE, SUM)
            inner, dropped = inner * mask, part * mask
        of_value += tl.sum(grad * dropped[:, None], 0)
        q = (part * (inner - tl.load(delta + i * heads + h, mask=here, other=0).to(SUM)))[:, None]
        if ADDITIVE:
            of_key += tl.sum(q * slope, 0) * w
        else:
            of_key += tl.sum(q * queries, 0) * FACTOR
    if last > first:
        # Key and value may be one tensor, whose gradient is the sum of both.
        tl.store(dkey + at + c, tl.load(dkey + at + c, mask=inside, other=0) + of_key, mask=inside)
        tl.store(dvalue + at + c, tl.load(dvalue + at + c, mask=inside, other=0) + of_value, mask=inside)
