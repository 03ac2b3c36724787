"""The kernels in plain torch, for tensors on other devices or of other types, and the states that both kinds update.

Edges are taken in chunks, so that messages in memory are bounded whatever the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from gtrain.nn.dropout import Mask

if TYPE_CHECKING:
    from gtrain_sar.edges import Compressed

Three = tuple[Tensor, Tensor, Tensor]
CHUNK_NUMBERS = 1 << 24  # in the messages of a chunk: 64 MiB of float32


class AttentionState(NamedTuple):
    """What the blocks so far come to.

    Attributes:
        out: ``[T, H, C]``, sum of source rows, each times ``exp(logit - top)`` and its dropout.
        top: ``[T, H]``, largest logit; -inf where no edge was seen.
        total: ``[T, H]``, sum of ``exp(logit - top)``.
    """

    out: Tensor
    top: Tensor
    total: Tensor


class ExtremeState(NamedTuple):
    """What the blocks so far come to.

    Attributes:
        out: ``[T, C]``, the largest (smallest) message; -inf (inf) where none was seen, NaN where one was.
        ties: ``[T, C]``, messages that equal ``out``.
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


def chunks(block: Compressed, width: int) -> Iterator[Chunk]:
    """Yield a block's edges, so many at a time that ``width`` numbers for each take bounded memory."""
    size = max(1, CHUNK_NUMBERS // max(1, width))
    count = block.columns.numel()
    for start in range(0, count, size):
        stop = min(start + size, count)
        positions = torch.arange(start, stop, device=block.ptr.device)
        rows = block.rows[torch.searchsorted(block.ptr, positions, right=True) - 1]
        yield Chunk(rows, block.columns[start:stop], block.edges[start:stop])


def spmm(block: Compressed, x: Tensor, out: Tensor, weight: Tensor | None) -> None:
    """See :func:`.linear.spmm`."""
    for chunk in chunks(block, x[0].numel() if len(x) else 1):
        messages = x.index_select(0, chunk.columns)
        if weight is not None:
            messages = messages * weight.index_select(0, chunk.edges).unsqueeze(-1)
        out.index_add_(0, chunk.rows, messages.to(out.dtype))


def sddmm(block: Compressed, a: Tensor, b: Tensor, out: Tensor) -> None:
    """See :func:`.linear.sddmm`."""
    for chunk in chunks(block, a[0].numel() if len(a) else 1):
        product = (a.index_select(0, chunk.rows) * b.index_select(0, chunk.columns)).sum(-1)
        out.index_copy_(0, chunk.edges.long(), product.to(out.dtype))


def attention_forward(
    block: Compressed, x: Tensor, source: Tensor, target: Tensor, slope: float, state: AttentionState, keep: Mask
) -> None:
    """See :func:`.attention.attention_forward`. One pass finds the new maxima, the next adds."""
    heads, width = source.size(1), x[0].numel() if len(x) else 1
    new = state.top.clone()
    for chunk in chunks(block, width):
        logit = _logit(source.index_select(0, chunk.columns) + target.index_select(0, chunk.rows), slope)
        new.scatter_reduce_(0, _each(chunk.rows, logit), logit, "amax")
    factor = torch.exp(state.top - new).masked_fill_(state.total == 0, 0)
    state.top.copy_(new)
    state.total.mul_(factor)
    state.out.mul_(factor.unsqueeze(-1))
    base = new.masked_fill(new == float("-inf"), 0)
    for chunk in chunks(block, width):
        logit = _logit(source.index_select(0, chunk.columns) + target.index_select(0, chunk.rows), slope)
        part = torch.exp(logit - base.index_select(0, chunk.rows))
        state.total.index_add_(0, chunk.rows, part)
        if keep.threshold > 0:
            part = part * keep.kept(chunk.edges, heads) * keep.scale
        state.out.index_add_(0, chunk.rows, x.index_select(0, chunk.columns) * part.unsqueeze(-1))


def attention_finish(state: AttentionState) -> Tensor:
    """See :func:`.attention.attention_finish`."""
    state.out.div_(state.total.masked_fill(state.total == 0, 1).unsqueeze(-1))
    return state.top + state.total.log()


def attention_backward(
    block: Compressed, inputs: Three, saved: Three, slope: float, keep: Mask, gradients: Three
) -> None:
    """See :func:`.attention.attention_backward`: ``x, source, target``, ``lse, delta, grad`` and what is added to."""
    (x, source, target), (lse, delta, grad), (dx, dsource, dtarget) = inputs, saved, gradients
    heads, infinite = source.size(1), float("-inf")
    for chunk in chunks(block, x[0].numel() if len(x) else 1):
        j, i = chunk.rows, chunk.columns
        z = source.index_select(0, j) + target.index_select(0, i)
        logit = _logit(z, slope)
        part = torch.exp((logit - lse.index_select(0, i)).masked_fill_(logit == infinite, infinite))
        kept = part.new_full(part.shape, keep.scale if keep.threshold > 0 else 1.0)
        if keep.threshold > 0:
            kept *= keep.kept(chunk.edges, heads)
        rows = grad.index_select(0, i)
        inner = (rows * x.index_select(0, j)).sum(-1)
        dx.index_add_(0, j, rows * (part * kept).unsqueeze(-1))
        q = part * (kept * inner - delta.index_select(0, i))
        q = torch.where(z > 0, q, q * slope)
        dsource.index_add_(0, j, q)
        dtarget.index_add_(0, i, q)


def extreme_forward(block: Compressed, x: Tensor, largest: bool, state: ExtremeState) -> None:
    """See :func:`.extreme.extreme_forward`. One pass finds the new extremes, the next counts."""
    new, width = state.out.clone(), x.size(1)
    for chunk in chunks(block, width):
        messages = x.index_select(0, chunk.columns)
        new.scatter_reduce_(0, _each(chunk.rows, messages), messages, "amax" if largest else "amin")
    state.ties.mul_(new == state.out)
    state.out.copy_(new)
    for chunk in chunks(block, width):
        attained = x.index_select(0, chunk.columns) == new.index_select(0, chunk.rows)
        state.ties.index_add_(0, chunk.rows, attained.to(state.ties.dtype))


def extreme_backward(block: Compressed, x: Tensor, out: Tensor, share: Tensor, dx: Tensor) -> None:
    """See :func:`.extreme.extreme_backward`."""
    for chunk in chunks(block, x.size(1)):
        attained = x.index_select(0, chunk.rows) == out.index_select(0, chunk.columns)
        dx.index_add_(0, chunk.rows, share.index_select(0, chunk.columns) * attained)


def _logit(z: Tensor, slope: float) -> Tensor:
    return leaky_relu(z, slope)


def _each(rows: Tensor, like: Tensor) -> Tensor:
    """Rows as an index for scattering ``like`` ``[e, C]``."""
    return rows.view(-1, 1).expand_as(like)
