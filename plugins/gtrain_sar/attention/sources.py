"""Attention's backward pass at the owners of the sources: one set of messages where fetching again would take two.

The gradient of a source row needs the row, which its owner has, and of each target that reads it the gradient and three
numbers a head. So the targets' side travels: rows once, and back a number a head for the target's logit. Rows whose
gradients are complete are handed on while later messages travel.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from gtrain.nn.dropout import Mask
from gtrain_sar.attention.reverse import ReadBy, reverse
from gtrain_sar.halo import add_rows, gather
from gtrain_sar.kernels import attention_backward
from gtrain_sar.messages import InFlight, Packet, peers

if TYPE_CHECKING:
    from gtrain_sar.attention.fused import AttentionBackward

_SPREAD = 60.0  # exp(2 * _SPREAD) would overflow float32
_AHEAD = 8  # messages on their way beside the one that is worked on; answers come between them
_AHEAD_IN_MODE_1 = 4  # for each block of ``strategy.prefetch``


def send_targets(backward: AttentionBackward, extremes: list[Tensor], prefetch: int | None) -> None:
    """Add the gradients of all edges, remote ones at the owner of their source, and hand on rows as they are complete.

    Args:
        backward: the tensors.
        extremes: for each round from 1 on, the largest and smallest logit of the block's sources, [2, H].
        prefetch: blocks in flight beside the one that is worked on; None: as many as is useful.
    """
    ahead = _AHEAD if prefetch is None else prefetch * _AHEAD_IN_MODE_1
    messages = _Messages(backward, extremes, ahead)
    finished = iter(reverse(backward.blocks).finished(ahead + 1))
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
        known = reverse(backward.blocks)
        self._backward, self._extremes, self._ahead = backward, extremes, ahead
        self._group, self._messages = backward.blocks.exchange.group, known.messages
        self._tags = [(self._group.next_tag(), self._group.next_tag()) for _ in range(known.pieces)]
        self._known_extremes: dict[int, Tensor] = {}
        self._expected: deque[tuple[InFlight, InFlight]] = deque()
        self._flying: deque[InFlight] = deque()
        self._answers: dict[int, InFlight] = {}
        self._received = self._sent = 0
        self.count = len(known.messages)

    def post(self, until: int) -> None:
        """Post the first ``until`` messages, and receives of as many more: see :class:`InFlight`."""
        while self._received < min(until + self._ahead, self.count):
            self._expect(self._messages[self._received])
            self._received += 1
        while self._sent < min(until, self.count):
            flight, self._answers[self._sent] = self._expected.popleft()
            self._send(self._messages[self._sent], flight)
            self._flying.append(flight)
            self._sent += 1

    def work_off(self, k: int) -> None:
        """Add the gradients of own sources that the reader's targets of message k ask for, the next one; answer it."""
        self.post(k + 1)
        pieces = self._flying.popleft().wait()
        self.post(k + 1 + self._ahead)  # after what was sent is let go of
        message = self._messages[k]
        self._answers[k].send(self._answer(message, pieces), peers(self._group, message.round)[0])

    def take_answer(self, k: int) -> None:
        """Add the gradients of own targets' logits that the answer to message k brings."""
        add_rows(self._backward.dtarget, self._messages[k].targets, self._answers.pop(k).wait()[0])

    def _expect(self, message: ReadBy) -> None:
        """Post the receives of the reader's targets of a block, and of the owner's answer to this rank's."""
        backward, (there, back) = self._backward, self._tags[message.piece]
        reader, owner = peers(self._group, message.round)
        incoming = self._packet(message.num_targets, folded=_folds(self._sent_extremes(message.round)))
        answer = backward.target.new_empty((len(message.targets), backward.target.size(1)))
        self._expected.append(
            (InFlight(self._group, incoming, reader, there), InFlight(self._group, answer, owner, back))
        )

    def _send(self, message: ReadBy, flight: InFlight) -> None:
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
        flight.send(outgoing.buffer, peers(self._group, message.round)[1])

    def _packet(self, count: int, *, folded: bool) -> Packet:
        grad, exchange = self._backward.grad, self._backward.blocks.exchange
        heads = ((count, grad.size(1)), grad.dtype)
        rows = ((count, *grad.shape[1:]), exchange.on_wire(grad.dtype))
        scalars = [heads] * (2 if folded else 3)
        return Packet([rows, *scalars, ((1 if count else 0,), torch.int64)], grad.device)

    def _answer(self, message: ReadBy, pieces: list[Tensor]) -> Tensor:
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
