"""A layer of GraphSAGE's form, ``agg(x) W_l + x W_r + b``, in one autograd function.

If W_l narrows the rows, they are transformed before they are sent. If it keeps their width, they are transformed first
only when gradients are needed: then no aggregate must be saved for the backward pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtrain_sar.autograd import SavedOnce
from gtrain_sar.config import Schedule
from gtrain_sar.constants import Constants
from gtrain_sar.edges import EdgeBlocks
from gtrain_sar.halo import incremental
from gtrain_sar.linear import LinearCall, PackedSums, aggregate

Layers = tuple[Tensor, Tensor | None, Tensor]
"""W_l [out, in], b [out] or None, W_r [out, in]."""


def sage_layer(
    blocks: EdgeBlocks,
    x: Tensor,
    edge_index: Tensor,
    weight: Tensor | None,
    mean: bool,
    layers: Layers,
    schedule: Schedule,
    constants: Constants,
) -> Tensor:
    """Return the layer's result, [num_targets, out].

    Args:
        blocks: edges among the nodes of ``x``.
        x: the rank's rows, [num_local, in].
        edge_index: the edges of ``blocks``.
        weight: [E], without a gradient; None: 1.
        mean: whether ``agg`` is the mean, else the sum.
        layers: the dense part.
        schedule: when blocks are fetched.
        constants: the cache of the aggregate of constant rows.
    """
    left, bias, right = layers
    learns = x.requires_grad and torch.is_grad_enabled()
    if left.size(0) < left.size(1) or (learns and left.size(0) == left.size(1)):
        scale = blocks.inverse_degree(x.dtype) if mean else None
        if scale is not None and weight is not None:
            weight, scale = weight * scale[edge_index[1]], None
        return _TransformThenSum.apply(blocks, (weight, scale), schedule, x, left, bias, right)
    call, cached = LinearCall(blocks, x, weight, mean), None
    if constants.caches(x, edge_index, weight):
        cached = constants.result((x, edge_index, weight), ("linear", mean), lambda: aggregate([call], schedule)[0])
    return _SumThenTransform.apply(call, schedule, cached, x, left, bias, right)


class _TransformThenSum(torch.autograd.Function):
    """``agg(x W_l) + x W_r + b``.

    A mean is a sum with a scale for each target, so that kernels add it in place to the product ``x W_r``.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        blocks: EdgeBlocks,
        factors: tuple[Tensor | None, Tensor | None],
        schedule: Schedule,
        x: Tensor,
        left: Tensor,
        bias: Tensor | None,
        right: Tensor,
    ) -> Tensor:
        rows, (weight, scale) = x.detach(), factors
        sent = rows.new_empty((len(rows), len(left)))
        needed = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        ctx.packed = PackedSums([LinearCall(blocks, sent, weight, scale=scale)], schedule, needed)
        ctx.packed.post(incremental(partial(_multiply, rows, left, sent)))
        del sent  # finish() frees it
        out = rows @ right.t()
        ctx.packed.add_local_block([out])
        ctx.packed.finish([out])
        ctx.save_for_backward(x, left, right)
        return out if bias is None else out.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, left, right = ctx.saved_tensors
        gradient, packed = gradient.contiguous(), ctx.packed
        dx = dleft = None
        if packed.needed:
            packed.send([gradient])
        dright, dbias = _root_gradients(ctx, gradient, x)
        if packed.needed:
            packed.add_local_gradients([gradient])
            dleft, dsent = torch.zeros_like(left), packed.gradient(0)
            if ctx.needs_input_grad[3]:  # of equal width, it overwrites the gradient that it is computed from
                dx = dsent if left.size(0) == left.size(1) else torch.empty_like(x)
            first = 0
            for until in packed.receive_by_rows():
                part = slice(first, until)
                dleft.addmm_(dsent[part].t(), x[part])
                if dx is not None:
                    dx[part] = (gradient[part] @ right).addmm_(dsent[part], left)
                first = until
            packed.take_gradients()
        return None, None, None, dx, dleft if ctx.needs_input_grad[4] else None, dbias, dright


def _root_gradients(ctx: Any, gradient: Tensor, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of W_r and b, which need no message: they are computed while messages are in flight."""
    return (
        gradient.t() @ x if ctx.needs_input_grad[6] else None,
        gradient.sum(0) if ctx.needs_input_grad[5] else None,
    )


def _multiply(rows: Tensor, left: Tensor, out: Tensor, low: int, high: int) -> None:
    """Compute the rows ``low .. high-1`` of ``out = rows @ left.t()``."""
    torch.mm(rows[low:high], left.t(), out=out[low:high])


class _SumThenTransform(torch.autograd.Function):
    """``agg(x) W_l + x W_r + b``; the aggregate is saved for W_l's gradient, and freed in the backward pass."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        call: LinearCall,
        schedule: Schedule,
        aggregated: Tensor | None,
        x: Tensor,
        left: Tensor,
        bias: Tensor | None,
        right: Tensor,
    ) -> Tensor:
        ctx.packed = None
        if aggregated is None:
            ctx.packed = PackedSums([call], schedule, ctx.needs_input_grad[3])
            (aggregated,) = ctx.packed.start()
        out = x.detach() @ right.t()
        if ctx.packed is not None:
            ctx.packed.finish([aggregated])
        ctx.aggregated = SavedOnce(aggregated)
        ctx.save_for_backward(x, left, right)
        out.addmm_(aggregated, left.t())
        return out if bias is None else out.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, left, right = ctx.saved_tensors
        packed: PackedSums | None = ctx.packed
        dsums = dx = dleft = None
        aggregated = ctx.aggregated.take()
        if ctx.needs_input_grad[4]:
            dleft = gradient.t() @ aggregated
        del aggregated
        if packed is not None and packed.needed:
            dsums, (edges,) = gradient @ left, packed.sums
            if edges.mean:
                dsums.div_(edges.blocks.divisor(dsums))
            packed.send([dsums])
        dright, dbias = _root_gradients(ctx, gradient, x)
        if packed is not None and dsums is not None:
            dx = packed.gradient(0).addmm_(gradient, right)
            packed.add_local_gradients([dsums])
            packed.receive()
            packed.take_gradients()
        return None, None, None, dx, dleft, dbias, dright
