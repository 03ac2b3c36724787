"""Maximum and minimum of unchanged source rows, by kernels over blocks; no message is materialised."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtrain_sar.config import Schedule
from gtrain_sar.edges import EdgeBlocks
from gtrain_sar.halo import count_needed, push, stream
from gtrain_sar.kernels import extreme_backward, extreme_forward, extreme_state
from gtrain_sar.point_to_point import PendingExchange


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
    return _Extreme.apply(blocks, largest, schedule, x)


class _Extreme(torch.autograd.Function):
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
