"""Aggregation block by block: the backward pass recomputes blocks (mode 1), or the autograd graph keeps them (2).

Maxima and minima of unchanged source rows are computed by kernels, without materialised messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtrain.engine.edges import EdgeBlocks
from gtrain.engine.halo import HaloExchange, PendingExchange, add_rows, count_needed, push, stream
from gtrain.engine.kernels import extreme_backward, extreme_forward, extreme_state
from gtrain.engine.precision import sum_dtype
from gtrain.engine.propagate_call import PropagateCall, message_parameters, random_state, replayed_random
from gtrain.engine.schedule import Schedule

MessageGradient = Callable[[Tensor, Tensor], Tensor]
"""Computes the gradient of a block's messages from their targets and the messages."""


def aggregate_by_blocks(call: PropagateCall, schedule: Schedule) -> Tensor:
    """Return the reduced messages, [num_targets, ...]; in mode 1 nothing of a block outlives the forward pass."""
    if schedule.mode == 1:
        return _Recomputed.apply(call, schedule, *call.tensors, *message_parameters(call))
    messages = [call.message(r, tensors) for r, tensors in kept_blocks(call, schedule)]
    return _ExtremeOfMessages.apply(call, *messages) if call.reduce in ("max", "min") else mean_or_sum(call, messages)


def kept_blocks(call: PropagateCall, schedule: Schedule) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield the call's tensors for each block, as nodes of the autograd graph."""
    tag = call.blocks.exchange.group.next_tag()
    count_needed(call.rows)
    count_needed([row for row in call.rows if row[1].requires_grad])
    for r, block in stream(call.rows, schedule.window):
        local = [call.tensors[i] for i in call.sources]
        if r > 0 and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in local):
            block = list(_Fetched.apply(call.blocks.exchange, r, tag, len(local), *local, *block))
        yield r, call.with_block(call.tensors, block)


class _Fetched(torch.autograd.Function):
    """One block of several row tensors as a node of the graph: its gradients go to the owner in one message."""

    @staticmethod
    def forward(ctx: Any, exchange: HaloExchange, r: int, tag: int, count: int, *tensors: Tensor) -> Any:  # type: ignore[override]
        ctx.exchange, ctx.r, ctx.tag = exchange, r, tag
        local, block = tensors[:count], tensors[count:]
        ctx.shapes = [(tensor.shape, tensor.dtype) for tensor in local]
        ctx.mark_non_differentiable(*(b for b in block if not b.is_floating_point()))
        # Views, because autograd treats an output that is an input itself in a special way.
        return tuple(rows.view_as(rows) for rows in block)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        needed = [i for i, need in enumerate(ctx.needs_input_grad[4 : 4 + len(gradients)]) if need]
        transfer = push([(ctx.exchange, gradients[i].contiguous()) for i in needed], ctx.r, ctx.tag)
        local: list[Tensor | None] = [None] * len(gradients)
        for i, arrived in zip(needed, transfer.wait(), strict=True):
            shape, dtype = ctx.shapes[i]
            local[i] = total = torch.zeros(shape, dtype=dtype, device=arrived.device)
            ctx.exchange.add_gradients(ctx.r, total, arrived)
        return None, None, None, None, *local, *(None for _ in gradients)


class _RunningSum:
    """Sum or mean of the messages of all blocks, which may be added in any order; at least in float32."""

    def __init__(self, call: PropagateCall) -> None:
        self._call = call
        self._out: Tensor | None = None
        self._dtype: torch.dtype | None = None

    def add(self, r: int, messages: Tensor) -> None:
        if self._out is None:
            self._dtype, shape = messages.dtype, (self._call.blocks.num_targets, *messages.shape[1:])
            self._out = messages.new_zeros(shape, dtype=sum_dtype(messages.dtype))
        add_rows(self._out, self._call.blocks.blocks[r].targets, messages)

    def finish(self) -> tuple[Tensor, ...]:
        """Return the reduction, in the messages' dtype."""
        assert self._out is not None
        out = self._out / self._call.blocks.divisor(self._out) if self._call.reduce == "mean" else self._out
        return (out.to(self._dtype),)


def mean_or_sum(call: PropagateCall, messages: Sequence[Tensor]) -> Tensor:
    """Return the reduction of all blocks' messages."""
    return _reduce(_RunningSum(call), messages)[0]


class _RunningExtreme:
    """Running maximum or minimum over blocks, with the number of messages that attain it.

    Ties share the gradient as :func:`gtrain.engine.blocks.extreme` says.
    """

    def __init__(self, call: PropagateCall) -> None:
        self._call, self._largest = call, call.reduce == "max"
        self._out: Tensor | None = None
        self._ties: Tensor | None = None

    def add(self, r: int, messages: Tensor) -> None:
        targets = self._call.blocks.blocks[r].targets
        index = targets.view(-1, *[1] * (messages.dim() - 1)).expand_as(messages)
        nothing = float("-inf") if self._largest else float("inf")
        block = messages.new_full((self._call.blocks.num_targets, *messages.shape[1:]), nothing)
        block.scatter_reduce_(0, index, messages, "amax" if self._largest else "amin")
        attained = messages == block.gather(0, index)
        # bfloat16 cannot count beyond 256.
        ties = torch.zeros_like(block, dtype=sum_dtype(block.dtype))
        ties.scatter_add_(0, index, attained.to(ties.dtype))
        if self._out is None or self._ties is None:
            self._out, self._ties = block, ties
            return
        better = block > self._out if self._largest else block < self._out
        # A strictly better block starts the count again, an equal one adds to it.
        self._ties = torch.where(better, ties, self._ties + ties * (block == self._out))
        self._out = torch.where(better, block, self._out)

    def finish(self) -> tuple[Tensor, ...]:
        """Return the extreme, 0 for a target without messages, and the divisor of each tie's gradient."""
        assert self._out is not None and self._ties is not None
        empty = self._call.blocks.in_degree.view(-1, *[1] * (self._out.dim() - 1)) == 0
        out = self._out.masked_fill(empty, 0.0)
        return out, (self._ties + (out == 0)).clamp_(min=1)


def _reduce(running: _RunningSum | _RunningExtreme, messages: Sequence[Tensor]) -> tuple[Tensor, ...]:
    for r, block in enumerate(messages):
        running.add(r, block)
    return running.finish()


def _sum_gradient(gradient: Tensor, targets: Tensor, messages: Tensor) -> Tensor:
    """Return the gradient of a block's messages from that of their sum."""
    return gradient.index_select(0, targets)


def _extreme_gradient(share: Tensor, out: Tensor, targets: Tensor, messages: Tensor) -> Tensor:
    """Return the gradient of a block's messages, from each tie's share."""
    return share.index_select(0, targets) * (messages == out.index_select(0, targets))


class _ExtremeOfMessages(torch.autograd.Function):
    """Maximum or minimum over all blocks' messages, which the graph keeps."""

    @staticmethod
    def forward(ctx: Any, call: PropagateCall, *messages: Tensor) -> Tensor:  # type: ignore[override]
        out, ties = _reduce(_RunningExtreme(call), messages)
        ctx.call = call
        ctx.save_for_backward(out, ties, *messages)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        out, ties, *messages = ctx.saved_tensors
        share, blocks = gradient / ties, ctx.call.blocks.blocks
        return None, *(_extreme_gradient(share, out, blocks[r].targets, m) for r, m in enumerate(messages))


class _Recomputed(torch.autograd.Function):
    """Sequential aggregation with rematerialisation (Mostafa, MLSys 2022, algorithms 1 and 2).

    Forward: fetch a block, compute its messages, reduce them, free them. Backward: fetch the block again, compute its
    messages with autograd and the same random numbers, send the gradient of its rows to their owner, free them.
    """

    @staticmethod
    def forward(ctx: Any, call: PropagateCall, schedule: Schedule, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        ctx.call, ctx.schedule = call, schedule
        ctx.random = random_state(tensors[0].device)
        data = list(tensors[: len(call.tensors)])
        count_needed(call.rows)
        running = _RunningExtreme(call) if call.reduce in ("max", "min") else _RunningSum(call)
        for r, block in stream(call.rows, schedule.window):
            running.add(r, call.message(r, call.with_block(data, block)))
            # Frees the block before the next one is waited for.
            del block
        results = running.finish()
        ctx.save_for_backward(*tensors, *(results if len(results) > 1 else ()))
        return results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        call: PropagateCall = ctx.call
        saved = list(ctx.saved_tensors)
        if call.reduce in ("max", "min"):
            *saved, out, ties = saved
            message_gradient = partial(_extreme_gradient, gradient / ties, out)
        else:
            mean = call.reduce == "mean"
            message_gradient = partial(_sum_gradient, gradient / call.blocks.divisor(gradient) if mean else gradient)
        replay = Replay(call, saved, list(ctx.needs_input_grad[2:]))
        with replayed_random(ctx.random):
            replay.run(ctx.schedule, message_gradient)
        return None, None, *replay.gradients


class Replay:
    """A backward pass over blocks: fetch, recompute messages with autograd, send the gradients of rows, free.

    Args:
        call: the aggregation.
        saved: its tensors and the parameters that its messages use.
        needed: for each of these whether it needs a gradient.
    """

    def __init__(self, call: PropagateCall, saved: list[Tensor], needed: list[bool]) -> None:
        self._call, self._saved = call, saved
        self._data, self._parameters = saved[: len(call.tensors)], saved[len(call.tensors) :]
        self._totals = {
            i: torch.zeros_like(t, dtype=sum_dtype(t.dtype))
            for i, (t, need) in enumerate(zip(saved, needed, strict=True))
            if need
        }
        self._sent = [i for i in call.sources if i in self._totals]
        self._pending: tuple[int, PendingExchange] | None = None

    @property
    def gradients(self) -> list[Tensor | None]:
        """The gradients of ``saved``; None for tensors that need none."""
        return [self._totals[i].to(t.dtype) if i in self._totals else None for i, t in enumerate(self._saved)]

    def run(self, schedule: Schedule, message_gradient: MessageGradient) -> None:
        """Process all blocks.

        Args:
            schedule: when they are fetched.
            message_gradient: see :data:`MessageGradient`.
        """
        exchange = self._call.blocks.exchange
        rows = [(exchange, self._data[i]) for i in self._call.sources]
        tag = exchange.group.next_tag()
        count_needed([(exchange, self._data[i]) for i in self._sent])
        for r, block in stream(rows, schedule.window):
            self._process(r, block, message_gradient, tag)
            del block
        self._receive()

    def _process(self, r: int, rows: list[Tensor], message_gradient: MessageGradient, tag: int) -> None:
        tensors, exchange = self._call.with_block(self._data, rows), self._call.blocks.exchange
        # Computed while the reader's gradients of the former round are in flight.
        gradients = self._gradients(r, tensors, message_gradient)
        self._receive()
        sent = self._sent if r > 0 else []
        for i, gradient in gradients.items():
            if i not in sent:
                self._totals[i].add_(gradient)
        if sent:
            # Every rank sends, if only zeros: its peers expect a message.
            blocks = [gradients[i] if i in gradients else torch.zeros_like(tensors[i]) for i in sent]
            self._pending = r, push([(exchange, block) for block in blocks], r, tag)

    def _gradients(self, r: int, tensors: list[Tensor], message_gradient: MessageGradient) -> dict[int, Tensor]:
        """Return the gradients that block r contributes, by position; without those that are zero."""
        if not len(self._call.blocks.blocks[r]) or not self._totals:
            return {}
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_(i in self._totals) for i, tensor in enumerate(tensors)]
            messages = self._call.message(r, leaves)
        if not messages.requires_grad:
            return {}
        inputs = [*leaves, *self._parameters]
        gradient = message_gradient(self._call.blocks.blocks[r].targets, messages.detach()).to(messages.dtype)
        needed = [inputs[i] for i in self._totals]
        gradients = torch.autograd.grad(messages, needed, gradient, allow_unused=True)
        return {i: value for i, value in zip(self._totals, gradients, strict=True) if value is not None}

    def _receive(self) -> None:
        """Add the gradients that the reader sent in the round before."""
        if self._pending is not None:
            r, transfer = self._pending
            for i, arrived in zip(self._sent, transfer.wait(), strict=True):
                self._call.blocks.exchange.add_gradients(r, self._totals[i], arrived)
            self._pending = None


def extreme(blocks: EdgeBlocks, x: Tensor, largest: bool, schedule: Schedule) -> Tensor:
    """Return the largest, or smallest, source value of each target, column by column.

    Ties share the gradient evenly, counted over all blocks. ``scatter_reduce``, the reference, starts from zeros and
    counts that start as a tie where the extreme is exactly 0, so a zero extreme counts one tie more here as well.

    Args:
        blocks: the edges.
        x: the rank's source rows, [num_local, C].
        largest: maximum, not minimum.
        schedule: how blocks are fetched; mode 1 fetches them again in the backward pass, others keep them.

    Returns:
        [num_targets, C]; 0 where a target has no edge.
    """
    # The kernels count ties in the dtype of rows.
    return _ExtremeOfRows.apply(blocks, largest, schedule, x.to(sum_dtype(x.dtype))).to(x.dtype)


class _ExtremeOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, blocks: EdgeBlocks, largest: bool, schedule: Schedule, x: Tensor) -> Tensor:  # type: ignore[override]
        rows = [(blocks.exchange, x.detach())]
        count_needed(rows, passes=2 if ctx.needs_input_grad[3] else 1)
        state, kept = extreme_state(blocks.num_targets, x, largest), []
        for r, (block,) in stream(rows, schedule.window):
            extreme_forward(blocks.blocks[r].by_target, block, largest, state)
            if r > 0 and schedule.mode != 1:
                kept.append(block)
        out = state.out.masked_fill_((blocks.in_degree == 0).unsqueeze(1), 0.0)
        ctx.blocks, ctx.schedule = blocks, schedule
        ctx.save_for_backward(x, out, state.ties.add_(out == 0).clamp_(min=1), *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, out, ties, *kept = ctx.saved_tensors
        blocks: EdgeBlocks = ctx.blocks
        exchange, share, dx = blocks.exchange, gradient / ties, torch.zeros_like(x)
        remote: Iterable[Tensor] = kept
        if ctx.schedule.mode == 1:
            remote = (block for r, (block,) in stream([(exchange, x.detach())], ctx.schedule.window) if r > 0)
        tag, transfers = exchange.group.next_tag(), deque[tuple[int, PendingExchange]]()

        def receive(most: int) -> None:
            while len(transfers) > most:
                r, transfer = transfers.popleft()
                exchange.add_gradients(r, dx, transfer.wait()[0])

        for r, block in enumerate(remote, start=1):
            gradient_of_block = torch.zeros_like(block)
            extreme_backward(blocks.blocks[r].by_source, block, out, share, gradient_of_block)
            transfers.append((r, push([(exchange, gradient_of_block)], r, tag)))
            receive(1 if ctx.schedule.mode == 1 else exchange.rounds)
        extreme_backward(blocks.blocks[0].by_source, x, out, share, dx)
        receive(0)
        return None, None, None, dx
