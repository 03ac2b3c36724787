"""A layer of GraphSAGE's form, ``agg(x) W_l + x W_r + b``, in one step of the graph.

Where W_l narrows the rows, they are transformed before they are sent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtrain_sar.borrowed import Borrowed
from gtrain_sar.config import Schedule
from gtrain_sar.constants import Constants
from gtrain_sar.edges import EdgeBlocks
from gtrain_sar.flight import Flight, LinearCall
from gtrain_sar.linear import aggregate

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
    call = LinearCall(blocks, x, weight, mean)
    left, bias, right = layers
    narrows = left.size(0) < left.size(1)
    known = None
    if not narrows and constants.keeps(x, edge_index, weight):
        known = constants.result((x, edge_index, weight), ("linear", mean), lambda: aggregate([call], schedule)[0])
    out: Tensor = _Layer.apply(call, schedule, narrows, known, x, left, bias, right)
    return out


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        call: LinearCall,
        schedule: Schedule,
        narrows: bool,
        known: Tensor | None,
        x: Tensor,
        left: Tensor,
        bias: Tensor | None,
        right: Tensor,
    ) -> Tensor:
        rows, ctx.flight = x.detach(), None
        if known is None:
            sent = rows @ left.t() if narrows else rows
            wanted = ctx.needs_input_grad[4] or (narrows and ctx.needs_input_grad[5])
            ctx.flight = Flight([LinearCall(call.blocks, sent, call.weight, call.mean)], schedule, wanted)
            ctx.shape = sent.shape
            (known,) = ctx.flight.start()
            out = rows @ right.t()
            ctx.flight.finish([known])
        else:
            out = rows @ right.t()
        out = out.add_(known) if narrows else out.addmm_(known, left.t())
        ctx.narrows, ctx.biased = narrows, bias is not None
        ctx.aggregate = None if narrows else Borrowed(known)
        ctx.save_for_backward(x, left, right)
        return out if bias is None else out.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, left, right = ctx.saved_tensors
        flight: Flight | None = ctx.flight
        sums = of_sent = of_x = of_left = of_bias = of_right = None
        if ctx.aggregate is not None:
            of_left = gradient.t() @ ctx.aggregate.give_back()
        if flight is not None and flight.wanted:
            of_sent = gradient.new_zeros(ctx.shape)
            sums = _send(ctx, flight, gradient, left, of_sent)
        if ctx.needs_input_grad[7]:
            of_right = gradient.t() @ x
        if ctx.biased and ctx.needs_input_grad[6]:
            of_bias = gradient.sum(0)
        if ctx.needs_input_grad[4]:
            shared = of_sent is not None and not ctx.narrows  # both are gradients of x
            of_x = of_sent.addmm_(gradient, right) if shared else gradient @ right  # type: ignore[union-attr]
        if flight is not None and sums is not None and of_sent is not None:
            flight.add_local([sums])
            flight.land()
            flight.gradients = {}
            if ctx.narrows:
                of_left = of_sent.t() @ x if ctx.needs_input_grad[5] else None
                of_x = None if of_x is None else of_x.addmm_(of_sent, left)
        return None, None, None, None, of_x, of_left, of_bias, of_right


def _send(ctx: Any, flight: Flight, gradient: Tensor, left: Tensor, of_sent: Tensor) -> Tensor:
    """Send the gradients of remote rows, and return that of the sums [num_targets, out or in]."""
    flight.gradients = {0: of_sent}
    (edges,) = flight.sums
    sums = gradient @ left if not ctx.narrows else gradient
    if edges.mean and not ctx.narrows:
        sums.div_(edges.blocks.divisor(sums))
    else:
        sums = edges.of_sum(sums)
    flight.send([sums])
    return sums
