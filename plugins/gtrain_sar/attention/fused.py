"""Attention of GAT over blocks: running maximum and sum, coefficients never held for a layer's edges.

As flash attention does for sequences (Dao et al. 2022): the forward pass keeps the logarithm of each target's sum of
exponentials, from which the backward pass makes any coefficient again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtrain.nn.dropout import Mask
from gtrain_sar.attention.reverse import reverse
from gtrain_sar.attention.sources import extremes_of, send_targets
from gtrain_sar.config import Schedule
from gtrain_sar.edges import EdgeBlocks, hashed
from gtrain_sar.halo import Make, Rows, add_rows, count_needed, in_order, push, stream
from gtrain_sar.kernels import AttentionState, attention_backward, attention_finish, attention_forward
from gtrain_sar.messages import InFlight

_CHUNK = 1 << 13  # rows of a product that are held at once


def attend(
    blocks: EdgeBlocks,
    x: Tensor,
    source_logit: Tensor,
    target_logit: Tensor,
    slope: float,
    dropout: float,
    schedule: Schedule,
) -> Tensor:
    """Sum of source rows weighted by ``softmax_j(leaky_relu(source_logit[j] + target_logit[i]))``.

    Args:
        blocks: the edges j -> i.
        x: own source rows, [num_local, H, C].
        source_logit: [num_local, H].
        target_logit: [num_targets, H].
        slope: of leaky_relu below zero.
        dropout: chance that a coefficient is dropped.
        schedule: how blocks are fetched. No remote rows are kept: the backward pass sends the targets' gradients to the
            owners of the sources, which have the rows. Where that takes more bytes than sending the rows' gradients,
            mode 1 fetches rows again, and the others keep them.

    Returns:
        [num_targets, H, C]; 0 where a target has no edge.
    """
    out: Tensor = _Attention.apply(blocks, schedule, slope, Mask.next(dropout), x, source_logit, target_logit)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, blocks: EdgeBlocks, schedule: Schedule, slope: float, keep: Mask, *tensors: Tensor
    ) -> Tensor:
        x, source, target = (tensor.detach().contiguous() for tensor in tensors)
        ctx.settings = blocks, schedule, slope, keep
        out, *rest = attention_blocks(ctx.settings, x, source, target, trains=any(ctx.needs_input_grad[4:]))
        ctx.save_for_backward(x, source, target, out, *rest)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, source, target, out, lse, *rest = ctx.saved_tensors
        gradient = gradient.contiguous()
        backward = AttentionBackward(ctx.settings, gradient, x, source, target, lse, partial(row_dots, gradient, out))
        attention_backward_blocks(backward, rest)
        return None, None, None, None, backward.dx, backward.dsource, backward.dtarget


Dots = Callable[[Tensor, int, int], None]
"""Makes the rows of a tensor from one to before another."""

Finish = Callable[["AttentionBackward", Tensor | None], None]
"""Takes in own rows whose gradients are complete, int64, or all of them."""

Settings = tuple[EdgeBlocks, Schedule, float, Mask]
"""The edges, how blocks are fetched, the slope of leaky_relu below zero, dropout of coefficients."""


def attention_blocks(
    settings: Settings, x: Tensor, source: Tensor, target: Tensor, *, trains: bool, make: Make | None = None
) -> tuple[Tensor, ...]:
    """The forward pass over all blocks.

    Args:
        settings: how to go about it.
        x, source, target: own rows [n, H, C] and logits [n, H] of both ends.
        trains: whether gradients of x will be sent.
        make: makes the first so many rows of ``x``, ``source`` and ``target``; None: they are there.

    Returns:
        The result [T, H, C], the logarithms of the sums of exponentials [T, H], and what the backward pass asks for of
        remote blocks: the extremes of their logits where the owners answer; else, but in mode 1, rows and logits.
    """
    blocks, schedule, slope, keep = settings
    rows: list[Rows] = [(blocks.exchange, x), (blocks.exchange, source)]
    count_needed(rows, passes=2 if trains else 1)
    rest: list[Tensor] = []
    answered = trains and _owners_answer(blocks, schedule)
    arriving = stream(rows, schedule.window, make)
    first = next(arriving)  # rows are on their way before memory is filled
    out = x.new_zeros((blocks.num_targets, *x.shape[1:]))
    state = AttentionState(out, target.new_full(target.shape, float("-inf")), torch.zeros_like(target))
    for r, (block_x, block_source) in chain([first], arriving):
        attention_forward(hashed(blocks)[r].by_target, block_x, block_source, target, slope, state, keep)
        if r > 0 and answered:
            rest.append(extremes_of(block_source))
        elif r > 0 and schedule.mode != 1:
            rest += [block_x, block_source]
    lse = attention_finish(state)
    return state.out, lse, *rest


def attention_backward_blocks(backward: AttentionBackward, rest: Sequence[Tensor]) -> None:
    """The backward pass over all blocks; ``rest`` as :func:`attention_blocks` returned it."""
    blocks, schedule = backward.blocks, backward.schedule
    if _owners_answer(blocks, schedule):
        send_targets(backward, list(rest), schedule.window)
    else:
        _push_sources(backward, _remote_blocks(backward, schedule, list(rest)), schedule.window)


def _owners_answer(blocks: EdgeBlocks, schedule: Schedule) -> bool:
    """Whether the owners of the sources make their gradients; all ranks must ask together."""
    return blocks.exchange.rounds > 1 and reverse(blocks).pays(schedule.mode)


class AttentionBackward:
    """The tensors of one backward pass.

    Args:
        settings: how to go about it.
        grad: [T, H, C], of the result.
        x: rows as in the forward pass, or what makes them again once they are asked for.
        source, target: as in the forward pass.
        lse: [T, H], the logarithm of the sum of exponentials.
        dots: makes some rows of ``<grad, out>``, [T, H]: those from a first one to before another, into the tensor.
        finish: told this and which own rows' gradients are complete, int64, or None for all; each row once.

    The gradients so far are made where they are first asked for: when rows are on their way.

    Attributes:
        delta: [T, H], what ``dots`` has made so far.
        make_delta: makes its first so many rows.
    """

    def __init__(
        self,
        settings: Settings,
        grad: Tensor,
        x: Tensor | Callable[[], Tensor],
        source: Tensor,
        target: Tensor,
        lse: Tensor,
        dots: Dots,
        finish: Finish | None = None,
    ) -> None:
        self.blocks, self.schedule, self.slope, self.keep = settings
        self.grad, self._x, self.source, self.target = grad, x, source, target
        self.lse, self.delta, self._finish = lse, torch.empty_like(lse), finish
        self.make_delta = in_order(partial(dots, self.delta))

    @cached_property
    def x(self) -> Tensor:
        """[n, H, C]."""
        return self._x if isinstance(self._x, Tensor) else self._x()

    @cached_property
    def dx(self) -> Tensor:
        """[n, H, C]."""
        return torch.zeros_like(self.x)

    @cached_property
    def dsource(self) -> Tensor:
        """[n, H]."""
        return torch.zeros_like(self.source)

    @cached_property
    def dtarget(self) -> Tensor:
        """[T, H]."""
        return torch.zeros_like(self.target)

    def block(self, r: int, x: Tensor, source: Tensor, dx: Tensor, dsource: Tensor) -> None:
        """Add block r's gradients, its rows being here."""
        self.make_delta(len(self.delta))
        attention_backward(
            hashed(self.blocks)[r].by_source, x, source, self.target, self.lse, self.delta, self.grad, self.slope,
            self.keep, dx, dsource, self.dtarget,
        )  # fmt: skip

    def finish(self, rows: Tensor | None) -> None:
        """Say that the gradients of these own rows, int64, are complete; None: of all."""
        if self._finish is not None and (rows is None or len(rows)):
            self._finish(self, rows)

    def local(self) -> None:
        """Add the gradients of edges within the part."""
        self.make_delta(len(self.delta))  # lets go of the layer's result, before rows are made
        self.block(0, self.x, self.source, self.dx, self.dsource)


def _remote_blocks(backward: AttentionBackward, schedule: Schedule, kept: list[Tensor]) -> Iterable[Sequence[Tensor]]:
    """Remote rows in round order: kept, or in mode 1 fetched again."""
    if schedule.mode != 1:
        return zip(kept[::2], kept[1::2], strict=True)
    rows = [(backward.blocks.exchange, backward.x), (backward.blocks.exchange, backward.source)]
    return (block for r, block in stream(rows, schedule.prefetch) if r > 0)


def _push_sources(backward: AttentionBackward, remote: Iterable[Sequence[Tensor]], window: int | None) -> None:
    """Gradients of remote rows, on their way to the owners while the local block is worked off."""
    exchange = backward.blocks.exchange
    flying, tag, landed = deque[InFlight](), exchange.group.next_tag(), 0
    for r, (x, source) in enumerate(remote, start=1):
        dx, dsource = torch.zeros_like(x), torch.zeros_like(source)
        backward.block(r, x, source, dx, dsource)
        flying.append(push([(exchange, dx), (exchange, dsource)], r, tag))
        while window is not None and len(flying) > window:
            landed += 1
            _land(backward, landed, flying.popleft())
    backward.local()
    for r, flight in enumerate(flying, start=landed + 1):
        _land(backward, r, flight)
    backward.finish(None)


def _land(backward: AttentionBackward, r: int, flight: InFlight) -> None:
    dx, dsource = flight.wait()
    add_rows(backward.dx, backward.blocks.exchange.send_rows[r], dx)
    add_rows(backward.dsource, backward.blocks.exchange.send_rows[r], dsource)


def row_dots(a: Tensor, b: Tensor, out: Tensor, low: int, high: int) -> None:
    """Some rows of ``out[i, h] = <a[i, h], b[i, h]>``, [n, H], without a product of the tensors' whole size."""
    for start in range(low, high, _CHUNK):
        part = slice(start, min(start + _CHUNK, high))
        torch.sum(a[part] * b[part], -1, out=out[part])
