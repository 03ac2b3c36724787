"""Attention of GAT over blocks: a running maximum and sum; the coefficients of a layer's edges are never stored.

As in flash attention (Dao et al. 2022), the forward pass saves the logarithm of each target's sum of exponentials, from
which the backward pass recomputes any coefficient.

The backward pass runs at the owners of the sources if that takes one set of messages where fetching rows again would
take two. The gradient of a source row needs the row, which its owner has, and of each target that reads it the gradient
and three numbers per head. The targets' side is sent: rows once, and one number per head back for the target's logit.
Rows whose gradients are complete are processed while later messages are in flight. The rank that owns the targets is
the *reader*; the owner of the sources knows the reader's edges, which are exchanged once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import leaky_relu

from gtrain.engine.edges import CompressedEdges, EdgeBlocks, compress
from gtrain.engine.halo import (
    HaloExchange,
    OwnedRows,
    Packet,
    PendingExchange,
    RowProducer,
    add_rows,
    count_needed,
    gather,
    incremental,
    peers,
    push,
    send_backward,
    stream,
    uncounted,
)
from gtrain.engine.kernels import (
    AttentionGradients,
    AttentionInputs,
    AttentionState,
    TargetGradients,
    attention_backward,
    attention_finish,
    attention_forward,
    row_dots,
)
from gtrain.engine.precision import sum_dtype, without_autocast
from gtrain.engine.schedule import Schedule
from gtrain.errors import ConfigError
from gtrain.memory.reuse import zeros
from gtrain.nn.dropout import Mask

# Of a message, which is in memory twice: as it is sent and as it is received.
MOST_ROWS = 1 << 12
LEAST_ROWS = 1 << 9  # the last messages are small, so that little work remains after their arrival

RowDots = Callable[[Tensor, int, int], None]
"""Computes the rows ``low .. high-1`` of a tensor, given the tensor, ``low`` and ``high``."""
CompleteRows = Callable[["AttentionBackward", Tensor | None], None]
"""Receives the local rows whose gradients are complete, int64, or None for all of them."""
# exp(2 * _SPREAD) would overflow float32.
_SPREAD = 60.0
# Messages in flight beside the one that is processed; answers are sent between them.
_AHEAD = 8
_AHEAD_IN_MODE_1 = 4  # for each block of ``strategy.prefetch``


@dataclass
class ReaderEdges:
    """One message in each direction: the rows that this rank sends as a reader, and the edges it serves as an owner.

    Attributes:
        round: number of the exchange's round, which determines both peers.
        piece: number of the message within its round; each number has a tag of its own.
        targets: int64 [T], ascending, distinct local targets: the rows that this rank sends to the owner of its
            sources.
        edges: the reader's edges, by this rank's local sources; columns are positions among the rows that it sends.
        num_targets: rows that the reader sends.
    """

    round: int
    piece: int
    targets: Tensor
    edges: CompressedEdges
    num_targets: int


@dataclass
class ReaderPlan:
    """All messages of a backward pass in order, and the traffic that they cause.

    Attributes:
        messages: this rank's messages; :func:`piece_sizes` divides the rows of a round.
        pieces: the largest number of messages of a round, over all ranks.
        over_halo: rows that all ranks send, divided by the rows of all halos.
        num_local: rows that this rank owns.
    """

    messages: list[ReaderEdges]
    pieces: int
    over_halo: float
    num_local: int
    _finished: dict[int, list[Tensor]] = field(default_factory=dict)

    def saves_traffic(self, mode: int) -> bool:
        """Whether this plan sends no more rows than the ordinary backward pass."""
        # The ordinary pass sends each halo row's gradient to its owner, and in mode 1 fetches the halo rows again.
        return self.over_halo <= (2 if mode == 1 else 1)

    def rows_by_completion(self, lag: int) -> list[Tensor]:
        """Group the local rows by the step after which their gradients are complete.

        Args:
            lag: the reply to message k has arrived once message k + lag is processed, or at the end.

        Returns:
            Local rows, int64: those complete before message 0 is processed, then after each message, then at the end.
        """
        if lag not in self._finished:
            count = len(self.messages)
            complete = torch.zeros(self.num_local, dtype=torch.int64)
            answered = torch.zeros_like(complete)
            # A row gets gradients as a source (when the last message with its edges is processed) and as a target (when
            # the reply to the last message with its row has arrived): the later of the two.
            for k, message in enumerate(self.messages):
                complete[message.edges.rows.cpu()] = k + 1
                answered[message.targets.cpu()] = min(k + lag, count) + 1
            steps = torch.maximum(complete, answered)
            device = self.messages[0].targets.device if count else steps.device
            order, each = steps.argsort(stable=True).to(device), torch.bincount(steps, minlength=count + 2)
            self._finished[lag] = list(order.split(each.tolist()))
        return self._finished[lag]


def reader_plan(blocks: EdgeBlocks) -> ReaderPlan:
    """Return the plan for a set of edges; the first call exchanges the edges, uncounted."""
    return blocks.derived("reader_plan", lambda: _exchange_edges(blocks))


def piece_sizes(rows: int) -> list[int]:
    """Divide a round's rows into messages: as large as allowed, and smaller and smaller towards the end."""
    counts = []
    while rows > 0:
        # A quarter of what remains, between the limits: the last messages are small.
        counts.append(min(rows, MOST_ROWS, max(LEAST_ROWS, rows // 4)))
        rows -= counts[-1]
    return counts


def _exchange_edges(blocks: EdgeBlocks) -> ReaderPlan:
    """Send each owner the edges that read its rows, and receive the edges that read this rank's rows."""
    exchange, hashed = blocks.exchange, blocks.hashed
    group, tag = exchange.group, exchange.group.next_tag()
    targets = [block.by_target.rows for block in hashed]
    messages: list[ReaderEdges] = []
    with uncounted(group):
        lengths = torch.tensor([[len(b), len(t)] for b, t in zip(hashed, targets, strict=True)], dtype=torch.int64)
        # Of each rank [rounds, 2]: edges, targets.
        all_lengths = group.all_gather(lengths)
        for r in range(1, exchange.rounds):
            num_edges, num_targets = all_lengths[peers(group, r)[0]][r].tolist()
            incoming = targets[r].new_empty((3, num_edges), dtype=torch.int32)
            send_backward(group, r, _description(hashed[r].by_source, targets[r]), incoming, tag).wait()
            source, target, edge = incoming.long()
            reader_edges = exchange.send_rows[r][source], target, edge
            messages += _split(r, targets[r], num_targets, reader_edges, exchange)
        halo = int(group.all_reduce(torch.tensor([sum(exchange.reads)], dtype=torch.int64)))
    sent = torch.stack(all_lengths)[:, 1:, 1]
    pieces = max((len(piece_sizes(rows)) for rows in sent.flatten().tolist()), default=0)
    return ReaderPlan(messages, pieces, int(sent.sum()) / max(halo, 1), exchange.shard.num_local)


def _split(
    r: int, targets: Tensor, num_targets: int, edges: tuple[Tensor, Tensor, Tensor], exchange: HaloExchange
) -> Iterator[ReaderEdges]:
    """Yield one round's messages; ``edges`` are local source, position of the reader's target, and id."""
    source, target, edge_id = edges
    low = first = 0
    sizes = zip_longest(piece_sizes(len(targets)), piece_sizes(num_targets), fillvalue=0)
    for piece, (sent, received) in enumerate(sizes):
        inside = (target >= first) & (target < first + received)
        selected = compress(source[inside], target[inside] - first, edge_id[inside], exchange.shard.num_local)
        yield ReaderEdges(r, piece, targets[low : low + sent], selected, received)
        # The reader numbers its targets through all messages of a round, so a message's columns start at ``first``.
        low, first = low + sent, first + received


def _description(edges: CompressedEdges, targets: Tensor) -> Tensor:
    """Return the row in the block, the position of the target and the id of each edge, int32 [3, E_b]."""
    source = torch.repeat_interleave(edges.rows, edges.ptr.diff())
    target = torch.searchsorted(targets, edges.columns.long())
    return torch.stack([source.int(), target.int(), edges.edges])


class AttentionSettings(NamedTuple):
    """Everything but tensors that attention is a function of.

    Attributes:
        blocks: the edges.
        schedule: when blocks are fetched.
        slope: of leaky_relu below zero.
        dropout: of coefficients.
    """

    blocks: EdgeBlocks
    schedule: Schedule
    slope: float
    dropout: Mask


def attend(
    blocks: EdgeBlocks,
    x: Tensor,
    source_logit: Tensor,
    target_logit: Tensor,
    slope: float,
    dropout: float,
    schedule: Schedule,
) -> Tensor:
    """Return the sum of source rows weighted by ``softmax_j(leaky_relu(source_logit[j] + target_logit[i]))``.

    Args:
        blocks: the edges j -> i.
        x: the rank's source rows, [num_local, H, C].
        source_logit: [num_local, H].
        target_logit: [num_targets, H].
        slope: of leaky_relu below zero.
        dropout: probability that a coefficient is dropped.
        schedule: when blocks are fetched. No remote rows are kept: the backward pass sends the targets' gradients to
            the owners of the sources, which have the rows. Where that takes more bytes than sending the rows'
            gradients, mode 1 fetches rows again, and modes 2 and 3 keep them.

    Returns:
        [num_targets, H, C]; 0 for a target without edges.
    """
    settings, exact = AttentionSettings(blocks, schedule, slope, Mask.next(dropout)), sum_dtype(x.dtype)
    dtype = torch.promote_types(x.dtype, source_logit.dtype)
    with without_autocast(x):
        return _Attention.apply(settings, x, source_logit.to(exact), target_logit.to(exact)).to(dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: AttentionSettings, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        x, source, target = (tensor.detach().contiguous() for tensor in tensors)
        ctx.settings = settings
        out, *rest = attention_blocks(settings, x, source, target, trains=any(ctx.needs_input_grad[1:]))
        ctx.save_for_backward(x, source, target, out, *rest)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, source, target, out, lse, *rest = ctx.saved_tensors
        gradient = gradient.contiguous()
        backward = AttentionBackward(ctx.settings, gradient, x, source, target, lse, partial(row_dots, gradient, out))
        backward.run(rest)
        return None, backward.dx.to(x.dtype), backward.dsource, backward.dtarget


def attention_blocks(
    settings: AttentionSettings,
    x: Tensor,
    source: Tensor,
    target: Tensor,
    *,
    trains: bool,
    produce: RowProducer | None = None,
) -> tuple[Tensor, ...]:
    """Run the forward pass over all blocks.

    Args:
        settings: see the class.
        x, source, target: the rank's rows [n, H, C], and logits [n, H] of both ends.
        trains: whether gradients of x are needed.
        produce: computes the rows of ``x``, ``source`` and ``target``; None: they are complete.

    Returns:
        The result [T, H, C], at least float32, the logarithms of the sums of exponentials [T, H], and what the backward
        pass needs of remote blocks: the extremes of their logits if the owners compute it; else, except in mode 1, rows
        and logits.

    Raises:
        ConfigError: there are other numbers of rows than of nodes, which kernels do not check.
    """
    blocks, schedule, slope, dropout = settings
    num_sources = blocks.exchange.shard.num_local
    if (len(x), len(source), len(target)) != (num_sources, num_sources, blocks.num_targets):
        raise ConfigError(
            f"attention was called with {len(x)} rows of sources, {len(source)} of their logits and {len(target)} of "
            f"the targets'; its edges are from {num_sources} nodes to {blocks.num_targets}.",
            hint="give the convolution a row for each node.",
        )
    rows: list[OwnedRows] = [(blocks.exchange, x), (blocks.exchange, source)]
    count_needed(rows, passes=2 if trains else 1)
    rest: list[Tensor] = []
    at_owners = trains and _runs_at_owners(settings)
    arriving = stream(rows, schedule.window, produce)
    # Posts the exchange before memory is filled.
    first = next(arriving)
    out = zeros((blocks.num_targets, *x.shape[1:]), target.dtype, target.device)
    state = AttentionState(out, target.new_full(target.shape, float("-inf")), torch.zeros_like(target))
    for r, (block_x, block_source) in chain([first], arriving):
        inputs = AttentionInputs(block_x, block_source, target, slope, dropout)
        attention_forward(blocks.for_dropout(dropout)[r].by_target, inputs, state)
        if r > 0 and at_owners:
            rest.append(_extremes(block_source))
        elif r > 0 and schedule.mode != 1:
            rest += [block_x, block_source]
    lse = attention_finish(state)
    return state.out, lse, *rest


def _runs_at_owners(settings: AttentionSettings) -> bool:
    """Whether the owners of the sources run the backward pass; all ranks must ask together."""
    rounds, devices = settings.blocks.exchange.rounds, settings.blocks.exchange.group.devices
    # Messages between GPUs go both ways at once, as those of rows do and those of targets do not.
    return rounds > 1 and devices is None and reader_plan(settings.blocks).saves_traffic(settings.schedule.mode)


class AttentionBackward:
    """One backward pass. Gradients are allocated at their first use, when rows are in flight.

    Args:
        settings: see the class.
        grad: [T, H, C], of the result.
        x: rows as in the forward pass, or a function that computes them again at their first use.
        source, target: as in the forward pass.
        lse: [T, H], the logarithm of the sum of exponentials.
        dots: computes rows of ``<grad, out>``, [T, H].
        complete: called with this object whenever gradients of some local rows are complete; each row once.

    Attributes:
        delta: [T, H], ``<grad, out>``, as far as ``dots`` was called.
        make_delta: computes its first rows.
    """

    def __init__(
        self,
        settings: AttentionSettings,
        grad: Tensor,
        x: Tensor | Callable[[], Tensor],
        source: Tensor,
        target: Tensor,
        lse: Tensor,
        dots: RowDots,
        complete: CompleteRows | None = None,
    ) -> None:
        self.settings, self.blocks, self.schedule = settings, settings.blocks, settings.schedule
        self.grad, self._x, self.source, self.target = grad, x, source, target
        self.lse, self.delta, self._complete = lse, torch.empty_like(lse), complete
        self.make_delta = incremental(partial(dots, self.delta))

    @cached_property
    def x(self) -> Tensor:
        """[n, H, C]."""
        return self._x if isinstance(self._x, Tensor) else self._x()

    @cached_property
    def dx(self) -> Tensor:
        """[n, H, C], at least float32."""
        return zeros(self.x.shape, self.source.dtype, self.x.device)

    @cached_property
    def dsource(self) -> Tensor:
        """[n, H]."""
        return torch.zeros_like(self.source)

    @cached_property
    def dtarget(self) -> Tensor:
        """[T, H]."""
        return torch.zeros_like(self.target)

    def run(self, rest: Sequence[Tensor]) -> None:
        """Process all blocks; ``rest`` is the rest of :func:`attention_blocks`' result."""
        if _runs_at_owners(self.settings):
            self._send_targets(list(rest))
        else:
            self._push_sources(list(rest))

    def local(self) -> None:
        """Add the gradients of edges within the part."""
        # Frees the layer's result, before rows and gradients are allocated.
        self.make_delta(len(self.delta))
        self._block(0, self.x, self.source, self.dx, self.dsource)

    def _block(self, r: int, x: Tensor, source: Tensor, dx: Tensor, dsource: Tensor) -> None:
        """Add block r's gradients to ``dx`` and ``dsource`` of its sources, and to the targets'."""
        self.make_delta(len(self.delta))
        inputs = AttentionInputs(x, source, self.target, self.settings.slope, self.settings.dropout)
        saved = TargetGradients(self.lse, self.delta, self.grad)
        edges = self.blocks.for_dropout(self.settings.dropout)[r].by_source
        attention_backward(edges, inputs, saved, AttentionGradients(dx, dsource, self.dtarget))

    def _finish(self, rows: Tensor | None) -> None:
        """Report that the gradients of these local rows, int64, are complete; None: of all."""
        if self._complete is not None and (rows is None or len(rows)):
            self._complete(self, rows)

    # ------------------------------------------------------------------------ gradients of rows are sent

    def _push_sources(self, kept: list[Tensor]) -> None:
        """Compute gradients of remote rows; they are in flight to the owners while the local block is processed."""
        exchange, window = self.blocks.exchange, self.schedule.window
        remote: Iterable[Sequence[Tensor]] = zip(kept[::2], kept[1::2], strict=True)
        if self.schedule.mode == 1:
            rows = [(exchange, self.x), (exchange, self.source)]
            remote = (block for r, block in stream(rows, self.schedule.prefetch) if r > 0)
        transfers, tag = deque[tuple[int, PendingExchange]](), exchange.group.next_tag()

        def receive(in_flight: int) -> None:
            while len(transfers) > in_flight:
                r, transfer = transfers.popleft()
                for total, arrived in zip((self.dx, self.dsource), transfer.wait(), strict=True):
                    exchange.add_gradients(r, total, arrived)

        for r, (x, source) in enumerate(remote, start=1):
            dx, dsource = torch.zeros_like(x, dtype=source.dtype), torch.zeros_like(source)
            self._block(r, x, source, dx, dsource)
            transfers.append((r, push([(exchange, dx), (exchange, dsource)], r, tag)))
            receive(exchange.rounds if window is None else window)
        self.local()
        receive(0)
        self._finish(None)

    # ------------------------------------------------------------------------ gradients of targets are sent

    def _send_targets(self, extremes: list[Tensor]) -> None:
        """Add the gradients of all edges, those of remote edges at the owner of their source.

        Args:
            extremes: for each round from 1 on, the largest and smallest logit of the block's sources, [2, H].
        """
        window = self.schedule.window
        ahead = _AHEAD if window is None else window * _AHEAD_IN_MODE_1
        messages = _Messages(self, extremes, ahead)
        finished = iter(reader_plan(self.blocks).rows_by_completion(ahead + 1))
        messages.post(ahead)
        self.local()
        self._finish(next(finished))
        for k in range(messages.count):
            messages.process(k)
            if k > ahead:
                messages.receive_answer(k - ahead - 1)
            self._finish(next(finished))
        for k in range(max(messages.count - ahead - 1, 0), messages.count):
            messages.receive_answer(k)
        self._finish(next(finished))


class _Messages:
    """The messages of targets in one backward pass, posted in order and processed in order.

    Args:
        backward: the backward pass.
        extremes: see :meth:`AttentionBackward._send_targets`.
        ahead: messages in flight beside the one that is processed.
    """

    def __init__(self, backward: AttentionBackward, extremes: list[Tensor], ahead: int) -> None:
        plan = reader_plan(backward.blocks)
        self._backward, self._extremes, self._ahead = backward, extremes, ahead
        self._group, self._messages = backward.blocks.exchange.group, plan.messages
        self._tags = [(self._group.next_tag(), self._group.next_tag()) for _ in range(plan.pieces)]
        self._sent_extremes: dict[int, Tensor] = {}
        self._expected: deque[tuple[PendingExchange, PendingExchange]] = deque()
        self._pending: deque[PendingExchange] = deque()
        self._answers: dict[int, PendingExchange] = {}
        self._received = self._sent = 0
        self.count = len(plan.messages)

    def post(self, until: int) -> None:
        """Post the first ``until`` messages, and the receives of ``ahead`` more: see :class:`PendingExchange`."""
        while self._received < min(until + self._ahead, self.count):
            self._expect(self._messages[self._received])
            self._received += 1
        while self._sent < min(until, self.count):
            transfer, self._answers[self._sent] = self._expected.popleft()
            self._send(self._messages[self._sent], transfer)
            self._pending.append(transfer)
            self._sent += 1

    def process(self, k: int) -> None:
        """Add the gradients of local sources for the targets of message k, the next one, and answer it."""
        self.post(k + 1)
        pieces = self._pending.popleft().wait()
        self.post(k + 1 + self._ahead)  # after the sent buffer is freed
        message = self._messages[k]
        self._answers[k].send(self._answer(message, pieces), peers(self._group, message.round)[0])

    def receive_answer(self, k: int) -> None:
        """Add the gradients of local targets' logits from the answer to message k."""
        add_rows(self._backward.dtarget, self._messages[k].targets, self._answers.pop(k).wait()[0])

    def _expect(self, message: ReaderEdges) -> None:
        """Post the receives of the reader's targets of a block, and of the owner's answer to this rank's."""
        backward, (request_tag, answer_tag) = self._backward, self._tags[message.piece]
        reader, owner = peers(self._group, message.round)
        incoming = self._packet(message.num_targets, folded=_fold_lse(self._extremes_at_reader(message.round)))
        answer = backward.target.new_empty((len(message.targets), backward.target.size(1)))
        self._expected.append(
            (
                PendingExchange(self._group, incoming, reader, request_tag),
                PendingExchange(self._group, answer, owner, answer_tag),
            )
        )

    def _send(self, message: ReaderEdges, transfer: PendingExchange) -> None:
        """Post this rank's targets of a block to the owner of the sources."""
        backward, targets, extremes = self._backward, message.targets, self._extremes[message.round - 1]
        if len(targets):
            backward.make_delta(int(targets[-1]) + 1)
        target, lse, delta = (tensor[targets] for tensor in (backward.target, backward.lse, backward.delta))
        outgoing = self._packet(len(targets), folded=_fold_lse(extremes))
        rows, logit, *rest, seed = outgoing.pieces
        gather(backward.grad, targets, rows)
        if len(rest) == 1:
            # exp(-lse) becomes a factor of the rows, as exp(top - lse), where ``top`` is the logit that the block's
            # largest source would give the target: below exp(_SPREAD), whether or not they share an edge.
            scale = (leaky_relu(extremes[0] + target, backward.settings.slope) - lse).exp()
            rows.mul_(scale.unsqueeze(-1))
            # delta is an inner product with the gradient, which was scaled.
            delta = delta * scale
        else:
            rest[1].copy_(lse)
        logit.copy_(target)
        rest[0].copy_(delta)
        seed.fill_(backward.settings.dropout.stream)
        transfer.send(outgoing.buffer, peers(self._group, message.round)[1])

    def _packet(self, count: int, *, folded: bool) -> Packet:
        """Allocate a message of ``count`` targets: gradient rows, logit, delta, lse unless folded, dropout seed."""
        grad, exchange = self._backward.grad, self._backward.blocks.exchange
        rows = ((count, *grad.shape[1:]), exchange.on_wire(grad.dtype))
        scalars = [((count, grad.size(1)), self._backward.lse.dtype)] * (2 if folded else 3)
        return Packet([rows, *scalars, ((1 if count else 0,), torch.int64)], grad.device)

    def _answer(self, message: ReaderEdges, pieces: list[Tensor]) -> Tensor:
        """Add the gradients of local sources for the reader's targets; return those of the targets' logits [T, H]."""
        backward, settings = self._backward, self._backward.settings
        rows, target, delta, *rest, seed = pieces
        # The sender multiplied by exp(top - lse), so ``top`` takes the place of lse.
        lse = rest[0] if rest else leaky_relu(self._extremes_at_reader(message.round)[0] + target, settings.slope)
        dropout = Mask(settings.dropout.p, int(seed) if len(seed) else 0)
        inputs = AttentionInputs(backward.x, backward.source, target, settings.slope, dropout)
        saved = TargetGradients(lse, delta, rows.to(backward.grad.dtype))
        gradients = AttentionGradients(backward.dx, backward.dsource, torch.zeros_like(target))
        attention_backward(message.edges, inputs, saved, gradients)
        return gradients.target

    def _extremes_at_reader(self, r: int) -> Tensor:
        """Return the largest and smallest logit of the sources that round r's reader has, [2, H], as it does."""
        if r not in self._sent_extremes:
            exchange = self._backward.blocks.exchange
            rows = self._backward.source[exchange.send_rows[r]]
            self._sent_extremes[r] = _extremes(rows.to(exchange.on_wire(rows.dtype)).to(rows.dtype))
        return self._sent_extremes[r]


def _fold_lse(extremes: Tensor) -> bool:
    """Whether a block's logits are so close together that exp(-lse) may be a factor of the rows; both ranks agree."""
    return bool((extremes[0] - extremes[1] < _SPREAD).all())


def _extremes(source: Tensor) -> Tensor:
    """Return the largest and smallest logit of a block's sources [n, H], as [2, H]; 0 for a block without sources."""
    return torch.stack([source.amax(0), source.amin(0)]) if len(source) else source.new_zeros((2, source.size(1)))
