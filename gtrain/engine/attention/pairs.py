"""Attention of GATv2 and of transformers over blocks: a running maximum and sum, no number for each edge.

The backward pass computes the gradients of remote rows and sends them to their owners, as
:mod:`gtrain.engine.attention.fused` does for GAT where that takes fewer bytes than sending the targets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtrain.engine.edges import EdgeBlocks
from gtrain.engine.halo import OwnedRows, PendingExchange, count_needed, push, stream
from gtrain.engine.kernels import (
    PairGradients,
    PairInputs,
    TargetGradients,
    attention_finish,
    attention_state,
    pair_backward,
    pair_forward,
)
from gtrain.engine.precision import sum_dtype, without_autocast
from gtrain.engine.schedule import Schedule
from gtrain.nn.dropout import Mask


class PairSettings(NamedTuple):
    """Everything but tensors that attention is a function of.

    Attributes:
        blocks: the edges.
        schedule: when blocks are fetched.
        factor: slope of the leaky ReLU below 0, or factor of the inner product.
        dropout: of coefficients.
    """

    blocks: EdgeBlocks
    schedule: Schedule
    factor: float
    dropout: Mask


def attend_additive(
    blocks: EdgeBlocks, x: Tensor, target: Tensor, weight: Tensor, slope: float, dropout: float, schedule: Schedule
) -> Tensor:
    """Return the sum of source rows weighted by ``softmax_j(<weight, leaky_relu(x[j] + target[i])>)``, as GATv2 does.

    Args:
        blocks: the edges j -> i.
        x: the rank's source rows, [num_local, H, C].
        target: the target rows, [num_targets, H, C].
        weight: [H, C].
        slope: of leaky_relu below zero.
        dropout: probability that a coefficient is dropped.
        schedule: when blocks are fetched. Mode 1 fetches remote rows again in the backward pass; modes 2 and 3 keep
            them.

    Returns:
        [num_targets, H, C]; 0 for a target without edges.
    """
    settings = PairSettings(blocks, schedule, slope, Mask.next(dropout))
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return _attend(settings, target, weight, x).to(dtype)


def attend_by_products(
    blocks: EdgeBlocks, key: Tensor, value: Tensor, query: Tensor, dropout: float, schedule: Schedule
) -> Tensor:
    """Return the sum of values weighted by ``softmax_j(<key[j], query[i]> / sqrt(C))``.

    Args:
        blocks: the edges j -> i.
        key, value: of the rank's sources, [num_local, H, C].
        query: of the targets, [num_targets, H, C].
        dropout, schedule: as for :func:`attend_additive`.

    Returns:
        [num_targets, H, C]; 0 for a target without edges.
    """
    settings = PairSettings(blocks, schedule, key.size(-1) ** -0.5, Mask.next(dropout))
    return _attend(settings, query, key.new_empty(0, 0), key, value).to(value.dtype)


def _attend(settings: PairSettings, query: Tensor, *others: Tensor) -> Tensor:
    """Compute in float32 what is given in bfloat16."""
    exact = sum_dtype(query.dtype)
    with without_autocast(query):
        return _PairAttention.apply(settings, *(tensor.to(exact) for tensor in (query, *others)))


class _PairAttention(torch.autograd.Function):
    """``sources`` are the keys and the values, or one tensor that is both."""

    @staticmethod
    def forward(ctx: Any, settings: PairSettings, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        query, weight, *sources = (tensor.detach().contiguous() for tensor in tensors)
        ctx.settings = settings
        blocks, schedule, _, dropout = settings
        trains = any(ctx.needs_input_grad[1:])
        rows: list[OwnedRows] = [(blocks.exchange, tensor) for tensor in sources]
        count_needed(rows, passes=2 if trains else 1)
        state, rest = attention_state(blocks.num_targets, query), []
        for r, block in stream(rows, schedule.window):
            edges = blocks.for_dropout(dropout)[r].by_target
            pair_forward(edges, _inputs(settings, query, weight, block), state)
            if r > 0 and trains and schedule.mode != 1:
                rest += block
        lse = attention_finish(state)
        ctx.save_for_backward(query, weight, state.out, lse, *sources, *rest)
        ctx.count = len(sources)
        return state.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        query, weight, out, lse, *rest = ctx.saved_tensors
        gradient = gradient.contiguous()
        saved = TargetGradients(lse, (gradient * out).sum(-1), gradient)
        backward = _Backward(ctx.settings, query, weight, rest[: ctx.count], saved)
        backward.run(rest[ctx.count :])
        return None, backward.of_query, backward.of_weight, *backward.of_sources


class _Backward:
    """One backward pass; gradients of remote rows are in flight while later blocks are processed."""

    def __init__(
        self, settings: PairSettings, query: Tensor, weight: Tensor, sources: list[Tensor], saved: TargetGradients
    ) -> None:
        self._settings, self._query, self._weight, self._saved = settings, query, weight, saved
        self._sources = sources
        self.of_query, self.of_weight = torch.zeros_like(query), torch.zeros_like(weight)
        self.of_sources = [torch.zeros_like(tensor) for tensor in sources]

    def run(self, kept: list[Tensor]) -> None:
        """Process all blocks; ``kept`` has the remote rows, unless mode 1 fetches them again."""
        blocks, schedule = self._settings.blocks, self._settings.schedule
        exchange, count = blocks.exchange, len(self._sources)
        remote: Iterable[Sequence[Tensor]] = (kept[at : at + count] for at in range(0, len(kept), count))
        if schedule.mode == 1:
            rows = [(exchange, tensor) for tensor in self._sources]
            remote = (block for r, block in stream(rows, schedule.prefetch) if r > 0)
        transfers, tag = deque[tuple[int, PendingExchange]](), exchange.group.next_tag()

        def receive(in_flight: int) -> None:
            while len(transfers) > in_flight:
                r, transfer = transfers.popleft()
                for total, arrived in zip(self.of_sources, transfer.wait(), strict=True):
                    exchange.add_gradients(r, total, arrived)

        for r, block in enumerate(remote, start=1):
            gradients = [torch.zeros_like(rows) for rows in block]
            self._block(r, block, gradients)
            transfers.append((r, push([(exchange, rows) for rows in gradients], r, tag)))
            receive(exchange.rounds if schedule.window is None else schedule.window)
        self._block(0, self._sources, self.of_sources)
        receive(0)

    def _block(self, r: int, sources: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        edges = self._settings.blocks.for_dropout(self._settings.dropout)[r]
        sums = PairGradients(gradients[0], gradients[-1], self.of_query, self.of_weight)
        inputs = _inputs(self._settings, self._query, self._weight, sources)
        pair_backward(edges.by_target, edges.by_source, inputs, self._saved, sums)


def _inputs(settings: PairSettings, query: Tensor, weight: Tensor, sources: Sequence[Tensor]) -> PairInputs:
    return PairInputs(sources[0], sources[-1], query, weight, settings.factor, settings.dropout)
