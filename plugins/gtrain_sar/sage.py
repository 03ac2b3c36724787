"""A layer of GraphSAGE's form, ``agg(x) W_l + x W_r + b``, in one step of the graph.

Where W_l narrows the rows, they are transformed before they are sent; where it keeps their width too, if gradients are
asked for, since then no aggregate need be kept.
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
from gtrain_sar.halo import in_order
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
    """The layer's result, [num_targets, out].

    Args:
        blocks: edges among the nodes of ``x``.
        x: own rows, [num_local, in].
        edge_index: what ``blocks`` was made of.
        weight: [E], not to be learned; None: 1.
        mean: whether ``agg`` is the mean, else the sum.
        layers: the dense part.
        schedule: how blocks are fetched.
        constants: the aggregate of constant rows is kept where these allow it.
    """
    left, bias, right = layers
    learns = x.requires_grad and torch.is_grad_enabled()
    before = left.size(0) < left.size(1) or (learns and left.size(0) == left.size(1))
    if before:
        scale = blocks.inverse_degree(x.dtype) if mean else None
        if scale is not None and weight is not None:
            weight, scale = weight * scale[edge_index[1]], None
        narrow: Tensor = _TransformThenSum.apply(blocks, (weight, scale), schedule, x, left, bias, right)
        return narrow
    call, known = LinearCall(blocks, x, weight, mean), None
    if constants.keeps(x, edge_index, weight):
        known = constants.result((x, edge_index, weight), ("linear", mean), lambda: aggregate([call], schedule)[0])
    wide: Tensor = _SumThenTransform.apply(call, schedule, known, x, left, bias, right)
    return wide


class _TransformThenSum(torch.autograd.Function):
    """``agg(x W_l) + x W_r + b``; a mean is a sum with a scale for each target, so it is added to the rest in place."""

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
        wanted = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        ctx.packed = PackedSums([LinearCall(blocks, sent, weight, scale=scale)], schedule, wanted)
        ctx.packed.post(in_order(partial(_multiply, rows, left, sent)))
        del sent  # the sums release it
        out = rows @ right.t()
        ctx.packed.add_own([out])
        ctx.packed.finish([out])
        ctx.save_for_backward(x, left, right)
        return out if bias is None else out.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, left, right = ctx.saved_tensors
        gradient, packed = gradient.contiguous(), ctx.packed
        of_x = of_left = of_bias = of_right = None
        if packed.wanted:
            packed.send([gradient])
        if ctx.needs_input_grad[6]:
            of_right = gradient.t() @ x
        if ctx.needs_input_grad[5]:
            of_bias = gradient.sum(0)
        if packed.wanted:
            packed.add_local([gradient])
            of_left, of_sent = torch.zeros_like(left), packed.gradient(0)
            if ctx.needs_input_grad[3]:  # it takes the place of what it is made of, where it is as wide
                of_x = of_sent if left.size(0) == left.size(1) else torch.empty_like(x)
            first = 0
            for until in packed.receive_by_rows():
                part = slice(first, until)
                of_left.addmm_(of_sent[part].t(), x[part])
                if of_x is not None:
                    of_x[part] = (gradient[part] @ right).addmm_(of_sent[part], left)
                first = until
            packed.take_gradients()
        return None, None, None, of_x, of_left if ctx.needs_input_grad[4] else None, of_bias, of_right


def _multiply(rows: Tensor, left: Tensor, out: Tensor, low: int, high: int) -> None:
    """Some rows of ``out = rows @ left.t()``."""
    torch.mm(rows[low:high], left.t(), out=out[low:high])


class _SumThenTransform(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        call: LinearCall,
        schedule: Schedule,
        known: Tensor | None,
        x: Tensor,
        left: Tensor,
        bias: Tensor | None,
        right: Tensor,
    ) -> Tensor:
        rows, ctx.packed = x.detach(), None
        if known is None:
            ctx.packed = PackedSums([call], schedule, ctx.needs_input_grad[3])
            (known,) = ctx.packed.start()
            out = rows @ right.t()
            ctx.packed.finish([known])
        else:
            out = rows @ right.t()
        ctx.aggregate = SavedOnce(known)
        ctx.save_for_backward(x, left, right)
        out.addmm_(known, left.t())
        return out if bias is None else out.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, left, right = ctx.saved_tensors
        packed: PackedSums | None = ctx.packed
        sums = of_x = of_left = of_bias = of_right = None
        aggregate = ctx.aggregate.take()
        if ctx.needs_input_grad[4]:
            of_left = gradient.t() @ aggregate
        del aggregate
        if packed is not None and packed.wanted:
            sums = _of_sums(packed, gradient @ left)
            packed.send([sums])
        if ctx.needs_input_grad[6]:
            of_right = gradient.t() @ x
        if ctx.needs_input_grad[5]:
            of_bias = gradient.sum(0)
        if packed is not None and sums is not None:
            of_x = packed.gradient(0).addmm_(gradient, right)
            packed.add_local([sums])
            packed.receive()
            packed.take_gradients()
        return None, None, None, of_x, of_left, of_bias, of_right


def _of_sums(packed: PackedSums, of_aggregate: Tensor) -> Tensor:
    """The gradient of the sums, from that of the aggregate, which may be changed."""
    (edges,) = packed.sums
    return of_aggregate.div_(edges.blocks.divisor(of_aggregate)) if edges.mean else of_aggregate
