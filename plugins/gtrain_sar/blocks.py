"""Aggregation block by block: with recomputation in the backward pass (mode 1), or with the graph kept (mode 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtrain_sar.call import PropagateCall, message_parameters
from gtrain_sar.halo import FetchedBlock, HaloExchange, InFlight, add_rows


def aggregate_recomputed(exchange: HaloExchange, call: PropagateCall, prefetch: int) -> Tensor:
    """Mode 1: nothing of a block survives the forward pass; [num_local, ...]."""
    parameters = message_parameters(call)
    out: Tensor = _Recomputed.apply(exchange, call, prefetch, *call.tensors, *parameters)
    return out


def aggregate_kept(exchange: HaloExchange, call: PropagateCall, prefetch: int) -> Tensor:
    """Mode 2: every block's messages stay in the autograd graph; [num_local, ...]."""
    tags = {i: exchange.group.next_tag() for i in call.sources}
    messages = []
    for r, block in exchange.stream([call.tensors[i] for i in call.sources], prefetch):
        tensors = list(call.tensors)
        for i, rows in zip(call.sources, block, strict=True):
            needs_way_back = r > 0 and tensors[i].requires_grad
            tensors[i] = FetchedBlock.apply(exchange, r, tags[i], tensors[i], rows) if needs_way_back else rows
        messages.append(call.message(r, tensors))
    if call.reduce in ("max", "min"):
        extreme: Tensor = _Extreme.apply(call, *messages)
        return extreme
    return _mean_or_sum(call, _Sum(call), messages)


class _Sum:
    """Adds messages to their targets; a block may be added at any time."""

    def __init__(self, call: PropagateCall) -> None:
        self._call = call
        self._out: Tensor | None = None

    def add(self, r: int, messages: Tensor) -> None:
        if self._out is None:
            self._out = messages.new_zeros((self._call.num_local, *messages.shape[1:]))
        add_rows(self._out, self._call.blocks.targets[r], messages)

    @property
    def out(self) -> Tensor:
        assert self._out is not None
        return self._out


def _mean_or_sum(call: PropagateCall, total: _Sum, messages: Sequence[Tensor]) -> Tensor:
    for r, block in enumerate(messages):
        total.add(r, block)
    return total.out / _divisor(call, total.out) if call.reduce == "mean" else total.out


def _divisor(call: PropagateCall, like: Tensor) -> Tensor:
    """In-degrees, at least 1, shaped to divide [num_local, ...]."""
    return call.blocks.in_degree.clamp(min=1).to(like.dtype).view(-1, *[1] * (like.dim() - 1))


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
        targets = self._call.blocks.targets[r]
        index = targets.view(-1, *[1] * (messages.dim() - 1)).expand_as(messages)
        nothing = float("-inf") if self._largest else float("inf")
        block = messages.new_full((self._call.num_local, *messages.shape[1:]), nothing)
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
        share, targets = gradient / ties, ctx.call.blocks.targets
        return None, *(_extreme_gradient(share, out, targets[r], m) for r, m in enumerate(messages))


class _Recomputed(torch.autograd.Function):
    """Sequential aggregation with rematerialisation.

    Forward: fetch a block, compute its messages, reduce, forget. Backward: fetch the block again, compute its messages
    with autograd and the same random numbers, send the gradient of its rows to their owner, forget.
    """

    @staticmethod
    def forward(ctx: Any, exchange: HaloExchange, call: PropagateCall, prefetch: int, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        ctx.exchange, ctx.call, ctx.prefetch = exchange, call, prefetch
        ctx.random = _random_state(tensors[0].device)
        data = list(tensors[: len(call.names)])
        extreme = call.reduce in ("max", "min")
        running: Any = _RunningExtreme(call) if extreme else _Sum(call)
        for r, block in exchange.stream([data[i] for i in call.sources], prefetch):
            running.add(r, call.message(r, _with_block(call, data, block)))
            del block
        if extreme:
            out, ties = running.finish()
            ctx.save_for_backward(*tensors, out, ties)
            return out
        ctx.save_for_backward(*tensors)
        return _mean_or_sum(call, running, ())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        call: PropagateCall = ctx.call
        replay = _Replay(ctx, gradient)
        with torch.random.fork_rng(devices=_cuda_devices(gradient.device)):
            _set_random_state(ctx.random)
            for r, block in ctx.exchange.stream([replay.data[i] for i in call.sources], ctx.prefetch):
                replay.block(r, block)
                del block
        return None, None, None, *replay.finish()


class _Replay:
    """The backward pass of :class:`_Recomputed` over the blocks."""

    def __init__(self, ctx: Any, gradient: Tensor) -> None:
        self.exchange: HaloExchange = ctx.exchange
        self.call: PropagateCall = ctx.call
        saved = list(ctx.saved_tensors)
        self.out = None
        if self.call.reduce in ("max", "min"):
            self.out, ties = saved[-2], saved[-1]
            gradient, saved = gradient / ties, saved[:-2]
        elif self.call.reduce == "mean":
            gradient = gradient / _divisor(self.call, gradient)
        self.gradient = gradient
        self.needed: list[bool] = list(ctx.needs_input_grad[3:])
        count = len(self.call.names)
        self.data, self.parameters = saved[:count], saved[count:]
        self.gradients = [torch.zeros_like(t) if need else None for t, need in zip(saved, self.needed, strict=True)]
        self.tags = {i: self.exchange.group.next_tag() for i in self.call.sources if self.needed[i]}
        self.leaving: list[tuple[int, int, InFlight]] = []

    def block(self, r: int, rows: list[Tensor]) -> None:
        """Compute block r's messages again and hand their gradients on."""
        with torch.enable_grad():
            leaves = [t.detach() for t in _with_block(self.call, self.data, rows)]
            for leaf, need in zip(leaves, self.needed, strict=False):
                leaf.requires_grad_(need)
            messages = self.call.message(r, leaves)
        inputs = [*leaves, *self.parameters]
        wanted = [i for i, need in enumerate(self.needed) if need]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if messages.requires_grad and wanted:
            found = torch.autograd.grad(
                messages, [inputs[i] for i in wanted], self._of_messages(r, messages), allow_unused=True
            )
        self._arrive()
        for i, value in zip(wanted, found, strict=True):
            self._hand_on(i, r, inputs[i], value)

    def _of_messages(self, r: int, messages: Tensor) -> Tensor:
        targets = self.call.blocks.targets[r]
        if self.out is not None:
            return _extreme_gradient(self.gradient, self.out, targets, messages.detach())
        return self.gradient.index_select(0, targets)

    def _hand_on(self, i: int, r: int, of: Tensor, value: Tensor | None) -> None:
        total = self.gradients[i]
        assert total is not None
        if r > 0 and i in self.tags:  # fetched rows: every rank sends, even zeros, for its peers expect it
            gradient = torch.zeros_like(of) if value is None else value
            self.leaving.append((i, r, self.exchange.push(gradient, r, self.tags[i])))
        elif value is not None:
            total += value

    def _arrive(self) -> None:
        """Take in the gradients that the peers sent in the round before."""
        for i, r, transfer in self.leaving:
            total = self.gradients[i]
            assert total is not None
            self.exchange.add(transfer.wait(), r, total)
        self.leaving = []

    def finish(self) -> list[Tensor | None]:
        """Gradients of the data and the parameters."""
        self._arrive()
        return self.gradients


def _with_block(call: PropagateCall, data: Sequence[Tensor], block: Sequence[Tensor]) -> list[Tensor]:
    tensors = list(data)
    for i, rows in zip(call.sources, block, strict=True):
        tensors[i] = rows
    return tensors


def _cuda_devices(device: torch.device) -> list[int]:
    return [device.index or 0] if device.type == "cuda" else []


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
