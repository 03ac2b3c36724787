"""Attention of GAT over blocks: running maximum and sum, coefficients never held for a layer's edges.

As flash attention does for sequences (Dao et al. 2022): the forward pass keeps the logarithm of each target's sum of
exponentials, from which the backward pass makes any coefficient again.

The backward pass runs at the owners of the sources where that takes one set of messages, and fetching rows again would
take two. The gradient of a source row needs the row, which its owner has, and of each target that reads it the gradient
and three numbers a head. So the targets' side travels: rows once, and back a number a head for the target's logit. Rows
whose gradients are complete are handed on while later messages travel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtrain.nn.dropout import Mask
from gtrain_sar.attention.readers import ReaderEdges, reader_plan
from gtrain_sar.config import Schedule
from gtrain_sar.edges import EdgeBlocks, hashed
from gtrain_sar.halo import Make, Rows, add_rows, count_needed, gather, in_order, push, stream
from gtrain_sar.kernels import AttentionState, attention_backward, attention_finish, attention_forward
from gtrain_sar.point_to_point import Packet, PendingExchange, peers

_CHUNK = 1 << 13  # rows of a product that are held at once
Dots = Callable[[Tensor, int, int], None]
"""Makes the rows of a tensor from one to before another."""
Finish = Callable[["AttentionBackward", Tensor | None], None]
"""Takes in own rows whose gradients are complete, int64, or all of them."""
Settings = tuple[EdgeBlocks, Schedule, float, Mask]
"""The edges, how blocks are fetched, the slope of leaky_relu below zero, dropout of coefficients."""
_SPREAD = 60.0  # exp(2 * _SPREAD) would overflow float32
_AHEAD = 8  # messages on their way beside the one that is worked on; answers come between them
_AHEAD_IN_MODE_1 = 4  # for each block of ``strategy.prefetch``


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
    return blocks.exchange.rounds > 1 and reader_plan(blocks).pays(schedule.mode)


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
    transfers, tag, received = deque[PendingExchange](), exchange.group.next_tag(), 0
    for r, (x, source) in enumerate(remote, start=1):
        dx, dsource = torch.zeros_like(x), torch.zeros_like(source)
        backward.block(r, x, source, dx, dsource)
        transfers.append(push([(exchange, dx), (exchange, dsource)], r, tag))
        while window is not None and len(transfers) > window:
            received += 1
            _receive(backward, received, transfers.popleft())
    backward.local()
    for r, transfer in enumerate(transfers, start=received + 1):
        _receive(backward, r, transfer)
    backward.finish(None)


def _receive(backward: AttentionBackward, r: int, transfer: PendingExchange) -> None:
    dx, dsource = transfer.wait()
    add_rows(backward.dx, backward.blocks.exchange.send_rows[r], dx)
    add_rows(backward.dsource, backward.blocks.exchange.send_rows[r], dsource)


def row_dots(a: Tensor, b: Tensor, out: Tensor, low: int, high: int) -> None:
    """Some rows of ``out[i, h] = <a[i, h], b[i, h]>``, [n, H], without a product of the tensors' whole size."""
    for start in range(low, high, _CHUNK):
        part = slice(start, min(start + _CHUNK, high))
        torch.sum(a[part] * b[part], -1, out=out[part])


def send_targets(backward: AttentionBackward, extremes: list[Tensor], prefetch: int | None) -> None:
    """Add the gradients of all edges, remote ones at the owner of their source, and hand on rows as they are complete.

    Args:
        backward: the tensors.
        extremes: for each round from 1 on, the largest and smallest logit of the block's sources, [2, H].
        prefetch: blocks in flight beside the one that is worked on; None: as many as is useful.
    """
    ahead = _AHEAD if prefetch is None else prefetch * _AHEAD_IN_MODE_1
    messages = _Messages(backward, extremes, ahead)
    finished = iter(reader_plan(backward.blocks).finished(ahead + 1))
    messages.post(ahead)
    backward.local()
    backward.finish(next(finished))
    for k in range(messages.count):
        messages.work_off(k)
        if k > ahead:
            messages.take_answer(k - ahead - 1)
        backward.finish(next(finished))
    for k in range(max(messages.count - ahead - 1, 0), messages.count):
        messages.take_answer(k)
    backward.finish(next(finished))


class _Messages:
    """The messages of one backward pass, posted in order and worked off in order.

    Args:
        backward: the tensors.
        extremes: as :func:`send_targets` takes them.
        ahead: messages on their way beside the one that is worked on.
    """

    def __init__(self, backward: AttentionBackward, extremes: list[Tensor], ahead: int) -> None:
        known = reader_plan(backward.blocks)
        self._backward, self._extremes, self._ahead = backward, extremes, ahead
        self._group, self._messages = backward.blocks.exchange.group, known.messages
        self._tags = [(self._group.next_tag(), self._group.next_tag()) for _ in range(known.pieces)]
        self._known_extremes: dict[int, Tensor] = {}
        self._expected: deque[tuple[PendingExchange, PendingExchange]] = deque()
        self._pending: deque[PendingExchange] = deque()
        self._answers: dict[int, PendingExchange] = {}
        self._received = self._sent = 0
        self.count = len(known.messages)

    def post(self, until: int) -> None:
        """Post the first ``until`` messages, and receives of as many more: see :class:`PendingExchange`."""
        while self._received < min(until + self._ahead, self.count):
            self._expect(self._messages[self._received])
            self._received += 1
        while self._sent < min(until, self.count):
            transfer, self._answers[self._sent] = self._expected.popleft()
            self._send(self._messages[self._sent], transfer)
            self._pending.append(transfer)
            self._sent += 1

    def work_off(self, k: int) -> None:
        """Add the gradients of own sources that the reader's targets of message k ask for, the next one; answer it."""
        self.post(k + 1)
        pieces = self._pending.popleft().wait()
        self.post(k + 1 + self._ahead)  # after what was sent is let go of
        message = self._messages[k]
        self._answers[k].send(self._answer(message, pieces), peers(self._group, message.round)[0])

    def take_answer(self, k: int) -> None:
        """Add the gradients of own targets' logits that the answer to message k brings."""
        add_rows(self._backward.dtarget, self._messages[k].targets, self._answers.pop(k).wait()[0])

    def _expect(self, message: ReaderEdges) -> None:
        """Post the receives of the reader's targets of a block, and of the owner's answer to this rank's."""
        backward, (there, back) = self._backward, self._tags[message.piece]
        reader, owner = peers(self._group, message.round)
        incoming = self._packet(message.num_targets, folded=_folds(self._sent_extremes(message.round)))
        answer = backward.target.new_empty((len(message.targets), backward.target.size(1)))
        self._expected.append(
            (PendingExchange(self._group, incoming, reader, there), PendingExchange(self._group, answer, owner, back))
        )

    def _send(self, message: ReaderEdges, transfer: PendingExchange) -> None:
        """Post this rank's targets of a block to the owner of the sources."""
        backward, targets, extremes = self._backward, message.targets, self._extremes[message.round - 1]
        if len(targets):
            backward.make_delta(int(targets[-1]) + 1)
        target, lse, delta = (tensor[targets] for tensor in (backward.target, backward.lse, backward.delta))
        outgoing = self._packet(len(targets), folded=_folds(extremes))
        rows, logit, *rest, seed = outgoing.pieces
        gather(backward.grad, targets, rows)
        if len(rest) == 1:  # exp(-lse) goes into the rows, relative to the block's largest logit
            scale = (_leaky(extremes[0] + target, backward.slope) - lse).exp()
            rows.mul_(scale.unsqueeze(-1))
            delta = delta * scale
        else:
            rest[1].copy_(lse)
        logit.copy_(target)
        rest[0].copy_(delta)
        seed.fill_(backward.keep.stream)
        transfer.send(outgoing.buffer, peers(self._group, message.round)[1])

    def _packet(self, count: int, *, folded: bool) -> Packet:
        grad, exchange = self._backward.grad, self._backward.blocks.exchange
        heads = ((count, grad.size(1)), grad.dtype)
        rows = ((count, *grad.shape[1:]), exchange.on_wire(grad.dtype))
        scalars = [heads] * (2 if folded else 3)
        return Packet([rows, *scalars, ((1 if count else 0,), torch.int64)], grad.device)

    def _answer(self, message: ReaderEdges, pieces: list[Tensor]) -> Tensor:
        """Add the gradients of own sources that the reader's targets ask for; returns those of its logits [T, H]."""
        backward = self._backward
        rows, target, delta, *rest, seed = pieces
        lse = rest[0] if rest else _leaky(self._sent_extremes(message.round)[0] + target, backward.slope)
        keep = Mask(backward.keep.p, int(seed) if len(seed) else 0)
        of_target = torch.zeros_like(target)
        attention_backward(
            message.edges, backward.x, backward.source, target, lse, delta, rows.to(backward.grad.dtype),
            backward.slope, keep, backward.dx, backward.dsource, of_target,
        )  # fmt: skip
        return of_target

    def _sent_extremes(self, r: int) -> Tensor:
        """The largest and smallest logit of the sources that the reader of round r has, [2, H]; as it computed them."""
        if r not in self._known_extremes:
            exchange = self._backward.blocks.exchange
            rows = self._backward.source[exchange.send_rows[r]]
            self._known_extremes[r] = extremes_of(rows.to(exchange.on_wire(rows.dtype)).to(rows.dtype))
        return self._known_extremes[r]


def _folds(extremes: Tensor) -> bool:
    """Whether logits of a block lie so close together that exp(-lse) may be a factor of the rows; both ends see it."""
    return bool((extremes[0] - extremes[1] < _SPREAD).all())


def extremes_of(source: Tensor) -> Tensor:
    """Largest and smallest logit of a block's sources [n, H], as [2, H]; 0 where it has none."""
    return torch.stack([source.amax(0), source.amin(0)]) if len(source) else source.new_zeros((2, source.size(1)))


def _leaky(logit: Tensor, slope: float) -> Tensor:
    return F.leaky_relu(logit, slope)
