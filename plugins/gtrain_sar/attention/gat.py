"""A layer of GAT in one autograd function: transform, logits, attention over blocks, bias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtrain.nn.dropout import Mask
from gtrain_sar.attention.fused import AttentionBackward, AttentionSettings, attention_blocks, row_dots
from gtrain_sar.autograd import SavedOnce
from gtrain_sar.config import Schedule
from gtrain_sar.edges import EdgeBlocks
from gtrain_sar.halo import incremental

_ROWS = 1 << 12  # gathered at once

Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""x [num_local, in], W [H * C, in], attention vectors [1, H, C] of sources and targets, bias [H * C] or None."""


def gat_layer(blocks: EdgeBlocks, tensors: Tensors, slope: float, dropout: float, schedule: Schedule) -> Tensor:
    """Return the layer's result, heads side by side, [num_targets, H * C].

    Args:
        blocks: edges among the nodes of x.
        tensors: input and parameters of the layer.
        slope: of leaky_relu below zero.
        dropout: probability that a coefficient is dropped.
        schedule: when blocks are fetched; mode 1 transforms x again in the backward pass, others keep the result.
    """
    return _Layer.apply(AttentionSettings(blocks, schedule, slope, Mask.next(dropout)), *tensors)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        settings: AttentionSettings,
        x: Tensor,
        weight: Tensor,
        att_source: Tensor,
        att_target: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        heads, channels = att_source.shape[-2:]
        rows = x.new_empty((len(x), heads, channels))
        source, target = (x.new_empty((len(x), heads)) for _ in range(2))
        vectors = torch.cat([_block_diagonal(att_source), _block_diagonal(att_target)], 1)

        def transform(low: int, high: int) -> None:
            part = rows[low:high].flatten(1)
            torch.mm(x.detach()[low:high], weight.t(), out=part)
            source[low:high], target[low:high] = (part @ vectors).split(heads, 1)

        produce, trains = incremental(transform), any(ctx.needs_input_grad[1:5])
        out, lse, *rest = attention_blocks(settings, rows, source, target, trains=trains, produce=produce)
        out = out.view(-1, heads * channels)
        if bias is not None:
            out.add_(bias)
        ctx.settings = settings
        ctx.kept = [] if settings.schedule.mode == 1 else [rows]
        ctx.out = SavedOnce(out)
        ctx.save_for_backward(x, weight, att_source, att_target, bias, source, target, lse, *rest)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight, att_source, att_target, bias, source, target, lse, *rest = ctx.saved_tensors
        heads, channels = att_source.shape[-2:]
        gradient = gradient.contiguous()
        grad = gradient.view(-1, heads, channels)
        kept = ctx.kept.pop() if ctx.kept else lambda: (x @ weight.t()).view(-1, heads, channels)
        dots = _Dots(grad, ctx.out.take().view_as(grad), bias)
        vectors = torch.cat([_block_diagonal(att_source), _block_diagonal(att_target)], 1)
        dense = DenseGradients(x, weight, vectors, needed=ctx.needs_input_grad[1])
        backward = AttentionBackward(ctx.settings, grad, kept, source, target, lse, dots, dense.add)
        del kept, dots
        backward.run(rest)
        dweight, dvectors = dense.result()
        dsource, dtarget = (_diagonal(part, att_source) for part in dvectors.split(heads, 1))
        return None, dense.dx, dweight, dsource, dtarget, None if bias is None else gradient.sum(0)


class _Dots:
    """Inner products of gradients with the layer's result minus its bias, which is not weighted by coefficients.

    Args:
        grad, out: [n, H, C].
        bias: [H * C] or None; ``out`` includes it.
    """

    def __init__(self, grad: Tensor, out: Tensor, bias: Tensor | None) -> None:
        self._grad, self._out = grad, out
        self._bias = None if bias is None else _block_diagonal(bias.view(1, *grad.shape[1:]))

    def __call__(self, dots: Tensor, low: int, high: int) -> None:
        row_dots(self._grad, self._out, dots, low, high)
        if self._bias is not None:
            dots[low:high] -= self._grad[low:high].flatten(1) @ self._bias
        if high == len(self._grad):  # the last call: frees the result
            self._out = self._out.new_empty(0)


def _block_diagonal(vectors: Tensor) -> Tensor:
    """Return [1, H, C] as [H * C, H], with vector h in column h."""
    return torch.block_diag(*vectors.detach().flatten(0, -2)).t()


def _diagonal(blocks: Tensor, like: Tensor) -> Tensor:
    """Return [H * C, H] in the shape of ``like``, [1, H, C]: the inverse of :func:`_block_diagonal`."""
    heads, channels = like.shape[-2:]
    return blocks.reshape(heads, channels, heads).diagonal(dim1=0, dim2=2).t().reshape(like.shape)


class DenseGradients:
    """Gradients of x, W and the attention vectors, from those of rows ``x W^T`` and of their logits at both ends.

    With A the attention vectors as a block diagonal matrix, D the gradients of rows and L those of logits ``x W^T A``,
    the rows' total gradient is ``D + L A^T``. So the weight's is ``D^T x + A L^T x`` and A's is ``W (L^T x)^T``: rows
    need not be computed again.

    Args:
        x: [n, in].
        weight: [H * C, in].
        vectors: A, [H * C, 2 * H].
        needed: whether x needs a gradient.

    Attributes:
        dx: [n, in]; it overwrites D if that is of equal width. None: not needed.
    """

    def __init__(self, x: Tensor, weight: Tensor, vectors: Tensor, *, needed: bool) -> None:
        self._x, self._weight, self._vectors, self._needed = x, weight, vectors, needed
        self._dweight = torch.zeros_like(weight)
        self._logits_x = x.new_zeros((vectors.size(1), x.size(1)))  # L^T x
        self._vectors_weight = vectors.t() @ weight
        self.dx: Tensor | None = None

    def add(self, attention: AttentionBackward, rows: Tensor | None) -> None:
        """Add local rows whose gradients are complete, int64, or None for all; each row once."""
        drows = attention.dx.flatten(1)
        if self._needed and self.dx is None:
            self.dx = drows if drows.size(1) == self._x.size(1) else torch.empty_like(self._x)
        for part in _parts(rows, len(drows)):
            x, of_part = _take(self._x, part), _take(drows, part)
            dlogits = torch.cat([_take(attention.dsource, part), _take(attention.dtarget, part)], 1)
            self._dweight.addmm_(of_part.t(), x)
            self._logits_x.addmm_(dlogits.t(), x)
            if self.dx is not None:
                gradient = (of_part @ self._weight).addmm_(dlogits, self._vectors_weight)
                if isinstance(part, slice):
                    self.dx[part] = gradient
                else:
                    self.dx.index_copy_(0, part, gradient)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of the weight and of A; only the latter's diagonal blocks are meaningful."""
        return self._dweight.addmm_(self._vectors, self._logits_x), self._weight @ self._logits_x.t()


def _parts(rows: Tensor | None, count: int) -> Iterator[slice | Tensor]:
    if rows is None:
        yield from (slice(start, start + _ROWS) for start in range(0, count, _ROWS))
    else:
        yield from rows.split(_ROWS)


def _take(tensor: Tensor, part: slice | Tensor) -> Tensor:
    return tensor[part] if isinstance(part, slice) else tensor.index_select(0, part)
