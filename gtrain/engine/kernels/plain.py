"""The kernels in plain torch, for tensors on other devices or of other dtypes, and the types of their arguments.

Edges are processed in chunks, so that the memory of their messages does not grow with the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from gtrain.engine.edges import CompressedEdges
from gtrain.engine.precision import sum_dtype
from gtrain.nn.dropout import Mask

CHUNK_NUMBERS = 1 << 24  # in the messages of a chunk: 64 MiB of float32


class AttentionInputs(NamedTuple):
    """What attention is a function of, besides the edges.

    Attributes:
        x: ``[S, H, C]``, source rows.
        source: ``[S, H]``, the sources' part of the logit.
        target: ``[T, H]``, the targets' part.
        slope: of the leaky ReLU below 0.
        dropout: of the coefficients, by edge id.
    """

    x: Tensor
    source: Tensor
    target: Tensor
    slope: float
    dropout: Mask


class PairInputs(NamedTuple):
    """What attention is a function of if logits depend on whole rows of both ends, besides the edges.

    Attributes:
        key: ``[S, H, C]``, source rows.
        value: ``[S, H, C]``, the source rows that are added; GATv2's are the keys.
        query: ``[T, H, C]``, target rows.
        weight: ``[H, C]``: the logit is ``<weight, leaky_relu(key + query)>``; ``[0, 0]``: it is ``<key, query>``.
        factor: slope of the leaky ReLU below 0, or factor of the inner product.
        dropout: of the coefficients, by edge id.
    """

    key: Tensor
    value: Tensor
    query: Tensor
    weight: Tensor
    factor: float
    dropout: Mask


class PairGradients(NamedTuple):
    """Gradients of :class:`PairInputs`, shaped like them; ``key`` and ``value`` may be one tensor."""

    key: Tensor
    value: Tensor
    query: Tensor
    weight: Tensor


class AttentionState(NamedTuple):
    """The result of the blocks so far.

    Attributes:
        out: ``[T, H, C]``, sum of source rows, each times ``exp(logit - top)`` and its dropout.
        top: ``[T, H]``, largest logit; -inf before the first edge.
        total: ``[T, H]``, sum of ``exp(logit - top)``.
    """

    out: Tensor
    top: Tensor
    total: Tensor


class TargetGradients(NamedTuple):
    """What the backward pass of attention needs of the targets.

    Attributes:
        lse: ``[T, H]``, logarithm of the sum of exponentials.
        delta: ``[T, H]``, inner product of ``gradient`` and the finished output.
        gradient: ``[T, H, C]``, of the finished output.
    """

    lse: Tensor
    delta: Tensor
    gradient: Tensor


class AttentionGradients(NamedTuple):
    """Gradients of :class:`AttentionInputs`, shaped like them."""

    x: Tensor
    source: Tensor
    target: Tensor


class ExtremeState(NamedTuple):
    """The result of the blocks so far.

    Attributes:
        out: ``[T, C]``, the largest (smallest) message; -inf (inf) before the first, NaN after a NaN.
        ties: ``[T, C]``, number of messages that equal ``out``.
    """

    out: Tensor
    ties: Tensor


class Chunk(NamedTuple):
    """Some edges of a block.

    Attributes:
        rows: int64 ``[e]``, the row of each edge.
        columns: int32 ``[e]``, its other end.
        edges: int32 ``[e]``, its position in ``edge_index``.
    """

    rows: Tensor
    columns: Tensor
    edges: Tensor


def _chunks(block: CompressedEdges, x: Tensor) -> Iterator[Chunk]:
    """Yield a block's edges in chunks of at most ``CHUNK_NUMBERS`` numbers, with messages like the rows of ``x``."""
    size = max(1, CHUNK_NUMBERS // max(1, x[0].numel() if len(x) else 1))
    count = block.columns.numel()
    for start in range(0, count, size):
        stop = min(start + size, count)
        positions = torch.arange(start, stop, device=block.ptr.device)
        rows = block.rows[torch.searchsorted(block.ptr, positions, right=True) - 1]
        yield Chunk(rows, block.columns[start:stop], block.edges[start:stop])


def spmm(block: CompressedEdges, x: Tensor, out: Tensor, weight: Tensor | None) -> None:
    """See :func:`.sums.spmm`."""
    if out.dtype != sum_dtype(out.dtype):
        total = out.to(sum_dtype(out.dtype))
        spmm(block, x, total, weight)
        out.copy_(total)
        return
    for chunk in _chunks(block, x):
        messages = x.index_select(0, chunk.columns)
        if weight is not None:
            messages = messages * weight.index_select(0, chunk.edges).unsqueeze(-1)
        out.index_add_(0, chunk.rows, messages.to(out.dtype))


def sddmm(block: CompressedEdges, a: Tensor, b: Tensor, out: Tensor) -> None:
    """See :func:`.sums.sddmm`."""
    for chunk in _chunks(block, a):
        product = a.index_select(0, chunk.rows).to(out.dtype) * b.index_select(0, chunk.columns)
        out.index_copy_(0, chunk.edges.long(), product.sum(-1))


def attention_forward(block: CompressedEdges, inputs: AttentionInputs, state: AttentionState) -> None:
    """See :func:`.attention.attention_forward`."""
    _, source, target, slope, dropout = inputs

    def logits(chunk: Chunk) -> Tensor:
        return leaky_relu(source.index_select(0, chunk.columns) + target.index_select(0, chunk.rows), slope)

    _attend(block, inputs.x, logits, dropout, state)


def pair_forward(block: CompressedEdges, inputs: PairInputs, state: AttentionState) -> None:
    """See :func:`.pairs.pair_forward`."""

    def logits(chunk: Chunk) -> Tensor:
        return _pair_logits(inputs, chunk.columns, chunk.rows)[1]

    _attend(block, inputs.value, logits, inputs.dropout, state)


def _attend(
    block: CompressedEdges, x: Tensor, logits: Callable[[Chunk], Tensor], dropout: Mask, state: AttentionState
) -> None:
    """Merge a block with the given logits ``[e, H]`` into ``state``. One pass finds the new maxima, the next adds."""
    new = state.top.clone()
    for chunk in _chunks(block, x):
        logit = logits(chunk)
        new.scatter_reduce_(0, _index_like(chunk.rows, logit), logit, "amax")
    # Where no edge came yet, top is -inf and the difference may be NaN; total and out are 0 there.
    factor = torch.exp(state.top - new).masked_fill_(state.total == 0, 0)
    state.top.copy_(new)
    state.total.mul_(factor)
    state.out.mul_(factor.unsqueeze(-1))
    # Rows whose logits are all -inf: subtract 0, so that their exponentials are 0, not NaN.
    base = new.masked_fill(new == float("-inf"), 0)
    for chunk in _chunks(block, x):
        part = torch.exp(logits(chunk) - base.index_select(0, chunk.rows))
        state.total.index_add_(0, chunk.rows, part)
        if dropout.threshold > 0:
            part = part * dropout.not_dropped(chunk.edges, part.size(1)) * dropout.scale
        state.out.index_add_(0, chunk.rows, x.index_select(0, chunk.columns) * part.unsqueeze(-1))


def attention_finish(state: AttentionState) -> Tensor:
    """See :func:`.attention.attention_finish`."""
    state.out.div_(state.total.masked_fill(state.total == 0, 1).unsqueeze(-1))
    return state.top + state.total.log()


def attention_backward(
    block: CompressedEdges, inputs: AttentionInputs, saved: TargetGradients, gradients: AttentionGradients
) -> None:
    """See :func:`.attention.attention_backward`."""
    x, source, target, slope, dropout = inputs
    infinite = float("-inf")
    for chunk in _chunks(block, x):
        j, i = chunk.rows, chunk.columns
        z = source.index_select(0, j) + target.index_select(0, i)
        logit = leaky_relu(z, slope)
        part = torch.exp((logit - saved.lse.index_select(0, i)).masked_fill_(logit == infinite, infinite))
        mask = part.new_full(part.shape, dropout.scale if dropout.threshold > 0 else 1.0)
        if dropout.threshold > 0:
            mask *= dropout.not_dropped(chunk.edges, part.size(1))
        rows = saved.gradient.index_select(0, i).to(part.dtype)
        inner = (rows * x.index_select(0, j)).sum(-1)
        gradients.x.index_add_(0, j, rows * (part * mask).unsqueeze(-1))
        q = part * (mask * inner - saved.delta.index_select(0, i))
        # leaky_relu'(0) is the slope, as in torch.
        q = torch.where(z > 0, q, q * slope)
        gradients.source.index_add_(0, j, q)
        gradients.target.index_add_(0, i, q)


def pair_backward(
    by_target: CompressedEdges,
    by_source: CompressedEdges,
    inputs: PairInputs,
    saved: TargetGradients,
    gradients: PairGradients,
) -> None:
    """See :func:`.pairs.pair_backward`; one pass by source computes all gradients."""
    key, value, query, weight, factor, dropout = inputs
    infinite = float("-inf")
    for chunk in _chunks(by_source, value):
        j, i = chunk.rows, chunk.columns
        z, logit = _pair_logits(inputs, j, i)
        part = torch.exp((logit - saved.lse.index_select(0, i)).masked_fill_(logit == infinite, infinite))
        mask = part.new_full(part.shape, dropout.scale if dropout.threshold > 0 else 1.0)
        if dropout.threshold > 0:
            mask *= dropout.not_dropped(chunk.edges, part.size(1))
        rows = saved.gradient.index_select(0, i)
        inner = (rows * value.index_select(0, j)).sum(-1)
        gradients.value.index_add_(0, j, rows * (part * mask).unsqueeze(-1))
        q = (part * (mask * inner - saved.delta.index_select(0, i))).unsqueeze(-1)
        if weight.numel():
            gradients.weight.add_((q * leaky_relu(z, factor)).sum(0))
            # leaky_relu'(0) is the slope, as in torch.
            of_both = torch.where(z > 0, q, q * factor) * weight
            gradients.key.index_add_(0, j, of_both)
            gradients.query.index_add_(0, i, of_both)
        else:
            gradients.key.index_add_(0, j, q * factor * query.index_select(0, i))
            gradients.query.index_add_(0, i, q * factor * key.index_select(0, j))


def _pair_logits(inputs: PairInputs, sources: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums or products of both ends' rows ``[e, H, C]``, and the logits ``[e, H]``."""
    key, query = inputs.key.index_select(0, sources), inputs.query.index_select(0, targets)
    if inputs.weight.numel():
        return key + query, (leaky_relu(key + query, inputs.factor) * inputs.weight).sum(-1)
    return key * query, (key * query).sum(-1) * inputs.factor


def extreme_forward(block: CompressedEdges, x: Tensor, largest: bool, state: ExtremeState) -> None:
    """See :func:`.sums.extreme_forward`. One pass finds the new extremes, the next counts."""
    new = state.out.clone()
    for chunk in _chunks(block, x):
        messages = x.index_select(0, chunk.columns)
        new.scatter_reduce_(0, _index_like(chunk.rows, messages), messages, "amax" if largest else "amin")
    # The earlier messages count only where the extreme did not change.
    state.ties.mul_(new == state.out)
    state.out.copy_(new)
    for chunk in _chunks(block, x):
        attained = x.index_select(0, chunk.columns) == new.index_select(0, chunk.rows)
        state.ties.index_add_(0, chunk.rows, attained.to(state.ties.dtype))


def extreme_backward(block: CompressedEdges, x: Tensor, out: Tensor, share: Tensor, dx: Tensor) -> None:
    """See :func:`.sums.extreme_backward`."""
    for chunk in _chunks(block, x):
        attained = x.index_select(0, chunk.rows) == out.index_select(0, chunk.columns)
        dx.index_add_(0, chunk.rows, share.index_select(0, chunk.columns) * attained)


def _index_like(rows: Tensor, like: Tensor) -> Tensor:
    """Expand rows to an index for scattering ``like`` ``[e, C]``."""
    return rows.view(-1, 1).expand_as(like)
