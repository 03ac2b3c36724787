"""Sums and means of source rows, weighted or not, by sparse products over blocks; no message is materialised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtrain_sar.config import Schedule
from gtrain_sar.flight import Flight, LinearCall

__all__ = ["LinearCall", "aggregate"]


def aggregate(calls: Sequence[LinearCall], schedule: Schedule) -> list[Tensor]:
    """Aggregate over several sets of edges with one exchange for all their sources.

    Args:
        calls: what to aggregate; sources that are the same tensor are sent once.
        schedule: how blocks are fetched.

    Returns:
        [num_targets, ...] of each call, differentiable in ``x`` and ``weight``.
    """
    flight = Flight(calls, schedule)
    outs: tuple[Tensor, ...] = _Aggregate.apply(flight, *(tensor for _, tensor in flight.rows), *flight.weights)
    return list(outs)


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.flight = flight
        outs = flight.start()
        flight.finish(outs)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        flight: Flight = ctx.flight
        scaled = [sums.of_sum(gradient) for sums, gradient in zip(flight.sums, gradients, strict=True)]
        flight.send(scaled)
        flight.add_local(scaled)
        of_weights: list[Tensor | None] = [None] * len(flight.weights)
        if flight.weights_wanted:
            of_weights = [*flight.weight_gradients(scaled)]
        flight.land()
        found = flight.take_gradients()
        return None, *(found.get(i) for i in range(len(flight.rows))), *of_weights
