"""One exchange of source rows, and the sums over blocks that it feeds; without autograd.

A sum is linear in the sources, so its backward pass needs none of their rows: gradients go to the owners by the
transposed product. Only gradients of weights need rows again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtrain_sar.config import Schedule
from gtrain_sar.edges import Compressed, EdgeBlocks
from gtrain_sar.halo import Make, Rows, add_rows, count_needed, in_order, push, stream
from gtrain_sar.kernels import sddmm, spmm
from gtrain_sar.point_to_point import PendingExchange


@dataclass
class LinearCall:
    """One aggregation: ``out[i] = sum over edges j -> i of weight * x[j]``, or the mean.

    Attributes:
        blocks: the edges.
        x: own source rows, [num_local, ...].
        weight: [E] or [E, H] where x is [num_local, H, ...]; None: 1.
        mean: divide by the in-degree.
        scale: [num_targets], what the sum of each target is multiplied by, if there is no weight; None: 1.
    """

    blocks: EdgeBlocks
    x: Tensor
    weight: Tensor | None = None
    mean: bool = False
    scale: Tensor | None = None


class EdgeSums:
    """The edges of one call, without the tensors that only the forward pass needs."""

    def __init__(self, call: LinearCall, source: int, weight: int | None) -> None:
        self.blocks, self.mean, self.scale = call.blocks, call.mean, call.scale
        self.source, self.weight = source, weight  # positions among the distinct ones
        self.heads = 1 if call.weight is None or call.weight.dim() == 1 else call.weight.size(1)

    def add(self, r: int, rows: Tensor, weight: Tensor | None, to: Tensor) -> None:
        """``to[target] += weight * rows[source]`` over block r; times the target's scale."""
        block = self.blocks.blocks[r]
        edges = block.by_target
        if self.scale is not None:
            edges, weight = edges._replace(edges=block.target_of), self.scale
        self._spmm(edges, rows, weight, to)

    def add_transposed(
        self, r: int, rows: Tensor, weight: Tensor | None, to: Tensor, span: tuple[int, int] | None = None
    ) -> None:
        """``to[source] += weight * rows[target]`` over block r, or a span of its sources; times the target's scale."""
        block = self.blocks.blocks[r]
        by_edge = weight is not None and self.scale is None
        edges = block.by_source if by_edge else block.targets_by_source
        self._spmm(edges if span is None else edges.between(*span), rows, weight if by_edge else self.scale, to)

    def _spmm(self, block: Compressed, rows: Tensor, weight: Tensor | None, to: Tensor) -> None:
        if len(block.columns):
            flat = None if weight is None else weight.reshape(len(weight), -1).contiguous()
            spmm(block, _heads(rows.contiguous(), self.heads), _heads(to, self.heads), flat)

    def dot(self, r: int, gradient: Tensor, rows: Tensor, to: Tensor) -> None:
        """``to[edge] = <gradient[target], rows[source]>`` over block r."""
        block = self.blocks.blocks[r].by_target
        if len(block.columns):
            columns = _heads(gradient, self.heads), _heads(rows.contiguous(), self.heads)
            sddmm(block, *columns, to.view(len(to), -1))

    def of_sum(self, gradient: Tensor) -> Tensor:
        """Gradient of the sum, contiguous, of that of a mean."""
        return gradient / self.blocks.divisor(gradient) if self.mean else gradient.contiguous()


def _heads(tensor: Tensor, heads: int) -> Tensor:
    """[n, ...] as [n, H, C]."""
    return tensor.view(len(tensor), heads, tensor[0].numel() // heads if len(tensor) else 0)


class PackedSums:
    """Aggregations that share one exchange: ``start`` (which is ``post`` and ``add_own``) and ``finish``; and back
    ``send``, ``add_local`` and ``receive``.

    Args:
        calls: what to aggregate; sources that are the same tensor are sent once.
        schedule: how blocks are fetched.
        wanted: for each call whether its source needs a gradient; None: where autograd says so.

    Attributes:
        rows: the distinct sources, with their exchanges.
        weights: of the calls that have them.
        sums: the calls' edges.
        wanted: positions in ``rows`` of the sources that need a gradient.
    """

    def __init__(self, calls: Sequence[LinearCall], schedule: Schedule, wanted: bool | None = None) -> None:
        self.schedule = schedule
        self.rows: list[Rows] = []
        self.weights: list[Tensor] = []
        self.sums = [EdgeSums(call, self._source(call), self._weight(call)) for call in calls]
        needs = [tensor.requires_grad if wanted is None else wanted for _, tensor in self.rows]
        self.wanted = [i for i, need in enumerate(needs) if need]
        self.weights_wanted = any(weight.requires_grad for weight in self.weights)
        self._like = [(tensor.shape, tensor.dtype, tensor.device) for _, tensor in self.rows]
        self._gradients: dict[int, Tensor] = {}
        self._blocks: Iterator[tuple[int, list[Tensor]]] | None = None
        self._kept: dict[int, list[Tensor]] = {}
        self._pending: list[PendingExchange] = []
        self._received = 0

    def _source(self, call: LinearCall) -> int:
        for i, (exchange, tensor) in enumerate(self.rows):
            if tensor is call.x and exchange is call.blocks.exchange:
                return i
        self.rows.append((call.blocks.exchange, call.x))
        return len(self.rows) - 1

    def _weight(self, call: LinearCall) -> int | None:
        if call.weight is None:
            return None
        self.weights.append(call.weight)
        return len(self.weights) - 1

    # ------------------------------------------------------------------------ forward

    def start(self) -> list[Tensor]:
        """Post the exchange and return the sums over the local block, [num_targets, ...] each."""
        self.post()
        outs = []
        for sums in self.sums:
            rows = self.rows[sums.source][1]
            outs.append(rows.new_zeros((sums.blocks.num_targets, *rows.shape[1:])))
        self.add_own(outs)
        return outs

    def post(self, make: Make | None = None) -> None:
        """Post the exchange; ``make``, if given, makes the rows as they leave, and all of them before this returns."""
        count_needed(self.rows)
        count_needed([self.rows[i] for i in self.wanted])
        self._blocks = stream(self.rows, self.schedule.window, make)
        next(self._blocks)  # own rows, which are here

    def add_own(self, outs: Sequence[Tensor]) -> None:
        """Add the sums over the local block, in place."""
        for sums, out in zip(self.sums, outs, strict=True):
            sums.add(0, self.rows[sums.source][1].detach(), self._weight_of(sums), out)

    def finish(self, outs: Sequence[Tensor]) -> None:
        """Add what remote blocks bring, in place, and forget the rows unless gradients of weights ask for them."""
        assert self._blocks is not None
        for r, rows in self._blocks:
            for sums, out in zip(self.sums, outs, strict=True):
                sums.add(r, rows[sums.source], self._weight_of(sums), out)
            if self.weights_wanted and self.schedule.mode != 1:
                self._kept[r] = rows
        for sums, out in zip(self.sums, outs, strict=True):
            if sums.mean:
                out.div_(sums.blocks.divisor(out))
        self._blocks = None
        self.weights = [weight.detach() for weight in self.weights]
        self.rows = [(exchange, self._kept_of(tensor)) for exchange, tensor in self.rows]

    def _kept_of(self, rows: Tensor) -> Tensor:
        """Rows for gradients of weights, or else none: a view of them would keep them all."""
        return rows.detach() if self.weights_wanted else rows.new_empty((0, *rows.shape[1:]))

    def _weight_of(self, sums: EdgeSums) -> Tensor | None:
        return None if sums.weight is None else self.weights[sums.weight].detach()

    # ------------------------------------------------------------------------ backward

    def send(self, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of remote rows to their owners, ``gradients`` being those of the sums."""
        group = self.rows[0][0].group
        self._received = 0
        if not self.wanted or group.size == 1:
            return
        tag, window = group.next_tag(), self.schedule.window
        for r in range(1, group.size):
            blocks = {i: _empty_block(self.rows[i], r) for i in self.wanted}
            make = in_order(partial(self._add_transposed, r, gradients, blocks))
            if window and self._pending:
                make(max(map(len, blocks.values())))  # while they fly
                self.receive(window - 1)  # before the next buffers are made
            self._pending.append(push([(self.rows[i][0], blocks[i]) for i in self.wanted], r, tag, make))
            if window == 0:
                self.receive()

    def _add_transposed(
        self, r: int, gradients: Sequence[Tensor], blocks: dict[int, Tensor], low: int, high: int
    ) -> None:
        """Make the gradients of some of block r's sources."""
        for to in blocks.values():
            to[low:high].zero_()
        for sums, gradient in zip(self.sums, gradients, strict=True):
            if sums.source in blocks:
                to = blocks[sums.source]
                sums.add_transposed(r, gradient, self._weight_of(sums), to, (low, min(high, len(to))))

    def add_local(self, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of the local block's sources."""
        for sums, gradient in zip(self.sums, gradients, strict=True):
            if sums.source in self.wanted:
                sums.add_transposed(0, gradient, self._weight_of(sums), self.gradient(sums.source))

    def gradient(self, i: int) -> Tensor:
        """The gradient so far of source i; made where it is first asked for, when rows are on their way."""
        if i not in self._gradients:
            shape, dtype, device = self._like[i]
            self._gradients[i] = torch.zeros(shape, dtype=dtype, device=device)
        return self._gradients[i]

    def take_gradients(self) -> dict[int, Tensor]:
        """The gradients of the sources that need one, by position; they are forgotten here."""
        gradients, self._gradients = self._gradients, {}
        return gradients

    def receive(self, keep: int = 0) -> None:
        """Add gradients that arrived to their rows, until only ``keep`` rounds are on their way."""
        while len(self._pending) > keep:
            self._received += 1
            for i, arrived in zip(self.wanted, self._pending.pop(0).wait(), strict=True):
                add_rows(self.gradient(i), self.rows[i][0].send_rows[self._received], arrived)

    def receive_by_rows(self) -> Iterator[int]:
        """:meth:`receive` for one source: yields how many of its first rows are complete, the last time all of them."""
        ((exchange, _),) = self.rows
        self.receive(keep=1)
        while self._pending:
            self._received += 1
            chosen = exchange.send_rows[self._received]
            for first, arrived in self._pending.pop(0).rows():
                until = first + len(arrived)
                add_rows(self.gradient(0), chosen[first:until], arrived)
                if until < len(chosen):
                    yield int(chosen[until:].min())
        yield len(self.gradient(0))

    def weight_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the weights; mode 1 fetches the remote rows again."""
        of_weights = [torch.zeros_like(weight) for weight in self.weights]
        for r, rows in self._rows_again():
            for sums, gradient in zip(self.sums, gradients, strict=True):
                if sums.weight is not None:
                    sums.dot(r, gradient, rows[sums.source], of_weights[sums.weight])
        self._kept.clear()
        return of_weights

    def _rows_again(self) -> Iterable[tuple[int, list[Tensor]]]:
        if self.schedule.mode == 1:
            return stream(self.rows, self.schedule.window)
        return {0: [tensor for _, tensor in self.rows], **self._kept}.items()


def _empty_block(row: Rows, r: int) -> Tensor:
    exchange, tensor = row
    return tensor.new_empty((exchange.reads[r], *tensor.shape[1:]))


def aggregate(calls: Sequence[LinearCall], schedule: Schedule) -> list[Tensor]:
    """Aggregate over several sets of edges with one exchange for all their sources.

    Args:
        calls: what to aggregate; sources that are the same tensor are sent once.
        schedule: how blocks are fetched.

    Returns:
        [num_targets, ...] of each call, differentiable in ``x`` and ``weight``.
    """
    packed = PackedSums(calls, schedule)
    outs: tuple[Tensor, ...] = _Aggregate.apply(packed, *(tensor for _, tensor in packed.rows), *packed.weights)
    return list(outs)


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: PackedSums, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.packed = packed
        outs = packed.start()
        packed.finish(outs)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        packed: PackedSums = ctx.packed
        scaled = [sums.of_sum(gradient) for sums, gradient in zip(packed.sums, gradients, strict=True)]
        packed.send(scaled)
        packed.add_local(scaled)
        of_weights: list[Tensor | None] = [None] * len(packed.weights)
        if packed.weights_wanted:
            of_weights = [*packed.weight_gradients(scaled)]
        packed.receive()
        of_rows = packed.take_gradients()
        return None, *(of_rows.get(i) for i in range(len(packed.rows))), *of_weights
