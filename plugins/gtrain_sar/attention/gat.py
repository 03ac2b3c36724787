"""A layer of GAT in one step of the graph: transform, logits, attention over blocks, bias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtrain.nn.dropout import Mask
from gtrain_sar.attention.fused import AttentionBackward, attention_backward_blocks, attention_blocks, row_dots
from gtrain_sar.autograd import SavedOnce
from gtrain_sar.config import Schedule
from gtrain_sar.edges import EdgeBlocks
from gtrain_sar.halo import in_order

_ROWS = 1 << 12  # that are gathered at once


Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""x [num_local, in], W [H * C, in], attention vectors [1, H, C] of sources and targets, bias [H * C] or None."""


def gat_layer(blocks: EdgeBlocks, tensors: Tensors, slope: float, dropout: float, schedule: Schedule) -> Tensor:
    """The layer's result, heads side by side, [num_targets, H * C].

    Args:
        blocks: edges among the nodes of x.
        tensors: what the layer is a function of.
        slope: of leaky_relu below zero.
        dropout: chance that a coefficient is dropped.
        schedule: how blocks are fetched; mode 1 transforms x again in the backward pass, others keep it transformed.
    """
    out: Tensor = _Layer.apply(blocks, schedule, slope, Mask.next(dropout), *tensors)
    return out


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        blocks: EdgeBlocks,
        schedule: Schedule,
        slope: float,
        keep: Mask,
        x: Tensor,
        weight: Tensor,
        att_source: Tensor,
        att_target: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        heads, channels = att_source.shape[-2:]
        rows = x.new_empty((len(x), heads, channels))
        source, target = (x.new_empty((len(x), heads)) for _ in range(2))
        make = in_order(_Transform((x.detach(), weight, att_source, att_target), (rows, source, target)))
        settings = blocks, schedule, slope, keep
        trains = any(ctx.needs_input_grad[4:8])
        out, lse, *rest = attention_blocks(settings, rows, source, target, trains=trains, make=make)
        out = out.view(-1, heads * channels)
        if bias is not None:
            out.add_(bias)
        ctx.settings = settings
        ctx.kept = [] if schedule.mode == 1 else [rows]
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
        both = torch.cat([_block_diagonal(att_source), _block_diagonal(att_target)], 1)
        dense = DenseGradients(x, weight, both, wanted=ctx.needs_input_grad[4])
        backward = AttentionBackward(ctx.settings, grad, kept, source, target, lse, dots, dense.add)
        del kept, dots
        attention_backward_blocks(backward, rest)
        of_weight, of_both = dense.result()
        of_source, of_target = (_diagonal(part, att_source) for part in of_both.split(heads, 1))
        of_bias = None if bias is None else gradient.sum(0)
        return None, None, None, None, dense.of_x, of_weight, of_source, of_target, of_bias


class _Dots:
    """Inner products of gradients with the layer's result less its bias, which no coefficient weighted.

    Args:
        grad, out: [n, H, C].
        bias: [H * C] or None; it is in ``out``.
    """

    def __init__(self, grad: Tensor, out: Tensor, bias: Tensor | None) -> None:
        self._grad, self._out = grad, out
        self._bias = None if bias is None else _block_diagonal(bias.view(1, *grad.shape[1:]))

    def __call__(self, dots: Tensor, low: int, high: int) -> None:
        row_dots(self._grad, self._out, dots, low, high)
        if self._bias is not None:
            dots[low:high] -= self._grad[low:high].flatten(1) @ self._bias
        if high == len(self._grad):  # nobody asks for more
            self._out = self._out.new_empty(0)


class _Transform:
    """Rows ``x @ weight.t()`` and their logits ``<row[h], att[h]>`` of both ends.

    Args:
        given: x, weight and the attention vectors of sources and targets.
        made: where the rows [n, H, C] and the logits [n, H] go.
    """

    def __init__(self, given: tuple[Tensor, Tensor, Tensor, Tensor], made: tuple[Tensor, Tensor, Tensor]) -> None:
        self._x, self._weight, *vectors = given
        self._both = torch.cat([_block_diagonal(vector) for vector in vectors], 1)
        self._rows, self._source, self._target = made

    def __call__(self, low: int, high: int) -> None:
        rows = self._rows[low:high].flatten(1)
        torch.mm(self._x[low:high], self._weight.t(), out=rows)
        logits = rows @ self._both
        self._source[low:high], self._target[low:high] = logits.split(self._source.size(1), 1)


def _block_diagonal(vectors: Tensor) -> Tensor:
    """[1, H, C] -> [H * C, H], column h holding vector h."""
    return torch.block_diag(*vectors.detach().flatten(0, -2)).t()


def _diagonal(blocks: Tensor, like: Tensor) -> Tensor:
    """[H * C, H] -> the shape of ``like``, [1, H, C]: the inverse of :func:`_block_diagonal`."""
    heads, channels = like.shape[-2:]
    every = torch.arange(heads, device=blocks.device)
    return blocks.reshape(heads, channels, heads)[every, :, every].view_as(like)


class DenseGradients:
    """Gradients of x, W and attention vectors, of rows ``x W^T`` and their logits ``<row[h], att[h]>`` of both ends.

    With A the attention vectors as a block diagonal matrix, D the gradients of rows and L those of logits, the rows'
    gradients are ``D + L A^T`` in all. So the weight's are ``D^T x + A L^T x`` and A's ``W (L^T x)^T``: no row need be
    made again.

    Args:
        x: [n, in].
        weight: [H * C, in].
        both: A, [H * C, 2 * H].
        wanted: whether x needs a gradient.

    Attributes:
        of_x: [n, in]; it takes the place of D, where that is as wide. None: not wanted.
    """

    def __init__(self, x: Tensor, weight: Tensor, both: Tensor, *, wanted: bool) -> None:
        self._x, self._weight, self._both, self._wanted = x, weight, both, wanted
        self._of_weight = torch.zeros_like(weight)
        self._mixed = x.new_zeros((both.size(1), x.size(1)))  # L^T x
        self._both_weight = both.t() @ weight
        self.of_x: Tensor | None = None

    def add(self, attention: AttentionBackward, rows: Tensor | None) -> None:
        """Take in own rows whose gradients are complete, int64, or None for all; each row once."""
        given = attention.dx.flatten(1)
        if self._wanted and self.of_x is None:
            self.of_x = given if given.size(1) == self._x.size(1) else torch.empty_like(self._x)
        for part in _parts(rows, len(given)):
            x, of_rows = _take(self._x, part), _take(given, part)
            of_logits = torch.cat([_take(attention.dsource, part), _take(attention.dtarget, part)], 1)
            self._of_weight.addmm_(of_rows.t(), x)
            self._mixed.addmm_(of_logits.t(), x)
            if self.of_x is not None:
                _put(self.of_x, part, (of_rows @ self._weight).addmm_(of_logits, self._both_weight))

    def result(self) -> tuple[Tensor, Tensor]:
        """Gradients of the weight and of A; the latter's off A's diagonal blocks are of no use."""
        return self._of_weight.addmm_(self._both, self._mixed), self._weight @ self._mixed.t()


def _parts(rows: Tensor | None, count: int) -> Iterator[slice | Tensor]:
    if rows is not None:
        yield from rows.split(_ROWS)
        return
    for start in range(0, count, _ROWS):
        yield slice(start, start + _ROWS)


def _take(tensor: Tensor, part: slice | Tensor) -> Tensor:
    return tensor[part] if isinstance(part, slice) else tensor.index_select(0, part)


def _put(tensor: Tensor, part: slice | Tensor, rows: Tensor) -> None:
    if isinstance(part, slice):
        tensor[part] = rows
    else:
        tensor.index_copy_(0, part, rows)
