"""Aggregation block by block: with recomputation in the backward pass (mode 1), or with the graph kept (mode 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtrain_sar.autograd import random_state, replayed_random
from gtrain_sar.config import Schedule
from gtrain_sar.halo import HaloExchange, add_rows, count_needed, push, stream
from gtrain_sar.point_to_point import PendingExchange
from gtrain_sar.propagate_call import PropagateCall, message_parameters


def aggregate_by_blocks(call: PropagateCall, schedule: Schedule) -> Tensor:
    """Reduced messages, [num_targets, ...]; in mode 1 nothing of a block survives the forward pass."""
    if schedule.mode != 1:
        return _kept(call, schedule)
    out: Tensor = _Recomputed.apply(call, schedule, *call.tensors, *message_parameters(call))
    return out


def _kept(call: PropagateCall, schedule: Schedule) -> Tensor:
    """Mode 2: every block's messages stay in the autograd graph."""
    messages = [call.message(r, tensors) for r, tensors in kept_blocks(call, schedule)]
    if call.reduce in ("max", "min"):
        extreme: Tensor = _Extreme.apply(call, *messages)
        return extreme
    return mean_or_sum(call, messages)


def kept_blocks(call: PropagateCall, schedule: Schedule) -> Iterator[tuple[int, list[Tensor]]]:
    """The call's tensors for each block, as steps of the autograd graph."""
    tag = call.blocks.exchange.group.next_tag()
    count_needed(call.rows)
    count_needed([row for row in call.rows if row[1].requires_grad])
    for r, block in stream(call.rows, schedule.window):
        if r > 0 and torch.is_grad_enabled() and any(call.tensors[i].requires_grad for i in call.sources):
            own = [call.tensors[i] for i in call.sources]
            block = list(_Fetched.apply(call.blocks.exchange, r, tag, len(own), *own, *block))
        yield r, call.with_block(call.tensors, block)


class _Fetched(torch.autograd.Function):
    """One block of several row tensors as a step of the graph: gradients go back to the owners in one message."""

    @staticmethod
    def forward(ctx: Any, exchange: HaloExchange, r: int, tag: int, count: int, *tensors: Tensor) -> Any:  # type: ignore[override]
        ctx.exchange, ctx.r, ctx.tag = exchange, r, tag
        own, block = tensors[:count], tensors[count:]
        ctx.shapes = [(tensor.shape, tensor.dtype) for tensor in own]
        ctx.mark_non_differentiable(*(b for b in block if not b.is_floating_point()))
        return tuple(rows.view_as(rows) for rows in block)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        wanted = [i for i, need in enumerate(ctx.needs_input_grad[4 : 4 + len(gradients)]) if need]
        transfer = push([(ctx.exchange, gradients[i].contiguous()) for i in wanted], ctx.r, ctx.tag)
        found: list[Tensor | None] = [None] * len(gradients)
        for i, arrived in zip(wanted, transfer.wait(), strict=True):
            shape, dtype = ctx.shapes[i]
            own = torch.zeros(shape, dtype=dtype, device=arrived.device)
            add_rows(own, ctx.exchange.send_rows[ctx.r], arrived)
            found[i] = own
        return None, None, None, None, *found, *(None for _ in gradients)


class _Sum:
    """Adds messages to their targets; a block may be added at any time."""

    def __init__(self, call: PropagateCall) -> None:
        self._call = call
        self._out: Tensor | None = None

    def add(self, r: int, messages: Tensor) -> None:
        if self._out is None:
            self._out = messages.new_zeros((self._call.blocks.num_targets, *messages.shape[1:]))
        add_rows(self._out, self._call.blocks.blocks[r].targets, messages)

    @property
    def out(self) -> Tensor:
        assert self._out is not None
        return self._out


def mean_or_sum(call: PropagateCall, messages: Sequence[Tensor]) -> Tensor:
    """The reduction of all blocks' messages."""
    total = _Sum(call)
    for r, block in enumerate(messages):
        total.add(r, block)
    return _reduced(call, total.out)


def _reduced(call: PropagateCall, total: Tensor) -> Tensor:
    return total / call.blocks.divisor(total) if call.reduce == "mean" else total


class _RunningExtreme:
    """Running maximum or minimum over blocks, with the number of messages that attain it.

    Ties share the gradient evenly, counted over all blocks. ``scatter_reduce``, the reference, starts from zeros and
    counts that start as one more tie where the extreme is exactly 0, so a zero extreme counts one more here as well.
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
        ties = torch.zeros_like(block).scatter_add_(0, index, (messages == block.gather(0, index)).to(block.dtype))
        if self._out is None or self._ties is None:
            self._out, self._ties = block, ties
            return
        better = block > self._out if self._largest else block < self._out
        self._ties = torch.where(better, ties, self._ties + ties * (block == self._out))
        self._out = torch.where(better, block, self._out)

    def finish(self) -> tuple[Tensor, Tensor]:
        """The extreme (0 where no message arrived) and what each tie's gradient is divided by."""
        assert self._out is not None and self._ties is not None
        empty = self._call.blocks.in_degree.view(-1, *[1] * (self._out.dim() - 1)) == 0
        out = self._out.masked_fill(empty, 0.0)
        return out, (self._ties + (out == 0)).clamp_(min=1)


def _extreme_gradient(gradient: Tensor, out: Tensor, targets: Tensor, messages: Tensor) -> Tensor:
    """Gradient of a block's messages, ``gradient`` being each tie's share already."""
    return gradient.index_select(0, targets) * (messages == out.index_select(0, targets))


class _Extreme(torch.autograd.Function):
    """Maximum or minimum over all blocks' messages, which the graph keeps."""

    @staticmethod
    def forward(ctx: Any, call: PropagateCall, *messages: Tensor) -> Tensor:  # type: ignore[override]
        running = _RunningExtreme(call)
        for r, block in enumerate(messages):
            running.add(r, block)
        out, ties = running.finish()
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
    """Sequential aggregation with rematerialisation.

    Forward: fetch a block, compute its messages, reduce, forget. Backward: fetch the block again, compute its messages
    with autograd and the same random numbers, send the gradient of its rows to their owner, forget.
    """

    @staticmethod
    def forward(ctx: Any, call: PropagateCall, schedule: Schedule, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        ctx.call, ctx.schedule = call, schedule
        ctx.random = random_state(tensors[0].device)
        data = list(tensors[: len(call.tensors)])
        count_needed(call.rows)
        extreme = call.reduce in ("max", "min")
        running: Any = _RunningExtreme(call) if extreme else _Sum(call)
        for r, block in stream(call.rows, schedule.window):
            running.add(r, call.message(r, call.with_block(data, block)))
            del block
        if extreme:
            out, ties = running.finish()
            ctx.save_for_backward(*tensors, out, ties)
            return out
        ctx.save_for_backward(*tensors)
        return _reduced(call, running.out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        call: PropagateCall = ctx.call
        saved, of_block = list(ctx.saved_tensors), None
        if call.reduce in ("max", "min"):
            *saved, out, ties = saved
            share = gradient / ties
            of_block = partial(_extreme_gradient, share, out)
        elif call.reduce == "mean":
            gradient = gradient / call.blocks.divisor(gradient)
        replay = Replay(call, saved, list(ctx.needs_input_grad[2:]))
        with replayed_random(ctx.random):
            replay.run(ctx.schedule, of_block or partial(_sum_gradient, gradient))
        return None, None, *replay.gradients


def _sum_gradient(gradient: Tensor, targets: Tensor, messages: Tensor) -> Tensor:
    return gradient.index_select(0, targets)


class Replay:
    """A backward pass over blocks: fetch, compute messages again with autograd, send the gradients of rows, forget.

    Args:
        call: what was aggregated.
        saved: its tensors and the parameters that its messages use.
        needed: which of them need a gradient.

    Attributes:
        gradients: of ``saved``; None where it needs none.
    """

    def __init__(self, call: PropagateCall, saved: list[Tensor], needed: list[bool]) -> None:
        self.call, self.needed = call, needed
        count = len(call.tensors)
        self.data, self.parameters = saved[:count], saved[count:]
        self.gradients = [torch.zeros_like(t) if need else None for t, need in zip(saved, needed, strict=True)]
        self.travel = [i for i in call.sources if needed[i]]
        self.leaving: list[tuple[int, PendingExchange]] = []

    def run(self, schedule: Schedule, of_messages: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Work off all blocks.

        Args:
            schedule: how they are fetched.
            of_messages: gradient of a block's messages, given its targets and the messages.
        """
        exchange = self.call.blocks.exchange
        rows = [(exchange, self.data[i]) for i in self.call.sources]
        tag = exchange.group.next_tag()
        count_needed([(exchange, self.data[i]) for i in self.travel])
        for r, block in stream(rows, schedule.window):
            self._block(r, block, of_messages, tag)
            del block
        self._arrive()

    def _block(self, r: int, rows: list[Tensor], of_messages: Callable[[Tensor, Tensor], Tensor], tag: int) -> None:
        tensors = self.call.with_block(self.data, rows)
        wanted = [i for i, need in enumerate(self.needed) if need]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if len(self.call.blocks.blocks[r]) and wanted:
            found = self._gradients(r, tensors, wanted, of_messages)
        self._arrive()
        self._hand_on(r, dict(zip(wanted, found, strict=True)), tensors, tag)

    def _gradients(
        self, r: int, tensors: list[Tensor], wanted: list[int], of_messages: Callable[[Tensor, Tensor], Tensor]
    ) -> Sequence[Tensor | None]:
        """Of the tensors and parameters that are wanted, from block r alone."""
        with torch.enable_grad():
            leaves = [t.detach() for t in tensors]
            for leaf, need in zip(leaves, self.needed, strict=False):
                leaf.requires_grad_(need)
            messages = self.call.message(r, leaves)
        if not messages.requires_grad:
            return [None] * len(wanted)
        inputs = [*leaves, *self.parameters]
        gradient = of_messages(self.call.blocks.blocks[r].targets, messages.detach())
        return torch.autograd.grad(messages, [inputs[i] for i in wanted], gradient, allow_unused=True)

    def _hand_on(self, r: int, found: dict[int, Tensor | None], inputs: list[Tensor], tag: int) -> None:
        exchange, leaving = self.call.blocks.exchange, self.travel if r > 0 else []
        for i, value in found.items():
            total = self.gradients[i]
            if value is not None and i not in leaving and total is not None:
                total += value
        if leaving:  # every rank sends, even zeros, for its peers expect it
            blocks = [torch.zeros_like(inputs[i]) if found[i] is None else found[i] for i in leaving]
            self.leaving.append((r, push([(exchange, b) for b in blocks if b is not None], r, tag)))

    def _arrive(self) -> None:
        """Take in the gradients that the peers sent in the round before."""
        for r, transfer in self.leaving:
            for i, arrived in zip(self.travel, transfer.wait(), strict=True):
                total = self.gradients[i]
                assert total is not None
                add_rows(total, self.call.blocks.exchange.send_rows[r], arrived)
        self.leaving = []
