"""Weighted sums of source rows over all blocks, with one exchange of rows for several of them.

A sum is linear in the sources, so its backward pass needs none of their rows: the transposed product computes the
gradients, which go to the owners. Only gradients of weights need the rows again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtrain.engine.edges import CompressedEdges, EdgeBlocks
from gtrain.engine.halo import (
    OwnedRows,
    PendingExchange,
    RowProducer,
    add_rows,
    count_needed,
    incremental,
    push,
    stream,
)
from gtrain.engine.kernels import sddmm, spmm
from gtrain.engine.precision import sum_dtype, without_autocast
from gtrain.engine.schedule import Schedule
from gtrain.memory.reuse import zeros


@dataclass
class LinearCall:
    """One aggregation: ``out[i] = sum over edges j -> i of weight * x[j]``, or the mean.

    Attributes:
        blocks: the edges.
        x: the rank's source rows, [num_local, ...].
        weight: [E] or [E, H] for x [num_local, H, ...]; None: 1.
        mean: divide by the in-degree.
        scale: [num_targets], the factor of each target's sum, for calls without a weight; None: 1.
    """

    blocks: EdgeBlocks
    x: Tensor
    weight: Tensor | None = None
    mean: bool = False
    scale: Tensor | None = None


class EdgeSums:
    """The edges of one call, without the tensors that only the forward pass needs.

    Args:
        call: the call.
        source: position of its rows among the distinct ones.
        weight: position of its weight, likewise; None: 1.
    """

    def __init__(self, call: LinearCall, source: int, weight: int | None) -> None:
        self.blocks, self.mean, self.scale = call.blocks, call.mean, call.scale
        self.source, self.weight = source, weight
        self.heads = 1 if call.weight is None or call.weight.dim() == 1 else call.weight.size(1)

    def add(self, r: int, rows: Tensor, weight: Tensor | None, total: Tensor) -> None:
        """Add ``scale[target] * weight * rows[source]`` of each edge of block r to ``total[target]``."""
        block = self.blocks.blocks[r]
        edges = block.by_target
        if self.scale is not None:
            # The weight is looked up by target instead of by edge.
            edges, weight = edges._replace(edges=block.target_of), self.scale
        self._spmm(edges, rows, weight, total)

    def add_transposed(
        self, r: int, rows: Tensor, weight: Tensor | None, total: Tensor, span: tuple[int, int] | None = None
    ) -> None:
        """Add ``scale[target] * weight * rows[target]`` of each edge of block r to ``total[source]``.

        ``span`` restricts it to the sources from the first number to before the second.
        """
        block = self.blocks.blocks[r]
        by_edge = weight is not None and self.scale is None
        edges = block.by_source if by_edge else block.targets_by_source
        self._spmm(edges if span is None else edges.between(*span), rows, weight if by_edge else self.scale, total)

    def _spmm(self, block: CompressedEdges, rows: Tensor, weight: Tensor | None, total: Tensor) -> None:
        if len(block.columns):
            flat = None if weight is None else weight.reshape(len(weight), -1).contiguous().to(sum_dtype(weight.dtype))
            spmm(block, self._by_head(rows.contiguous()), self._by_head(total), flat)

    def dot(self, r: int, gradient: Tensor, rows: Tensor, out: Tensor) -> None:
        """Set ``out[edge] = <gradient[target], rows[source]>`` over block r."""
        block = self.blocks.blocks[r].by_target
        if len(block.columns):
            sddmm(block, self._by_head(gradient), self._by_head(rows.contiguous()), out.view(len(out), -1))

    def sum_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the sum, from that of the result."""
        return gradient / self.blocks.divisor(gradient) if self.mean else gradient.contiguous()

    def _by_head(self, tensor: Tensor) -> Tensor:
        """View [n, ...] as [n, H, C]."""
        return tensor.view(len(tensor), self.heads, tensor[0].numel() // self.heads if len(tensor) else 0)


class PackedSums:
    """Aggregations that share one exchange.

    Forward: :meth:`start` (that is :meth:`post` and :meth:`add_local_block`), then :meth:`finish`. Backward:
    :meth:`send`, :meth:`add_local_gradients`, :meth:`receive`. Dense work in between overlaps with the exchange.

    Args:
        calls: the aggregations; sources that are the same tensor are sent once.
        schedule: when blocks are fetched.
        needs_gradient: whether the sources need a gradient; None: as autograd says.

    Attributes:
        rows: the distinct sources, with their exchanges.
        weights: of the calls that have them.
        sums: the calls' edges.
        needed: positions in ``rows`` of the sources that need a gradient.
    """

    def __init__(self, calls: Sequence[LinearCall], schedule: Schedule, needs_gradient: bool | None = None) -> None:
        self.schedule = schedule
        self.rows: list[OwnedRows] = []
        self.weights: list[Tensor] = []
        self.sums = [EdgeSums(call, self._source(call), self._weight(call)) for call in calls]
        needs = [tensor.requires_grad if needs_gradient is None else needs_gradient for _, tensor in self.rows]
        self.needed = [i for i, need in enumerate(needs) if need]
        self.weights_need_gradient = any(weight.requires_grad for weight in self.weights)
        self._like = [(tensor.shape, tensor.dtype, tensor.device) for _, tensor in self.rows]
        self._gradients: dict[int, Tensor] = {}
        self._blocks: Iterator[tuple[int, list[Tensor]]] | None = None
        self._kept: dict[int, list[Tensor]] = {}
        self._pending: deque[PendingExchange] = deque()
        self._received = 0

    def _source(self, call: LinearCall) -> int:
        for i, (exchange, tensor) in enumerate(self.rows):
            # By identity: equal rows of different tensors have gradients of their own.
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
        """Post the exchange and return the sums over the local block, [num_targets, ...] each, at least float32."""
        self.post()
        tensors = [self.rows[sums.source][1] for sums in self.sums]
        outs = [
            zeros((sums.blocks.num_targets, *rows.shape[1:]), sum_dtype(rows.dtype), rows.device)
            for sums, rows in zip(self.sums, tensors, strict=True)
        ]
        self.add_local_block(outs)
        return outs

    def post(self, produce: RowProducer | None = None) -> None:
        """Post the exchange; ``produce`` computes the rows as they leave, and all of them before this returns."""
        count_needed(self.rows)
        count_needed([self.rows[i] for i in self.needed])
        self._blocks = stream(self.rows, self.schedule.window, produce)
        next(self._blocks)  # the local block

    def add_local_block(self, outs: Sequence[Tensor]) -> None:
        """Add the sums over the local block, in place."""
        for sums, out in zip(self.sums, outs, strict=True):
            sums.add(0, self.rows[sums.source][1].detach(), self._weight_of(sums), out)

    def finish(self, outs: Sequence[Tensor]) -> None:
        """Add the sums over remote blocks, in place, and free the rows unless gradients of weights need them."""
        assert self._blocks is not None
        for r, rows in self._blocks:
            for sums, out in zip(self.sums, outs, strict=True):
                sums.add(r, rows[sums.source], self._weight_of(sums), out)
            if self.weights_need_gradient and self.schedule.mode != 1:
                self._kept[r] = rows
        for sums, out in zip(self.sums, outs, strict=True):
            if sums.mean:
                out.div_(sums.blocks.divisor(out))
        self._blocks = None
        self.weights = [weight.detach() for weight in self.weights]
        # an empty tensor in place of rows that are not needed: a view of them would keep them all
        self.rows = [
            (exchange, rows.detach() if self.weights_need_gradient else rows.new_empty((0, *rows.shape[1:])))
            for exchange, rows in self.rows
        ]

    def result_dtype(self, sums: EdgeSums) -> torch.dtype:
        """Return the dtype of a row times its weight."""
        rows = self.rows[sums.source][1].dtype
        return rows if sums.weight is None else torch.promote_types(rows, self.weights[sums.weight].dtype)

    def _weight_of(self, sums: EdgeSums) -> Tensor | None:
        return None if sums.weight is None else self.weights[sums.weight].detach()

    # ------------------------------------------------------------------------ backward

    def send(self, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of remote rows to their owners; ``gradients`` are those of the sums."""
        group = self.rows[0][0].group
        self._received = 0
        if not self.needed or group.size == 1:
            return
        tag, window = group.next_tag(), self.schedule.window
        for r in range(1, group.size):
            rows = {i: self.rows[i] for i in self.needed}
            blocks = {i: x.new_empty((exchange.reads[r], *x.shape[1:])) for i, (exchange, x) in rows.items()}
            produce = incremental(partial(self._add_transposed, r, gradients, blocks))
            if window and self._pending:
                produce(max(map(len, blocks.values())))  # while earlier rounds are in flight
                # Before the next buffers are allocated.
                self.receive(window - 1)
            self._pending.append(push([(rows[i][0], blocks[i]) for i in self.needed], r, tag, produce))
            if window == 0:
                self.receive()

    def _add_transposed(
        self, r: int, gradients: Sequence[Tensor], blocks: dict[int, Tensor], low: int, high: int
    ) -> None:
        """Compute the gradients of block r's sources ``low .. high-1``."""
        for total in blocks.values():
            # The buffer is uninitialised, and zeroed piece by piece while it is in the cache.
            total[low:high].zero_()
        for sums, gradient in zip(self.sums, gradients, strict=True):
            if sums.source in blocks:
                total = blocks[sums.source]
                sums.add_transposed(r, gradient, self._weight_of(sums), total, (low, min(high, len(total))))

    def add_local_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of the local block's sources."""
        for sums, gradient in zip(self.sums, gradients, strict=True):
            if sums.source in self.needed:
                sums.add_transposed(0, gradient, self._weight_of(sums), self.gradient(sums.source))

    def gradient(self, i: int) -> Tensor:
        """Return the gradient of source i so far; allocated at the first call, when rows are in flight.

        Of bfloat16 rows it is float32 if blocks of several ranks are added to it.
        """
        if i not in self._gradients:
            shape, dtype, device = self._like[i]
            total = sum_dtype(dtype) if self.rows[i][0].rounds > 1 else dtype
            self._gradients[i] = zeros(shape, total, device)
        return self._gradients[i]

    def take_gradients(self) -> dict[int, Tensor]:
        """Return the gradients of the sources that need one, by position, and drop the references to them."""
        gradients, self._gradients = self._gradients, {}
        return {i: gradient.to(self._like[i][1]) for i, gradient in gradients.items()}

    def receive(self, in_flight: int = 0) -> None:
        """Add received gradients to their rows, until only ``in_flight`` rounds are in flight."""
        while len(self._pending) > in_flight:
            self._received += 1
            for i, arrived in zip(self.needed, self._pending.popleft().wait(), strict=True):
                self.rows[i][0].add_gradients(self._received, self.gradient(i), arrived)

    def receive_by_rows(self) -> Iterator[int]:
        """:meth:`receive` for one source: yields the number of first rows that are complete, at last all of them."""
        ((exchange, _),) = self.rows
        self.receive(in_flight=1)
        while self._pending:
            self._received += 1
            rows = exchange.send_rows[self._received]
            for first, arrived in self._pending.popleft().rows():
                until = first + len(arrived)
                add_rows(self.gradient(0), rows[first:until], arrived)
                # Rows below the smallest one that is still to come cannot change any more.
                if until < len(rows):
                    yield int(rows[until:].min())
        yield len(self.gradient(0))

    def weight_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the weights; mode 1 fetches the remote rows again."""
        totals = [torch.zeros_like(weight, dtype=sum_dtype(weight.dtype)) for weight in self.weights]
        blocks: Iterable[tuple[int, list[Tensor]]]
        if self.schedule.mode == 1:
            blocks = stream(self.rows, self.schedule.window)
        else:
            blocks = {0: [tensor for _, tensor in self.rows], **self._kept}.items()
        for r, rows in blocks:
            for sums, gradient in zip(self.sums, gradients, strict=True):
                if sums.weight is not None:
                    sums.dot(r, gradient, rows[sums.source], totals[sums.weight])
        self._kept.clear()
        return [total.to(weight.dtype) for total, weight in zip(totals, self.weights, strict=True)]


def aggregate(calls: Sequence[LinearCall], schedule: Schedule) -> list[Tensor]:
    """Aggregate over several sets of edges with one exchange for all their sources.

    Args:
        calls: the aggregations; sources that are the same tensor are sent once.
        schedule: when blocks are fetched.

    Returns:
        [num_targets, ...] of each call, differentiable in ``x`` and ``weight``, of the dtype of their product.
    """
    packed = PackedSums(calls, schedule)
    with without_autocast(calls[0].x):
        return list(_Aggregate.apply(packed, *(tensor for _, tensor in packed.rows), *packed.weights))


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: PackedSums, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.packed = packed
        dtypes = [packed.result_dtype(sums) for sums in packed.sums]
        outs = packed.start()
        packed.finish(outs)
        return tuple(out.to(dtype) for out, dtype in zip(outs, dtypes, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        packed: PackedSums = ctx.packed
        scaled = [sums.sum_gradient(gradient) for sums, gradient in zip(packed.sums, gradients, strict=True)]
        packed.send(scaled)
        packed.add_local_gradients(scaled)
        weights: list[Tensor | None] = [None] * len(packed.weights)
        if packed.weights_need_gradient:
            weights = [*packed.weight_gradients(scaled)]
        packed.receive()
        rows = packed.take_gradients()
        return None, *(rows.get(i) for i in range(len(packed.rows))), *weights
